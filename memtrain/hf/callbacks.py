"""Callbacks of transformers in a run of memtrain: each record that memtrain shows becomes the hooks that it is for.

A ``TrainerCallback`` is called with the ``TrainingArguments``, a ``TrainerState`` that is filled from the records, and a
``TrainerControl`` whose ``should_training_stop``, ``should_save`` and ``should_evaluate`` become actions. ``model``, ``optimizer``
and the like are None, since a callback sees what happens as numbers and changes nothing behind a plan. The hooks inside a step
have no record and are not called.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from memtrain.callbacks import Action, Callback, Record

NOT_CALLED: Final = (
    "on_step_begin",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_prediction_step",
    "on_predict",
    "on_push_begin",
)
"""The hooks for which there is no record."""

# What transformers gives to hooks by name beside what they are about.
_NOT_GIVEN: Final = dict.fromkeys(
    ("model", "processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
)
_LOGGED: Final = ("grad_norm", "learning_rate")


def callbacks_from_hf(callbacks: Iterable[Any], args: Any) -> tuple[tuple[Callback, ...], list[str]]:
    """The callbacks as memtrain calls them, and a sentence about each that waits for hooks that are not called.

    Args:
        callbacks: objects or classes of ``transformers.TrainerCallback``, which stand for one together, and functions of a
            :class:`memtrain.callbacks.Record`, which stay what they are.
        args: their ``transformers.TrainingArguments``.

    Raises:
        ValueError: one is neither.
    """
    from transformers import TrainerCallback

    theirs, own, said = [], [], []
    for given in callbacks:
        is_class = isinstance(given, type) and issubclass(given, TrainerCallback)
        callback = given() if is_class else given
        if not isinstance(callback, TrainerCallback):
            if isinstance(given, type) or not callable(given):
                raise ValueError(
                    f"callbacks has {given!r}, and it must be a transformers.TrainerCallback or a function of a memtrain Record: "
                    f"leave it out."
                )
            own.append(callback)
            continue
        theirs.append(callback)
        waits_for = [name for name in NOT_CALLED if getattr(type(callback), name) is not getattr(TrainerCallback, name)]
        if waits_for:
            said.append(f"Callback {type(callback).__name__} has {', '.join(waits_for)}, which memtrain does not call.")
    if not theirs:
        return tuple(own), said
    hooks = Hooks(theirs, args)
    # A callback of memtrain asks for one thing at a time.
    return (hooks, *(Also(hooks, action) for action in (Action.SAVE, Action.EVALUATE)), *own), said


class Hooks:
    """Callbacks of transformers as one of memtrain.

    Attributes:
        state: the ``transformers.TrainerState`` that they see.
        asked: what they ask for since the last record.
    """

    def __init__(self, callbacks: Iterable[Any], args: Any) -> None:
        from transformers import TrainerControl, TrainerState
        from transformers.trainer_callback import ExportableState

        self._callbacks, self._args = list(callbacks), args
        self._control, self.state = TrainerControl(), TrainerState()
        self.asked: set[Action] = set()
        # A run may begin again, and what they remember is then seen again.
        self._kept = [
            (one, copy.deepcopy(one.state()["attributes"])) for one in self._callbacks if isinstance(one, ExportableState)
        ]
        self._epoch = 0
        self._losses: list[float] = []
        self._tell("on_init_end")

    def __call__(self, record: Record) -> Action | None:
        """Call the hooks that a record is for; whether the run is to end."""
        control = self._control
        control.should_save = control.should_evaluate = control.should_log = False
        if record.event == "begin":
            self._begin(record)
        state = self.state
        state.global_step, state.max_steps, state.epoch = record.step, record.steps, record.epoch
        match record.event:
            case "begin":
                self._tell("on_train_begin")
                if record.step < record.steps:
                    self._tell("on_epoch_begin")
            case "step":
                self._step(record)
            case "evaluation":
                self._evaluation(record)
            case "checkpoint":
                self._tell("on_save")
            case "end":
                self._tell("on_train_end")
        control = self._control
        wishes = {
            Action.STOP: control.should_training_stop,
            Action.SAVE: control.should_save,
            Action.EVALUATE: control.should_evaluate,
        }
        self.asked = {action for action, wished in wishes.items() if wished}
        return Action.STOP if Action.STOP in self.asked else None

    def _begin(self, record: Record) -> None:
        from transformers import TrainerState

        for callback, attributes in self._kept:
            vars(callback).update(copy.deepcopy(attributes))
        self._control.should_training_stop = False
        self._epoch, self._losses = math.floor(record.epoch), []
        self.state = TrainerState(max_steps=record.steps, num_train_epochs=math.ceil(self._args.num_train_epochs))
        self.state.compute_steps(self._args, record.steps)

    def _step(self, record: Record) -> None:
        args, when = self._args, self._args.logging_strategy.value
        self._losses.append(record.metrics["loss"])
        self._tell("on_step_end")
        first = record.step == 1 and args.logging_first_step
        if self._control.should_log or first or (when == "steps" and record.step % self.state.logging_steps == 0):
            self._log_steps(record)
        is_last, goes_on = record.step == record.steps, math.floor(record.epoch) > self._epoch
        if not (goes_on or is_last):
            return
        self._epoch = math.floor(record.epoch)
        self._tell("on_epoch_end")
        if self._control.should_log or when == "epoch":
            self._log_steps(record)
        if not is_last:
            self._tell("on_epoch_begin")

    def _log_steps(self, record: Record) -> None:
        """Log the steps since the last time, of which the loss is the mean and the rest is of the last, as transformers does."""
        self._control.should_log = False
        if self._losses:
            named = {name: record.metrics[name] for name in _LOGGED if name in record.metrics}
            self._log({"loss": sum(self._losses) / len(self._losses), **named})
        self._losses = []

    def _evaluation(self, record: Record) -> None:
        args = self._args
        # memtrain always evaluates before the first step; transformers does where it is told to.
        at = record.epoch if args.eval_strategy.value == "epoch" else record.step
        if (record.step == 0 and not args.eval_on_start) or 0 < at < args.eval_delay:
            return
        self._log(dict(record.metrics))
        self._tell("on_evaluate", metrics={**record.metrics, "epoch": record.epoch})
        # After the hooks, which compare with the best one before.
        self._take_best(record)

    def _take_best(self, record: Record) -> None:
        args, state = self._args, self.state
        if args.metric_for_best_model is None:
            return
        name = f"eval_{args.metric_for_best_model.removeprefix('eval_')}"
        if name not in record.metrics:
            raise ValueError(
                f"metric_for_best_model is {args.metric_for_best_model!r}, and an evaluation has {', '.join(record.metrics)}: "
                f"name one of these."
            )
        value, best = record.metrics[name], state.best_metric
        if best is None or (value > best if args.greater_is_better else value < best):
            state.best_metric = value
            if args.save_strategy.value != "no":
                state.best_global_step = record.step

    def _log(self, logs: dict[str, float]) -> None:
        logs["epoch"] = self.state.epoch
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self._tell("on_log", logs=logs)

    def _tell(self, hook: str, **about: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            answer = getattr(callback, hook)(self._args, self.state, self._control, **_NOT_GIVEN, **about)
            if answer is not None:
                self._control = answer
            if self._control.should_epoch_stop:
                raise ValueError(
                    f"callback {type(callback).__name__} sets should_epoch_stop, and memtrain cannot leave an epoch before its end: "
                    f"set should_training_stop, or max_steps."
                )


@dataclass(frozen=True)
class Also:
    """Asks for an action where the hooks that were called before it do."""

    hooks: Hooks
    action: Action

    def __call__(self, record: Record) -> Action | None:
        """The action, or nothing."""
        return self.action if self.action in self.hooks.asked else None
