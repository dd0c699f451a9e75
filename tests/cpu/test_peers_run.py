"""The processes of the benchmarks beside other trainers: the same losses from each, in turns, and their peaks."""

from __future__ import annotations

import sys
from pathlib import Path

import peers
import pytest


def test_a_plain_loop_transformers_and_memtrain_train_the_same_step_by_step() -> None:
    model = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    task = peers.Task(model=model, batch=2, length=8, steps=5, schedule="cosine")
    contenders = [
        peers.Contender(name="loop", kind="loop"),
        peers.Contender(name="HF Trainer", kind="hf", checkpointing=True, accumulation=2),
        peers.Contender(name="memtrain", kind="memtrain", budget_bytes=2**22, constraints={"micro_batch_size": 2}),
    ]
    loop, *others = peers.measure_steps(Path(sys.executable), task, contenders, threads=1)
    for other in others:
        assert other.losses == pytest.approx(loop.losses, abs=1e-6)
    assert all(len(run.seconds) == len(run.cpu_seconds) == 4 for run in (loop, *others))
    measured = peers.measure_peak(Path(sys.executable), task, contenders[-1], threads=1)
    assert measured.losses == others[-1].losses
    # Besides what was predicted there are only the loss and the norm of each step, in blocks of 64 bytes.
    assert 0 <= measured.peak_bytes - measured.predicted_bytes <= 64 * 2 * task.steps
