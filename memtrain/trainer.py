"""The Trainer: what people call. It checks what it is given, plans, trains, and reports.

It plans on a data-less copy of the model, builds or takes the real one once a plan is chosen, and trains with exactly
that plan. It owns no training mathematics: the step is Run.step, the rows of a step come from StepBatches, and the
learning rate from schedule.learning_rate.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.text import Text
from torch import nn

from memtrain import distributed, machine
from memtrain.callbacks import Callback
from memtrain.conduct import Conduct, as_tuple
from memtrain.course import Course
from memtrain.data.batches import Batches, StepBatches, steps_for
from memtrain.data.loading import step_batches
from memtrain.data.options import DataOptions
from memtrain.data.task import Task
from memtrain.device import Cuda, Device
from memtrain.ending import Result, concluded
from memtrain.evaluation import ComputeMetrics, ReduceOutputs, metrics_of
from memtrain.hf.arguments import arguments_from_hf
from memtrain.inputs import Collator, Reader, check_module, load_tokenizer
from memtrain.job import AdamW, Budget, Cosine, Job, Loss, NotFinite, Optimizer, Schedule, approximations, not_finite
from memtrain.method import Full, Method, Quantization, Unquantized
from memtrain.metrics import IDENTITY, RunFolder, RunLog
from memtrain.models.build import bytes_on, source, weight_dtype, with_vocabulary
from memtrain.models.save import save_merged, save_model
from memtrain.plan import parse_constraints, ranks_of
from memtrain.planner.choice import Choice
from memtrain.precision import Fp32, Precision
from memtrain.report.tell import teller
from memtrain.report.terminal import TrainingProgress
from memtrain.resume import CHECKPOINTS, find_start, identity, name_of, parse_resume, resumed_constraints
from memtrain.session import Given, Session
from memtrain.trackers import check_trackers
from memtrain.units import parse_bytes


class Trainer:
    """Train a model inside a memory budget.

    Args:
        model: a local path, a hub id, a transformers configuration (object or mapping) or any nn.Module. It returns its loss
            when called with a batch as keyword arguments, unless ``loss`` makes one of what it returns.
        data: rows: files, a folder, a pattern or ``"hub:NAME"`` of the formats in docs/data.md; a ``datasets.Dataset``; any list,
            iterable or torch Dataset of mappings, of text or of tensors.
        budget: memory that training may take, such as ``"4GiB"``, or a Budget; by default all that a card has.
        eval_data: like ``data``; evaluated on before and after training, and every ``evaluate_every`` steps.
        tokenizer: a tokenizer or the path of one; by default the one at the model's path.
        task: what the model learns (:class:`memtrain.data.task.Task`); by default what its class was made for.
        trust_remote_code: whether code that comes with the model's files is run.
        sequence_length: tokens per row at the most; by default what the model has positions for, at most 1024.
        packing: whether short rows are put into one, where they do not see each other.
        train_on, chat_template, long_rows, on_bad_row: see :class:`memtrain.data.options.DataOptions`.
        data_collator: makes a batch of a list of rows, in place of padding.
        global_batch_size: rows per optimizer step.
        group_by_length: whether rows of like length are put into one step.
        drop_last: whether the short step at the end of an epoch is left out.
        steps, epochs: length of the run; one epoch by default.
        optimizer, schedule, precision, method, quantization, max_grad_norm, loss, allow, seed: see :class:`memtrain.job.Job`.
        compute_metrics, reduce_outputs: what is computed of an evaluation beside its loss, and what of the logits is kept for it: see
            :class:`memtrain.evaluation.Metrics`.
        constraints: plan fields that the planner must take as given, such as ``{"micro_batch_size": 2}`` or
            ``{"activations": {"policy": "recompute", "every": 2}}``.
        device: what it is trained on, as :func:`memtrain.machine.named` gives it; by default this machine's processor,
            and its card with ``machine.named("auto")``. A card that is elsewhere is good for planning.
        host_bytes: memory of the host that a plan for a card may take, such as ``"64GiB"``.
        on_not_finite: what happens to a step whose loss or gradient is not finite: ``"stop"`` ends the run before a weight
            changes, where the plan allows it; ``"skip"`` leaves the step out and goes on.
        evaluate_every, checkpoint_every, keep_checkpoints, stop_seconds, workers, callbacks, trackers: see
            :class:`memtrain.conduct.Conduct`.
        run_dir: folder for plan, prediction, metrics, checkpoints and comparison; nothing is written by default.
        resume: ``"auto"`` goes on with the run that is in ``run_dir``, if there is one; a path, with the checkpoint or run
            there; ``"never"`` begins anew. See docs/checkpoints.md.
        progress: whether to print the rows, the choice, a progress bar and the comparison.

    Raises:
        ValueError: one sentence about whatever of these cannot be trained, before anything is loaded.
    """

    def __init__(
        self,
        *,
        model: Any,
        data: Any,
        budget: str | Budget | None = None,
        eval_data: Any = None,
        tokenizer: Any = None,
        task: Task | str | None = None,
        trust_remote_code: bool = False,
        sequence_length: int | None = None,
        packing: bool = False,
        train_on: str = "auto",
        chat_template: str | None = None,
        long_rows: str = "truncate",
        on_bad_row: str = "stop",
        data_collator: Collator | None = None,
        global_batch_size: int = 8,
        group_by_length: bool = False,
        drop_last: bool = False,
        steps: int | None = None,
        epochs: float | None = None,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        precision: Precision | None = None,
        method: Method | None = None,
        quantization: Quantization | None = None,
        max_grad_norm: float | None = 1.0,
        loss: Loss | None = None,
        allow: Collection[str] = (),
        seed: int = 0,
        on_not_finite: NotFinite | str = NotFinite.STOP,
        evaluate_every: int | None = None,
        compute_metrics: ComputeMetrics | None = None,
        reduce_outputs: ReduceOutputs | None = None,
        callbacks: Sequence[Callback] = (),
        trackers: Sequence[str] = (),
        workers: int = 0,
        constraints: Mapping[str, Any] | None = None,
        device: Device | None = None,
        host_bytes: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = 500,
        keep_checkpoints: int = 2,
        resume: str | os.PathLike[str] = "auto",
        stop_seconds: float | None = None,
        progress: bool = True,
    ) -> None:
        from accelerate import PartialState

        # accelerate keeps one state per process for good; a second job of this process must not inherit the first one's.
        PartialState._reset_state()
        self.processes = machine.processes()
        distributed.start(self.processes, cards=isinstance(device, Cuda))
        PartialState(cpu=not isinstance(device, Cuda))
        if device is not None and not isinstance(device, Device):
            raise ValueError(
                f"device is {device!r}, and it must be a Device: take memtrain.machine.named(NAME), or leave it out to train on "
                f"this machine's processor."
            )
        self._constraints = distributed.shared_by(self.processes.ranks, parse_constraints(constraints or {}))
        self.device = device or machine.cpu()
        self._conduct = Conduct(
            evaluate_every=evaluate_every,
            checkpoint_every=checkpoint_every,
            keep_checkpoints=keep_checkpoints,
            stop_seconds=stop_seconds,
            workers=workers,
            callbacks=as_tuple("callbacks", callbacks),
            trackers=as_tuple("trackers", trackers),
        )
        check_trackers(self._conduct.trackers, has_folder=run_dir is not None)
        self.source = source(model, task=task, trust_remote_code=trust_remote_code)
        if isinstance(budget, Budget) and host_bytes is not None:
            raise ValueError(f"budget is a Budget and host_bytes is {host_bytes!r}: give the host's bytes in the Budget.")
        self.budget = budget if isinstance(budget, Budget) else self._budget(budget, host_bytes)
        precision = precision or Fp32()
        check_module(self.source, precision, self.device)
        if steps is not None and epochs is not None:
            raise ValueError(f"steps is {steps} and epochs is {epochs}, and only one can hold: leave the other out.")
        self.tokenizer = load_tokenizer(tokenizer, self.source, trust_remote_code=trust_remote_code)
        self.source, grown = with_vocabulary(self.source, self.tokenizer)
        options = DataOptions(
            sequence_length=sequence_length,
            packing=packing,
            train_on=train_on,
            chat_template=chat_template,
            long_rows=long_rows,
            on_bad_row=on_bad_row,
        )
        reader = Reader(self.source, self.tokenizer, options, seed=seed, data_collator=data_collator)
        if grown:
            reader.said.append(grown)
        enough = None if steps is None else steps * global_batch_size
        self.rows = reader.read(data, "data", enough)
        self.eval_rows = None if eval_data is None else reader.read(eval_data, "eval_data")
        self._said = reader.said
        evaluates = self.eval_rows is not None
        metrics, self._constraints = metrics_of(compute_metrics, reduce_outputs, self._constraints, evaluates=evaluates)
        if evaluate_every is not None and not evaluates:
            raise ValueError(f"evaluate_every is {evaluate_every}, and there is nothing to evaluate on: give eval_data.")
        in_epoch = steps_for(1 if epochs is None else epochs, len(self.rows), global_batch_size, drop_last=drop_last)
        self.job = Job(
            model=self.source.name,
            global_batch_size=global_batch_size,
            steps=in_epoch if steps is None else steps,
            optimizer=optimizer or AdamW(),
            schedule=schedule or Cosine(),
            precision=precision,
            method=method or Full(),
            quantization=quantization or Unquantized(),
            max_grad_norm=max_grad_norm,
            loss=loss,
            allow=approximations(allow),
            seed=seed,
            on_not_finite=not_finite(on_not_finite),
        )
        self._order = StepBatches(
            self.rows, global_batch_size=global_batch_size, seed=seed, drop_last=drop_last, group_by_length=group_by_length
        )
        trained = f"{self.rows.fingerprint}{', short steps left out' * drop_last}{', grouped by length' * group_by_length}"
        evaluated = "nothing" if self.eval_rows is None else self.eval_rows.fingerprint
        alike = {"loss": None if loss is None else name_of(loss), "data": trained, "eval_data": evaluated}
        distributed.check_same({"the job": replace(self.job, loss=None), **alike})
        # The first process writes and prints.
        going_on = parse_resume(resume)
        self.folder = (
            None
            if run_dir is None or self.processes.rank
            else RunFolder(Path(run_dir).expanduser(), goes_on=going_on != "never")
        )
        # All processes agree on whether there are checkpoints.
        self._checkpoints = None if run_dir is None else Path(run_dir).expanduser() / CHECKPOINTS
        self._identity = identity(self.job, self.source, trained, evaluated)
        self._start = distributed.from_first(lambda: find_start(going_on, self.folder, self._identity))
        self._progress = progress and not self.processes.rank
        self._has_trained = False
        self._session = Session(
            Given(
                job=self.job,
                source=self.source,
                device=self.device,
                budget=self.budget,
                rows=self.rows,
                eval_rows=self.eval_rows,
                metrics=metrics,
                constraints=self._constraints,
                processes=self.processes,
            )
        )
        self._course = Course(
            session=self._session,
            conduct=self._conduct,
            folder=self.folder,
            checkpoints=self._checkpoints,
            identity=self._identity,
            start=self._start,
        )

    @classmethod
    def from_hf(cls, args: Any, model: Any, *given: Any, **settings: Any) -> Self:
        """A Trainer of what ``transformers.Trainer`` takes, under the same names; what is another thing here is said.

        Args:
            args: ``transformers.TrainingArguments``.
            given, settings: as :func:`memtrain.hf.arguments.arguments_from_hf` takes them, and settings of this class beside them.

        Raises:
            ValueError: memtrain has nothing for something that is set.
        """
        translated = arguments_from_hf(args, model, *given, **settings)
        distributed.leave_foreign()
        made = cls(**translated.settings)
        made._said = [*translated.said, *made._said]
        return made

    def _budget(self, budget: str | None, host_bytes: str | None) -> Budget:
        return machine.budget_for(
            self.device,
            _bytes("budget", budget),
            host_bytes=_bytes("host_bytes", host_bytes),
            held_bytes=bytes_on(self.source, self.device.kind),
            ranks=ranks_of(self._constraints),
        )

    # ------------------------------------------------------------------ planning

    @property
    def choice(self) -> Choice:
        """The plan in force: made on first use by the first process for all, and written to the run folder.

        A run that resumes keeps the plan of its checkpoint, but for what the constraints now set otherwise; one that runs out of
        memory goes on with a smaller one.

        Raises:
            NoPlanFits: with the smallest plan and the missing bytes.
            ValueError: the model has no loss, or the constraints leave no plan.
        """
        return self._session.choice or self._plan()

    @distributed.naming_a_lost_process()
    def _plan(self) -> Choice:
        constraints, checkpoint = self._constraints, self._start.checkpoint
        if checkpoint is not None:
            constraints = resumed_constraints(checkpoint.facts, constraints, self.job)
        chosen = self._session.plan(constraints, None if checkpoint is None else checkpoint.step)
        if self.folder is not None:
            # First, since it says of which job the others are.
            if self.folder.identity is None:
                self.folder.write_json(IDENTITY, self._identity)
            chosen.write(self.folder)
        return chosen

    # ------------------------------------------------------------------ training

    @distributed.naming_a_lost_process()
    def train(self) -> Result:
        """Train with the chosen plan, or go on with a run, measuring the first, the second and the last step.

        Raises:
            ValueError: a loss is not finite, planning fails, memory runs out and nothing is left to give, or this Trainer has
                trained already.
            KeyboardInterrupt, SystemExit: Ctrl-C or SIGTERM came, and the run has saved and stopped; the exit code is 130 or
                143. A second Ctrl-C stops without saving.
        """
        if self._has_trained:
            raise ValueError(
                "this Trainer has trained already: make another, with model=trainer.model to go on from its weights."
            )
        machine.require(self.device)
        distributed.require(ranks_of(self._constraints))
        checkpoint = self._start.checkpoint
        if checkpoint is not None and checkpoint.step == self.job.steps and self._checkpoints is None:
            raise ValueError(f"the checkpoint {checkpoint.path} is of the last step: nothing is left to train; give run_dir.")
        console = Console(quiet=not self._progress)
        bar = TrainingProgress(self.job.steps, self.budget.device_bytes, console, "row" if self.rows.lengths is None else "tok")
        tell = teller(self.folder, bar if self._progress else None, silent=self.processes.rank > 0)
        log = RunLog(self.folder, tell)
        loop = self._course.run(self._begin, self._batches(), log, bar, tell, self.save_model)
        return concluded(self._session, loop, log, self.folder, console, tell)

    @distributed.naming_a_lost_process()
    def evaluate(self) -> dict[str, float]:
        """What is logged of an evaluation on ``eval_data``, with the chosen plan and dropout off.

        Raises:
            ValueError: there is no ``eval_data``.
        """
        machine.require(self.device)
        if self.eval_rows is None:
            raise ValueError("there is nothing to evaluate on: give eval_data to the Trainer.")
        if self._session.choice is None:
            self._plan()
        try:
            loop, checkpoint = self._session.begin(self._order), self._start.checkpoint
            if checkpoint is not None and not self._has_trained:
                self._course.keeper(self.choice, lambda _: None).restore(checkpoint, loop.run, loop.plan)
            return loop.evaluate()
        finally:
            self._session.end()

    def save_model(self, folder: str | os.PathLike[str]) -> None:
        """Write the model in HuggingFace format (safetensors), with its tokenizer if there is one; the first process does.

        Another nn.Module is written as ``model.safetensors``.
        """
        if not self.processes.rank:
            save_model(self.model, self.tokenizer, folder)

    def save_merged(self, folder: str | os.PathLike[str]) -> None:
        """Write the model with its adapters added to its weights, in the type of the precision, with its tokenizer; the first process does.

        Raises:
            ValueError: the model has no adapters, or has been quantised and there are no weights to load again.
        """
        if not self.processes.rank:
            save_merged(self.model, self.source, weight_dtype(self.job.precision), self.tokenizer, folder)

    @property
    def model(self) -> nn.Module:
        """The real model, loaded on first use; a module that was given is itself."""
        return self._session.model

    # ------------------------------------------------------------------ parts of a run

    def _begin(self) -> Choice:
        if self._progress:
            Console().print(Text("\n".join(self._said)))
        choice, self._has_trained = self.choice, True
        return choice

    def _batches(self) -> Batches:
        """The rows of each step; workers are forked here, before there are weights that they would hold as well."""
        return step_batches(self._order, seed=self.job.seed, steps=self.job.steps, workers=self._conduct.workers)


def _bytes(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
