"""Loading and saving in a data-less run: what is where beside a card, byte by byte, and that it is what a processor does."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_parity import PROCESSOR, shapes_of
from toys import CASES, VOCABULARY

from memtrain.device import Cuda, Device
from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.models.build import FromModule, ModelSource, source
from memtrain.models.save import largest_shard
from memtrain.plan import Plan
from memtrain.precision import Bf16
from memtrain.trace.event import DEVICE, HOST, Event, Kind, Phase, Trace
from memtrain.trace.simulate import RowShapes, dataless_model, simulate

CARD = Cuda(
    name="card",
    compute_capability=(8, 0),
    multiprocessors=4,
    usable_bytes=2**30,
    context_bytes=2**20,
    flops_per_second={"float32": 1e13},
    bytes_per_second=1e12,
    operator_seconds=1e-5,
    link_bytes_per_second=1e10,
    host_bytes_per_second=1e11,
)
JOB = Job(model="toy", global_batch_size=1, steps=1)
PLAN = Plan(micro_batch_size=1)
ROWS: RowShapes = dict.fromkeys(("input_ids", "labels"), ((8,), torch.int64))
WIDTH, INNER = 8, 12


def llama(*, tied: bool) -> ModelSource:
    return source(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "tie_word_embeddings": tied,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
    )


TABLE = VOCABULARY * WIDTH
# Four projections, three layers of the feed-forward part, and three norms.
BLOCK = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 3 * WIDTH
# Two buffers of frequencies, one for each second element of a head.
FREQUENCIES = 2 * 4 * (WIDTH // 2 // 2)


def loading(made: ModelSource, device: Device, job: Job = JOB, rows: RowShapes = ROWS) -> Trace:
    trace = simulate(job, PLAN, made, rows, device)
    start, stop = trace.section("load")
    first_step = trace.section("step 1")[0]
    assert (start, stop) == (0, first_step)
    return dataclasses.replace(trace, events=trace.events[:stop])


def weights(trace: Trace) -> list[Event]:
    return [event for event in trace.events if event.kind is Kind.WEIGHT and event.place == DEVICE and event.bytes > 0]


# ---------------------------------------------------------------------------------------------- beside a card


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_a_model_is_on_the_host_first_and_then_on_the_card(tied: bool, tables: int) -> None:
    trace = loading(llama(tied=tied), CARD)
    size = 4 * (tables * TABLE + BLOCK) + FREQUENCIES
    on_host, on_device = MemoryTimeline(trace, HOST), MemoryTimeline(trace)
    assert on_device.totals[-1] == on_device.peak_bytes == size == sum(event.bytes for event in weights(trace))
    # Building takes temporaries of its own, all of which are gone with the last weight.
    first = next(position for position, event in enumerate(trace.events) if event.place == DEVICE)
    assert sum(event.bytes for event in trace.events[:first]) == size
    assert on_host.totals[-1] == 0
    assert {event.phase for event in trace.events} == {Phase.LOAD}


@pytest.mark.parametrize("tied", [True, False])
def test_it_moves_one_tensor_at_a_time_and_tied_weights_once(tied: bool) -> None:
    events = loading(llama(tied=tied), CARD).events
    first = next(position for position, event in enumerate(events) if event.place == DEVICE)
    made, gone = events[first::2], events[first + 1 :: 2]
    assert [(event.place, event.bytes) for event in gone] == [(HOST, -event.bytes) for event in made]
    assert {event.place for event in made} == {DEVICE}
    assert [event.bytes for event in made].count(4 * TABLE) == (1 if tied else 2)


def test_a_weight_that_moved_is_a_weight_of_its_module() -> None:
    trace = loading(llama(tied=False), CARD)
    assert {(event.module, event.bytes) for event in weights(trace)} >= {
        ("model.embed_tokens", 4 * TABLE),
        ("lm_head", 4 * TABLE),
        ("model.layers.0.mlp.up_proj", 4 * WIDTH * INNER),
    }


@pytest.mark.parametrize("device", [PROCESSOR, CARD], ids=lambda device: device.name)
def test_in_16_bits_the_weights_take_half(device: Device) -> None:
    trace = loading(llama(tied=True), device, dataclasses.replace(JOB, precision=Bf16()))
    assert sum(event.bytes for event in weights(trace)) == 2 * (TABLE + BLOCK) + FREQUENCIES


@pytest.mark.parametrize("name", CASES)
def test_a_card_holds_what_a_processor_holds_of_every_model(name: str) -> None:
    case = CASES[name]
    made = [weights(loading(case.build(), device, rows=shapes_of(case))) for device in (PROCESSOR, CARD)]
    by_module: list[list[Any]] = [sorted((event.module, event.bytes) for event in one) for one in made]
    assert by_module[0] == by_module[1]


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_of_a_models_buffers_is_known_beside_a_card_too(name: str) -> None:
    """A mask that was made when the model was built decides which way its forward takes."""
    case = CASES[name]
    traces = [simulate(JOB, PLAN, case.build(), shapes_of(case), device) for device in (PROCESSOR, CARD)]
    assert traces[0].assumed == traces[1].assumed


def test_a_users_module_is_loaded_from_a_copy_and_stays_where_it_is() -> None:
    made = CASES["plain_module"].build()
    assert isinstance(made, FromModule)
    before = [(id(tensor), tensor.data_ptr()) for tensor in (*made.module.parameters(), *made.module.buffers())]
    trace = loading(made, CARD, rows=shapes_of(CASES["plain_module"]))
    size = sum(tensor.nbytes for tensor in (*made.module.parameters(), *made.module.buffers()))
    assert sum(event.bytes for event in weights(trace)) == size == MemoryTimeline(trace, HOST).peak_bytes
    assert [(id(tensor), tensor.data_ptr()) for tensor in (*made.module.parameters(), *made.module.buffers())] == before


# ---------------------------------------------------------------------------------------------- on a processor


def test_on_a_processor_nothing_is_elsewhere_and_nothing_moves() -> None:
    trace = loading(llama(tied=True), PROCESSOR)
    assert {event.place for event in trace.events} == {DEVICE}
    assert sum(event.bytes for event in trace.events) == 4 * (TABLE + BLOCK) + FREQUENCIES


# ---------------------------------------------------------------------------------------------- saving


def saved(made: ModelSource, device: Device) -> list[tuple[int, object]]:
    trace = simulate(JOB, PLAN, made, ROWS, device)
    return [(event.bytes, event.place) for event in trace.events if event.phase is Phase.SAVE and event.bytes > 0]


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_what_is_saved_from_a_card_is_on_the_host_once(tied: bool, tables: int) -> None:
    held = saved(llama(tied=tied), CARD)
    assert {place for _, place in held} == {HOST}
    assert sum(size for size, _ in held) == 4 * (tables * TABLE + BLOCK)
    assert saved(llama(tied=tied), PROCESSOR) == []


@pytest.mark.parametrize(
    ("file_bytes", "largest"),
    [
        # All in one; the head by itself; the embedding, the blocks and the head; every tensor.
        (4 * (2 * TABLE + BLOCK), 4 * (2 * TABLE + BLOCK)),
        (4 * (TABLE + BLOCK), 4 * (TABLE + BLOCK)),
        (4 * BLOCK, 4 * TABLE),
        (1, 4 * TABLE),
    ],
)
def test_a_large_model_is_saved_file_by_file(file_bytes: int, largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.models.save.SHARD_BYTES", file_bytes)
    assert sum(largest_shard(dataless_model(llama(tied=False)))) == largest


def test_a_plain_module_is_saved_in_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memtrain.models.save.SHARD_BYTES", 1)
    model = dataless_model(CASES["plain_module"].build())
    assert sum(largest_shard(model)) == sum(tensor.nbytes for tensor in model.state_dict().values())
