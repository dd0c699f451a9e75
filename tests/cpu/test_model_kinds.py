"""Models of every kind: what each learns, what its loss counts, and that micro-batches add up to its step."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from toys import CASES

from memtrain.check import PlanRefused
from memtrain.data.rows import IGNORED, Batch
from memtrain.data.task import Task
from memtrain.job import Job, Sgd
from memtrain.models.build import source
from memtrain.models.objective import objective, ties_rows
from memtrain.models.quietly import quietly
from memtrain.models.tasks import parse_task, task_of
from memtrain.plan import ChunkedLogits, DataParallel, Plan
from memtrain.run import prepare

TINY = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
IMAGES = {
    "image_size": 8,
    "patch_size": 4,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
MIXTRAL = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
CLIP = {
    "text_config": {**TINY, "max_position_embeddings": 8, **SPECIAL},
    "vision_config": IMAGES,
    "projection_dim": 8,
}
JOB = Job(model="toy", global_batch_size=4, steps=1, optimizer=Sgd(learning_rate=0.1, momentum=0.0), max_grad_norm=None)
IDS = torch.tensor([[3, 4, 5], [6, 7, 8], [9, 3, 4], [5, 6, 7]])


def built(model_type: str, task: str | None = None, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return source({"model_type": model_type, **settings}, task=task).build()


def language(model_type: str, task: str | None = None, **settings: Any) -> nn.Module:
    return built(model_type, task, **TINY, **SPECIAL, **settings)


# ---------------------------------------------------------------------------------------------- tasks


@pytest.mark.parametrize(
    ("model_type", "settings", "task"),
    [
        ("llama", {}, Task.CAUSAL_LM),
        ("gpt2", {}, Task.CAUSAL_LM),
        ("bert", {"is_decoder": True}, Task.CAUSAL_LM),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, Task.CAUSAL_LM),
        ("llava", {"architectures": ["LlavaForConditionalGeneration"]}, Task.CAUSAL_LM),
        ("bert", {}, Task.MASKED_LM),
        ("t5", {}, Task.SEQ2SEQ_LM),
        # Its class can tell masked tokens as well.
        ("bart", {}, Task.SEQ2SEQ_LM),
        ("bert", {"architectures": ["BertForSequenceClassification"]}, Task.SEQUENCE_CLASSIFICATION),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, Task.SEQUENCE_CLASSIFICATION),
        ("bert", {"architectures": ["BertForTokenClassification"]}, Task.TOKEN_CLASSIFICATION),
        ("vit", {"architectures": ["ViTForImageClassification"]}, Task.IMAGE_CLASSIFICATION),
        # One of several classes that transformers has for the type.
        ("deit", {"architectures": ["DeiTForImageClassificationWithTeacher"]}, Task.IMAGE_CLASSIFICATION),
        ("bert", {"architectures": ["BertForQuestionAnswering"]}, Task.OTHER),
        ("clip", {"architectures": ["CLIPModel"]}, Task.OTHER),
    ],
)
def test_a_class_of_transformers_says_what_it_learns(model_type: str, settings: dict[str, Any], task: Task) -> None:
    assert task_of(source({"model_type": model_type, **settings})) is task


def test_a_module_learns_what_its_class_or_a_base_of_it_does_unless_it_is_said() -> None:
    model = language("bert")

    class Derived(type(model)):  # type: ignore[misc]
        pass

    model.__class__ = Derived
    assert task_of(source(model)) is Task.MASKED_LM
    assert task_of(source(nn.Linear(2, 2))) is Task.OTHER
    assert task_of(source(nn.Linear(2, 2), task="causal_lm")) is Task.CAUSAL_LM


def test_a_module_that_peft_has_wrapped_learns_what_is_in_it() -> None:
    from peft import LoraConfig, get_peft_model

    with quietly():
        wrapped: Any = get_peft_model(
            built("gpt2", vocab_size=32, n_embd=8, n_layer=1, n_head=2, **SPECIAL), LoraConfig(fan_in_fan_out=True)
        )
    assert task_of(source(wrapped)) is Task.CAUSAL_LM
    what = objective(wrapped)
    assert what.settings == {"use_cache": False}
    assert what.count({"input_ids": IDS, "labels": IDS}).item() == 8


def test_a_task_is_one_of_those_that_there_are() -> None:
    assert [parse_task(name) for name in (None, "masked_lm", Task.OTHER)] == [None, Task.MASKED_LM, Task.OTHER]
    expected = (
        "task is 'regression', and it must be one of causal_lm, masked_lm, seq2seq_lm, sequence_classification, "
        "token_classification, image_classification, other."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        source(nn.Linear(2, 2), task="regression")


# ---------------------------------------------------------------------------------------------- counts

I = IGNORED  # noqa: E741  (so that a row of labels can be read)
TAGS = torch.tensor([[1, I, 0], [I, 1, I], [0, 0, 0], [1, 1, I]])
PIXELS = {"pixel_values": torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)}

KINDS: dict[str, tuple[nn.Module, Batch, int]] = {
    "causal": (language("llama"), {"input_ids": IDS, "labels": IDS.where(IDS != 8, I)}, 7),
    "masked": (language("bert"), {"input_ids": IDS, "labels": IDS.where(IDS > 4, I)}, 8),
    "seq2seq": (
        built("t5", vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0),
        {"input_ids": IDS, "labels": IDS.where(IDS != 8, I)},
        11,
    ),
    "tokens": (language("bert", "token_classification"), {"input_ids": IDS, "labels": TAGS}, 8),
    "classes": (language("bert", "sequence_classification"), {"input_ids": IDS, "labels": torch.tensor([0, 1, 1, 0])}, 4),
    "classes, some ignored": (
        language("llama", "sequence_classification"),
        {"input_ids": IDS, "labels": torch.tensor([0, 1, I, 0])},
        3,
    ),
    "several classes": (
        language("bert", "sequence_classification", problem_type="multi_label_classification", num_labels=3),
        {"input_ids": IDS, "labels": torch.tensor([[0.0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1]])},
        4,
    ),
    "numbers": (
        language("bert", "sequence_classification", num_labels=1),
        {"input_ids": IDS, "labels": torch.tensor([0.5, -100.0, 2, 3])},
        4,
    ),
    "whole numbers": (
        language("bert", "sequence_classification", num_labels=1),
        {"input_ids": IDS, "labels": torch.tensor([0, -100, 2, 3])},
        4,
    ),
    "images": (built("vit", "image_classification", **IMAGES), {**PIXELS, "labels": torch.tensor([0, 1, 1, 0])}, 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_that_a_model_returns_is_over_what_is_counted(kind: str) -> None:
    """The loss of a batch is the mean of those of its halves, weighed by what is counted in each."""
    model, rows, expected = KINDS[kind]
    what = objective(model.train(False))
    assert what.count(rows).item() == expected
    halves = [{name: tensor[half] for name, tensor in rows.items()} for half in (slice(0, 1), slice(1, 4))]
    whole = what.loss(model, rows)
    parts = sum((what.loss(model, half) * what.count(half) / expected for half in halves), torch.zeros(()))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- rows that are computed together


def mixture(**settings: Any) -> nn.Module:
    return language("mixtral", **MIXTRAL, **settings)


@pytest.mark.parametrize(
    ("settings", "tied"),
    [
        ({}, None),
        ({"output_router_logits": True}, "balances its experts (output_router_logits) over"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None),
        ({"router_aux_loss_coef": 0.5}, None),
    ],
)
def test_a_mixture_that_balances_its_experts_depends_on_the_micro_batch(settings: dict[str, Any], tied: str | None) -> None:
    assert ties_rows(mixture(**settings)) == tied


def test_it_is_neither_cut_into_micro_batches_nor_spread_over_processes() -> None:
    model = mixture(output_router_logits=True)
    balances = "MixtralForCausalLM balances its experts (output_router_logits) over"
    cut = (
        f"{balances} the micro-batch, so micro_batch_size 2 would train something else than the batch of 4 rows: set "
        f"micro_batch_size to 4."
    )
    with pytest.raises(PlanRefused, match=f"^{re.escape(cut)}$"):
        prepare(JOB, Plan(micro_batch_size=2), model)
    spread = f"{balances} the rows that a process has, which is another thing: train in one process."
    with pytest.raises(PlanRefused, match=f"^{re.escape(spread)}$"):
        prepare(JOB, Plan(micro_batch_size=2, sharding=DataParallel(ranks=2)), model)
    prepare(JOB, Plan(micro_batch_size=4), model).release()
    prepare(JOB, Plan(micro_batch_size=2), mixture()).release()


def test_a_model_that_compares_rows_is_asked_for_its_loss_and_not_cut_either() -> None:
    model = built("clip", **CLIP, architectures=["CLIPModel"])
    what = objective(model)
    assert what.settings == {"return_loss": True}
    rows = {"input_ids": IDS[:, [0, 1, 2, 2]], **PIXELS}
    assert what.loss(model, rows).dim() == 0
    assert what.count(rows).item() == 4
    with pytest.raises(
        PlanRefused, match="CLIPModel compares each row with the others of the micro-batch, so micro_batch_size 1"
    ):
        prepare(JOB, Plan(micro_batch_size=1), model)


def test_a_return_loss_that_is_on_by_itself_is_another_loss() -> None:
    class Forecasts(nn.Module):
        config = object()

        def forward(self, x: Tensor, return_loss: bool = True) -> Tensor:
            return x.sum()

    assert ties_rows(Forecasts()) is None
    assert objective(Forecasts()).settings == {}


# ---------------------------------------------------------------------------------------------- a loss of the user's


class Regression(nn.Module):
    """Returns its scores alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        return out


def squared(output: Tensor, rows: Batch) -> Tensor:
    return (output - rows["y"]).square().mean()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_a_model_without_a_loss_trains_with_one_that_is_given(micro_batch_size: int) -> None:
    model = Regression()
    rows = {"x": torch.tensor([[1.0], [2.0], [1.0], [2.0]]), "y": torch.tensor([[0.0], [0.0], [0.0], [2.0]])}
    run = prepare(dataclasses.replace(JOB, loss=squared), Plan(micro_batch_size=micro_batch_size), model)
    cut = [
        {name: tensor[start : start + micro_batch_size] for name, tensor in rows.items()}
        for start in range(0, 4, micro_batch_size)
    ]
    # Errors of 1, 2, 1 and 0; the gradient of the mean of their squares is 2 (1 + 4 + 1 + 0) / 4.
    assert run.step(cut).loss.item() == 1.5
    torch.testing.assert_close(model.linear.weight, torch.tensor([[1.0 - 0.1 * 3.0]]))
    shown: list[tuple[list[str], tuple[int, ...]]] = []
    run.evaluate(cut, lambda batch, output: shown.append((sorted(batch), tuple(output.shape))))
    assert shown == [(["x", "y"], (micro_batch_size, 1))] * (4 // micro_batch_size)
    run.release()


def test_a_loss_of_the_users_needs_the_whole_logits() -> None:
    plan = Plan(micro_batch_size=4, loss=ChunkedLogits(chunk_tokens=2))
    with pytest.raises(
        PlanRefused, match=r"^the loss is the job's own, and the chunked loss is that of the model: keep the whole"
    ):
        prepare(dataclasses.replace(JOB, loss=lambda output, rows: output.loss), plan, CASES["llama"].build().load())


# ---------------------------------------------------------------------------------------------- modes


class Parts(nn.Module):
    """A frozen part with dropout and running statistics, and a part that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5), nn.BatchNorm1d(2)).requires_grad_(False)
        self.trained = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.trained(self.frozen(x)).sum()
        return out


def modes(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules() if path}


def test_a_frozen_part_that_was_set_to_evaluation_stays_so_and_all_else_trains() -> None:
    model = Parts()
    model.frozen.eval()
    model.trained[1].eval()
    given = modes(model)
    rows = [{"x": torch.ones(2, 2)}, {"x": torch.ones(2, 2)}]
    # Running statistics that do not move do not tie the rows either.
    run = prepare(JOB, Plan(micro_batch_size=2), model)
    in_training = {path: not path.startswith("frozen") for path in given}
    assert modes(model) == in_training
    mean = model.frozen[2].running_mean
    before = mean.clone()
    run.step(rows)
    run.evaluate(rows)
    assert modes(model) == in_training
    assert torch.equal(mean, before)
    run.release()
    assert modes(model) == given


def test_a_model_that_is_in_evaluation_as_a_whole_says_nothing_about_its_parts() -> None:
    model = Parts().eval()
    run = prepare(JOB, Plan(micro_batch_size=4), model)
    assert all(modes(model).values())
    run.release()
    assert not any(modes(model).values())


def test_an_evaluation_leaves_modes_gradients_and_random_numbers_as_they_are() -> None:
    model = Parts()
    model.frozen.eval()
    run = prepare(JOB, Plan(micro_batch_size=2), model)
    rows = [{"x": torch.ones(2, 2)}, {"x": torch.ones(2, 2)}]
    run.forward_backward(rows)
    gradients = [None if one.grad is None else one.grad.clone() for one in model.parameters()]
    given, state = modes(model), torch.get_rng_state()
    run.evaluate(rows)
    assert modes(model) == given
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    for one, gradient in zip(model.parameters(), gradients, strict=True):
        assert one.grad is gradient is None or torch.equal(one.grad, gradient)  # type: ignore[arg-type]


def test_modes_are_put_back_where_an_evaluation_fails() -> None:
    model = Parts()
    run = prepare(JOB, Plan(micro_batch_size=4), model)
    with pytest.raises(RuntimeError):
        run.evaluate([{"x": torch.ones(2, 3)}])
    assert all(modes(model).values())
