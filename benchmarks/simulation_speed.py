"""Seconds to simulate one plan of a 7B and of a 70B model for a card: ``python benchmarks/simulation_speed.py [--repeats N]``.

Loading, two steps, an evaluation and saving, recomputed blocks, logits in chunks, state on the host; then the replay of the
allocator. Prints medians of interleaved repeats, after one that nobody counts (it loads what is loaded on first use).
"""

from __future__ import annotations

import argparse
import gc
import platform
import statistics
import time
from dataclasses import replace
from typing import Any

import torch
import transformers
import yaml

from memtrain import machine
from memtrain.job import Job
from memtrain.memory.footprint import footprint
from memtrain.models.build import source
from memtrain.plan import ChunkedLogits, OnHost, Plan, Recompute
from memtrain.precision import Bf16
from memtrain.trace.event import Trace
from memtrain.trace.simulate import simulate

PLAN = Plan(micro_batch_size=1, activations=Recompute(), loss=ChunkedLogits(), optimizer_state=OnHost())
JOB = Job(model="llama", global_batch_size=16, steps=2, precision=Bf16())
ROWS = dict.fromkeys(("input_ids", "labels"), ((2048,), torch.int64))


def configurations() -> dict[str, dict[str, Any]]:
    """Llama-2-7B, and the shapes of Llama-2-70B (arXiv 2307.09288)."""
    small = yaml.safe_load((machine.facts("configs") / "model" / "llama2_7b.yaml").read_text(encoding="utf-8"))["config"]
    # YAML 1.1 takes 1e-5 for a string.
    small["rms_norm_eps"] = float(small["rms_norm_eps"])
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    return {"32 layers": small, "80 layers": {**small, **large, "num_key_value_heads": 8}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    device = machine.named("rtx_4090")
    sources = {name: source(config) for name, config in configurations().items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sources}
    events: dict[str, int] = {}
    trace: Trace | None
    for number in range(repeats + 1):
        for name, model in sources.items():
            # The trace before is freed outside the time that is measured.
            trace = None
            gc.collect()
            started = time.perf_counter()
            trace = simulate(replace(JOB, model=name), PLAN, model, ROWS, device, evaluation_rows=32)
            simulated = time.perf_counter()
            footprint(trace, device)
            if number:
                seconds[name].append((simulated - started, time.perf_counter() - simulated))
            events[name] = len(trace.events)
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{'':12}{'simulation':>12}{'replay':>10}{'events':>10}")
    for name, pairs in seconds.items():
        simulation, replay = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(f"{name:12}{simulation:10.2f} s{replay:8.2f} s{events[name]:10,}")


if __name__ == "__main__":
    main()
