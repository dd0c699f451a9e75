"""Weights in 4 and 8 bits: which, in how many bytes, how they are loaded, where they lie beside a card, and what is refused."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_load import CARD, llama
from test_parity import PROCESSOR
from torch import nn
from toys import CASES, VOCABULARY, Mlp, batch

from memtrain.job import Job
from memtrain.memory.timeline import MemoryTimeline
from memtrain.method import Int8, Lora, Nf4, Quantization
from memtrain.models.build import ModelSource, source
from memtrain.models.load import build_model, load_model, product_dtype
from memtrain.models.quantize import is_quantized, quantize_, scales
from memtrain.models.save import save_model
from memtrain.plan import Plan
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Fp32, Precision
from memtrain.run import prepare
from memtrain.trace import kernels_bitsandbytes as kernels
from memtrain.trace.event import DEVICE, HOST, Kind, Phase
from memtrain.trace.simulate import dataless_model_of, simulate

WIDTH, INNER, BLOCKS = 64, 128, 3
# Of one block: four projections, and three layers of the other part.
ELEMENTS = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER
LAYERS = 7
ROWS = dict.fromkeys(("input_ids", "labels"), ((8,), torch.int64))
BF16 = Bf16()


def made(**config: Any) -> ModelSource:
    return source(
        {
            "model_type": "llama",
            "vocab_size": VOCABULARY,
            "hidden_size": WIDTH,
            "intermediate_size": INNER,
            "num_hidden_layers": BLOCKS,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **config,
        }
    )


def job(quantization: Quantization, precision: Precision = BF16, **lora: Any) -> Job:
    return Job(
        model="toy", global_batch_size=2, steps=1, precision=precision, quantization=quantization, method=Lora(rank=2, **lora)
    )


def packed_bytes(model: nn.Module) -> int:
    weights = [one for one in model.parameters() if one.dtype in (torch.uint8, torch.int8)]
    return sum(weight.nbytes for weight in weights) + sum(tensor.nbytes for _, tensor in scales(model))


# ---------------------------------------------------------------------------------------------- how many bytes


@pytest.mark.parametrize(
    ("quantization", "size"),
    [
        # Half a byte each, an fp32 scale for 64, and 16 values per layer.
        (Nf4(double_quantization=False), BLOCKS * (ELEMENTS // 2 + 4 * ELEMENTS // 64 + 64 * LAYERS)),
        # The scales in a byte; their own, one for 256 or a part of that; their mean; and 256 values per layer.
        (
            Nf4(),
            BLOCKS * (ELEMENTS // 2 + ELEMENTS // 64 + 4 * LAYERS + 4 * LAYERS + (64 + 1024) * LAYERS),
        ),
        # A byte each, and an fp32 scale for each output.
        (Int8(), BLOCKS * (ELEMENTS + 4 * (5 * WIDTH + 2 * INNER))),
    ],
    ids=["nf4", "nf4 with double quantisation", "int8"],
)
def test_packed_weights_take_their_bits_and_scales(quantization: Quantization, size: int) -> None:
    for model in (build_model(made(), job(quantization)), dataless_model_of(job(quantization), made())):
        assert packed_bytes(model) == size


def test_linear_layers_are_packed_but_for_the_head_and_what_trains_whole() -> None:
    model = build_model(made(), job(Nf4(), modules_to_save=("o_proj",)))
    packed = {path for path, module in model.named_modules() if type(module).__module__.startswith("bitsandbytes.")}
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    assert packed == {f"model.layers.{block}.{name}.base_layer" for block in range(BLOCKS) for name in names}
    assert is_quantized(model)


def test_what_a_model_keeps_in_32_bits_stays_and_gpt2s_layers_are_packed_turned() -> None:
    t5 = build_model(CASES["t5"].build(), job(Nf4()))
    kept = [path for path, module in t5.named_modules() if path.endswith(".wo.base_layer")]
    assert kept
    assert {type(t5.get_submodule(path)) for path in kept} == {nn.Linear}
    gpt2 = build_model(CASES["gpt2_with_dropout"].build(), job(Int8()))
    assert gpt2.get_submodule("transformer.h.0.attn.c_attn.base_layer").weight.shape == (3 * 32, 32)  # type: ignore[union-attr]


@pytest.mark.parametrize("quantization", [Nf4(), Int8()], ids=["Linear4bit", "Linear8bitLt"])
def test_packed_layers_get_the_adapters_that_peft_has_for_them(quantization: Quantization) -> None:
    for model in (
        build_model(made(num_hidden_layers=1), job(quantization)),
        load_model(source(Mlp()), job(quantization, Fp32())),
    ):
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        assert {type(layer).__module__ for layer in layers} == {"peft.tuners.lora.bnb"}
        assert {type(layer).__name__ for layer in layers} == {"Linear8bitLt" if quantization.bits == 8 else "Linear4bit"}


class Positioned(nn.Module):
    """Weights of three dimensions that are no experts: a convolution and a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(4, 4, 3)
        self.positions = nn.Parameter(torch.zeros(1, 5, 4))
        self.layer = nn.Linear(64, 64)


def test_convolutions_and_tables_of_positions_are_no_experts() -> None:
    model = quantize_(Positioned(), Nf4(), torch.float32)
    assert type(model.layer).__name__ == "Linear4bit"
    assert isinstance(model.convolution, nn.Conv1d)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [(Fp32(), torch.float32), (BF16, torch.bfloat16), (AutocastBf16(), torch.bfloat16), (AutocastFp16(), torch.float16)],
    ids=lambda one: str(one),
)
def test_packed_weights_are_multiplied_in_the_type_of_the_precisions_products(precision: Precision, dtype: torch.dtype) -> None:
    assert product_dtype(job(Nf4(), precision)) == dtype
    model: Any = build_model(made(num_hidden_layers=1), job(Nf4(), precision))
    layer = model.model.layers[0].mlp.up_proj.base_layer
    assert layer.compute_dtype == layer.weight.quant_state.dtype == dtype


@pytest.mark.parametrize("quantization", [Nf4(), Int8()], ids=str)
def test_a_packed_model_computes_nearly_what_it_did_and_trains_after_it_was_evaluated(quantization: Nf4 | Int8) -> None:
    torch.manual_seed(0)
    model = Mlp()
    rows = batch(CASES["plain_module"], 2)
    exact = model.eval()(**rows)
    quantize_(model, quantization, torch.float32)
    with torch.no_grad():
        rounded = model.eval()(**rows)
    assert 0 < abs(rounded - exact) < 0.05 * exact
    run = prepare(job(quantization, Fp32()), Plan(micro_batch_size=2), load_model(source(Mlp()), job(quantization, Fp32())))
    run.evaluate([rows])
    run.forward_backward([rows])
    assert all(one.grad is not None for one in run.model.parameters() if one.requires_grad)


# ---------------------------------------------------------------------------------------------- loading


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has been saved."""
    path: Path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    save_model(made().build(torch.bfloat16), None, path)
    return path


@pytest.mark.parametrize("quantization", [Nf4(), Nf4(double_quantization=False), Int8()], ids=str)
def test_a_saved_model_is_packed_as_it_is_read_like_one_that_is_there(quantization: Nf4 | Int8, folder: Path) -> None:
    read = load_model(source(str(folder)), job(quantization, modules_to_save=("lm_head",)))
    there = quantize_(source(str(folder)).load(torch.bfloat16), quantization, torch.bfloat16)
    found = {path.replace(".base_layer", ""): one for path, one in read.state_dict().items() if "lora" not in path}
    for path, one in there.state_dict().items():
        if "lm_head" not in path:
            assert torch.equal(one, found[path]), path


@pytest.mark.parametrize("quantization", [Nf4(), Int8()], ids=str)
def test_reading_a_saved_model_holds_one_layer_besides_what_is_packed(quantization: Nf4 | Int8, folder: Path) -> None:
    load_model(source(str(folder)), job(quantization))  # what libraries make once
    peak, model = allocated(lambda: load_model(source(str(folder)), job(quantization)))
    held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    held += sum(tensor.nbytes for _, tensor in scales(model))
    largest = WIDTH * INNER
    # Packing takes 13.5 bytes for a weight of 4 bits, beside the 2 that are read; 8 bits less.
    assert held < peak < held + 17 * largest
    whole = 2 * (BLOCKS * ELEMENTS + VOCABULARY * WIDTH)
    assert peak < whole + packed_bytes(model)


def allocated(function: Callable[[], Any]) -> tuple[int, Any]:
    """The most bytes that torch's allocator has handed out in it, in every thread, and what it returns."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        returned = function()
    nodes, changes = list(profiler.profiler.kineto_results.experimental_event_tree()), []  # type: ignore[union-attr]
    while nodes:
        node = nodes.pop()
        nodes += node.children
        if node.name == "[memory]":
            changes.append((node.start_time_ns, node.extra_fields.alloc_size))
    in_order = (change for _, change in sorted(changes, key=lambda one: one[0]))
    return max(itertools.accumulate(in_order)), returned


@pytest.mark.parametrize("quantization", [Nf4(), Int8()], ids=str)
def test_a_model_with_random_weights_is_never_whole(quantization: Nf4 | Int8) -> None:
    trace = simulate(job(quantization), Plan(micro_batch_size=1), made(num_hidden_layers=12), ROWS, PROCESSOR)
    peak = MemoryTimeline(trace).peak_by_phase()[Phase.LOAD]
    weights = sum(event.bytes for event in trace.events if event.kind is Kind.WEIGHT and event.bytes > 0)
    # A block in 16 bits, and what packing its largest layer takes.
    assert peak < weights + 2 * ELEMENTS + 14 * WIDTH * INNER < 2 * 12 * ELEMENTS


def test_random_weights_are_drawn_as_the_model_draws_them() -> None:
    torch.manual_seed(0)
    model: Any = build_model(made(initializer_range=0.5), job(Int8(threshold=0.0), Fp32()))
    layer = model.model.layers[1].mlp.up_proj.base_layer
    whole = layer.weight.float() * layer.state.SCB[:, None] / 127
    assert abs(whole.std().item() - 0.5) < 0.05
    assert abs(model.model.embed_tokens.weight.std().item() - 0.5) < 0.05
    assert torch.equal(model.model.norm.weight, torch.ones(WIDTH))
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    tied: Any = build_model(made(tie_word_embeddings=True), job(Nf4()))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


@pytest.mark.parametrize("quantization", [Nf4(), Nf4(double_quantization=False), Int8()], ids=str)
def test_beside_a_card_each_layer_is_packed_there_and_the_host_holds_a_block(quantization: Nf4 | Int8) -> None:
    traces = [simulate(job(quantization), Plan(micro_batch_size=1), made(), ROWS, device) for device in (CARD, PROCESSOR)]
    weights = [
        sum(event.bytes for event in trace.events if event.kind is Kind.WEIGHT and event.place == DEVICE and event.bytes > 0)
        for trace in traces
    ]
    assert weights[0] == weights[1]
    assert not [event for event in traces[0].events if event.kind is Kind.WEIGHT and event.place == HOST]
    on_card, on_host = MemoryTimeline(traces[0]), MemoryTimeline(traces[0], HOST)
    # At most one layer in 16 bits, or in 8 also the 16-bit floats that it is rounded from.
    assert on_card.peak_by_phase()[Phase.LOAD] <= weights[0] + 4 * WIDTH * INNER
    # What is moved last: tables, norms, frequencies and adapters; and one block before its layers are packed.
    adapters = 4 * 2 * BLOCKS * (8 * WIDTH + 3 * (WIDTH + INNER))
    rest = 2 * (2 * VOCABULARY * WIDTH + (2 * BLOCKS + 1) * WIDTH) + 8 * (WIDTH // 4 // 2) + adapters
    assert on_host.peak_by_phase()[Phase.LOAD] <= rest + 2 * ELEMENTS


def test_loading_the_library_leaves_its_logger_as_it_was() -> None:
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    build_model(made(num_hidden_layers=1), job(Nf4()))
    assert logger.level == level


def test_planning_leaves_no_table_without_data_behind() -> None:
    import bitsandbytes

    tables: dict[str, torch.Tensor] = bitsandbytes.functional.name2qmap
    tables.pop("dynamic", None)
    dataless_model_of(job(Nf4()), made(num_hidden_layers=1))
    assert not tables["dynamic"].is_meta


# ---------------------------------------------------------------------------------------------- what is refused

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize("without_data", [True, False])
def test_experts_in_one_tensor_are_refused_with_the_bytes_that_would_stay(without_data: bool) -> None:
    build = (
        (lambda: dataless_model_of(job(Nf4()), source(MIXTRAL)))
        if without_data
        else (lambda: build_model(source(MIXTRAL), job(Nf4())))
    )
    # Two blocks of four experts of three matrices, two bytes each.
    assert 2 * 4 * 3 * WIDTH * INNER * 2 == 384 * 2**10
    with pytest.raises(
        ValueError,
        match=r"^model\.layers\.0\.mlp\.experts\.\w+ holds the weights of several experts as one tensor, which bitsandbytes does not "
        r"quantise, and 384 KiB of MixtralForCausalLM would stay in 16 bits: set quantization to unquantized, or take a model without "
        r"such experts\.$",
    ):
        build()


def test_dora_in_8_bits_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^use_dora is true and quantization is int8, in which peft's DoRA does not run: set quantization to nf4, or use_dora to "
        r"false\.$",
    ):
        job(Int8(), use_dora=True)


def test_a_users_module_is_packed_in_place_and_planned_on_a_copy() -> None:
    given = Mlp()
    dataless_model_of(job(Nf4(), Fp32()), source(given))
    assert not is_quantized(given)
    assert load_model(source(given), job(Nf4(), Fp32())) is given
    assert is_quantized(given)
    assert is_quantized(copy.deepcopy(given))


# ---------------------------------------------------------------------------------------------- what a prediction says


def test_that_no_input_is_large_is_said_with_a_prediction_in_8_bits() -> None:
    for threshold, assumed in ((6.0, (kernels.NO_OUTLIERS,)), (0.0, ())):
        trace = simulate(job(Int8(threshold)), Plan(micro_batch_size=2), llama(tied=True), ROWS, CARD)
        assert trace.assumed == assumed
