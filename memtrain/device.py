"""The device description: every fact about a processor or a card that a prediction may depend on.

A prediction is a function of (job, plan, device description) and never of the machine that computes it (rule 4), so
what a kernel's choice, its scratch memory or its time depends on is written down here instead of being asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, get_type_hints

from memtrain.units import format_bytes, parse_bytes

DTYPES = ("float32", "bfloat16", "float16")


def _above_zero(device: Any) -> None:
    for field in fields(device):
        value = getattr(device, field.name)
        numbers = value.values() if isinstance(value, Mapping) else [value] if isinstance(value, int | float) else []
        if not all(number > 0 for number in numbers):
            shown = dict(value) if isinstance(value, Mapping) else value
            raise ValueError(f"device {device.name}: {field.name} is {shown}, and it must be above 0.")


@dataclass(frozen=True, kw_only=True)
class Cpu:
    """A processor.

    Attributes:
        name: as printed and as chosen with ``device=NAME``.
        threads: threads a kernel spreads over; its scratch buffers are one per thread.
        flops_per_second: dense fp32 operations, sustained (a multiply-add is two).
        bytes_per_second: memory bandwidth, sustained.
        operator_seconds: fixed time to dispatch one operator from Python.
    """

    kind: ClassVar[str] = "cpu"

    name: str
    threads: int
    flops_per_second: float
    bytes_per_second: float
    operator_seconds: float

    def __post_init__(self) -> None:
        _above_zero(self)

    def flops(self, dtype: str) -> float:
        """Operations per second in the torch data type of that name; one rate stands for all."""
        return self.flops_per_second


@dataclass(frozen=True, kw_only=True)
class Cuda:
    """An NVIDIA card in a host.

    Attributes:
        name: as printed and as chosen with ``device=NAME``.
        compute_capability: (major, minor); decides which kernels there are.
        multiprocessors: streaming multiprocessors, over which some kernels split their scratch memory.
        usable_bytes: memory of the whole card as torch reports it (``total_memory``), before the context.
        context_bytes: what the CUDA context and the kernels loaded on first use take of it, outside torch's allocator.
        flops_per_second: dense operations by torch data type ("float32", "bfloat16", "float16"); a type that is left
            out is not supported by the card's matrix units and runs at the rate of float32.
        bytes_per_second: memory bandwidth.
        operator_seconds: fixed time to launch one operator from Python.
        link_bytes_per_second: copies between host and card, in each direction.
        host_bytes_per_second: memory bandwidth of the host's processor, at which an update on the host runs.
    """

    kind: ClassVar[str] = "cuda"

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    usable_bytes: int
    context_bytes: int
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    operator_seconds: float
    link_bytes_per_second: float
    host_bytes_per_second: float

    def __post_init__(self) -> None:
        _above_zero(self)
        if "float32" not in self.flops_per_second:
            raise ValueError(f"device {self.name}: flops_per_second names no rate for float32, which every card has: add it.")
        if unknown := self.flops_per_second.keys() - set(DTYPES):
            raise ValueError(
                f"device {self.name}: flops_per_second has a rate for {sorted(unknown)[0]!r}, "
                f"and its data types are {', '.join(DTYPES)}."
            )
        if self.context_bytes >= self.usable_bytes:
            raise ValueError(
                f"device {self.name}: context_bytes is {format_bytes(self.context_bytes)}, "
                f"and it must be below usable_bytes, which is {format_bytes(self.usable_bytes)}."
            )

    def flops(self, dtype: str) -> float:
        """Operations per second in the torch data type of that name.

        "tf32" is fp32 in the matrix units, at half the rate of bfloat16 (NVIDIA A100, H100 and RTX 4090 data sheets).
        """
        if dtype == "tf32" and "bfloat16" in self.flops_per_second:
            return self.flops_per_second["bfloat16"] / 2
        return self.flops_per_second.get(dtype, self.flops_per_second["float32"])


Device = Cpu | Cuda


def from_dict(written: Mapping[str, Any]) -> Device:
    """The device that a description names: its ``kind`` and the fields of that kind.

    A key that is None counts as left out. Bytes may be text (``"23.5GiB"``), and a number may be text such as ``"1e11"``,
    which YAML 1.1 does not read as a number.

    Raises:
        ValueError: the kind is unknown, a key is missing, is of another kind or has a value that it cannot have.

    >>> from_dict({"kind": "cpu", "name": "laptop", "threads": 2, "flops_per_second": "1e11", "bytes_per_second": 1e10,
    ...            "operator_seconds": 1e-5})
    Cpu(name='laptop', threads=2, flops_per_second=100000000000.0, bytes_per_second=10000000000.0, operator_seconds=1e-05)
    """
    given = {key: value for key, value in written.items() if value is not None}
    kind, name = given.pop("kind", None), str(given.get("name"))
    kinds: dict[str, type[Cpu] | type[Cuda]] = {"cpu": Cpu, "cuda": Cuda}
    if kind not in kinds:
        raise ValueError(f"device {name}: kind is {kind!r}, and it must be one of {', '.join(kinds)}.")
    if kind == "cuda" and name == "cpu":
        raise ValueError("the card has no name, and 'cpu' is the processor's: give it one with device.name.")
    types = {field.name: get_type_hints(kinds[kind])[field.name] for field in fields(kinds[kind])}
    for key in given:
        if key not in types:
            other = "cuda" if kind == "cpu" else "cpu"
            raise ValueError(
                f"device {name} is of kind {kind}, which has no key {key!r}: it has {', '.join(types)}; "
                f"another kind is written as kind: {other}."
            )
    for key in types:
        if key not in given:
            raise ValueError(f"device {name} is of kind {kind} and has no {key}: add it to the description.")
    return kinds[kind](**{key: _read(name, key, types[key], value) for key, value in given.items()})


def _read(name: str, key: str, expected: Any, value: Any) -> Any:
    """The value of one key, as the type that its field has."""
    wrong = f"device {name}: {key} is {value!r}, and it must be "
    if expected is str:
        return str(value)
    if expected is float:
        return _number(value, f"{wrong}a number.")
    if isinstance(value, str) and key.endswith("_bytes"):
        try:
            return parse_bytes(value)
        except ValueError as error:
            raise ValueError(f"device {name}: {key}: {error}") from None
    if expected is int:
        if type(value) is not int:
            raise ValueError(f"{wrong}a whole number.")
        return value
    if expected == tuple[int, int]:
        if not isinstance(value, list | tuple) or [type(part) for part in value] != [int, int]:
            raise ValueError(f"{wrong}two whole numbers, such as [8, 9].")
        return tuple(value)
    rule = f"{wrong}a rate for each data type, such as {{float32: 8e13}}."
    if not isinstance(value, Mapping):
        raise ValueError(rule)
    return {str(dtype): _number(rate, rule) for dtype, rate in value.items()}


def _number(value: Any, sentence: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(sentence) from None
    if not math.isfinite(number):
        raise ValueError(sentence)
    return number
