"""Recomputation: the same numbers, in the blocks that were chosen and in no other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_bytes_freed import CARD
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from toys import CASES

from memtrain.check import PlanRefused
from memtrain.features.recompute import WritesInPlace, recompute_blocks_, recompute_first_, recompute_selectively_
from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.blocks import Part, blocks, parts
from memtrain.models.build import source
from memtrain.plan import Activations, Keep, Plan, Recompute, RecomputeAttention, RecomputeMlp, RecomputeSelective
from memtrain.planner.predict import Predictor
from memtrain.precision import AutocastBf16
from memtrain.trace.event import Phase
from memtrain.trace.simulate import dataless_model, simulate


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


# ---------------------------------------------------------------------------------------------- the first blocks


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_first_blocks_run_twice_and_the_gradients_are_the_same_to_the_bit(count: int) -> None:
    blocks, step = stack(5)
    plain = step()
    undo = recompute_first_(blocks, count)
    assert all(torch.equal(a, b) for a, b in zip(step(), plain, strict=True))
    assert [block.runs for block in blocks] == [2] * count + [1] * (5 - count)
    undo()
    step()
    assert [block.runs for block in blocks] == [1] * 5


def test_more_first_blocks_than_there_are_are_refused_and_nothing_is_changed() -> None:
    blocks, _ = stack(3)
    with pytest.raises(ValueError, match=r"^the model has 3 blocks, too few to recompute the first 4: choose 1 to 3\.$"):
        recompute_first_(blocks, 4)
    assert not any("forward" in block.__dict__ for block in blocks)
    for recompute in (lambda: recompute_first_([], 1), lambda: recompute_selectively_([])):
        with pytest.raises(ValueError, match=r"^the model has no repeated blocks to recompute: keep the activations\.$"):
            recompute()


# ---------------------------------------------------------------------------------------------- all but products


class Operators(TorchDispatchMode):
    """Counts the operators that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_products_run_once_and_all_else_of_a_block_twice_with_the_same_dropout() -> None:
    blocks, step = stack(3)
    plain = step()
    recompute_selectively_(blocks)
    with Operators() as counted:
        recomputed = step()
    assert all(torch.equal(a, b) for a, b in zip(recomputed, plain, strict=True))
    assert [block.runs for block in blocks] == [2, 2, 2]
    assert (counted.ran["addmm"], counted.ran["bernoulli_"], counted.ran["tanh"]) == (3, 6, 6)


@pytest.mark.parametrize(("dropout", "phases"), [(0.0, {Phase.FORWARD}), (0.1, {Phase.FORWARD, Phase.RECOMPUTE})])
def test_an_attention_kernel_that_draws_dropout_is_run_again(dropout: float, phases: set[Phase]) -> None:
    """Left out, it would leave other random numbers to the dropouts that follow it in the block."""
    config = {"model_type": "gpt2", "vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
    built = source({**config, "attn_pdrop": dropout, "bos_token_id": 1, "eos_token_id": 2})
    plan = Plan(micro_batch_size=2, activations=RecomputeSelective())
    rows = dict.fromkeys(("input_ids", "labels"), ((16,), torch.int64))
    trace = simulate(Job(model="toy", global_batch_size=2, steps=1), plan, built, rows, CARD)
    ran = [event.phase for event in trace.events if event.operator == "_scaled_dot_product_efficient_attention"]
    assert set(ran) == phases
    # Of two blocks the product of each linear layer is there once, and its operands' gradients in backward.
    assert not [event for event in trace.events if event.operator == "addmm" and event.phase is Phase.RECOMPUTE]


class InPlace(nn.Module):
    """Two blocks that write into the result of their product."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.blocks(x).sum()
        return out


WRITES = (
    r"^a block writes in place into the result of a product, which selective recomputation keeps: "
    r"recompute whole blocks, or make the block with inplace=False\.$"
)


def test_a_block_that_writes_into_a_kept_product_is_refused() -> None:
    model = InPlace()
    recompute_selectively_(list(model.blocks))
    with pytest.raises(WritesInPlace, match=WRITES):
        model(torch.ones(2, 8)).backward()


def test_a_model_that_writes_into_its_products_is_planned_without_keeping_them() -> None:
    job = Job(model="toy", global_batch_size=4, steps=1)
    predictor = Predictor(job, source(InPlace()), {"x": ((8,), torch.float32)}, CARD)
    for size in (2, 4):
        with pytest.raises(PlanRefused, match=WRITES):
            predictor.trace(Plan(micro_batch_size=size, activations=RecomputeSelective()))
    assert predictor.trace(Plan(micro_batch_size=4, activations=Recompute())).events


# ---------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize(
    ("name", "part", "last", "count"),
    [
        ("llama", "attention", "self_attn", 3),
        ("llama", "mlp", "mlp", 3),
        ("gpt2_with_dropout", "attention", "attn", 3),
        # The outer of the two that a block of BERT has inside one another.
        ("bert_masked_lm", "attention", "attention", 3),
        # Two blocks of the encoder with one attention each, and two of the decoder with two.
        ("t5", "attention", ("SelfAttention", "EncDecAttention"), 6),
        ("t5", "mlp", "DenseReluDense", 4),
    ],
)
def test_the_parts_of_blocks_are_found_by_name(name: str, part: Part, last: Any, count: int) -> None:
    found = parts(blocks(dataless_model(CASES[name].build())), part)
    assert len(found) == count
    assert all(path.endswith(last) for path in found)


@pytest.mark.parametrize(
    ("name", "part", "names"),
    [
        ("bert_masked_lm", "mlp", r"mlp, feed_forward, ffn or DenseReluDense"),
        ("plain_module", "mlp", r"mlp, feed_forward, ffn or DenseReluDense"),
        ("plain_module", "attention", r"attention, attn, self_attn, .* or EncDecAttention"),
    ],
)
def test_blocks_without_a_part_of_a_known_name_are_refused(name: str, part: Part, names: str) -> None:
    found = blocks(dataless_model(CASES[name].build()))
    with pytest.raises(ValueError, match=rf"^no block of the model has a part called {names}: recompute whole blocks\.$"):
        parts(found, part)


# ---------------------------------------------------------------------------------------------- adapters


class Adapted(nn.Module):
    """A frozen linear layer and a trained detour of rank 2 beside it, as LoRA makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (self.base(x) + self.up(self.down(x))).tanh()
        return out


@pytest.mark.parametrize(
    "recompute",
    [
        recompute_blocks_,
        lambda blocks: recompute_first_(blocks, 2),
        recompute_selectively_,
        lambda blocks: recompute_blocks_([block.up for block in blocks]),
    ],
    ids=["all", "first", "selective", "parts"],
)
def test_adapters_in_recomputed_blocks_get_their_gradients_though_nothing_before_them_is_trained(
    recompute: Callable[[Any], Callable[[], None]],
) -> None:
    torch.manual_seed(0)
    blocks = [Adapted() for _ in range(3)]

    def gradients() -> list[Tensor | None]:
        x = torch.ones(4, 8)
        for block in blocks:
            block.zero_grad()
            x = block(x)
        x.square().sum().backward()
        return [None if p.grad is None else p.grad.clone() for block in blocks for p in block.parameters()]

    plain = gradients()
    assert [gradient is None for gradient in plain] == [True, True, False, False] * 3
    recompute(blocks)
    for again, before in zip(gradients(), plain, strict=True):
        assert (again is None) == (before is None)
        assert again is None or before is None or torch.equal(again, before)


# ---------------------------------------------------------------------------------------------- on a card


@pytest.mark.parametrize("activations", [Recompute(), RecomputeSelective(), RecomputeAttention(), RecomputeMlp()], ids=str)
def test_what_is_recomputed_under_the_autocast_of_a_card_saves_the_same_tensors(activations: Activations) -> None:
    """Transformers gives attention its tensors by name, and torch looks for their device among the others."""
    job = Job(model="toy", global_batch_size=1, steps=2, precision=AutocastBf16())
    rows = dict.fromkeys(("input_ids", "labels"), ((16,), torch.int64))
    made = source({"model_type": "llama", "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2})
    kept, again = (
        MemoryTimeline(simulate(job, Plan(micro_batch_size=1, activations=one), made, rows, CARD))
        for one in (Keep(), activations)
    )
    assert again.peak_bytes < kept.peak_bytes
