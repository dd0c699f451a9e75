"""Runs of the xMem study told as runs of memtrain: the models' sizes, what the loop leaves bound, the lengths."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from published.run import NotExpressible
from published.xmem_models import language_model, network
from published.xmem_runs import AsInTheLoop, Setting, card, express, shortest_expected
from torch import Tensor, nn

from memtrain.plan import Foreach, Fused
from memtrain.trace.event import DEVICE, Phase
from memtrain.trace.simulate import simulate


def setting(**more: Any) -> Setting:
    said = {
        "id": "one",
        "model": "distilbert/distilgpt2",
        "optimizer": "SGD",
        "batch_size": 2,
        "seq_len": 8,
        "dtype": "float32",
        "gpu": "NVIDIA GeForce RTX 3060",
        "total_gpu_memory": 12_622_168_064,
        "seq_padding": "fixed_128",
        "effective_zero_grad": "grads_freed_before_forward",
        "attn_impl_inferred": "eager",
        "input_size": None,
    }
    return Setting.of({**said, **more})


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("EleutherAI/gpt-neo-125M", 125_198_592),
        ("openai-community/gpt2", 124_439_808),
        ("distilbert/distilgpt2", 81_912_576),
        ("cerebras/Cerebras-GPT-111M", 111_050_496),
        ("facebook/opt-125m", 125_239_296),
        ("facebook/opt-350m", 331_196_416),
        ("T5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("Qwen/Qwen3-4B", 4_022_468_096),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1_777_088_000),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
        ("google/gemma-2-2b-it", 2_614_341_888),
    ],
)
def test_a_model_has_the_parameters_that_its_authors_state(name: str, parameters: int) -> None:
    model = language_model(name, "eager")
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"optimizer": "Rprop"}, "memtrain has no optimizer Rprop."),
        ({"model": "mine"}, "the model 'mine' is unknown, and the record gives no architecture of it"),
        ({"gpu": "NVIDIA Tesla K80"}, "the card NVIDIA Tesla K80 is not described."),
    ],
)
def test_what_cannot_be_told_is_said_in_a_sentence(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(NotExpressible, match=f"^{sentence}$"):
        express(setting(**more))


def test_an_unknown_network_is_said_in_a_sentence() -> None:
    with pytest.raises(
        NotExpressible, match=r"^LeNet is in the table of networks for images under no name of torchvision's\.$"
    ):
        network("LeNet", 10)


# ---------------------------------------------------------------------- the loop


class Doubling(nn.Module):
    """Returns an object with loss and logits, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.seen: list[tuple[Any, ...]] = []
        self.watched: list[weakref.ref[Any]] = []

    def forward(self, input_ids: Tensor) -> Any:
        self.seen.append((tuple(input_ids.shape), [one() is not None for one in self.watched]))
        logits = input_ids.sum() * self.weight * 2
        self.watched = [weakref.ref(logits)]
        return type("Output", (), {"loss": logits.sum(), "logits": logits})()


def test_the_last_outputs_live_until_the_next_forward_has_returned() -> None:
    inner = Doubling()
    model = AsInTheLoop(inner)
    for _ in range(2):
        model(input_ids=torch.ones(1, 4)).backward()
    assert [alive for _, alive in inner.seen] == [[], [True]]
    first = weakref.ref(model._bound[0])
    model(input_ids=torch.ones(1, 4))
    assert first() is None


@pytest.mark.parametrize("keeps", [False, True])
def test_gradients_live_until_the_next_forward_has_returned_where_they_are_zeroed_then(keeps: bool) -> None:
    inner = Doubling()
    model = AsInTheLoop(inner, keeps_gradients=keeps)
    model(input_ids=torch.ones(1, 4)).backward()
    assert inner.weight.grad is not None
    gradient = weakref.ref(inner.weight.grad)
    inner.weight.grad = None
    assert (gradient() is not None) == keeps
    model(input_ids=torch.ones(1, 4))
    assert gradient() is None


def test_the_first_forwards_have_the_lengths_that_are_given() -> None:
    inner = Doubling()
    model = AsInTheLoop(inner, lengths=(2,))
    for _ in range(2):
        model(input_ids=torch.ones(1, 4))
    assert [shape for shape, _ in inner.seen] == [(1, 2), (1, 4)]


def test_a_small_batch_begins_with_a_shorter_step_and_a_padded_one_does_not() -> None:
    assert [shortest_expected(rows) for rows in (1, 5, 6, 7, 64)] == [1, 110, 124, 128, 128]
    drawn = express(setting(batch_size=5, seq_len=128, seq_padding="dynamic_to_longest_in_batch_max_128"))
    assert drawn.assumed == ("the first batch has 110 tokens a row",)
    assert express(setting(batch_size=5, seq_len=128)).assumed == ()


def test_adafactor_goes_weight_by_weight_and_the_others_all_at_once() -> None:
    assert express(setting(optimizer="Adafactor")).plan.optimizer_kernel == Fused()
    assert express(setting(optimizer="AdamW")).plan.optimizer_kernel == Foreach()


def test_a_card_has_the_memory_of_the_record() -> None:
    found = card("NVIDIA GeForce RTX 4060", 8_000_000_000)
    assert (found.compute_capability, found.multiprocessors, found.usable_bytes) == ((8, 9), 24, 8_000_000_000)


def test_the_simulated_run_holds_the_last_gradients_through_forward_where_they_are_zeroed_late() -> None:
    """One gradient of 4 bytes for each of the 81,912,576 parameters."""

    def held_when_the_second_forward_begins(zeroing: str) -> int:
        run = express(setting(effective_zero_grad=zeroing))
        trace = simulate(run.job, run.plan, run.source, run.rows, run.device)
        start = dict(trace.marks)["step 2"]
        begun = next(i for i in range(start, len(trace.events)) if trace.events[i].phase is Phase.FORWARD)
        return sum(event.bytes for event in trace.events[:begun] if event.place == DEVICE)

    late = held_when_the_second_forward_begins("after_forward_before_backward")
    assert late - held_when_the_second_forward_begins("grads_freed_before_forward") == 4 * 81_912_576
