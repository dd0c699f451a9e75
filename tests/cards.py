"""Devices whose numbers say nothing, for tests in which only their kind matters."""

from __future__ import annotations

from memtrain.device import Cpu, Cuda

CPU = Cpu(name="cpu", threads=1, flops_per_second=1.0, bytes_per_second=1.0, operator_seconds=1.0)
CARD = Cuda(
    name="card",
    compute_capability=(8, 0),
    multiprocessors=1,
    usable_bytes=2,
    context_bytes=1,
    flops_per_second={"float32": 1.0},
    bytes_per_second=1.0,
    operator_seconds=1.0,
    link_bytes_per_second=1.0,
    host_bytes_per_second=1.0,
)
