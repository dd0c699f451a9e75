"""The blocks of a model: those that transformers names, else the longest list of equals."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn
from toys import CASES

from memtrain.models.blocks import blocks


@pytest.mark.parametrize(
    ("name", "paths"),
    [
        ("llama", ["model.layers.0", "model.layers.1", "model.layers.2"]),
        ("gpt2_with_dropout", ["transformer.h.0", "transformer.h.1", "transformer.h.2"]),
        ("t5", ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]),
        ("bert_masked_lm", ["bert.embeddings", *(f"bert.encoder.layer.{number}" for number in range(3))]),
        ("plain_module", [f"blocks.{number}" for number in range(6)]),
    ],
)
def test_the_blocks_are_those_that_transformers_names_else_the_longest_list(name: str, paths: list[str]) -> None:
    model = CASES[name].build().build()
    assert list(blocks(model)) == paths
    assert all(blocks(model)[path] is model.get_submodule(path) for path in paths)


class Block(nn.Module):
    """A block that holds another of its kind, or none."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.inner = inner


def holding(**children: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, child in children.items():
        model.add_module(name, child)
    return model


def linears(count: int) -> list[nn.Module]:
    return [nn.Linear(2, 2) for _ in range(count)]


def named(model: nn.Module, *classes: str) -> nn.Module:
    model._no_split_modules = list(classes)  # type: ignore[assignment]
    return model


@pytest.mark.parametrize(
    ("model", "paths"),
    [
        (holding(layers=nn.ModuleList(linears(3))), ["layers.0", "layers.1", "layers.2"]),
        (nn.Sequential(*linears(2)), ["0", "1"]),
        (nn.Sequential(OrderedDict(a=nn.Linear(2, 2), b=nn.Linear(2, 2))), ["a", "b"]),
        (holding(few=nn.ModuleList(linears(2)), many=nn.ModuleList(linears(4))), [f"many.{number}" for number in range(4)]),
        # Of two of one length the first.
        (holding(one=nn.ModuleList(linears(2)), other=nn.ModuleList(linears(2))), ["one.0", "one.1"]),
        # A list of lists: the outer where it is longer, the inner where that is.
        (nn.ModuleList(nn.Sequential(*linears(2)) for _ in range(3)), ["0", "1", "2"]),
        (nn.ModuleList(nn.Sequential(*linears(3)) for _ in range(2)), ["0.0", "0.1", "0.2"]),
        # Not alike, without parameters, or only one.
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), []),
        (holding(layers=nn.ModuleList([nn.Dropout(), nn.Dropout()])), []),
        (holding(layers=nn.ModuleList(linears(1))), []),
        (holding(layers=nn.ModuleList()), []),
        (nn.Linear(2, 2), []),
        # A name that transformers gives counts, unless nothing bears it; a block inside a block is part of the outer one.
        (named(holding(a=Block(Block()), b=nn.ModuleList(linears(3))), "Block"), ["a"]),
        (named(holding(a=Block(), ab=Block()), "Block"), ["a", "ab"]),
        (named(holding(b=nn.ModuleList(linears(3))), "Absent"), ["b.0", "b.1", "b.2"]),
    ],
)
def test_blocks_of_other_models(model: nn.Module, paths: list[str]) -> None:
    assert list(blocks(model)) == paths
