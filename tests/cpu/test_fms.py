"""Runs of fms-hf-tuning: layers of bitsandbytes 0.43, what its trainer does around a model, and telling records of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from published import environments, fms, fms_model
from published.bitsandbytes_043 import quantize_as_loaded_
from published.record import Record
from published.run import NotExpressible, Prediction, PublishedRun
from torch import Tensor, nn

from memtrain.job import AdamW, Job
from memtrain.machine import named
from memtrain.method import Nf4
from memtrain.models.build import FromModule
from memtrain.plan import Plan
from memtrain.precision import Bf16
from memtrain.trace.autocast import emulated
from memtrain.trace.event import DEVICE, HOST, Event, Kind, Phase, Trace
from memtrain.trace.simulate import DatalessRecorder, simulate

CARD = named("a100_80gb")
RECORD = Record(
    id="one",
    source="refs/a100_80gb.csv row 1",
    model="mistralai/Mistral-7B-v0.1",
    batch_size_per_gpu=4,
    seq_len=4096,
    gpus={"count": 1, "type": "A100-80GB"},
)


class Toy(nn.Module):
    """One linear layer that is packed, a head that is not, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 128)
        self.outer = nn.Linear(128, 8)

    def get_output_embeddings(self) -> nn.Module:
        return self.outer

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.inner(x)).float().sum()


@pytest.fixture
def packed() -> nn.Module:
    with torch.device("meta"):
        return quantize_as_loaded_(Toy().to(torch.bfloat16), Nf4(), torch.bfloat16, "meta")


def recorded(work: Any, model: nn.Module) -> list[Event]:
    recorder = DatalessRecorder(CARD, model)
    with recorder:
        held = work()
    del held
    return [event for event in recorder.trace().events if event.bytes > 0]


def test_packing_takes_the_bytes_of_double_quantisation(packed: Any) -> None:
    state = packed.inner.weight.quant_state
    assert packed.inner.weight.shape == (256 * 128 // 2, 1)
    assert (state.absmax.dtype, state.absmax.numel()) == (torch.uint8, 256 * 128 // 64)
    assert (state.state2.absmax.dtype, state.state2.absmax.numel()) == (torch.float32, 2)
    assert type(packed.outer) is nn.Linear


def test_all_layers_have_one_table_of_the_values_of_8_bits() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(256, 128), nn.Linear(128, 64))
        quantize_as_loaded_(model, Nf4(), torch.bfloat16, "meta")
    first, second = (layer.weight.quant_state for layer in model)
    assert first.state2.code is second.state2.code
    assert first.code is not second.code


def test_the_installed_packing_is_back_afterwards(packed: Any) -> None:
    import bitsandbytes

    assert bitsandbytes.functional.quantize_4bit.__module__ == "bitsandbytes.functional"


def test_a_product_unpacks_the_whole_weight_in_forward_and_in_backward(packed: Any) -> None:
    given = torch.empty(4, 256, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = 256 * 128 * 2
    forward = recorded(lambda: packed.inner(given), packed)
    assert [event.bytes for event in forward].count(weight) == 1
    output = packed.inner(given)
    backward = recorded(lambda: torch.autograd.grad(output, given, torch.empty_like(output)), packed)
    assert [event.bytes for event in backward].count(weight) == 1


def test_a_product_in_fp32_holds_the_weight_in_both_types(packed: Any) -> None:
    given = torch.empty(4, 256, dtype=torch.float32, device="meta", requires_grad=True)
    sizes = [event.bytes for event in recorded(lambda: packed.inner(given), packed)]
    assert sizes.count(256 * 128 * 2) == 1
    assert sizes.count(256 * 128 * 4) == 1
    # The bias becomes of the type of the first input, and stays so.
    assert packed.inner.bias.dtype is torch.float32
    assert packed.inner(given).dtype is torch.float32


def test_a_module_that_is_packed_already_is_on_the_card_with_biases_and_scales(packed: Any) -> None:
    packed.requires_grad_(False)
    packed.outer.requires_grad_(True)
    job = Job(model="toy", global_batch_size=2, steps=1, optimizer=AdamW(), precision=Bf16())
    rows = {"x": ((256,), torch.bfloat16)}
    trace = simulate(job, Plan(micro_batch_size=2), FromModule(packed), rows, CARD)
    weights = [event for event in trace.events if event.kind is Kind.WEIGHT and event.bytes > 0 and event.place == DEVICE]
    # Packed weight, its scales in 8 bits, their scales, the table of 16 values, that of 256, the mean; and the biases.
    inner = [256 * 128 // 2, 512, 8, 64, 1024, 4, 128 * 2]
    assert sorted(event.bytes for event in weights) == sorted([*inner, 128 * 8 * 2, 8 * 2])
    assert not any(event.bytes == 256 * 128 // 2 for event in trace.events if event.place == HOST and event.phase is Phase.LOAD)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sharding": "fsdp1 full_shard"}, "sharding 'fsdp1 full_shard' is not simulated"),
        ({"assume": ("unpacked ORCA examples",)}, "rows of several lengths"),
        ({"seq_len": None}, "no batch size or no length"),
        ({"method": "lora", "lora_rank": None}, "which modules get adapters, or of which rank"),
    ],
)
def test_what_is_not_told_of_fms_has_a_reason(changed: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotExpressible, match=reason):
        fms.express(replace(RECORD, **changed))
    told = environments.predict(replace(RECORD, source_family="fms-acceleration (IBM)", **changed))
    assert reason in told.skipped


def test_a_simulation_that_fails_is_told_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(record: Record) -> PublishedRun:
        raise RuntimeError("first line\nno such layer")

    monkeypatch.setattr("published.express.express", broken)
    assert environments.predict(RECORD) == Prediction("one", failed="RuntimeError: no such layer")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("updates", [True, False])
def test_a_record_is_predicted_by_the_step_and_without_its_update_where_none_was_measured(
    monkeypatch: pytest.MonkeyPatch, updates: bool
) -> None:
    job = Job(model="toy", global_batch_size=2, steps=1, optimizer=AdamW(), precision=Bf16())
    model = Toy().to(torch.bfloat16)
    rows = {"x": ((256,), torch.bfloat16)}
    run = PublishedRun(job, Plan(micro_batch_size=2), FromModule(model), rows, CARD, updates=updates, assumed=("a guess",))
    monkeypatch.setattr("published.express.express", lambda record: run)
    found = environments.predict(RECORD)
    assert not found.failed
    assert found.assumed == ("a guess",)
    assert found.usable_bytes == CARD.usable_bytes  # type: ignore[union-attr]
    assert found.versions["torch"] == torch.__version__.partition("+")[0] or found.versions["torch"] == torch.__version__
    assert (found.peak_phase in ("update", "first update")) == updates


def test_the_trace_before_the_update_ends_there() -> None:
    events = tuple(
        Event(number, 512, Kind.TEMPORARY, phase, "empty")
        for number, phase in enumerate((Phase.LOAD, Phase.FORWARD, Phase.BACKWARD, Phase.FIRST_UPDATE, Phase.FORWARD))
    )
    assert environments.before_the_update(Trace(events)).events == events[:3]


def test_tokens_are_added_by_the_tokenizer() -> None:
    def tokens(kind: str, vocabulary: int) -> int:
        settings: dict[str, Any] = {"vocab_size": vocabulary}
        return int(fms_model._as_trained_on(kind, settings, RECORD)["vocab_size"])

    assert tokens("mistral", 32000) == 32001
    assert tokens("llama", 128256) == 128258
    assert tokens("granite", 49152) == 49152
    assert tokens("gpt_bigcode", 49280) == 49158


def test_trl_leaves_norms_in_fp32_and_takes_embeddings_back() -> None:
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(4, 2), "norm": nn.LayerNorm(2), "proj": nn.Linear(2, 2)})
    found = fms_model._cast_by_trl_(model)
    assert {name: parameter.dtype for name, parameter in found.named_parameters()} == {
        "embed_tokens.weight": torch.bfloat16,
        "norm.weight": torch.float32,
        "norm.bias": torch.float32,
        "proj.weight": torch.float32,
        "proj.bias": torch.float32,
    }


def test_under_autocast_the_trainer_returns_fp32_and_says_how_many_items_there_are() -> None:
    given: dict[str, Any] = {}

    def forward(labels: Tensor, **settings: Any) -> dict[str, Tensor]:
        given.update(settings)
        return {"logits": torch.zeros(2, dtype=torch.bfloat16)}

    called = fms_model._as_called(forward, torch.bfloat16, divides=True)
    with emulated("cuda"):
        assert called(labels=torch.zeros(2, 3))["logits"].dtype is torch.float32
    assert given == {"num_items_in_batch": 6}
    given.clear()
    called = fms_model._as_called(forward, None, divides=False)
    assert called(labels=torch.zeros(2, 3))["logits"].dtype is torch.bfloat16
    assert not given
