"""G4: each policy frees exactly what it says, in bytes, on a toy."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from toys import VOCABULARY

from memtrain.device import Device
from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import source
from memtrain.plan import ChunkedLogits, DuringBackward, Foreach, Plan, Recompute
from memtrain.trace.event import Kind, Phase, Trace
from memtrain.trace.simulate import RowShapes, dataless_model, simulate

DEVICE = Device(name="cpu", kind="cpu", threads=1, flops_per_second=1e11, bytes_per_second=1e10, operator_seconds=1e-6)
ROWS, WIDTH, BLOCKS = 4, 8, 6
ACTIVATION = 4 * ROWS * WIDTH
WEIGHT = 4 * WIDTH * WIDTH
# A block of Linear, ReLU, Linear saves its input, the result of its ReLU and nothing else; the last also feeds the loss.
PLAIN = Plan(micro_batch_size=ROWS)
JOB = Job(model="toy", global_batch_size=ROWS, steps=2, max_grad_norm=None)


class Stack(nn.Module):
    """Six blocks of Linear, ReLU, Linear, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(), nn.Linear(WIDTH, WIDTH, bias=False))
                for _ in range(BLOCKS)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum()


def traced(plan: Plan, job: Job = JOB) -> Trace:
    return simulate(job, plan, dataless_model(source(Stack())), {"x": ((WIDTH,), torch.float32)}, DEVICE)


def saved_after_forward(trace: Trace) -> int:
    """Bytes of saved activations when the last step's backward begins."""
    timeline = MemoryTimeline(trace)
    start, stop = trace.section("step 2")
    backward = next(position for position in range(start, stop) if trace.events[position].phase is Phase.BACKWARD)
    return timeline.by_kind(backward - 1).get(Kind.SAVED_ACTIVATION, 0)


@pytest.mark.parametrize(("every", "recomputed"), [(None, 0), (1, 6), (2, 3), (3, 2), (6, 1)], ids=["keep", "1", "2", "3", "6"])
def test_a_recomputed_block_keeps_its_input_and_the_generators_state(every: int | None, recomputed: int) -> None:
    plan = PLAIN if every is None else dataclasses.replace(PLAIN, activations=Recompute(every))
    # Of a kept block the result of its ReLU, and each block's result but the last's, which the next block keeps as its
    # input. The scalar loss, its weight and the count are three more numbers of 4 or 8 bytes.
    kept = (BLOCKS - recomputed) * ACTIVATION + (BLOCKS - 1) * ACTIVATION
    states = recomputed * torch.get_rng_state().nbytes
    assert saved_after_forward(traced(plan)) - kept - states in range(4, 40)


def test_an_update_during_backward_holds_one_gradient_at_a_time() -> None:
    def most_gradients(plan: Plan) -> int:
        return max(sums[Kind.GRADIENT] for _, sums in MemoryTimeline(traced(plan)).curves())

    assert most_gradients(PLAIN) == 2 * BLOCKS * WEIGHT
    assert most_gradients(dataclasses.replace(PLAIN, update=DuringBackward())) == WEIGHT


def test_foreach_holds_temporaries_as_large_as_the_weights_and_fused_none() -> None:
    def temporaries(plan: Plan) -> int:
        trace = traced(plan)
        return max(
            (sums[Kind.TEMPORARY] for event, sums in MemoryTimeline(trace).curves() if event.phase is Phase.UPDATE), default=0
        )

    assert temporaries(PLAIN) == 0
    assert temporaries(dataclasses.replace(PLAIN, optimizer_kernel=Foreach())) == 2 * BLOCKS * WEIGHT


def test_weights_gradients_and_state_are_4_4_and_8_bytes_a_parameter_and_a_step_count_each() -> None:
    by_kind = MemoryTimeline(traced(PLAIN)).by_kind()
    parameters = 2 * BLOCKS * WIDTH * WIDTH
    assert by_kind[Kind.WEIGHT] == 4 * parameters
    assert by_kind[Kind.OPTIMIZER_STATE] == 8 * parameters + 4 * 2 * BLOCKS


@pytest.mark.parametrize(("chunk_tokens", "most"), [(None, 3 * 64), (16, 16), (8, 8), (64, 64)])
def test_chunked_logits_exist_a_chunk_at_a_time(chunk_tokens: int | None, most: int) -> None:
    """Whole: the logits in log-softmax and their gradient twice. Chunked: one chunk, which becomes its own gradient."""
    config = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    rows: RowShapes = dict.fromkeys(("input_ids", "labels"), ((16,), torch.int64))
    plan = PLAIN if chunk_tokens is None else dataclasses.replace(PLAIN, loss=ChunkedLogits(chunk_tokens))
    trace = simulate(JOB, plan, dataless_model(source(config)), rows, DEVICE)
    assert max(sums[Kind.LOGITS] for _, sums in MemoryTimeline(trace).curves()) == 4 * most * VOCABULARY


@pytest.mark.parametrize("size", [1, 2, 4])
def test_activations_are_in_proportion_to_the_micro_batch(size: int) -> None:
    job = dataclasses.replace(JOB, global_batch_size=4)
    trace = traced(Plan(micro_batch_size=size), job)
    assert saved_after_forward(trace) - (2 * BLOCKS - 1) * ACTIVATION * size // ROWS in range(4, 60)
