"""Seconds per step alone and beside a second training run, by how long threads spin while they wait for each other.

torch's threads wait for each other several times per operator, and libgomp lets them spin meanwhile. Two processes with as
many threads as there are cores then keep each other off the cores. `python -m memtrain` sets GOMP_SPINCOUNT for that reason;
this prints what it is worth and what it costs. Each row is the median over interleaved repeats of a run's median step.

Usage: python benchmarks/shared_machine.py [REPEATS]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from memtrain.__main__ import SPIN_COUNT

STEPS = 6
# Half the quickstart: its model, one micro-batch of 4 rows a step.
STEP = f"""
import statistics, time, torch
from memtrain.job import Job
from memtrain.models.build import source
from memtrain.plan import Plan
from memtrain.run import prepare
config = dict(model_type="llama", vocab_size=4096, hidden_size=256, intermediate_size=688, num_hidden_layers=5,
              num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=True)
run = prepare(Job(model="llama", global_batch_size=4, steps=1), Plan(micro_batch_size=4), source(config).load())
seconds = []
for _ in range({STEPS}):
    ids = torch.randint(4096, (4, 256))
    started = time.perf_counter()
    run.step([{{"input_ids": ids, "labels": ids}}])
    seconds.append(time.perf_counter() - started)
print(statistics.median(seconds[1:]))
"""


def median_step(processes: int, spin_count: int | None) -> float:
    """Median seconds per step of ``processes`` runs at once."""
    environment = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    if spin_count is not None:
        environment["GOMP_SPINCOUNT"] = str(spin_count)
    runs = [
        subprocess.Popen([sys.executable, "-c", STEP], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    return statistics.median(float(run.communicate()[0]) for run in runs)


def main(repeats: int) -> None:
    """Measure and print."""
    settings = {"libgomp's default": None, f"GOMP_SPINCOUNT={SPIN_COUNT}": SPIN_COUNT}
    found: dict[tuple[str, int], list[float]] = {(name, processes): [] for name in settings for processes in (1, 2)}
    for _ in range(repeats):
        for (name, processes), seconds in found.items():
            seconds.append(median_step(processes, settings[name]))
    print(f"{os.cpu_count()} processors, {repeats} repeats, seconds per step")
    print(f"{'':24}{'alone':>8}{'two at once':>14}")
    for name in settings:
        alone, together = (statistics.median(found[name, processes]) for processes in (1, 2))
        print(f"{name:24}{alone:8.3f}{together:14.3f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
