"""The device description: every fact about a card or a processor that a prediction may depend on.

A prediction is a function of (job, plan, device description) and never of the machine that computes it (rule 4), so
what a kernel's choice or its scratch memory depends on is written down here instead of being asked.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Device:
    """A training device.

    Attributes:
        name: as printed and as chosen with ``device=NAME``.
        kind: the torch device type the kernels run on; decides the kernel table of the simulation.
        threads: processor threads a CPU kernel spreads over; its scratch buffers are one per thread.
        flops_per_second: dense fp32 multiply-adds counted as two operations each, sustained.
        bytes_per_second: memory bandwidth, sustained.
        operator_seconds: fixed time to dispatch one operator from Python.
    """

    name: str
    kind: str
    threads: int
    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float

    def __post_init__(self) -> None:
        if self.kind != "cpu":
            raise ValueError(f"device kind {self.kind!r} is not simulated yet: use a description of kind 'cpu'.")
        for field in ("threads", "flops_per_second", "bytes_per_second", "operator_seconds"):
            if not getattr(self, field) > 0:
                raise ValueError(f"device {self.name}: {field} is {getattr(self, field)}, and it must be above 0.")
