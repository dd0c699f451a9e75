"""Field reports about amounts of memory as text."""

from __future__ import annotations

import dataclasses
import re
from io import StringIO

import pytest
from cases.fixtures import ConstGrad, factors, trainer
from rich.console import Console

from memtrain import machine
from memtrain.device import Cuda
from memtrain.job import Budget
from memtrain.report.terminal import choice_view
from memtrain.units import parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24GB", 24_000_000_000),
        ("24gb", 24_000_000_000),
        ("24 GB", 24_000_000_000),
        ("24GiB", 25_769_803_776),
        ("24gib", 25_769_803_776),
        ("23.6GiB", 25_340_307_046),
        ("24000MiB", 25_165_824_000),
        ("24576MB", 24_576_000_000),
        ("0.5TiB", 549_755_813_888),
    ],
)
def test_decimal_and_binary_units_are_two_things_in_any_case(text: str, size: int) -> None:
    """est-02: 24gb was read as three billion bytes, as if its b were bits."""
    assert parse_bytes(text) == size
    assert Budget.of(text).device_bytes == size


@pytest.mark.parametrize("text", ["24G", "24", "-1GB", "", "24Gbit", "24Gb", "1e9", "nan", "12,5GB", "0GB"])
def test_whatever_is_no_amount_of_bytes_is_refused_with_the_forms_that_are(text: str) -> None:
    """est-02: also a bare G, of which nobody knows which of the two it is."""
    with pytest.raises(
        ValueError, match=r"give a positive number of bytes with its unit, such as 24GB \(10\^9\), 24GiB \(2\^30\)"
    ):
        parse_bytes(text)


def test_a_budget_above_what_the_card_offers_is_the_smaller_of_the_two_and_says_so() -> None:
    """est-02: a card sold as 24 GB that offers 23.56 GiB, and a budget of 24GiB."""
    card = machine.named("rtx_4090")
    assert isinstance(card, Cuda)
    offered = int(23.56 * 2**30)
    card = dataclasses.replace(card, usable_bytes=offered)
    made = trainer(ConstGrad(), factors(1.0), micro_batch_size=1, global_batch_size=1, steps=1, device=card, budget="24GiB")
    assert made.budget.device_bytes == offered
    said = Console(file=StringIO(), width=120)
    said.print(choice_view(made.choice))
    printed = said.file.getvalue()  # type: ignore[attr-defined]
    # With their units.
    assert "24.0 GiB  asked for\n" in re.sub(r" *\n", "\n", printed)
    assert "23.6 GiB  usable on rtx_4090 (the tightest)" in printed
