"""What ``transformers.Trainer`` is given, as what a memtrain Trainer is given, with a sentence about whatever means another thing.

What the numbers depend on is translated, what memtrain has nothing for is refused, and the rest is said
(:mod:`memtrain.hf.fields`); nothing is left out in silence. A setting of memtrain that is given beside takes the place of what is
translated.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from memtrain import machine
from memtrain.data.batches import steps_for
from memtrain.hf.callbacks import callbacks_from_hf
from memtrain.hf.fields import check_fields
from memtrain.hf.rows import align_tokens_, rows_from_hf, rows_in
from memtrain.job import AdamW, Constant, Cosine, Linear, Lion, Optimizer, Schedule, Sgd
from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Fp32, Precision
from memtrain.trackers import PACKAGES

# The optimizer's state in the plan, where transformers' name of the optimizer says it.
_STATES: Final[Mapping[str, str | None]] = {
    "adamw_torch": None,
    "adamw_torch_fused": None,
    "adamw_bnb_8bit": "eight_bit",
    "adamw_8bit": "eight_bit",
    "paged_adamw_32bit": "paged",
    "paged_adamw_8bit": "paged_eight_bit",
    "lion_32bit": None,
    "paged_lion_32bit": "paged",
    "sgd": None,
}


@dataclass(frozen=True)
class Translated:
    """What a memtrain Trainer is given.

    Attributes:
        settings: its keyword arguments.
        said: sentences about what is another thing than with transformers.
    """

    settings: Mapping[str, Any]
    said: tuple[str, ...]


def arguments_from_hf(
    args: Any,
    model: Any,
    data_collator: Callable[[list[Any]], Any] | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    processing_class: Any = None,
    model_init: Any = None,
    compute_loss_func: Callable[..., Any] | None = None,
    compute_metrics: Callable[[Any], Mapping[str, float]] | None = None,
    callbacks: Sequence[Any] | None = None,
    optimizers: tuple[Any, Any] = (None, None),
    optimizer_cls_and_kwargs: Any = None,
    preprocess_logits_for_metrics: Callable[..., Any] | None = None,
    **settings: Any,
) -> Translated:
    """The keyword arguments of a :class:`memtrain.trainer.Trainer` that trains what ``transformers.Trainer`` would.

    Args:
        args: ``transformers.TrainingArguments``.
        model: as either Trainer takes it.
        data_collator, train_dataset, eval_dataset, processing_class, compute_loss_func, compute_metrics, callbacks,
            preprocess_logits_for_metrics: as ``transformers.Trainer`` takes them; callbacks may be memtrain's as well.
        model_init, optimizers, optimizer_cls_and_kwargs: refused.
        settings: keyword arguments of memtrain's Trainer, such as ``budget``, in the place of what is translated; ``tokenizer``
            is another name of ``processing_class``.

    Raises:
        ValueError: memtrain has nothing for something that is set.
    """
    _refuse(model_init=model_init, optimizers=optimizers, optimizer_cls_and_kwargs=optimizer_cls_and_kwargs)
    if not hasattr(args, "per_device_train_batch_size"):
        raise ValueError(
            f"args is a {type(args).__name__}, and it must be transformers.TrainingArguments: give these, and the model after them."
        )
    if train_dataset is None:
        raise ValueError("train_dataset is None, and a Trainer of memtrain is made to train: give the rows.")
    if isinstance(eval_dataset, Mapping):
        raise ValueError(f"eval_dataset has {', '.join(map(str, eval_dataset))}, and memtrain evaluates on one set: give one.")
    processing_class = processing_class if processing_class is not None else settings.pop("tokenizer", None)
    said = check_fields(args, settings)
    align_tokens_(model, processing_class)
    found: dict[str, Any] = {"model": model, "data": train_dataset, "eval_data": eval_dataset, "tokenizer": processing_class}
    found["device"] = settings.get("device") or machine.named("cpu" if args.use_cpu else "auto")
    found |= {"seed": args.seed, "drop_last": args.dataloader_drop_last, "workers": args.dataloader_num_workers}
    found |= {
        "max_grad_norm": args.max_grad_norm or None,
        "trackers": _trackers(args, said),
    }
    found["global_batch_size"] = settings.get("global_batch_size") or _global_batch_size(args, said)
    if args.dataloader_drop_last:
        said.append(
            "dataloader_drop_last leaves out the short step at an epoch's end, where transformers leaves out a short batch."
        )
    found["group_by_length"] = _groups(args)
    length = _Length(args, {**found, **settings})
    found |= {"steps": length.given_steps, "epochs": None if length.given_steps else length.epochs}
    if "schedule" not in settings:
        found["schedule"] = _schedule(args, length, said)
    if "optimizer" not in settings:
        found["optimizer"] = _optimizer(args, found, said)
    if "precision" not in settings:
        found["precision"] = _precision(args, model, said)
    _recompute(args, found, said)
    _conduct(args, found, length, said)
    if compute_loss_func is not None:
        found["loss"] = loss_from_hf(compute_loss_func)
    metrics = None if args.prediction_loss_only else compute_metrics
    if metrics is not None and list(args.label_names or ["labels"]) != ["labels"]:
        raise ValueError(
            f"label_names is {args.label_names}, and compute_metrics sees the tensor that is called labels: rename the column."
        )
    found |= {"compute_metrics": metrics, "reduce_outputs": preprocess_logits_for_metrics}
    found["callbacks"], notes = callbacks_from_hf(callbacks or (), args)
    said += notes
    found |= rows_from_hf(found, args, data_collator, said, settings)
    constraints = {**found.pop("constraints", {}), **(settings.pop("constraints", None) or {})}
    if settings.keys() & {"steps", "epochs"}:
        found |= {"steps": None, "epochs": None}
    return Translated({**found, **settings, "constraints": constraints}, tuple(said))


def loss_from_hf(compute_loss_func: Callable[..., Any]) -> Callable[[Any, Any], Any]:
    """A loss for memtrain that is the mean over a batch, of a function of outputs, labels and ``num_items_in_batch``.

    That number is None, with which such functions take the mean; memtrain weighs the batches of a step itself.
    """

    # Under the name of the function, by which a run that goes on tells it from another.
    @functools.wraps(compute_loss_func)
    def loss(outputs: Any, batch: Any) -> Any:
        return compute_loss_func(outputs, batch.get("labels"), num_items_in_batch=None)

    return loss


def _refuse(model_init: Any, optimizers: Any, optimizer_cls_and_kwargs: Any) -> None:
    if model_init is not None:
        raise ValueError("model_init is set, and a run of memtrain has one model: give it as model.")
    for name, value in {"optimizers": tuple(optimizers), "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs}.items():
        if value not in ((None, None), None):
            raise ValueError(
                f"{name} is set, and memtrain makes the optimizer and the learning rates itself, since it plans their memory: leave "
                f"it out, and give optimizer=AdamW(...) or another of memtrain.job, and schedule."
            )


# ---------------------------------------------------------------------------------------------- the length of the run


class _Length:
    """How long the run is, as far as it is known before rows are read."""

    def __init__(self, args: Any, settings: Mapping[str, Any]) -> None:
        self._batch, self._drop_last = settings["global_batch_size"], settings["drop_last"]
        self._rows = rows_in(settings["data"], settings)
        epochs: float | None = settings.get("epochs")
        of_args: int | None = args.max_steps if args.max_steps > 0 and epochs is None else None
        self.given_steps: int | None = settings.get("steps") or of_args
        self.epochs: float = epochs or args.num_train_epochs

    def steps(self, name: str, value: float) -> int:
        """So many steps: a number of them, or a part of the run where it is below 1.

        Raises:
            ValueError: it is a part of what is not known.
        """
        if value >= 1 or not value:
            return int(value)
        return math.ceil(self._known(name, value, self.given_steps, self.epochs) * value)

    def epoch(self, name: str) -> int:
        """The steps of an epoch.

        Raises:
            ValueError: they are not known.
        """
        return self._known(name, "epoch", None, 1)

    def _known(self, name: str, value: object, steps: int | None, epochs: float) -> int:
        if steps is not None:
            return steps
        if self._rows is None:
            raise ValueError(
                f"{name} is {value!r}, and how many rows there will be is not known before they are read: give a number of steps."
            )
        return steps_for(epochs, self._rows, self._batch, drop_last=self._drop_last)


def _global_batch_size(args: Any, said: list[str]) -> int:
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError(
            "accelerator_config has split_batches, and memtrain counts the rows of all processes: leave it out, and give "
            "global_batch_size."
        )
    ranks, cards = machine.processes().ranks, max(1, args.n_gpu)
    parts = {
        "per_device_train_batch_size": args.per_device_train_batch_size,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
        "processes": ranks,
        "cards": cards,
    }
    shown = " × ".join(f"{name} {number}" for name, number in parts.items() if number > 1 or name.startswith("per_device"))
    size: int = math.prod(parts.values())
    said.append(f"A step has {size} row{'s' * (size != 1)} ({shown}); the plan says how many are computed at once.")
    return size


def _trackers(args: Any, said: list[str]) -> tuple[str, ...]:
    others = [one for one in args.report_to if one not in PACKAGES]
    if others:
        said.append(f"report_to has {', '.join(others)}, to which memtrain logs nothing: it has {', '.join(PACKAGES)}.")
    return tuple(one for one in args.report_to if one in PACKAGES)


def _groups(args: Any) -> bool:
    """Whether rows of like length are put together."""
    how = getattr(args, "train_sampling_strategy", "random")
    if how not in ("random", "group_by_length"):
        raise ValueError(
            f"train_sampling_strategy is {how!r}, and memtrain draws the order of the rows anew in each epoch: take random or "
            f"group_by_length."
        )
    return how == "group_by_length" or bool(getattr(args, "group_by_length", False))


# ---------------------------------------------------------------------------------------------- mathematics


def _schedule(args: Any, length: _Length, said: list[str]) -> Schedule:
    kind, extra = str(args.lr_scheduler_type.value), dict(args.lr_scheduler_kwargs or {})
    ratio = getattr(args, "warmup_ratio", None) or 0
    warmup = 0 if kind == "constant" else length.steps("warmup_steps", args.warmup_steps or ratio)
    if kind == "cosine_with_min_lr":
        fraction = extra.pop("min_lr_rate", None) or (extra.pop("min_lr", None) or 0.0) / args.learning_rate
    if kind == "cosine" and extra.get("num_cycles") == 0.5:
        extra.pop("num_cycles")
    if extra:
        raise ValueError(
            f"lr_scheduler_kwargs has {', '.join(extra)}, which memtrain has nothing for with {kind}: leave it out, or give schedule."
        )
    if warmup:
        said.append(f"The rate rises over {warmup} steps from 1/{warmup} of learning_rate, where transformers begins with 0.")
    if kind.startswith("cosine"):
        said.append("The cosine is at its end in the last step, where transformers is one step before it.")
    match kind:
        case "linear":
            return Linear(warmup_steps=warmup)
        case "cosine":
            return Cosine(warmup_steps=warmup)
        case "cosine_with_min_lr":
            return Cosine(warmup_steps=warmup, final_fraction=fraction)
        case "constant" | "constant_with_warmup":
            return Constant(warmup_steps=warmup)
    raise ValueError(
        f"lr_scheduler_type is {kind!r}, and memtrain has linear, cosine, cosine_with_min_lr, constant and constant_with_warmup: "
        f"take one of these, or give schedule."
    )


def _optimizer(args: Any, found: dict[str, Any], said: list[str]) -> Optimizer:
    name = str(args.optim.value)
    if name not in _STATES:
        raise ValueError(f"optim is {name!r}, and memtrain takes {', '.join(_STATES)}: take one of these, or give optimizer.")
    extra = dict(pair.split("=") for pair in (args.optim_args or "").replace(" ", "").split(",") if pair)
    rates = {"learning_rate": args.learning_rate, "weight_decay": args.weight_decay}
    betas = (args.adam_beta1, args.adam_beta2)
    optimizer: Optimizer
    if name == "sgd":
        optimizer = Sgd(**rates, momentum=float(extra.pop("momentum", 0.0)))
    elif "lion" in name:
        optimizer = Lion(**rates, betas=betas)
    else:
        optimizer = AdamW(**rates, betas=betas, eps=args.adam_epsilon)
    if extra:
        raise ValueError(
            f"optim_args has {', '.join(extra)}, which {name} has not in memtrain: leave it out, or give optimizer."
        )
    if name == "sgd" and betas != (0.9, 0.999):
        said.append(f"adam_beta1 and adam_beta2 have no effect, since optim is {name}.")
    if "adam" not in name and args.adam_epsilon != 1e-8:
        said.append(f"adam_epsilon has no effect, since optim is {name}.")
    state = _STATES[name]
    if state is not None:
        found["constraints"] = {"optimizer_state": state}
        said.append(f"The optimizer's state is {state} in the plan, as optim={name} says; adamw_torch leaves it to the plan.")
        if "eight_bit" in state:
            found["allow"] = ("eight_bit_state",)
    return optimizer


def _precision(args: Any, model: Any, said: list[str]) -> Precision:
    trained = {one.dtype for one in model.parameters() if one.requires_grad} if isinstance(model, nn.Module) else set()
    if args.tf32 and (args.fp16 or args.bf16):
        said.append("tf32 has no effect: products are in 16 bits.")
    if args.fp16:
        return AutocastFp16()
    if trained == {torch.bfloat16}:
        said.append("The weights are bfloat16, and so is all that is computed of them: precision is bf16.")
        return Bf16()
    return AutocastBf16() if args.bf16 else Fp32(tf32=bool(args.tf32))


def _recompute(args: Any, found: dict[str, Any], said: list[str]) -> None:
    """Take recomputation as given where it is asked for; left alone, the plan decides."""
    recomputes, extra = (
        getattr(args, f"activation_{rest}", None) or getattr(args, f"gradient_{rest}", None)
        for rest in ("checkpointing", "checkpointing_kwargs")
    )
    extra = dict(extra or {})
    if recomputes:
        every = extra.pop("every_n_layers", 1)
        found["constraints"] = {**found.get("constraints", {}), "activations": {"policy": "recompute", "every": every}}
        said.append("Activations are recomputed, as activation_checkpointing says; left out, the plan decides.")
    if extra:
        said.append(f"activation_checkpointing_kwargs has {', '.join(extra)}, which has no effect.")


# ---------------------------------------------------------------------------------------------- conduct


def _conduct(args: Any, found: dict[str, Any], length: _Length, said: list[str]) -> None:
    found["run_dir"] = args.output_dir
    if args.resume_from_checkpoint:
        # As scripts give it to train(): a path, or whether there is one.
        path = str(args.resume_from_checkpoint)
        found["resume"] = "auto" if path.lower() == "true" else path
    said.append(f"The run is written to {args.output_dir}, where one that was broken off goes on; resume='never' begins anew.")
    every = _every("eval", args.eval_strategy.value, args.eval_steps, length)
    found["evaluate_every"] = every
    if found["eval_data"] is not None and not (every and args.eval_on_start):
        said.append("eval_dataset is evaluated before the first step and after the last as well.")
    if args.save_strategy.value == "best":
        if every is None:
            raise ValueError("save_strategy is 'best', and nothing is evaluated during the run: set eval_strategy.")
        found["checkpoint_every"] = every
        said.append("A checkpoint is written after each evaluation, and that of the lowest eval_loss stays.")
    else:
        found["checkpoint_every"] = _every("save", args.save_strategy.value, args.save_steps, length)
    if args.save_total_limit:
        found["keep_checkpoints"] = args.save_total_limit
    elif found["checkpoint_every"] is not None:
        said.append("Of the checkpoints the latest 2 and the best stay, since save_total_limit is not set.")
    if args.load_best_model_at_end:
        said.append(
            "load_best_model_at_end has no effect: the weights at the end are those of the last step, and the best are kept."
        )
    if args.metric_for_best_model not in (None, "loss", "eval_loss") or args.greater_is_better:
        said.append(
            f"metric_for_best_model ({args.metric_for_best_model}, greater_is_better {args.greater_is_better}) is for callbacks alone: "
            f"the checkpoint that is kept as the best has the lowest eval_loss."
        )


def _every(what: str, strategy: str, steps: float | None, length: _Length) -> int | None:
    if strategy == "epoch":
        return length.epoch(f"{what}_strategy")
    return length.steps(f"{what}_steps", steps or 0) or None if strategy == "steps" else None
