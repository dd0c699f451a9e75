"""Field reports about checkpoints: full disks, which of them stay, tied weights, and signals."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fixtures import ConstGrad, column, factors, in_order, run, same, steps_in, tiny_llama, tokens, trainer, weights
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.callbacks import Record
from memtrain.checkpoint import latest, read
from memtrain.job import AdamW

ONE_BY_ONE: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 1, "epochs": 1}


def on(event: str, does: Callable[[int], object]) -> Callable[[Record], None]:
    """A callback that does something with the step of each event of a kind."""

    def callback(record: Record) -> None:
        if record.event == event:
            does(record.step)

    return callback


# ---------------------------------------------------------------------- ckp-02


def disk_full_in(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Let the disk be full when the files of these steps' checkpoints are written, with a part of them there already."""
    real = os.fsync

    def fsync(file: int) -> None:
        if any(f"step-{step:09d}" in os.readlink(f"/proc/self/fd/{file}") for step in steps):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_disk_that_is_full_costs_one_checkpoint_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ckp-02: of three saves the second fails; the first stays until the third is complete, and the run goes on."""
    disk_full_in(monkeypatch, 4)
    there: dict[int, list[int]] = {}
    callback = on("step", lambda step: there.update({step: steps_in(tmp_path / "run")} if step > 2 else {}))
    given: dict[str, Any] = {**ONE_BY_ONE, "checkpoint_every": 2, "keep_checkpoints": 1, "run_dir": tmp_path / "run"}
    result, made = run(ConstGrad(), factors(*[1.0] * 6), callbacks=[callback], **given)
    # A callback sees a step before its checkpoint is written.
    assert there == {3: [2], 4: [2], 5: [2], 6: [2]}
    assert "the checkpoint of step 4 cannot be written to" in caplog.text
    assert "(No space left on device): free space there, or name another folder." in caplog.text
    assert steps_in(tmp_path / "run") == [6]
    assert read(tmp_path / "run" / "checkpoints" / "step-000000006").step == 6
    assert weights(made)["w"].item() == -6
    assert column(result, "loss") == [0, -1, -2, -3, -4, -5]


def test_the_checkpoint_before_a_full_disk_is_gone_on_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ckp-02: the part of a file that was written is never taken for a checkpoint."""
    disk_full_in(monkeypatch, 4, 5)

    def stops(step: int) -> None:
        if step == 5:
            raise RuntimeError("the program has ended")

    given: dict[str, Any] = {**ONE_BY_ONE, "checkpoint_every": 2, "keep_checkpoints": 1, "run_dir": tmp_path / "run"}
    rows = factors(*range(1, 7))
    with pytest.raises(RuntimeError, match="the program has ended"):
        trainer(ConstGrad(), rows, callbacks=[on("step", stops)], **given).train()
    assert steps_in(tmp_path / "run") == [2]
    monkeypatch.undo()
    _, made = run(ConstGrad(), rows, **given)
    assert weights(made)["w"].item() == -21


def test_a_disk_without_room_for_one_checkpoint_is_told_of_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ckp-02: of 138048 weights and their state, so of 1656576 bytes and a little more."""
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**40, 2**40 - 1024, 1024))
    said: list[str] = []
    given: dict[str, Any] = {**ONE_BY_ONE, "steps": 1, "epochs": None, "checkpoint_every": 1, "run_dir": tmp_path / "run"}
    callback = on("step", lambda _: said.append(caplog.text))
    run(tiny_llama(), [tokens(8)], optimizer=AdamW(), callbacks=[callback], **given)
    assert re.search(
        r"No checkpoint can be written to .*/run/checkpoints \(it takes 1\.58 MiB and 1\.00 KiB are free\)", said[0]
    )


def test_a_checkpoint_takes_weights_and_state_and_little_else(tmp_path: Path) -> None:
    """ckp-02: 138048 weights, each with two moments, 12 bytes; by which free space is judged."""
    given: dict[str, Any] = {**ONE_BY_ONE, "steps": 1, "epochs": None, "checkpoint_every": 1, "run_dir": tmp_path / "run"}
    run(tiny_llama(), [tokens(8)], optimizer=AdamW(), **given)
    (place,) = (tmp_path / "run" / "checkpoints").iterdir()
    size = sum(file.stat().st_size for file in place.iterdir())
    assert 1656576 < size < 1656576 + 2**16


# ---------------------------------------------------------------------- ckp-03


def keeping(run_dir: Path, rows: list[dict[str, Tensor]], **given: Any) -> Trainer:
    return trainer(ConstGrad(), rows, **{**ONE_BY_ONE, "run_dir": run_dir, "checkpoint_every": 1, **given})


@pytest.mark.parametrize("time", [lambda step: 10**9, lambda step: 10**9 - step], ids=["equal", "reversed"])
def test_the_checkpoints_that_stay_are_those_of_the_latest_steps_whatever_their_times(
    time: Callable[[int], int], tmp_path: Path
) -> None:
    """ckp-03: of eleven steps 10 and 11; by their names 8 and 9 would stay, and by these times 1 and 2."""

    def touch(_: int) -> None:
        for place in (tmp_path / "run" / "checkpoints").iterdir():
            step = int(place.name.removeprefix("step-"))
            for path in (place, *place.iterdir()):
                os.utime(path, (time(step), time(step)))

    keeping(tmp_path / "run", factors(*[1.0] * 11), keep_checkpoints=2, callbacks=[on("checkpoint", touch)]).train()
    assert steps_in(tmp_path / "run") == [10, 11]


def test_where_one_is_kept_the_best_is_kept_as_well(tmp_path: Path) -> None:
    """ckp-03: the loss falls for nine steps and rises for two, so 9 and 11 stay, and not 11 alone or none."""
    rows = in_order(factors(*[1.0] * 9, -1.0, -1.0))
    result = keeping(tmp_path / "run", rows, keep_checkpoints=1, eval_data=factors(1.0), evaluate_every=1).train()
    assert min(result.evaluations, key=lambda one: one[1]) == (9, -9.0)
    assert steps_in(tmp_path / "run") == [9, 11]


def test_what_another_program_has_left_in_the_folder_is_neither_read_nor_removed(tmp_path: Path) -> None:
    """ckp-03: a checkpoint-1000 from elsewhere, which a rotation by number would take for the latest."""
    foreign = tmp_path / "run" / "checkpoints" / "checkpoint-1000"

    def leave(step: int) -> None:
        if step == 1:
            foreign.mkdir()
            (foreign / "trainer_state.json").write_text("{}")

    keeping(tmp_path / "run", factors(*[1.0] * 3), keep_checkpoints=1, callbacks=[on("checkpoint", leave)]).train()
    found, wrong = latest(foreign.parent)
    assert found is not None
    assert (found.step, wrong) == (3, ())
    assert (foreign / "trainer_state.json").read_text() == "{}"
    shutil.rmtree(foreign)
    assert steps_in(tmp_path / "run") == [3]


def test_a_folder_that_holds_another_programs_checkpoints_is_refused(tmp_path: Path) -> None:
    """ckp-03."""
    (tmp_path / "run" / "checkpoints" / "checkpoint-1000").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"already holds a run \(checkpoints\): choose another folder or remove it"):
        keeping(tmp_path / "run", factors(1.0)).train()


def test_checkpoints_of_another_run_in_the_folder_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    """ckp-03: they would be the latest for as long as their steps are higher."""
    keeping(tmp_path / "run", factors(*[1.0] * 4)).train()
    with pytest.raises(ValueError, match=r"holds a run of another job \(steps is 3 here and 4 there\): choose another folder"):
        keeping(tmp_path / "run", factors(*[1.0] * 3))


# ---------------------------------------------------------------------- ckp-05


class Shared(nn.Module):
    """An embedding and a head that are one tensor, a weight that lies transposed in memory, and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.turned = nn.Parameter(torch.randn(3, 4).T)
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) * self.scale
        hidden = hidden + hidden @ self.turned @ self.turned.T
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


SHARED_ROWS = [tokens(4, number, vocabulary=8) for number in range(3)]


def trained_shared(run_dir: Path | None, epochs: int = 1, **given: Any) -> tuple[Any, Trainer]:
    torch.manual_seed(len(given))
    given = {"optimizer": AdamW(learning_rate=0.1), "checkpoint_every": 1, **given}
    return run(Shared(), SHARED_ROWS, run_dir=run_dir, micro_batch_size=1, global_batch_size=1, epochs=epochs, **given)


def tied(model: Any) -> bool:
    """Whether the two are one tensor, and not two that happen to be equal."""
    shared: bool = model.embedding.weight.data_ptr() == model.head.weight.data_ptr()
    return shared and torch.equal(model.embedding.weight, model.head.weight)


def test_a_tensor_that_two_layers_share_is_written_once_and_read_into_both(tmp_path: Path) -> None:
    """ckp-05: of any module; 32 and 12 numbers, and no buffer that is not saved."""
    _, made = trained_shared(tmp_path / "run")
    file = tmp_path / "run" / "model" / "model.safetensors"
    written = load_file(file)
    assert sum(tensor.numel() for tensor in written.values()) == 32 + 12
    torch.manual_seed(9)
    fresh = Shared()
    load_model(fresh, file)
    assert all(torch.equal(one, other) for one, other in zip(fresh.parameters(), made.model.parameters(), strict=True))
    assert tied(fresh)


def test_a_checkpoint_restores_weights_that_are_one_and_they_train_on_as_one(tmp_path: Path) -> None:
    """ckp-05: two more updates of a fresh module, as in the run that was not stopped."""
    whole, made = trained_shared(tmp_path / "whole", keep_checkpoints=9)
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    for place in (tmp_path / "run" / "checkpoints").iterdir():
        if place.name != "step-000000001":
            shutil.rmtree(place)
    (tmp_path / "run" / "comparison.json").unlink()
    result, again = trained_shared(tmp_path / "run", workers=0)
    assert column(result, "loss") == column(whole, "loss")
    assert same(weights(again), weights(made))
    assert tied(again.model)
    found, _ = latest(tmp_path / "run" / "checkpoints")
    assert found is not None
    assert sum(tensor.numel() for _, tensor in found.tensors("model")) == 32 + 12


@pytest.mark.parametrize(("is_tied", "numbers"), [(True, 138048), (False, 202048)])
def test_a_transformers_model_is_written_as_it_is_tied(is_tied: bool, numbers: int, tmp_path: Path) -> None:
    """ckp-05: 138048 numbers, of which a state dict would make 202048."""
    _, made = run(tiny_llama(tied=is_tied), [tokens(8)], **{**ONE_BY_ONE, "optimizer": AdamW(learning_rate=0.1)})
    made.save_model(tmp_path / "model")
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert sum(file.get_tensor(key).numel() for key in file.keys()) == numbers  # noqa: SIM118 - it is no mapping
    # Read again, it trains on, and what was one tensor is one.
    again = trainer(str(tmp_path / "model"), [tokens(8)], **{**ONE_BY_ONE, "optimizer": AdamW(learning_rate=0.1)})
    assert all(torch.equal(one, other) for one, other in zip(again.model.parameters(), made.model.parameters(), strict=True))
    again.train()
    model: Any = again.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (embedding.data_ptr() == head.data_ptr()) == is_tied
    assert torch.equal(embedding, head) == is_tied


def test_a_weight_that_is_missing_from_a_file_is_not_drawn_at_random(tmp_path: Path) -> None:
    """ckp-05: the tied head may be missing, and a norm may not."""
    made = trainer(tiny_llama(), [tokens(8)], **ONE_BY_ONE)
    made.save_model(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    kept = load_file(file)
    del kept["model.norm.weight"]
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"^the weights of model\.norm are not at "):
        run(str(tmp_path / "model"), [tokens(8)], **ONE_BY_ONE)


# ---------------------------------------------------------------------- ckp-06


class Told(nn.Module):
    """Eight weights under dropout, which are sent a signal in one of their forwards."""

    def __init__(self, at: int | None = None) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(8))
        self.at, self.calls = at, 0

    def forward(self, x: Tensor) -> Tensor:
        if not x.is_meta:
            self.calls += 1
            if self.calls == self.at:
                os.kill(os.getpid(), signal.SIGTERM)
        dropped = nn.functional.dropout(self.w, 0.5, self.training)
        return (dropped * x.unsqueeze(-1)).square().mean()


def told(run_dir: Path, at: int | None = None) -> Trainer:
    """Three steps of four micro-batches, and evaluations on forty rows."""
    given: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4, "epochs": 1, "checkpoint_every": 2}
    given |= {"eval_data": factors(*range(40)), "evaluate_every": 1, "optimizer": AdamW(learning_rate=0.1)}
    return trainer(Told(at), factors(*range(1, 13)), run_dir=run_dir, **given)


@pytest.fixture(scope="module")
def never_told(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], dict[str, Tensor]]:
    made = told(tmp_path_factory.mktemp("never told") / "run")
    return column(made.train(), "loss"), weights(made)


# Eight forwards of the rehearsal and forty of the first evaluation come before the four of step 1 and forty more.
REHEARSED, EVALUATED = 8, 40


@pytest.mark.parametrize(
    ("at", "saved"),
    [
        (REHEARSED + EVALUATED + 4 + EVALUATED + 2, 1),
        (REHEARSED + EVALUATED + 4 + 20, 1),
        (REHEARSED + EVALUATED + 4 + EVALUATED + 4 + 20, 2),
    ],
    ids=["between two micro-batches", "in an evaluation", "in an evaluation after a step that is saved"],
)
def test_a_run_that_is_preempted_saves_its_last_step_at_once_and_goes_on_bit_for_bit(
    at: int, saved: int, never_told: tuple[list[float], dict[str, Tensor]], tmp_path: Path
) -> None:
    """ckp-06 (a) and (b): heard between two micro-batches and two batches of an evaluation, and not at the next step."""
    made = told(tmp_path / "run", at)
    with pytest.raises(SystemExit) as ends:
        made.train()
    assert ends.value.code == 143
    assert made.model.calls <= at + 1
    assert steps_in(tmp_path / "run") == [saved]
    goes_on(tmp_path / "run", never_told)


def test_a_run_that_is_preempted_while_it_saves_saves_once_and_whole(
    never_told: tuple[list[float], dict[str, Tensor]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ckp-06 (c)."""
    rename, renamed_from = Path.rename, list[str]()

    def renamed(self: Path, target: Any) -> Path:
        if self.name.startswith("step-"):
            renamed_from.append(self.name)
            os.kill(os.getpid(), signal.SIGTERM)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(SystemExit) as ends:
        told(tmp_path / "run").train()
    monkeypatch.undo()
    assert ends.value.code == 143
    assert renamed_from == ["step-000000002.partial"]
    assert steps_in(tmp_path / "run") == [2]
    goes_on(tmp_path / "run", never_told)


def goes_on(run_dir: Path, never_told: tuple[list[float], dict[str, Tensor]]) -> None:
    made = told(run_dir)
    assert column(made.train(), "loss") == never_told[0]
    assert same(weights(made), never_told[1])


@pytest.fixture(autouse=True)
def hears_ctrl_c() -> Iterator[None]:
    """Also where these tests run in the background of a script, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
