"""What becomes of each field of ``transformers.TrainingArguments``: every one is in exactly one of these tables.

A field that is in none of them, as other versions and the arguments of other libraries have, is said where it is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Final

TRANSLATED: Final = frozenset(
    (
        *("output_dir", "resume_from_checkpoint", "report_to", "seed", "use_cpu"),
        *("per_device_train_batch_size", "gradient_accumulation_steps", "accelerator_config"),
        *("num_train_epochs", "max_steps", "max_grad_norm", "bf16", "fp16", "tf32"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"),
        *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon"),
        *("activation_checkpointing", "activation_checkpointing_kwargs"),
        *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
        *("eval_strategy", "eval_steps", "eval_on_start", "prediction_loss_only"),
        *("save_strategy", "save_steps", "save_total_limit"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("dataloader_drop_last", "dataloader_num_workers", "train_sampling_strategy", "group_by_length"),
        *("remove_unused_columns", "label_names"),
    )
)
"""Fields that :mod:`memtrain.hf.arguments` makes settings of, or a sentence of its own."""

_LOGGED: Final = "metrics.jsonl has every step, and {name} is for the on_log of callbacks alone."
_ALWAYS: Final = (
    "{name} is {value} and has no effect: a step's loss is always the mean over the counted items of all processes."
)
_EVALUATED: Final = "{name} has no effect: rows are evaluated in the precision that is trained in."

SAID: Final[Mapping[str, str]] = {
    "per_device_eval_batch_size": "{name} has no effect: the plan says how many rows are evaluated at once.",
    "auto_find_batch_size": "{name} has no effect: the plan is made for the memory that there is, before the run begins.",
    "average_tokens_across_devices": _ALWAYS,
    "bf16_full_eval": _EVALUATED,
    "fp16_full_eval": _EVALUATED,
    "data_seed": "{name} is {value} and has no effect: the order of the rows follows from seed.",
    "logging_strategy": _LOGGED,
    "logging_steps": _LOGGED,
    "logging_first_step": _LOGGED,
    "logging_nan_inf_filter": _LOGGED,
    "eval_delay": "{name} is {value}, and evaluations before are made nevertheless; callbacks do not see them.",
    "save_only_model": "{name} has no effect: a checkpoint has all that the run needs to go on.",
    "push_to_hub": "{name} has no effect, and nothing is uploaded: call trainer.model.push_to_hub after the run.",
    "ignore_data_skip": "{name} has no effect: a run that goes on sees the rows that it would have seen.",
    "restore_callback_states_from_checkpoint": "{name} has no effect: a run that goes on shows callbacks its evaluations again.",
    "use_liger_kernel": "{name} has no effect: where logits are too large, the plan computes the loss in chunks.",
    "include_num_input_tokens_seen": "{name} has no effect: metrics.jsonl has the tokens per second.",
    "skip_memory_metrics": "{name} has no effect: comparison.json has the memory as predicted and measured.",
    "disable_tqdm": "{name} has no effect: progress=False shows nothing of the run.",
}
"""Sentences for what is otherwise here, where it is set."""

REFUSED: Final[Mapping[str, str]] = {
    "label_smoothing_factor": "leave it out, or give a compute_loss_func that smooths",
    "torch_compile": "leave it out",
    "torch_compile_backend": "leave it out",
    "torch_compile_mode": "leave it out",
    "neftune_noise_alpha": "leave it out",
    "deepspeed": "leave it out; state that does not fit goes to the host by itself, and torchrun starts several processes",
    "fsdp": "leave it out; torchrun starts several processes",
    "parallelism_config": "leave it out; torchrun starts several processes",
    "optim_target_modules": "leave it out, or give a method such as memtrain.method.Lora",
    "full_determinism": "leave it out, and call transformers.enable_full_determinism(seed) before",
    "batch_eval_metrics": "leave it out, since compute_metrics sees all rows at once",
    "eval_do_concat_batches": "leave it out, since compute_metrics sees all rows as one array",
    "include_for_metrics": "leave it out, since compute_metrics sees predictions and labels",
    "predict_with_generate": "leave it out, and generate with trainer.model after the run",
    "debug": "leave it out, since a loss or gradient that is not finite ends the run and is said",
}
"""What to do about fields that only their default is taken of."""

WITHOUT_MEANING: Final = frozenset(
    (
        *("use_cache", "liger_kernel_config", "torch_empty_cache_steps", "eval_accumulation_steps", "eval_use_gather_object"),
        *("log_on_each_node", "log_level", "log_level_replica", "logging_dir", "run_name", "project"),
        *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        *("save_on_each_node", "enable_jit_checkpoint", "length_column_name"),
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("dataloader_multiprocessing_context", "dataloader_in_order"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend"),
        "ddp_timeout",
    )
)
"""What they set is not there; where they are set, one sentence names them together."""

NOT_READ: Final = frozenset(("do_train", "do_eval", "do_predict", "local_rank", "fsdp_config"))
"""What transformers' Trainer does not read either, the last without ``fsdp``."""


def changed(args: Any) -> dict[str, Any]:
    """The fields that are not what they are by default, with their values.

    What ``TrainingArguments`` makes of a default by itself, such as an empty list of None, is that default.
    """
    found = {}
    for one in dataclasses.fields(args):
        value = getattr(args, one.name)
        default = one.default if one.default_factory is dataclasses.MISSING else one.default_factory()
        follows = one.name == "dataloader_pin_memory" and getattr(args, "use_cpu", False)
        if value != default and (value or default) and not follows:
            found[one.name] = getattr(value, "value", value)
    return found


def check_fields(args: Any, overridden: Collection[str] = ()) -> list[str]:
    """A sentence for each field that is set and has no effect, or another one.

    Args:
        args: ``transformers.TrainingArguments`` or those of another library that are made of them.
        overridden: fields in whose place a setting of memtrain was given.

    Raises:
        ValueError: one is set that memtrain has nothing for.
    """
    said, without_meaning = [], []
    for name, value in changed(args).items():
        if name in overridden:
            continue
        shown = "a token" if name.endswith("_token") else repr(value)
        if name in REFUSED:
            raise ValueError(f"{name} is {shown}, which memtrain has nothing for: {REFUSED[name]}.")
        if name in SAID:
            said.append(SAID[name].format(name=name, value=shown))
        elif name in WITHOUT_MEANING:
            without_meaning.append(name)
        elif name not in TRANSLATED | NOT_READ:
            said.append(f"{name} is {shown}, which memtrain does not know: it has no effect.")
    if without_meaning:
        said.append(f"What these set is not there in memtrain: {', '.join(without_meaning)}.")
    return said
