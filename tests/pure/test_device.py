"""The device description: what it must hold, and how it is read from plain data."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from memtrain.device import Cpu, Cuda, from_dict

CPU = Cpu(name="laptop", threads=2, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-5)
CARD = Cuda(
    name="card",
    compute_capability=(8, 9),
    multiprocessors=2,
    usable_bytes=2**30,
    context_bytes=2**20,
    flops_per_second={"float32": 1e12, "bfloat16": 2e12},
    bytes_per_second=1e11,
    operator_seconds=1e-5,
    link_bytes_per_second=1e10,
    host_bytes_per_second=1e10,
)
WRITTEN_CPU = {
    "kind": "cpu",
    "name": "laptop",
    "threads": 2,
    "flops_per_second": "1e11",
    "bytes_per_second": "1e10",
    "operator_seconds": 1e-5,
}
WRITTEN_CARD = {
    "kind": "cuda",
    "name": "card",
    "compute_capability": [8, 9],
    "multiprocessors": 2,
    "usable_bytes": "1GiB",
    "context_bytes": 2**20,
    "flops_per_second": {"float32": "1e12", "bfloat16": 2e12},
    "bytes_per_second": "1e11",
    "operator_seconds": "1e-5",
    "link_bytes_per_second": 1e10,
    "host_bytes_per_second": 10**10,
}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: replace(CPU, threads=0), "device laptop: threads is 0, and it must be above 0."),
        (lambda: replace(CPU, flops_per_second=0.0), "device laptop: flops_per_second is 0.0, and it must be above 0."),
        (lambda: replace(CPU, bytes_per_second=-1.0), "device laptop: bytes_per_second is -1.0, and it must be above 0."),
        (lambda: replace(CPU, operator_seconds=0.0), "device laptop: operator_seconds is 0.0, and it must be above 0."),
        (lambda: replace(CARD, usable_bytes=0), "device card: usable_bytes is 0, and it must be above 0."),
        (
            lambda: replace(CARD, flops_per_second={"float32": 0.0}),
            "device card: flops_per_second is {'float32': 0.0}, and it must be above 0.",
        ),
        (
            lambda: replace(CARD, flops_per_second={"bfloat16": 1e12}),
            "device card: flops_per_second names no rate for float32, which every card has: add it.",
        ),
        (
            lambda: replace(CARD, flops_per_second={"float32": 1e12, "bf16": 2e12}),
            "device card: flops_per_second has a rate for 'bf16', and its data types are float32, bfloat16, float16.",
        ),
        (
            lambda: replace(CARD, context_bytes=2**30),
            "device card: context_bytes is 1.00 GiB, and it must be below usable_bytes, which is 1.00 GiB.",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_the_rule(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        make()


def test_a_data_type_without_a_rate_runs_at_that_of_float32() -> None:
    assert [CARD.flops(dtype) for dtype in ("float32", "bfloat16", "float16")] == [1e12, 2e12, 1e12]
    assert CPU.flops("bfloat16") == 1e11


def test_a_description_is_read_from_plain_data() -> None:
    assert from_dict(WRITTEN_CPU) == CPU
    assert from_dict(WRITTEN_CARD) == CARD
    # As the composed configuration has them: the keys of the other kind are there and empty.
    assert from_dict({**dict.fromkeys(WRITTEN_CARD), **WRITTEN_CPU}) == CPU


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ({**WRITTEN_CPU, "kind": "tpu"}, "device laptop: kind is 'tpu', and it must be one of cpu, cuda."),
        (
            {**WRITTEN_CPU, "usable_bytes": "1GiB"},
            "device laptop is of kind cpu, which has no key 'usable_bytes': "
            "it has name, threads, flops_per_second, bytes_per_second, operator_seconds; another kind is written as kind: cuda.",
        ),
        (
            {**WRITTEN_CARD, "multiprocessors": None},
            "device card is of kind cuda and has no multiprocessors: add it to the description.",
        ),
        ({**WRITTEN_CPU, "threads": 2.0}, "device laptop: threads is 2.0, and it must be a whole number."),
        ({**WRITTEN_CPU, "bytes_per_second": "fast"}, "device laptop: bytes_per_second is 'fast', and it must be a number."),
        ({**WRITTEN_CPU, "bytes_per_second": "inf"}, "device laptop: bytes_per_second is 'inf', and it must be a number."),
        (
            {**WRITTEN_CPU, "flops_per_second": {"float32": 1e11}},
            "device laptop: flops_per_second is {'float32': 100000000000.0}, and it must be a number.",
        ),
        (
            {**WRITTEN_CARD, "flops_per_second": 3},
            "device card: flops_per_second is 3, and it must be a rate for each data type, such as {float32: 8e13}.",
        ),
        (
            {**WRITTEN_CARD, "compute_capability": 8.9},
            "device card: compute_capability is 8.9, and it must be two whole numbers, such as [8, 9].",
        ),
        (
            {**WRITTEN_CARD, "usable_bytes": "24"},
            "device card: usable_bytes: '24' is not an amount of memory: give a positive number of bytes with its unit, "
            "such as 24GB (10^9), 24GiB (2^30), 512MiB or 1.5TiB.",
        ),
    ],
)
def test_a_wrong_description_is_refused_with_the_rule(written: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        from_dict(written)
