"""The three rates of a device description, measured on this machine's processor.

Prints the values for a file like configs/device/cpu.yaml: medians of repeats, in the units of memtrain.device.Device.

Usage: python benchmarks/cpu_rates.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

REPEATS = 9


def seconds(function: Callable[[], object], calls: int) -> float:
    """Median over the repeats of the seconds per call, after one call to warm up."""
    function()
    measured = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        for _ in range(calls):
            function()
        measured.append((time.perf_counter() - started) / calls)
    return statistics.median(measured)


def main() -> None:
    """Measure and print."""
    # A layer of a small model: 2048 tokens, 256 wide, four times that inside.
    left, right = torch.randn(2048, 256), torch.randn(256, 1024)
    flops = 2 * left.shape[0] * left.shape[1] * right.shape[1] / seconds(lambda: left @ right, calls=20)
    # Larger than the caches; read once and written once.
    large = torch.randn(1 << 25)
    bandwidth = 2 * large.nbytes / seconds(large.clone, calls=2)
    # So small that dispatching is all that costs: a linear layer is one operator forward and four backward.
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(100)))
    small = torch.ones(8, 8, requires_grad=True)
    operator = seconds(lambda: layers(small).sum().backward(), calls=20) / (100 * 5)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {REPEATS} repeats")
    print(f"flops_per_second: {flops:.2g}")
    print(f"bytes_per_second: {bandwidth:.2g}")
    print(f"operator_seconds: {operator:.2g}")


if __name__ == "__main__":
    main()
