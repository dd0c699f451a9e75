"""What this machine is, which devices are described, and what a plan may take of them."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from memtrain import machine
from memtrain.device import Cpu, Cuda
from memtrain.job import Budget, Limit

RATES = {"flops_per_second": 1e11, "bytes_per_second": 1e10, "operator_seconds": 1e-6}
CARDS = [name for name in machine.described_devices() if name not in ("auto", "cpu")]
KEYS = (
    "kind, name, compute_capability, multiprocessors, usable_bytes, context_bytes, flops_per_second, bytes_per_second, "
    "operator_seconds, link_bytes_per_second, host_bytes_per_second"
)


def card(name: str) -> Cuda:
    described = machine.named(name)
    assert isinstance(described, Cuda)
    return described


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 1000 bytes, 600 of them free, without a card."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=600))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def plug_in(monkeypatch: pytest.MonkeyPatch, name: str, *, total: int = 2**40, free: int = 2**40) -> None:
    """Put a card of 2 multiprocessors into this machine; torch's allocator holds 30 bytes of it and uses 10."""
    properties = SimpleNamespace(name=name, major=7, minor=1, multi_processor_count=2, total_memory=total)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 10)


# ---------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("folder", ["configs", "recipes"])
def test_facts_are_found_beside_the_package_or_inside_it(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(machine.facts(folder).rglob("*.yaml"))
    package = tmp_path / "site-packages" / "memtrain"
    package.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(package / "machine.py"))
    assert machine.facts(folder) == package.parent / folder
    (package / folder).mkdir()
    assert machine.facts(folder) == package / folder


@pytest.mark.parametrize("name", CARDS)
def test_a_card_is_described_under_its_own_name_with_numbers_that_agree(name: str) -> None:
    described = card(name)
    assert described.name == name
    assert 0 < described.context_bytes < 2**30 < described.usable_bytes
    assert described.flops("float16") >= described.flops("bfloat16") >= described.flops("float32")
    # bfloat16 came with compute capability 8.
    assert ("bfloat16" in described.flops_per_second) == (described.compute_capability >= (8, 0))
    # Each memory is slower than the one nearer to the multiprocessors.
    assert described.link_bytes_per_second < described.host_bytes_per_second < described.bytes_per_second


@pytest.mark.parametrize("name", [*CARDS, "cpu"])
def test_each_number_of_a_description_says_where_it_is_from(name: str) -> None:
    lines = (machine.facts("configs") / "device" / f"{name}.yaml").read_text().splitlines()
    assert lines[0].startswith("# ")
    sourced = ("usable_bytes", "context_bytes", "link_bytes_per_second", "host_bytes_per_second")
    for above, line in pairwise(lines):
        assert not line.startswith(sourced) or above.startswith("# "), line


@pytest.mark.parametrize("left_open", [{}, {"threads": None}])
def test_threads_that_a_description_leaves_open_are_those_of_torch(left_open: dict[str, None]) -> None:
    assert machine.describe(kind="cpu", name="cpu", **RATES, **left_open).threads == torch.get_num_threads()


def test_threads_that_a_description_names_are_taken() -> None:
    described = machine.describe(kind="cpu", name="big", threads=64, **RATES)
    assert described == Cpu(name="big", threads=64, **RATES)


def test_the_processor_is_described_by_numbers() -> None:
    device = machine.cpu()
    assert isinstance(device, Cpu)
    assert (device.name, device.threads) == ("cpu", torch.get_num_threads())
    assert all(type(getattr(device, name)) is float and getattr(device, name) > 0 for name in RATES)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("rtx_3080", "the nearest are rtx_4080, rtx_3090"),
        ("NVIDIA GeForce RTX 3080", "the nearest are rtx_4080, rtx_3090"),
        ("a100", "the nearest are a100_40gb, a100_80gb"),
        ("NVIDIA A10", "the nearest is a10g"),
        ("Instinct MI300X", f"there are {', '.join(machine.described_devices())}"),
    ],
)
def test_a_card_that_is_not_described_is_refused_with_the_nearest(name: str, known: str) -> None:
    sentence = (
        f"device {name!r} is not described: {known}; describe a card in the device section of a recipe, with the keys {KEYS}."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        machine.named(name)


# ---------------------------------------------------------------------------------------------- auto


def test_auto_is_the_processor_where_there_is_no_card() -> None:
    assert machine.named("auto") == machine.cpu()


@pytest.mark.parametrize(
    ("says", "described"),
    [
        ("NVIDIA GeForce RTX 3090", "rtx_3090"),
        ("NVIDIA GeForce RTX 4090", "rtx_4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100 80GB PCIe", "a100_80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("Tesla T4", "t4"),
    ],
)
def test_auto_asks_the_card_what_it_is_and_a_description_how_fast(
    says: str, described: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, says, total=2**34)
    own = {"name": says, "compute_capability": (7, 1), "multiprocessors": 2, "usable_bytes": 2**34}
    assert machine.named("auto") == replace(card(described), **own)


def test_what_a_description_says_beside_auto_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA L4")
    device = machine.describe(kind="auto", name="auto", threads=None, link_bytes_per_second=1e9)
    assert device == replace(card("l4"), **vars(machine.named("auto")) | {"link_bytes_per_second": 1e9})


@pytest.mark.parametrize("says", ["NVIDIA L20", "NVIDIA A100-SXM-64GB", "Instinct MI300X"])
def test_a_card_of_this_machine_that_is_not_described_is_refused_by_its_name(
    says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, says)
    with pytest.raises(ValueError, match=f"^device '{says}' is not described: .+ with the keys {KEYS}\\.$"):
        machine.named("auto")


# ---------------------------------------------------------------------------------------------- budgets


def test_a_budget_is_the_smallest_of_what_is_asked_for_installed_and_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = machine.cpu()
    limits = (Limit("asked for", 500), Limit("installed", 1000), Limit("free now", 600))
    assert machine.budget_for(cpu, 500) == Budget(limits=limits)
    assert [machine.budget_for(cpu, asked).tightest.source for asked in (500, 700, 5000)] == [
        "asked for",
        "free now",
        "free now",
    ]
    assert machine.budget_for(cpu, 700, headroom_bytes=50).device_bytes == 550
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=1000, available=1200))
    assert machine.budget_for(cpu, 5000).tightest == Limit("installed", 1000)


@pytest.mark.parametrize("elsewhere", [None, "NVIDIA GeForce RTX 4090"], ids=["no card", "another card"])
def test_a_budget_on_a_card_that_is_not_here_says_nothing_of_this_machine(
    elsewhere: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere is not None:
        plug_in(monkeypatch, elsewhere, free=0)
    device = replace(card("l4"), usable_bytes=2**40)
    usable = Limit("usable on l4", 2**40)
    assert machine.budget_for(device, None) == Budget(limits=(usable,))
    assert machine.budget_for(device, 700, 50, 400) == Budget(
        limits=(Limit("asked for", 700), usable), headroom_bytes=50, host_limits=(Limit("asked for", 400),)
    )


@pytest.mark.parametrize("name", ["l4", "auto"])
def test_a_budget_on_a_card_that_is_here_counts_what_is_free_of_it_and_of_the_host(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug_in(monkeypatch, "NVIDIA L4", total=2**40, free=2**35)
    device = card(name)
    # 20 bytes that torch's allocator keeps, and the context that asking has opened.
    free = Limit("free now", 2**35 + 20 + device.context_bytes)
    usable = Limit(f"usable on {device.name}", device.usable_bytes)
    here = (Limit("installed", 1000), Limit("free now", 600))
    assert machine.budget_for(device, None) == Budget(limits=(usable, free), host_limits=here)
    asked = machine.budget_for(device, 700, 50, 400)
    assert (asked.limits, asked.device_bytes) == ((Limit("asked for", 700), usable, free), 650)
    assert (asked.host_limits, asked.host_bytes) == ((Limit("asked for", 400), *here), 400)


def test_no_more_is_free_than_a_card_has(monkeypatch: pytest.MonkeyPatch) -> None:
    plug_in(monkeypatch, "NVIDIA L4", total=2**40, free=2**40 - 1)
    assert machine.budget_for(card("l4"), None).limits[-1] == Limit("free now", 2**40)


def test_a_processor_needs_a_budget_and_has_no_host_beside_it() -> None:
    with pytest.raises(
        ValueError, match=r"^budget has no value: say how much memory of a processor training may take, such as 8GiB\.$"
    ):
        machine.budget_for(machine.cpu(), None)
    sentence = "host_bytes is set and device cpu has no memory beside the host's: leave host_bytes out."
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
        machine.budget_for(machine.cpu(), 500, host_bytes=400)


def test_a_headroom_that_leaves_nothing_of_a_card_is_refused() -> None:
    device = replace(card("l4"), usable_bytes=2**30)
    with pytest.raises(ValueError, match=r"^headroom 1\.00 GiB leaves nothing of the 1\.00 GiB that are usable on l4: "):
        machine.stated_budget(device, None, 2**30)


def test_a_card_that_is_elsewhere_is_not_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    machine.require(machine.cpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    advice = r"plan for it here \(mode=plan, or Trainer\.choice\) and train on a machine that has it\."
    with pytest.raises(ValueError, match=rf"^device l4 is not in this machine, which has no CUDA card: {advice}$"):
        machine.require(machine.named("l4"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(name="NVIDIA GeForce RTX 3090"))
    with pytest.raises(ValueError, match=rf"^device l4 is not in this machine, which has a NVIDIA GeForce RTX 3090: {advice}$"):
        machine.require(machine.named("l4"))
    machine.require(machine.named("rtx_3090"))
