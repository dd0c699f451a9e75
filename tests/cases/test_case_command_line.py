"""Field reports about what is written in files and on the command line: each value has its type, or one clear message."""

from __future__ import annotations

from pathlib import Path

import pytest

from memtrain.__main__ import main
from memtrain.command_line import compose_jobs
from memtrain.config import settings
from memtrain.settings import Settings

RECIPE = "model: llama_5m\nsteps: 2\nglobal_batch_size: 4\ndata: {sequence_length: 64, tokenizer: {train_vocab_size: 300}}"


def one(*overrides: str) -> Settings:
    (cfg,) = compose_jobs(overrides, multirun=False)
    return settings(cfg)


def refused(override: str, capsys: pytest.CaptureFixture[str]) -> str:
    """What the command line says of an override, which must be one line."""
    assert main([override]) == 2
    said = capsys.readouterr().err
    assert said.startswith("memtrain: ")
    assert said.count("\n") == 1
    return said


def test_a_number_without_a_point_is_a_number_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    """cli-01: of which PyYAML makes the text '1e-4'."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{RECIPE}\noptimizer: {{learning_rate: 1e-4}}\nbudget: 24GB\n")
    for read in (one(f"recipe={recipe}"), one("optimizer.learning_rate=1e-4", "budget=24GB")):
        assert (read.optimizer.learning_rate, read.budget_bytes) == (0.0001, 24_000_000_000)
        assert type(read.optimizer.learning_rate) is float


def test_a_number_may_begin_with_zeros() -> None:
    """cli-01: 007 is 7, and no text and no octal number."""
    assert one("seed=007").seed == 7


@pytest.mark.parametrize("given", ["runs/epoch=6.ckpt", "résumé.ckpt", "数据.ckpt", "a,b.ckpt"])
def test_a_quoted_value_is_taken_as_it_is(given: str) -> None:
    """cli-01."""
    assert one(f'resume="{given}"').resume == given
    assert one(f'data.path="{given}"').data.path == (given,)


@pytest.mark.parametrize("given", ["runs/epoch=6.ckpt", "数据.jsonl"])
def test_a_value_that_cannot_be_read_is_named_with_its_key_and_how_to_quote_it(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """cli-01: whose grammar stops at = and at letters that are not ASCII."""
    said = refused(f"data.path={given}", capsys)
    assert f"data.path={given}" in said
    assert f"""'data.path="{given}"'""" in said


def test_a_value_with_a_comma_is_not_taken_for_two_jobs_without_being_told(capsys: pytest.CaptureFixture[str]) -> None:
    """cli-01: data=a,b.jsonl became a sweep."""
    said = refused("data.path=a,b.jsonl", capsys)
    assert "data.path=a,b.jsonl names several jobs: add -m to run them all" in said
    assert """'data.path="a,b.jsonl"'""" in said


@pytest.mark.parametrize("none", ["null", "None"])
def test_none_and_null_both_mean_none_where_that_is_allowed(none: str, tmp_path: Path) -> None:
    """cli-01: None was the text 'None', and so the name of a folder or of a model."""
    read = one(f"max_grad_norm={none}", f"evaluate_every={none}", f"run.dir={none}")
    assert (read.max_grad_norm, read.evaluate_every) == (None, None)
    assert read.run_dir.parent == Path("runs/quickstart")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"{RECIPE}\nbudget: 1GiB\nmax_grad_norm: {none}\nrun: {{dir: {none}}}\n")
    read = one(f"recipe={recipe}")
    assert (read.max_grad_norm, read.run_dir.parent) == (None, Path("runs/mine"))


@pytest.mark.parametrize("none", ["null", "None"])
def test_none_and_null_are_both_refused_where_a_value_is_needed(none: str, capsys: pytest.CaptureFixture[str]) -> None:
    """cli-01."""
    assert "resume is null, and it needs a value." in refused(f"resume={none}", capsys)


def test_a_word_where_a_number_belongs_is_named_with_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    """cli-01."""
    assert "optimizer.learning_rate is 'fast', and it must be a number." in refused("optimizer.learning_rate=fast", capsys)
