"""A data_collator of the user's: what it makes of rows is trained, as the same rows of tensors would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from memtrain import Trainer
from memtrain.callbacks import Record

ROWS = [{"numbers": [float(number), 1.0], "goal": number / 2} for number in range(1, 6)]


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight - y).square().mean()


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    # It takes what it reads out of the rows, as some do.
    goals = [row.pop("goal") for row in rows]
    return {"x": torch.tensor([row["numbers"] for row in rows]), "y": torch.tensor(goals)}


def run(data: Any, folder: Path, **given: Any) -> Trainer:
    made: dict[str, Any] = {"budget": "64MiB", "global_batch_size": 2, "epochs": 2, "progress": False, "checkpoint_every": 1}
    return Trainer(model=Line(), data=data, eval_data=data, run_dir=folder, **{**made, **given})


def losses(result: Any) -> list[float]:
    return [row.get("loss", row.get("eval_loss")) for row in result.metrics]


def test_what_it_makes_is_trained_evaluated_and_gone_on_with(tmp_path: Path) -> None:
    tensors = [{"x": torch.tensor(row["numbers"]), "y": torch.tensor(row["goal"])} for row in ROWS]
    expected = losses(run(tensors, tmp_path / "tensors").train())
    assert losses(run(ROWS, tmp_path / "whole", data_collator=collate).train()) == expected

    def stop(record: Record) -> None:
        if record.event == "step" and record.step == 3:
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        run(ROWS, tmp_path / "parts", data_collator=collate, callbacks=[stop]).train()
    assert losses(run(ROWS, tmp_path / "parts", data_collator=collate).train()) == expected


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (
            [1.0],
            r"^the data_collator made a list of 1 rows of data, and it must make a mapping of names to tensors: return a dict",
        ),
        (
            {"x": 1.0},
            r"^the data_collator made a float for 'x' of 1 rows of data, and each must be a tensor whose first dimension",
        ),
        ({"z": torch.ones(1, 2)}, r"^data has 'z' in its rows, and Line\.forward takes x, y: "),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_run(made: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        _ = run(ROWS[:1], tmp_path / "run", data_collator=lambda rows: made).choice
