"""Callbacks of transformers see what happens in a run of memtrain, and what they ask for is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from from_hf import arguments, tiny
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState

from memtrain.callbacks import Action, Callback, Callbacks, Record
from memtrain.hf.callbacks import callbacks_from_hf
from memtrain.trainer import Trainer

STEPS = 4


class Seen(TrainerCallback):
    """Writes down which hooks are called at which step, and asks for what it is told to."""

    def __init__(self, **asks: str) -> None:
        self.calls: list[tuple[str, int]] = []
        self.logs: list[dict[str, float]] = []
        self.given: set[Any] = set()
        self.asks = asks

    def _see(self, hook: str, state: TrainerState, control: TrainerControl) -> None:
        self.calls.append((hook, state.global_step))
        if hook in self.asks:
            setattr(control, self.asks[hook], True)

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self.given |= set(given.values())
        self._see("train_begin", state, control)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._see("epoch_begin", state, control)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._see("step_end", state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._see("epoch_end", state, control)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **given: Any) -> None:
        self.logs.append(dict(logs))
        self._see("log", state, control)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, metrics: Any = None, **given: Any) -> None:
        self._see("evaluate", state, control)

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._see("save", state, control)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        self._see("train_end", state, control)


def record(event: Any, step: int = 0, **metrics: float) -> Record:
    return Record(event=event, step=step, steps=STEPS, epoch=step / 2, metrics=metrics)


def step(number: int, loss: float = 1.0) -> Record:
    return record("step", number, loss=loss, learning_rate=0.1, perplexity=3.0)


def called(*callbacks: Any, records: list[Record], **fields: Any) -> list[frozenset[Action]]:
    made, _ = callbacks_from_hf(callbacks, arguments(**fields))
    together = Callbacks(made)
    return [together.tell(one) for one in records]


def test_each_record_calls_the_hooks_that_it_is_for() -> None:
    seen = Seen()
    end = [record("checkpoint", 4), record("end", 4)]
    called(seen, records=[record("begin"), step(1), step(2), step(3), step(4), *end], logging_strategy="no")
    assert seen.calls == [
        ("train_begin", 0),
        ("epoch_begin", 0),
        ("step_end", 1),
        ("step_end", 2),
        ("epoch_end", 2),
        ("epoch_begin", 2),
        ("step_end", 3),
        ("step_end", 4),
        ("epoch_end", 4),
        ("save", 4),
        ("train_end", 4),
    ]
    assert seen.given == {None}


def test_a_log_has_the_mean_loss_since_the_last_one() -> None:
    seen = Seen()
    called(seen, records=[record("begin"), step(1, 5.0), step(2, 3.0), step(3, 2.0)], logging_steps=2)
    assert seen.logs == [{"loss": 4.0, "learning_rate": 0.1, "epoch": 1.0}]
    by_epoch = Seen(step_end="should_log")
    called(by_epoch, records=[record("begin"), step(1, 5.0), step(2, 3.0)], logging_strategy="epoch")
    assert [one["loss"] for one in by_epoch.logs] == [5.0, 3.0]
    first = Seen()
    called(first, records=[record("begin"), step(1, 5.0), step(2, 3.0)], logging_first_step=True)
    assert [one["loss"] for one in first.logs] == [5.0]


def test_the_state_is_filled_from_the_records() -> None:
    made, _ = callbacks_from_hf([Seen()], arguments(metric_for_best_model="loss", logging_steps=1, save_steps=3))
    hooks: Any = made[0]
    for one in (record("begin"), record("evaluation", 0, eval_loss=0.1), step(1), record("evaluation", 1, eval_loss=2.0)):
        hooks(one)
    hooks(step(2, 4.0))
    hooks(record("evaluation", 2, eval_loss=3.0))
    state = hooks.state
    assert (state.global_step, state.max_steps, state.epoch, state.save_steps) == (2, 4, 1.0, 3)
    # That before the first step, of which transformers knows nothing, is not the best.
    assert (state.best_metric, state.best_global_step) == (2.0, 1)
    assert state.log_history[-2:] == [
        {"loss": 4.0, "learning_rate": 0.1, "epoch": 1.0, "step": 2},
        {"eval_loss": 3.0, "epoch": 1.0, "step": 2},
    ]


def test_an_evaluation_before_the_first_step_is_shown_where_it_is_asked_for() -> None:
    for fields, expected in (({}, []), ({"eval_on_start": True}, [("log", 0), ("evaluate", 0)])):
        seen = Seen()
        called(seen, records=[record("begin"), record("evaluation", 0, eval_loss=1.0)], **fields)
        assert seen.calls[2:] == expected


def test_evaluations_before_eval_delay_are_not_shown() -> None:
    seen = Seen()
    evaluations = [record("evaluation", number, eval_loss=1.0) for number in (1, 2, 3)]
    called(seen, records=[record("begin"), *evaluations], eval_delay=2)
    assert [number for hook, number in seen.calls if hook == "evaluate"] == [2, 3]


def test_what_a_callback_asks_for_is_asked_of_memtrain() -> None:
    seen = Seen(step_end="should_save", evaluate="should_training_stop", save="should_evaluate")
    records = [record("begin"), step(1), record("checkpoint", 1), record("evaluation", 1, eval_loss=1.0), step(2)]
    assert called(seen, records=records) == [
        frozenset(),
        {Action.SAVE},
        {Action.EVALUATE},
        {Action.STOP},
        # The end is asked for until it comes.
        {Action.STOP, Action.SAVE},
    ]


def test_leaving_an_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^callback Seen sets should_epoch_stop, and memtrain cannot leave an epoch before"):
        called(Seen(step_end="should_epoch_stop"), records=[record("begin"), step(1)])


def test_a_metric_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^metric_for_best_model is 'accuracy', and an evaluation has eval_loss: name one"):
        called(Seen(), records=[record("begin"), record("evaluation", 1, eval_loss=1.0)], metric_for_best_model="accuracy")


def test_early_stopping_counts_anew_where_a_run_begins_again() -> None:
    stopping = EarlyStoppingCallback(early_stopping_patience=2)
    fields = {"metric_for_best_model": "loss", "eval_strategy": "steps", "load_best_model_at_end": True}
    worse = [record("evaluation", number, eval_loss=float(number)) for number in (1, 2, 3)]
    asked = called(stopping, records=[record("begin"), *worse[:2], record("begin"), *worse], **fields)
    assert [Action.STOP in one for one in asked] == [False, False, False, False, False, False, True]


def test_hooks_that_are_not_called_are_said() -> None:
    class Inside(TrainerCallback):
        def on_substep_end(self, *given: Any, **named: Any) -> None: ...

        def on_optimizer_step(self, *given: Any, **named: Any) -> None: ...

    made, said = callbacks_from_hf([Inside, Seen()], arguments())
    assert said == ["Callback Inside has on_substep_end, on_optimizer_step, which memtrain does not call."]
    assert len(made) == 3


def test_a_callback_of_memtrain_stays_what_it_is_and_anything_else_is_refused() -> None:
    def own(one: Record) -> Action | None:
        return Action.SAVE

    expected: tuple[tuple[Callback, ...], list[str]] = ((own,), [])
    assert callbacks_from_hf([own], arguments()) == expected
    with pytest.raises(
        ValueError, match=r"^callbacks has 'early', and it must be a transformers.TrainerCallback or a function"
    ):
        callbacks_from_hf(["early"], arguments())


def test_early_stopping_ends_a_run_where_transformers_ends_it(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}]
    # What is learnt makes the others worse from the first step on.
    others = [{"input_ids": [1, 2, 3, 4], "labels": [9, 9, 9, 9]}]
    args = arguments(
        output_dir=str(tmp_path / "run"),
        max_steps=6,
        learning_rate=0.1,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="no",
        metric_for_best_model="loss",
        disable_tqdm=True,
    )
    given: dict[str, Any] = {"train_dataset": rows, "eval_dataset": others}
    theirs = transformers.Trainer(tiny(), args, **given, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])
    theirs.train()
    ours = Trainer.from_hf(
        args, tiny(), **given, callbacks=[EarlyStoppingCallback(early_stopping_patience=2)], budget="1GiB", progress=False
    )
    metrics = ours.train().metrics
    assert theirs.state.global_step == 3
    assert max(row["step"] for row in metrics) == 3
    evaluated = [row["eval_loss"] for row in metrics if "eval_loss" in row and row["step"]]
    assert evaluated == pytest.approx([one["eval_loss"] for one in theirs.state.log_history if "eval_loss" in one], rel=1e-5)
