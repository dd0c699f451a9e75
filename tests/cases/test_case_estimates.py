"""Field reports about estimates: how many parameters a model has, and what attention keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from cases.fixtures import tiny_gpt2, tiny_llama, tiny_mixtral, tiny_t5, tokens
from torch import Tensor

from memtrain.device import Cpu
from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import ModelSource
from memtrain.plan import Activations, Attention, Eager, Keep, Plan, Recompute, Sdpa
from memtrain.planner.predict import Predictor
from memtrain.run import prepare
from memtrain.trace.event import Kind, Phase, Trace

PROCESSOR = Cpu(name="cpu", threads=2, flops_per_second=1e11, bytes_per_second=2e10, operator_seconds=1e-5)
JOB = Job(model="tiny", global_batch_size=1, steps=2)


def predictor(model: ModelSource, length: int = 8) -> Predictor:
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tokens(length).items()}
    return Predictor(JOB, model, shapes, PROCESSOR)


# ---------------------------------------------------------------------- est-01

MODELS: dict[str, tuple[Callable[[], ModelSource], int]] = {
    "llama": (lambda: tiny_llama(tied=False), 202048),
    "llama, tied": (tiny_llama, 138048),
    "llama, as many heads of keys": (lambda: tiny_llama(tied=False, num_key_value_heads=4), 210240),
    "mixtral": (tiny_mixtral, 547136),
    "gpt2": (tiny_gpt2, 168192),
    "t5": (tiny_t5, 44800),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_counted_once(name: str) -> None:
    """est-01: tied weights once, the head that is not tied, all experts; the names of a state dict would give 202048 for 138048."""
    build, parameters = MODELS[name]
    made = predictor(build())
    assert made.weight_bytes == 4 * parameters
    real = build().load()
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in real.parameters()}
    assert sum(storages.values()) == made.weight_bytes
    # The run holds buffers as well, and nothing else under that name.
    buffers = sum({one.untyped_storage().data_ptr(): one.nbytes for one in real.buffers()}.values())
    trace = made.trace(Plan(micro_batch_size=1))
    assert held(trace, Kind.WEIGHT) == 4 * parameters + buffers


def test_experts_count_whole_in_memory_and_as_far_as_they_work_in_arithmetic() -> None:
    """est-01: 393216 of 547136 parameters are the experts', and 252224 work on a token."""
    made = predictor(tiny_mixtral())
    experts = sum(one.numel() for path, one in made.model.named_parameters() if ".experts." in path)
    assert experts == 393216
    active = made.weight_bytes // 4 - experts * 6 // 8
    assert active == 252224
    # Embeddings and norms make no products; scores of 8 tokens and their product with the values are 4 x 64 x 64 a layer.
    products = 2 * 8 * (active - 64 * 1000 - 5 * 64)
    assert made.trace(Plan(micro_batch_size=1)).work[Phase.FORWARD].flops == products + 2 * 4 * 64 * 64


def held(trace: Trace, kind: Kind) -> int:
    """Bytes of all storages of a kind."""
    return sum(event.bytes for event in trace.events if event.kind == kind and event.bytes > 0)


# ---------------------------------------------------------------------- est-04

LENGTHS = (64, 128, 256)


@contextmanager
def saved() -> Iterator[Callable[[set[int]], int]]:
    """Counts the bytes that autograd keeps for backward, each storage once, but for some."""
    kept: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda left_out: sum(size for address, (size, _) in kept.items() if address not in left_out)


def really_kept(length: int, plan: Plan) -> int:
    """Bytes kept by a forward of the run that trains, weights left out."""
    run = prepare(JOB, plan, tiny_llama(tied=False).load())
    weights = {tensor.untyped_storage().data_ptr() for tensor in run.model.parameters()}
    batch = {name: tensor.unsqueeze(0) for name, tensor in tokens(length).items()}
    with saved() as count:
        loss = run.objective.loss(run.model, batch)
        kept = count(weights)
    del loss
    run.release()
    return kept


def said_to_be_kept(length: int, plan: Plan) -> int:
    """Bytes that stand at the beginning of backward, weights, state and gradients left out."""
    trace = predictor(tiny_llama(tied=False), length).trace(plan)
    timeline = MemoryTimeline(trace)
    backward = next(position for position, event in enumerate(timeline.events) if event.phase == Phase.BACKWARD)
    by_kind = timeline.by_kind(backward - 1)
    return sum(by_kind.get(kind, 0) for kind in (Kind.INPUT, Kind.LOGITS, Kind.SAVED_ACTIVATION))


@pytest.mark.parametrize(("attention", "activations"), [(Sdpa(), Keep()), (Eager(), Keep()), (Sdpa(), Recompute())], ids=str)
def test_what_attention_keeps_is_predicted_with_the_implementation_that_runs(
    attention: Attention, activations: Activations
) -> None:
    """est-04: within 25 % at each of three lengths, and so growing as the real bytes do."""
    plan = Plan(micro_batch_size=1, attention=attention, activations=activations)
    for length in LENGTHS:
        assert said_to_be_kept(length, plan) == pytest.approx(really_kept(length, plan), rel=0.25)


def test_a_matrix_of_scores_is_predicted_where_it_is_made_and_nowhere_else() -> None:
    """est-04: eager attention keeps 2 x 4 heads x S x S x 4 bytes and 480 S more; the default grows with S alone."""
    fused = [said_to_be_kept(length, Plan(micro_batch_size=1, attention=Sdpa())) for length in LENGTHS]
    eager = [said_to_be_kept(length, Plan(micro_batch_size=1, attention=Eager())) for length in LENGTHS]
    assert [b - a for a, b in zip(fused, eager, strict=True)] == [2 * 4 * s * s * 4 + 480 * s for s in LENGTHS]
    # The same bytes for each further token.
    assert (fused[2] - fused[1]) == 2 * (fused[1] - fused[0])
    # Where nothing is asked for, the implementation is the fused one.
    assert predictor(tiny_llama(tied=False)).model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_a_plan_says_which_attention_runs() -> None:
    """est-04: in words, and so in what is printed before training."""
    assert [str(one) for one in (Sdpa(), Eager())] == ["SDPA", "eager"]
