"""Two processes that begin with TrainingArguments, which make a process group of their own, train what one does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from from_hf import arguments
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.device import Cpu

ROWS = [{"x": torch.tensor([float(number), 1.0]), "labels": torch.tensor(number % 2)} for number in range(6)]
PROCESSOR = Cpu(name="cpu", threads=1, flops_per_second=1e9, bytes_per_second=1e9, operator_seconds=1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        nn.init.constant_(self.linear.weight, 0.1)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def seen(prediction: Any) -> dict[str, float]:
    """The labels of all rows as digits, and the sum of the scores of the first."""
    digits = "".join(str(label) for label in prediction.label_ids)
    return {"labels": float(digits), "first": float(prediction.predictions[0].sum())}


def trained(folder: Path, batch: int) -> list[dict[str, float]]:
    args = arguments(output_dir=str(folder), per_device_train_batch_size=batch, max_steps=3, save_strategy="no", report_to=[])
    given: dict[str, Any] = {"train_dataset": ROWS, "eval_dataset": ROWS, "compute_metrics": seen}
    run = Trainer.from_hf(args, Net(), **given, budget="64MiB", device=PROCESSOR, progress=False)
    return [dict(row) for row in run.train().metrics]


def test_two_processes_train_and_measure_what_one_does(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, str(tmp_path)]
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1])])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    two = json.loads((tmp_path / "two.json").read_text())
    one = trained(tmp_path / "one", 4)
    names = ("step", "loss", "eval_loss", "eval_labels", "eval_first", "grad_norm")
    assert len(two) == len(one) == 5
    for mine, other in zip(two, one, strict=True):
        assert {name: mine[name] for name in names if name in mine} == pytest.approx(
            {name: other[name] for name in names if name in other}, rel=1e-5
        )
    # The rows in their own order, though each process has evaluated every second one.
    assert two[0]["eval_labels"] == 10101.0


if __name__ == "__main__":
    rows = trained(Path(sys.argv[1]) / "run", 2)
    if os.environ["RANK"] == "0":
        (Path(sys.argv[1]) / "two.json").write_text(json.dumps(rows))
