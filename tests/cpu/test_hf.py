"""TrainingArguments and what transformers.Trainer takes beside them: each is translated, said or refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from from_hf import ROWS, Net, arguments
from torch import Tensor
from transformers import TrainingArguments
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames

from memtrain import machine
from memtrain.hf.arguments import Translated, arguments_from_hf
from memtrain.hf.fields import NOT_READ, REFUSED, SAID, TRANSLATED, WITHOUT_MEANING, changed
from memtrain.job import AdamW, Constant, Cosine, Linear, Lion, Sgd
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Fp32

FIELDS = dataclasses.fields(TrainingArguments)


def translated(args: TrainingArguments | None = None, **given: Any) -> Translated:
    return arguments_from_hf(args or arguments(), **{"model": Net(), "train_dataset": ROWS, **given})


def settings(given: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    return dict(translated(arguments(**fields), **(given or {})).settings)


def said(given: dict[str, Any] | None = None, **fields: Any) -> str:
    return " ".join(translated(arguments(**fields), **(given or {})).said)


# ---------------------------------------------------------------------------------------------- every field

# Values other than the default where no rule gives one.
OTHERS: dict[str, Any] = {
    "output_dir": "elsewhere",
    "report_to": ["tensorboard"],
    "lr_scheduler_type": SchedulerType.COSINE,
    "lr_scheduler_kwargs": {"power": 2},
    "optim": OptimizerNames.SGD,
    "eval_strategy": IntervalStrategy.EPOCH,
    "save_strategy": SaveStrategy.NO,
    "logging_strategy": IntervalStrategy.NO,
    "hub_strategy": HubStrategy.END,
    "optim_args": "momentum=0.9",
    "max_steps": 7,
    "accelerator_config": type("Split", (), {"split_batches": True})(),
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "eval_steps": 4,
    "adam_beta1": 0.5,
    "adam_beta2": 0.5,
    "label_names": ["labels", "starts"],
    "train_sampling_strategy": "group_by_length",
    "include_for_metrics": ["loss"],
    "metric_for_best_model": "accuracy",
    "parallelism_config": object(),
}


def other(field: dataclasses.Field[Any]) -> Any:
    """A value of a field that is not its default."""
    default = field.default
    if field.name in OTHERS:
        return OTHERS[field.name]
    if default is None or isinstance(default, bool):
        return not default
    return default + 1 if isinstance(default, int | float) else "other"


def outcome(name: str | None = None, value: object = None) -> Any:
    args = arguments(eval_strategy="steps", eval_steps=3)
    args.use_cpu, args.dataloader_pin_memory = False, True
    if name is not None:
        setattr(args, name, value)
    try:
        found = translated(args, model=MODEL, eval_dataset=ROWS, compute_metrics=len)
    except ValueError as refused:
        if str(name) not in str(refused):
            raise
        return "refused"
    shown = {key: repr(item) for key, item in found.settings.items() if key not in ("callbacks", "data_collator")}
    return shown, type(found.settings["data_collator"]), found.said


MODEL = Net()


def test_every_field_is_in_one_table() -> None:
    tables = [TRANSLATED, frozenset(SAID), frozenset(REFUSED), WITHOUT_MEANING, NOT_READ]
    assert {field.name: sum(field.name in table for table in tables) for field in FIELDS} == {field.name: 1 for field in FIELDS}


def test_nothing_is_changed_where_nothing_is_given() -> None:
    assert changed(TrainingArguments(output_dir="out", use_cpu=True)).keys() - TRANSLATED - NOT_READ == set()


@pytest.mark.parametrize("field", [field for field in FIELDS if field.name not in NOT_READ], ids=lambda field: field.name)
def test_no_field_is_left_out_in_silence(field: dataclasses.Field[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "named", lambda name: name)
    assert outcome(field.name, other(field)) != outcome()


def test_what_no_table_knows_is_said_where_it_is_set() -> None:
    @dataclasses.dataclass
    class Newer(TrainingArguments):
        temperature: float = 1.0

    def of(**fields: Any) -> list[str]:
        args = Newer(output_dir="out", use_cpu=True, **fields)
        return [one for one in translated(args).said if "temperature" in one]

    assert of() == []
    assert of(temperature=0.5) == ["temperature is 0.5, which memtrain does not know: it has no effect."]


def test_what_is_not_there_is_named_in_one_sentence() -> None:
    assert "What these set is not there in memtrain: log_level, hub_token." in said(hub_token="secret", log_level="error")


def test_what_changes_the_numbers_and_is_not_there_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^label_smoothing_factor is 0.1, which memtrain has nothing for: leave it out, or give"
    ):
        settings(label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match=r"^neftune_noise_alpha is 5, which memtrain has nothing for: leave it out\.$"):
        settings(neftune_noise_alpha=5)


# ---------------------------------------------------------------------------------------------- the run


def test_the_defaults_of_transformers_are_taken_over() -> None:
    found = settings()
    assert found["optimizer"] == AdamW(learning_rate=5e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    assert found["schedule"] == Linear()
    assert found["precision"] == Fp32()
    assert (found["steps"], found["epochs"], found["global_batch_size"], found["seed"]) == (None, 3.0, 8, 42)
    given = {"report_to": ["tensorboard", "comet_ml"]}
    assert settings(**given)["trackers"] == ("tensorboard",)
    assert "report_to has comet_ml, to which memtrain logs nothing: it has tensorboard, wandb, mlflow." in said(**given)
    assert (found["max_grad_norm"], found["drop_last"], found["workers"], found["trackers"]) == (1.0, False, 0, ())
    assert (found["evaluate_every"], found["checkpoint_every"], found["run_dir"]) == (None, 500, "out")
    assert found["device"] == machine.cpu()
    assert found["constraints"] == {}


def test_a_step_has_the_rows_of_all_devices_and_accumulated_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "processes", lambda: machine.Processes(rank=1, ranks=3))
    fields = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    assert settings(**fields)["global_batch_size"] == 24
    assert (
        "A step has 24 rows (per_device_train_batch_size 4 × gradient_accumulation_steps 2 × processes 3); the plan says how many "
        "are computed at once."
    ) in said(**fields)


def test_what_is_dropped_at_the_end_of_an_epoch_is_said() -> None:
    assert "dataloader_drop_last leaves out the short step at an epoch's end" in said(dataloader_drop_last=True)
    assert "dataloader_drop_last" not in said()


def test_batches_that_are_split_over_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="accelerator_config has split_batches, and memtrain counts the rows of all processes"):
        settings(accelerator_config={"split_batches": True})


def test_max_steps_comes_before_epochs_and_a_setting_of_memtrain_before_both() -> None:
    assert (settings(max_steps=7)["steps"], settings(max_steps=7)["epochs"]) == (7, None)
    found = settings({"epochs": 2}, max_steps=7)
    assert (found["steps"], found["epochs"]) == (None, 2)


def test_a_part_of_the_run_is_counted_in_steps_and_rounded_up() -> None:
    # Three epochs of ten rows, four in each step: nine steps.
    found = settings(
        {"eval_dataset": ROWS},
        per_device_train_batch_size=4,
        warmup_steps=0.25,
        eval_strategy="steps",
        eval_steps=0.5,
        save_steps=0.3,
    )
    assert (found["schedule"].warmup_steps, found["evaluate_every"], found["checkpoint_every"]) == (3, 5, 3)


def test_an_epoch_is_counted_in_steps() -> None:
    fields = {"per_device_train_batch_size": 4, "eval_strategy": "epoch", "save_strategy": "epoch"}
    found = settings({"eval_dataset": ROWS}, **fields)
    assert (found["evaluate_every"], found["checkpoint_every"]) == (3, 3)
    assert settings({"eval_dataset": ROWS}, **fields, dataloader_drop_last=True)["evaluate_every"] == 2


@pytest.mark.parametrize("given", [{"train_dataset": iter(ROWS)}, {"train_dataset": "rows.jsonl"}, {"packing": True}])
def test_an_epoch_of_rows_that_are_not_counted_yet_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^save_strategy is 'epoch', and how many rows there will be is not known"):
        settings(given, save_strategy="epoch")
    with pytest.raises(ValueError, match=r"^warmup_steps is 0.5, and how many rows there will be is not known"):
        settings(given, warmup_steps=0.5)


def test_checkpoints_and_evaluations_follow_the_strategies() -> None:
    assert settings(save_strategy="no")["checkpoint_every"] is None
    assert settings(save_total_limit=5)["keep_checkpoints"] == 5
    assert "Of the checkpoints the latest 2 and the best stay" in said()
    best = {"save_strategy": "best", "metric_for_best_model": "loss"}
    assert settings({"eval_dataset": ROWS}, eval_strategy="steps", eval_steps=6, **best)["checkpoint_every"] == 6
    with pytest.raises(ValueError, match="save_strategy is 'best', and nothing is evaluated during the run: set eval_strategy"):
        settings(**best)


def test_the_weights_at_the_end_are_said_not_to_be_the_best() -> None:
    sentences = said(load_best_model_at_end=True, save_strategy="no", metric_for_best_model="accuracy")
    assert "load_best_model_at_end has no effect: the weights at the end are those of the last step" in sentences
    assert "metric_for_best_model (accuracy, greater_is_better True) is for callbacks alone" in sentences


def test_a_run_goes_on_from_where_the_arguments_say() -> None:
    assert "resume" not in settings()
    assert settings(resume_from_checkpoint="out/checkpoints/step-3")["resume"] == "out/checkpoints/step-3"
    assert settings(resume_from_checkpoint="True")["resume"] == "auto"


def test_without_use_cpu_a_card_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "named", lambda name: name)
    assert settings(use_cpu=False)["device"] == "auto"
    assert settings({"device": "here"})["device"] == "here"


# ---------------------------------------------------------------------------------------------- mathematics


def test_schedules_are_those_of_memtrain() -> None:
    assert settings(lr_scheduler_type="cosine", warmup_steps=2)["schedule"] == Cosine(warmup_steps=2)
    assert settings(lr_scheduler_type="constant", warmup_steps=2)["schedule"] == Constant()
    assert settings(lr_scheduler_type="constant_with_warmup", warmup_steps=2)["schedule"] == Constant(warmup_steps=2)
    least = {"lr_scheduler_type": "cosine_with_min_lr", "learning_rate": 0.5}
    assert settings(**least, lr_scheduler_kwargs={"min_lr": 0.1})["schedule"] == Cosine(final_fraction=0.2)
    assert settings(**least, lr_scheduler_kwargs={"min_lr_rate": 0.3})["schedule"] == Cosine(final_fraction=0.3)
    assert "The rate rises over 2 steps from 1/2 of learning_rate, where transformers begins with 0." in said(warmup_steps=2)


def test_a_schedule_that_is_not_there_is_refused_unless_another_is_given() -> None:
    with pytest.raises(ValueError, match=r"^lr_scheduler_type is 'polynomial', and memtrain has linear, cosine"):
        settings(lr_scheduler_type="polynomial")
    with pytest.raises(ValueError, match=r"^lr_scheduler_kwargs has num_cycles, which memtrain has nothing for with cosine"):
        settings(lr_scheduler_type="cosine", lr_scheduler_kwargs={"num_cycles": 3})
    assert settings({"schedule": Constant()}, lr_scheduler_type="polynomial")["schedule"] == Constant()


def test_optimizers_are_those_of_memtrain() -> None:
    fields = {"learning_rate": 0.5, "weight_decay": 0.1, "adam_beta1": 0.8}
    assert settings(optim="sgd", learning_rate=0.5)["optimizer"] == Sgd(learning_rate=0.5, momentum=0.0)
    momentum = settings(optim="sgd", optim_args="momentum=0.7")["optimizer"]
    assert momentum == Sgd(learning_rate=5e-5, momentum=0.7)
    lion = settings(optim="paged_lion_32bit", **fields)
    assert lion["optimizer"] == Lion(learning_rate=0.5, betas=(0.8, 0.999), weight_decay=0.1)
    assert lion["constraints"] == {"optimizer_state": "paged"}
    small = settings({"constraints": {"micro_batch_size": 2}}, optim="adamw_bnb_8bit")
    assert small["constraints"] == {"optimizer_state": "eight_bit", "micro_batch_size": 2}
    assert small["allow"] == ("eight_bit_state",)


def test_an_optimizer_that_is_not_there_is_refused_unless_another_is_given() -> None:
    with pytest.raises(ValueError, match=r"^optim is 'adafactor', and memtrain takes adamw_torch, adamw_torch_fused"):
        settings(optim="adafactor")
    with pytest.raises(
        ValueError, match=r"^optim_args has nesterov, which sgd has not in memtrain: leave it out, or give optim"
    ):
        settings(optim="sgd", optim_args="momentum=0.9, nesterov=true")
    assert settings({"optimizer": Lion()}, optim="adafactor")["optimizer"] == Lion()


def test_precision_follows_the_arguments_and_the_weights() -> None:
    assert settings(bf16=True)["precision"] == AutocastBf16()
    assert settings(fp16=True)["precision"] == AutocastFp16()
    assert settings({"model": Net().bfloat16()}, bf16=True)["precision"] == Bf16()


def test_recomputation_is_taken_as_given_where_it_is_asked_for() -> None:
    # Named gradient_checkpointing before version 5.24.
    name = "activation_checkpointing" if hasattr(arguments(), "activation_checkpointing") else "gradient_checkpointing"
    asked = settings(**{name: True, f"{name}_kwargs": {"every_n_layers": 2, "use_reentrant": False}})
    assert asked["constraints"] == {"activations": {"policy": "recompute", "every": 2}}
    assert settings()["constraints"] == {}


# ---------------------------------------------------------------------------------------------- what is given beside


def test_what_memtrain_makes_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^model_init is set, and a run of memtrain has one model: give it as model\."):
        translated(model_init=Net)
    optimizer = torch.optim.SGD(Net().parameters())
    with pytest.raises(ValueError, match=r"^optimizers is set, and memtrain makes the optimizer and the learning rates itself"):
        translated(optimizers=(optimizer, None))
    with pytest.raises(ValueError, match=r"^optimizer_cls_and_kwargs is set, and memtrain makes the optimizer"):
        translated(optimizer_cls_and_kwargs=(torch.optim.SGD, {}))


def test_what_is_not_the_arguments_and_what_is_no_single_set_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^args is a Net, and it must be transformers.TrainingArguments"):
        arguments_from_hf(Net(), arguments(), train_dataset=ROWS)
    with pytest.raises(ValueError, match="train_dataset is None, and a Trainer of memtrain is made to train: give the rows"):
        translated(train_dataset=None)
    with pytest.raises(ValueError, match="eval_dataset has easy, hard, and memtrain evaluates on one set: give one"):
        translated(eval_dataset={"easy": ROWS, "hard": ROWS})


def test_metrics_are_handed_on() -> None:
    def keep(logits: Tensor, labels: Tensor) -> Tensor:
        return logits.argmax(-1)

    found = settings({"compute_metrics": len, "preprocess_logits_for_metrics": keep})
    assert (found["compute_metrics"], found["reduce_outputs"]) == (len, keep)
    assert settings({"compute_metrics": len}, prediction_loss_only=True)["compute_metrics"] is None
    with pytest.raises(
        ValueError, match=r"^label_names is \['starts'\], and compute_metrics sees the tensor that is called labels"
    ):
        settings({"compute_metrics": len}, label_names=["starts"])


def test_a_loss_function_gets_labels_and_keeps_its_name() -> None:
    def smooth(outputs: Tensor, labels: Tensor, num_items_in_batch: int | None) -> Tensor:
        assert num_items_in_batch is None
        return outputs.sum() + labels.sum()

    loss = settings({"compute_loss_func": smooth})["loss"]
    assert loss(torch.tensor([1.0, 2.0]), {"labels": torch.tensor([4])}) == 7
    assert loss.__qualname__ == smooth.__qualname__
