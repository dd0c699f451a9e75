"""Field reports about going on with a run: the rows, rates and scales after a stop are those of a run that was not stopped."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases.fixtures import ConstGrad, column, factors, run, same, steps_in, tiny_gpt2, tokens, trainer, weights
from torch import Tensor

from memtrain import Trainer
from memtrain.data.batches import StepBatches
from memtrain.data.rowset import alike
from memtrain.job import AdamW, Linear
from memtrain.precision import AutocastFp16
from memtrain.trainer import Result


class Noting(list[dict[str, Tensor]]):
    """Rows that note which of them a run reads; a run reads those of its rehearsal and of its steps."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def stopped_after(step: int, folder: Path, target: Path) -> Path:
    """The run in ``folder`` as it would be had it been killed right after the checkpoint of ``step``."""
    shutil.copytree(folder, target)
    shutil.rmtree(target / "model")
    (target / "comparison.json").unlink()
    for place in (target / "checkpoints").iterdir():
        if int(place.name.removeprefix("step-")) > step:
            shutil.rmtree(place)
    return target


# ---------------------------------------------------------------------- res-01

TEN_ROWS = [tokens(8, number) for number in range(10)]


def three_epochs(run_dir: Path | None, rows: Any = TEN_ROWS, **given: Any) -> Trainer:
    """Ten rows, two to a step, three times over, with dropout: fifteen steps."""
    settings: dict[str, Any] = {"global_batch_size": 2, "micro_batch_size": 2, "epochs": 3, "keep_checkpoints": 99}
    settings |= {"optimizer": AdamW(learning_rate=3e-3), "checkpoint_every": 1}
    return trainer(tiny_gpt2(), rows, run_dir=run_dir, **{**settings, **given})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, dict[str, Tensor], list[int]]:
    """A run that was never stopped: its folder, its result, its weights, and the rows that its steps read."""
    folder, rows = tmp_path_factory.mktemp("undisturbed") / "run", Noting(TEN_ROWS)
    made = three_epochs(folder, rows)
    result = made.train()
    return folder, result, weights(made), rows.read[-30:]


def test_in_each_epoch_every_row_is_seen_once_and_in_an_order_of_its_own(
    undisturbed: tuple[Path, Result, dict[str, Tensor], list[int]],
) -> None:
    """res-01."""
    read = undisturbed[3]
    epochs = [read[start : start + 10] for start in (0, 10, 20)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


@pytest.mark.parametrize("stops", [(3,), (7,), (12,), (6, 8)], ids=str)
def test_a_run_that_was_stopped_sees_the_rows_that_are_left_of_its_epoch_and_no_other(
    stops: tuple[int, ...], undisturbed: tuple[Path, Result, dict[str, Tensor], list[int]], tmp_path: Path
) -> None:
    """res-01: stopped in the first, second and third epoch, and twice in one: then 16 rows are passed over, not 4."""
    folder, whole, final, read = undisturbed
    for number, step in enumerate(stops):
        folder = stopped_after(step, folder, tmp_path / str(number))
        rows = Noting(TEN_ROWS)
        made = three_epochs(folder, rows)
        result = made.train()
        assert rows.read[-(30 - 2 * step) :] == read[2 * step :]
        assert column(result, "loss") == column(whole, "loss")
        assert same(weights(made), final)


def test_a_run_that_was_stopped_goes_on_with_workers_as_without(
    undisturbed: tuple[Path, Result, dict[str, Tensor], list[int]], tmp_path: Path
) -> None:
    """res-01, with two processes that read the rows."""
    made = three_epochs(stopped_after(7, undisturbed[0], tmp_path / "run"), workers=2)
    assert column(made.train(), "loss") == column(undisturbed[1], "loss")
    assert same(weights(made), undisturbed[2])


# ---------------------------------------------------------------------- res-02


def test_rate_and_loss_scale_go_on_where_they_were(tmp_path: Path) -> None:
    """res-02: the scale doubles after the steps 3, 6 and 9, so that its counter stands at 2 where the run was stopped."""

    def ten_steps(run_dir: Path) -> Result:
        given: dict[str, Any] = {"schedule": Linear(), "optimizer": AdamW(learning_rate=1e-5), "checkpoint_every": 5}
        given |= {"precision": AutocastFp16(initial_scale=256.0, growth_interval=3), "keep_checkpoints": 9}
        rows = factors(*[1.0] * 10)
        return run(ConstGrad(), rows, micro_batch_size=1, global_batch_size=1, epochs=1, run_dir=run_dir, **given)[0]

    whole = ten_steps(tmp_path / "whole")
    resumed = ten_steps(stopped_after(5, tmp_path / "whole", tmp_path / "resumed"))
    for result in (whole, resumed):
        assert column(result, "learning_rate") == pytest.approx([1e-5 * (1 - step / 10) for step in range(10)], rel=1e-12)
        # After each step.
        assert column(result, "loss_scale") == [256, 256, 512, 512, 512, 1024, 1024, 1024, 2048, 2048]
        assert column(result, "overflows") == [0] * 10
        assert not any("skipped" in row for row in result.metrics)
    assert column(whole, "learning_rate") == column(resumed, "learning_rate")


# ---------------------------------------------------------------------- res-03


@pytest.mark.parametrize(
    ("micro_batches", "step", "epoch", "offset"),
    [(100, 500, 20, 0), (27484, 2748, 0, 10992), (6, 1, 0, 4), (6, 2, 1, 0), (6, 3, 1, 4)],
)
def test_a_place_in_the_data_is_told_in_steps_and_never_in_micro_batches(
    micro_batches: int, step: int, epoch: int, offset: int
) -> None:
    """res-03: of 4 rows to a step; taken for micro-batches, step 500 of 100 would be in epoch 5, or at 2000 in epoch 80."""
    rows = alike([{"x": torch.tensor(0.0)}] * micro_batches)
    batches = StepBatches(rows, global_batch_size=4, seed=0)
    assert batches.epoch(step) == pytest.approx(epoch + offset / micro_batches, abs=1e-12)
    assert batches.seen(step) == epoch * micro_batches + offset
    # The rows of the step that comes next are those after the offset, in the order of that epoch.
    first = epoch * batches.steps_per_epoch
    of_epoch = [number for one in range(batches.steps_per_epoch) for number in batches.indices(first + one)]
    assert sorted(of_epoch) == list(range(micro_batches))
    assert batches.indices(step) == of_epoch[offset : offset + 4]


def test_a_run_with_a_short_step_in_each_epoch_says_how_far_it_is(tmp_path: Path) -> None:
    """res-03: six micro-batches, four to a step: two steps an epoch, and 1.6667 epochs after the third."""
    given: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 4, "epochs": 2, "keep_checkpoints": 9}
    given |= {"checkpoint_every": 1}
    whole, made = run(ConstGrad(), factors(*range(6)), run_dir=tmp_path / "whole", **given)
    assert column(whole, "epoch") == pytest.approx([0.6667, 1.0, 1.6667, 2.0], abs=5e-5)
    assert steps_in(tmp_path / "whole") == [1, 2, 3, 4]
    for step in (1, 2, 3):
        folder = stopped_after(step, tmp_path / "whole", tmp_path / str(step))
        result, again = run(ConstGrad(), factors(*range(6)), run_dir=folder, **given)
        assert column(result, "loss") == column(whole, "loss")
        assert same(weights(again), weights(made))


# ---------------------------------------------------------------------- res-04

EIGHT_ROWS = factors(*range(1, 9))


def four_steps_an_epoch(run_dir: Path, epochs: int = 3, rows: Any = EIGHT_ROWS) -> Trainer:
    given: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 2, "checkpoint_every": 4, "keep_checkpoints": 9}
    return trainer(ConstGrad(), rows, epochs=epochs, run_dir=run_dir, **given)


@pytest.mark.parametrize(("stop", "left"), [(4, 8), (8, 4), (12, 0)])
def test_a_run_that_was_saved_at_the_end_of_an_epoch_begins_the_next_with_its_first_rows(
    stop: int, left: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """res-04: 8, 4 and 0 updates are left, and a run that has none left says so."""
    rows = Noting(EIGHT_ROWS)
    whole = four_steps_an_epoch(tmp_path / "whole", rows=rows)
    result = whole.train()
    folder = stopped_after(stop, tmp_path / "whole", tmp_path / "run")
    again = Noting(EIGHT_ROWS)
    made = four_steps_an_epoch(folder, rows=again)
    updates = counted_updates(made)
    assert column(made.train(), "loss") == column(result, "loss")
    assert updates() == left
    if left:
        assert again.read[-2 * left :] == rows.read[-2 * left :]
    assert steps_in(folder)[-1] == 12
    assert same(weights(made), weights(whole))
    assert ("nothing is left to train after step 12 of 12" in caplog.text) == (left == 0)


def test_more_epochs_than_a_run_was_begun_with_are_another_job_and_no_empty_run(tmp_path: Path) -> None:
    """res-04: the schedule would have been another; the refusal says what differs, and nothing ends as if it had trained."""
    four_steps_an_epoch(tmp_path / "run", epochs=1).train()
    with pytest.raises(ValueError, match=r"holds a run of another job \(steps is 12 here and 4 there\): choose another folder"):
        four_steps_an_epoch(tmp_path / "run", epochs=3)


def counted_updates(made: Trainer) -> Callable[[], int]:
    """How often the weight has really been changed."""
    weight = made.model.get_parameter("w")
    before = weight._version
    taken: list[float] = []
    weight.register_hook(lambda gradient: taken.append(gradient.item()))
    assert before == weight._version
    return lambda: len(taken)
