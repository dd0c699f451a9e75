"""The keys of the command line about saving, resuming and stopping: what they refuse, that they arrive, and how a run then ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memtrain import machine, recipe
from memtrain.__main__ import main
from memtrain.command_line import compose_jobs
from memtrain.config import settings
from memtrain.job import NotFinite
from memtrain.settings import Settings

REPOSITORY = Path(__file__).parents[2]
STEPS = 300
TINY = """
# A job that takes a moment.
budget: 64MiB
global_batch_size: 2
model:
  config: {model_type: gpt2, vocab_size: 259, n_embd: 8, n_layer: 1, n_head: 2, n_positions: 16, bos_token_id: 1, eos_token_id: 2}
data: {source: null, path: book.txt, sequence_length: 16, held_out: 0, tokenizer: {train_vocab_size: 259}}
plan: {micro_batch_size: 2, activations: keep, loss: whole_logits}
run: {dir: out}
"""


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the recipe ``tiny.yaml`` and its text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(f"{TINY}steps: {STEPS}\n")
    (tmp_path / "book.txt").write_text("\n\n".join(f"The word after {number} is {number + 1}." for number in range(40)))
    return tmp_path


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("checkpoint_every=0", "checkpoint_every is 0, and it must be 1 or more, or null."),
        ("keep_checkpoints=0", "keep_checkpoints is 0, and it must be 1 or more."),
        ("run.stop_seconds=0", "run.stop_seconds is 0.0, and it must be above 0, or null."),
        ("run.stop_seconds=-1", "run.stop_seconds is -1.0, and it must be above 0, or null."),
        ("on_not_finite=skp", "on_not_finite is 'skp', and it must be stop or skip."),
        ("data.workers=-1", "data.workers is -1, and it must be 0 or more processes."),
        ("resume=nowhere", "resume is 'nowhere', and it must be auto, never, or the folder of a checkpoint or of a run."),
        ("resume=book.txt", "resume is 'book.txt', and it must be auto, never, or the folder of a checkpoint or of a run."),
    ],
)
def test_a_setting_out_of_range_is_one_sentence(
    override: str, sentence: str, tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe=tiny.yaml", override]) == 2
    assert capsys.readouterr().err == f"memtrain: {sentence}\n"


def test_a_run_in_the_home_folder_is_found(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Settings] = []
    stands_in = types.ModuleType("memtrain.recipe")
    stands_in.run_recipe = lambda job, config_yaml: ran.append(job)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "memtrain.recipe", stands_in)
    monkeypatch.setenv("HOME", str(tiny / "home"))
    assert main(["recipe=tiny.yaml", "resume='~/before'"]) == 2
    assert capsys.readouterr().err.startswith("memtrain: resume is '~/before', and it must be")
    (tiny / "home" / "before").mkdir(parents=True)
    assert main(["recipe=tiny.yaml", "resume='~/before'"]) == 0
    assert [job.resume for job in ran] == ["~/before"]


# ---------------------------------------------------------------------- what arrives


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        (["data.workers=3"], "workers", 3),
        (["run.stop_seconds=2.5"], "stop_seconds", 2.5),
        (["run.stop_seconds=null"], "stop_seconds", None),
        (["keep_checkpoints=7"], "keep_checkpoints", 7),
        (["checkpoint_every=11"], "checkpoint_every", 11),
        (["checkpoint_every=null"], "checkpoint_every", None),
        (["on_not_finite=skip"], "on_not_finite", NotFinite.SKIP),
        (["resume=before"], "resume", "before"),
        (["resume=never"], "resume", "never"),
        (["resume=auto"], "resume", "auto"),
        # Planning goes on with nothing.
        (["resume=before", "mode=plan"], "resume", "never"),
    ],
)
def test_a_setting_reaches_the_trainer(
    overrides: list[str], name: str, value: object, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(recipe, "Trainer", lambda **arguments: given.update(arguments))
    (cfg,) = compose_jobs(["recipe=tiny.yaml", *overrides], multirun=False)
    recipe.trainer_of(settings(cfg), machine.cpu())
    assert given[name] == value


# ---------------------------------------------------------------------- how a run ends


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C is heard in children, also where these tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def running(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """The command line in a process of its own, which does not outlive the test."""
    with subprocess.Popen(
        [sys.executable, "-m", "memtrain", "recipe=tiny.yaml", *overrides],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        try:
            yield child
        finally:
            child.kill()


def ended(child: subprocess.Popen[str]) -> str:
    """All that a process has printed, as one line."""
    return " ".join(child.communicate(timeout=60)[0].split())


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


def signalled(child: subprocess.Popen[str], number: signal.Signals, folder: Path) -> str:
    """What a process has printed that is sent a signal as soon as it has taken a step."""
    metrics = folder / "out" / "metrics.jsonl"
    while child.poll() is None and not (metrics.exists() and metrics.read_text().count("\n")):
        time.sleep(0.01)
    child.send_signal(number)
    return ended(child)


def catches(child: subprocess.Popen[str], number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (SigCgt of proc_pid_status(5))."""
    (caught,) = re.findall(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{child.pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process listens to is read in /proc")
@pytest.mark.usefixtures("heard")
def test_ctrl_c_ends_with_130_and_the_same_command_goes_on_to_the_end_whatever_comes_before_it_can_save(tiny: Path) -> None:
    with running(tiny) as child:
        said = signalled(child, signal.SIGINT, tiny)
    assert child.returncode == 130, said
    (stopped,) = re.findall(
        r"The run has stopped after step (\d+); the same call goes on from step \1, in out/checkpoints/", said
    )
    assert steps(tiny) == list(range(1, int(stopped) + 1))
    assert int(stopped) < STEPS
    with running(tiny) as child:
        # The libraries take seconds to load after it listens.
        while child.poll() is None and not catches(child, signal.SIGUSR1):
            time.sleep(0.01)
        child.send_signal(signal.SIGUSR1)
        said = ended(child)
    assert child.returncode == 0, said
    assert f"going on from step {stopped} of {STEPS}" in said
    assert "Saved after step" not in said
    assert steps(tiny) == list(range(1, STEPS + 1))


# A micro-batch of many rows takes long enough for the time to be over within it.
@pytest.mark.parametrize(
    ("overrides", "code", "sentence"),
    [
        ([], 143, "; the same call goes on from step "),
        (
            ["run.stop_seconds=0.001", "global_batch_size=256", "plan.micro_batch_size=256"],
            75,
            "memtrain: the run has not stopped 1 ms after SIGTERM: it ends here with exit code 75",
        ),
    ],
)
def test_a_terminated_run_ends_with_a_code_that_tells_whether_it_could_save(
    overrides: list[str], code: int, sentence: str, tiny: Path
) -> None:
    with running(tiny, "steps=100000", *overrides) as child:
        said = signalled(child, signal.SIGTERM, tiny)
    assert child.returncode == code, said
    assert sentence in said
    # One that had begun is left half-way, and is none.
    assert bool(list((tiny / "out" / "checkpoints").glob("step-?????????"))) or code == 75
