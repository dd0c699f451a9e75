"""Recomputation: the same numbers, in the blocks that were chosen and in no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memtrain.features.recompute import recompute_blocks_


class Counting(nn.Module):
    """A block that counts how often it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.5)
        self.runs = 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.runs += 1
        out: Tensor = x + scale * self.dropout(self.linear(x)).tanh()
        return out


def stack(count: int) -> tuple[list[Counting], Callable[[], list[Tensor]]]:
    """Blocks, and the gradients of a step through them; the same numbers at every call."""
    torch.manual_seed(0)
    blocks = [Counting() for _ in range(count)]

    def step() -> list[Tensor]:
        torch.manual_seed(1)
        x = torch.ones(4, 3)
        for block in blocks:
            block.zero_grad()
            block.runs = 0
            x = block(x, scale=0.5)
        x.square().sum().backward()
        return [parameter.grad.clone() for block in blocks for parameter in block.parameters() if parameter.grad is not None]

    return blocks, step


@pytest.mark.parametrize(
    ("every", "runs"), [(1, [2, 2, 2, 2, 2]), (2, [1, 2, 1, 2, 1]), (3, [1, 1, 2, 1, 1]), (5, [1, 1, 1, 1, 2])]
)
def test_every_nth_block_runs_twice_and_the_gradients_are_the_same_to_the_bit(every: int, runs: list[int]) -> None:
    blocks, step = stack(5)
    plain = step()
    assert [block.runs for block in blocks] == [1] * 5
    undo = recompute_blocks_(blocks, every)
    recomputed = step()
    assert [block.runs for block in blocks] == runs
    assert all(torch.equal(a, b) for a, b in zip(recomputed, plain, strict=True))
    undo()
    assert all(torch.equal(a, b) for a, b in zip(step(), plain, strict=True))
    assert [block.runs for block in blocks] == [1] * 5


def test_all_blocks_are_recomputed_unless_told_otherwise() -> None:
    blocks, step = stack(2)
    recompute_blocks_(blocks)
    step()
    assert [block.runs for block in blocks] == [2, 2]


def test_without_gradients_a_block_runs_once() -> None:
    blocks, _ = stack(1)
    recompute_blocks_(blocks)
    with torch.no_grad():
        blocks[0](torch.ones(1, 3))
    assert blocks[0].runs == 1


def test_module_tree_names_and_hooks_stay_as_they_are() -> None:
    blocks, step = stack(1)
    block = blocks[0]
    seen: list[Any] = []
    block.register_forward_hook(lambda module, args, output: seen.append(type(output)))
    before = (
        [name for name, _ in block.named_modules()],
        [name for name, _ in block.named_parameters()],
        set(block.state_dict()),
    )
    undo = recompute_blocks_(blocks)
    step()
    assert (
        [name for name, _ in block.named_modules()],
        [name for name, _ in block.named_parameters()],
        set(block.state_dict()),
    ) == before
    assert type(block) is Counting
    # Hooks run above the forward that is recomputed, so once.
    assert seen == [Tensor]
    assert "forward" in block.__dict__
    undo()
    assert "forward" not in block.__dict__


def test_a_forward_that_the_instance_had_of_its_own_comes_back() -> None:
    block = nn.Linear(3, 3)
    own = block.forward
    block.forward = own  # type: ignore[method-assign]
    recompute_blocks_([block])()
    assert block.__dict__["forward"] is own


def test_recomputing_twice_is_undone_in_reverse() -> None:
    blocks, step = stack(1)
    plain = step()
    first, second = recompute_blocks_(blocks), recompute_blocks_(blocks)
    assert all(torch.equal(a, b) for a, b in zip(step(), plain, strict=True))
    second()
    step()
    assert blocks[0].runs == 2
    first()
    step()
    assert blocks[0].runs == 1


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^the model has no repeated blocks to recompute: keep the activations\.$"):
        recompute_blocks_([])


def test_more_than_the_blocks_there_are_is_refused_and_changes_nothing() -> None:
    blocks, _ = stack(3)
    with pytest.raises(
        ValueError, match=r"^recompute every 4 finds no block to recompute among the 3 of the model: choose 1 to 3\.$"
    ):
        recompute_blocks_(blocks, 4)
    assert not any("forward" in block.__dict__ for block in blocks)
