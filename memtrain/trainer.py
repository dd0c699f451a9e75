"""The Trainer: data, schedule, logging and measuring around ``Run.step``.

It plans on a data-less copy of the model, builds or takes the real one once a plan is chosen, and trains with exactly
that plan. It owns no training mathematics: the step is Run.step, the rows of a step come from StepBatches, and the
learning rate from schedule.learning_rate.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from memtrain import distributed, machine
from memtrain.data.batches import StepBatches, steps_for
from memtrain.data.rows import check_row, fingerprint
from memtrain.device import Cpu, Cuda, Device
from memtrain.inputs import check_module, load_tokenizer, rows_of
from memtrain.job import AdamW, Budget, Cosine, Job, Optimizer, Schedule, approximations
from memtrain.loop import Loop
from memtrain.measure import meter
from memtrain.method import Full, Method, Quantization, Unquantized
from memtrain.metrics import RunFolder, RunLog
from memtrain.models.build import FromModule, bytes_on, source, weight_dtype
from memtrain.models.load import load_model
from memtrain.models.objective import check_suits
from memtrain.models.quantize import move_unpacked_
from memtrain.models.save import no_progress_bars, save_merged, save_model
from memtrain.plan import parse_constraints, ranks_of
from memtrain.planner.choice import Choice, Comparison
from memtrain.planner.compare import compare
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.precision import Fp32, Precision
from memtrain.run import Run, prepare
from memtrain.trace.event import Kind, Phase
from memtrain.trace.profile import held_by
from memtrain.units import parse_bytes


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a training run came to.

    Attributes:
        comparison: predicted beside measured.
        evaluations: (step, mean loss over the evaluation rows) pairs, the first before training; empty without such rows.
        metrics: the rows of ``metrics.jsonl``.
    """

    comparison: Comparison
    evaluations: tuple[tuple[int, float], ...]
    metrics: tuple[Mapping[str, float], ...]


class Trainer:
    """Train a model inside a memory budget.

    Args:
        model: a local path, a hub id, a transformers configuration (object or mapping) or any nn.Module that returns its
            loss when called with a row batch as keyword arguments.
        data: a text file or a folder of them, or rows: a list or map-style dataset of mappings from argument name to tensor.
        budget: memory that training may take, such as ``"4GiB"``, or a Budget; by default all that a card has.
        eval_data: like ``data``; evaluated on before and after training, and every ``evaluate_every`` steps.
        tokenizer: a tokenizer or the path of one, for text; by default the one at the model's path.
        sequence_length: tokens per row of text; by default what the model has positions for, at most 1024.
        global_batch_size: rows per optimizer step.
        steps, epochs: length of the run; one epoch by default.
        optimizer, schedule, precision, method, quantization, max_grad_norm, allow, seed: see :class:`memtrain.job.Job`.
        constraints: plan fields that the planner must take as given, such as ``{"micro_batch_size": 2}`` or
            ``{"activations": {"policy": "recompute", "every": 2}}``.
        device: what it is trained on, as :func:`memtrain.machine.named` gives it; by default this machine's processor,
            and its card with ``machine.named("auto")``. A card that is elsewhere is good for planning.
        host_bytes: memory of the host that a plan for a card may take, such as ``"64GiB"``.
        run_dir: folder for plan, prediction, metrics and comparison; nothing is written by default.
        progress: whether to print the choice, a progress bar and the comparison.

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
        sequence_length: int | None = None,
        global_batch_size: int = 8,
        steps: int | None = None,
        epochs: float | None = None,
        optimizer: Optimizer | None = None,
        schedule: Schedule | None = None,
        precision: Precision | None = None,
        method: Method | None = None,
        quantization: Quantization | None = None,
        max_grad_norm: float | None = 1.0,
        allow: Collection[str] = (),
        seed: int = 0,
        evaluate_every: int | None = None,
        constraints: Mapping[str, Any] | None = None,
        device: Device | None = None,
        host_bytes: str | None = None,
        run_dir: str | os.PathLike[str] | None = None,
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
        self.source = source(model)
        if isinstance(budget, Budget) and host_bytes is not None:
            raise ValueError(f"budget is a Budget and host_bytes is {host_bytes!r}: give the host's bytes in the Budget.")
        self.budget = budget if isinstance(budget, Budget) else self._budget(budget, host_bytes)
        precision = precision or Fp32()
        check_module(self.source, precision, self.device)
        self.tokenizer = load_tokenizer(tokenizer, self.source)
        self.rows = rows_of(data, "data", self.source, self.tokenizer, sequence_length)
        self.eval_rows = (
            None if eval_data is None else rows_of(eval_data, "eval_data", self.source, self.tokenizer, sequence_length)
        )
        if steps is not None and epochs is not None:
            raise ValueError(f"steps is {steps} and epochs is {epochs}, and only one can hold: leave the other out.")
        self.job = Job(
            model=self.source.name,
            global_batch_size=global_batch_size,
            steps=steps_for(1 if epochs is None else epochs, len(self.rows), global_batch_size) if steps is None else steps,
            optimizer=optimizer or AdamW(),
            schedule=schedule or Cosine(),
            precision=precision,
            method=method or Full(),
            quantization=quantization or Unquantized(),
            max_grad_norm=max_grad_norm,
            allow=approximations(allow),
            seed=seed,
        )
        if evaluate_every is not None and evaluate_every < 1:
            raise ValueError(f"evaluate_every is {evaluate_every}, and it must be 1 or more steps, or None.")
        if evaluate_every is not None and self.eval_rows is None:
            raise ValueError(f"evaluate_every is {evaluate_every}, and there is nothing to evaluate on: give eval_data.")
        self._evaluate_every = evaluate_every
        evaluated = "nothing" if self.eval_rows is None else fingerprint(self.eval_rows)
        distributed.check_same({"the job": self.job, "data": fingerprint(self.rows), "eval_data": evaluated})
        # The first process writes and prints.
        self.folder = None if run_dir is None or self.processes.rank else RunFolder(Path(run_dir))
        self._progress = progress and not self.processes.rank
        self._has_trained = False
        self._model: nn.Module | None = None
        self._meter = meter(self.device, self._held)
        self._run: Run | None = None

    def _budget(self, budget: str | None, host_bytes: str | None) -> Budget:
        return machine.budget_for(
            self.device,
            _bytes("budget", budget),
            host_bytes=_bytes("host_bytes", host_bytes),
            held_bytes=bytes_on(self.source, self.device.kind),
            ranks=ranks_of(self._constraints),
        )

    # ------------------------------------------------------------------ planning

    @cached_property
    @distributed.naming_a_lost_process()
    def choice(self) -> Choice:
        """The plan, made on first use by the first process for all, and written to the run folder.

        Raises:
            NoPlanFits: with the smallest plan and the missing bytes.
            ValueError: the model has no loss, or the constraints leave no plan.
        """
        return distributed.from_first(self._chosen)

    def _chosen(self) -> Choice:
        first = self.rows[0]
        ranks = ranks_of(self._constraints)
        if self.eval_rows is not None and len(self.eval_rows) < ranks:
            raise ValueError(
                f"eval_data has {len(self.eval_rows)} rows for {ranks} processes, and each evaluates one or more: give more "
                f"rows, or start fewer processes."
            )
        shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in first.items()}
        evaluation_rows = 0 if self.eval_rows is None else len(self.eval_rows)
        predictor = Predictor(
            self.job,
            self.source,
            shapes,
            self.device,
            evaluation_rows=evaluation_rows,
            allocator=machine.allocator_settings(),
        )
        check_suits(predictor.model, self.rows, "data")
        if self.eval_rows is not None:
            check_row(self.eval_rows[0], first, index=0, what="eval_data, compared with data,")
            check_suits(predictor.model, self.eval_rows, "eval_data")
        chosen = choose(predictor, self.budget, self._constraints)
        if self.folder is not None:
            chosen.write(self.folder)
        return chosen

    # ------------------------------------------------------------------ training

    @distributed.naming_a_lost_process()
    def train(self) -> Result:
        """Train with the chosen plan, measuring the first, the second and the last step.

        Raises:
            ValueError: the loss of a step is not a finite number, planning fails, or this Trainer has trained already.
        """
        from rich.console import Console

        from memtrain.report.plot import plot_run
        from memtrain.report.terminal import TrainingProgress, choice_view, comparison_view

        if self._has_trained:
            raise ValueError(
                "this Trainer has trained already: make another, with model=trainer.model to go on from its weights."
            )
        machine.require(self.device)
        distributed.require(ranks_of(self._constraints))
        choice, log, console = self.choice, RunLog(self.folder), Console(quiet=not self._progress)
        console.print(choice_view(choice), "")
        with self._prepared() as loop:
            self._has_trained = True
            if self.eval_rows is not None:
                log.add({"step": 0, "eval_loss": loop.evaluate()})
            unit, speed = "tok" if loop.counts == "tokens" else "row", 0.0
            with TrainingProgress(self.job.steps, self.budget.device_bytes, console, unit) as bar:
                for step in range(self.job.steps):
                    row = loop.step(step)
                    # The profiler slows the steps that it watches: the speed shown is that of the last one it did not.
                    if not speed or not loop.watches(step):
                        speed = row[f"{loop.counts}_per_second"]
                    bar.update(
                        step + 1,
                        loss=row["loss"],
                        per_second=speed,
                        # Every weight and its state is asked for its size, for nobody where nothing is shown.
                        memory_bytes=self._meter.held_bytes() if self._progress else 0,
                        peak_bytes=self._meter.peak_bytes,
                    )
                    if self._evaluates_after(step):
                        row["eval_loss"] = loop.evaluate()
                    log.add(row)
            self._measure_the_end(loop)
            # The profiler slows the steps that it watches; where there is no other, theirs is all there is.
            unwatched = [row for row in log.steps if not loop.watches(int(row["step"]) - 1)] or log.steps
        comparison = compare(choice, self._meter.side(statistics.median(row["step_seconds"] for row in unwatched)))
        if self.folder is not None:
            self.folder.write_json("comparison.json", comparison.to_dict())
            plot_run(self.folder.path / "memory.png", log.rows, choice, self._meter.trace(f"step {min(2, self.job.steps)}"))
        console.print("", comparison_view(comparison, self.budget, log.evaluations))
        return Result(comparison=comparison, evaluations=log.evaluations, metrics=tuple(log.rows))

    @distributed.naming_a_lost_process()
    def evaluate(self) -> float:
        """The mean loss over the counted items of ``eval_data``, with the chosen plan and dropout off.

        Raises:
            ValueError: there is no ``eval_data``.
        """
        machine.require(self.device)
        if self.eval_rows is None:
            raise ValueError("there is nothing to evaluate on: give eval_data to the Trainer.")
        with self._prepared() as loop:
            return loop.evaluate()

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
        if self._model is None:
            from accelerate.utils import set_seed

            machine.require(self.device)
            if isinstance(self.device, Cpu):
                # The prediction counts the scratch memory of so many threads.
                torch.set_num_threads(self.device.threads)
            set_seed(self.job.seed)
            # A module that is given is there already.
            loads = isinstance(self.device, Cuda) or not isinstance(self.source, FromModule)
            with self._meter.window("load", Phase.LOAD) if loads else nullcontext(), no_progress_bars():
                card = self.device.kind if isinstance(self.device, Cuda) else None
                self._model = load_model(self.source, self.job, card)
                if card is not None:
                    move_unpacked_(self._model, card)
            distributed.differ_by_rank(self.job.seed, self.processes.rank)
        return self._model

    # ------------------------------------------------------------------ parts of a run

    @contextmanager
    def _prepared(self) -> Iterator[Loop]:
        """The steps of the chosen plan; afterwards the model is as it was, but for its weights."""
        distributed.require(self.choice.plan.ranks)
        self._run = run = prepare(self.job, self.choice.plan, self.model)
        ids = self.rows[0].get("input_ids")
        try:
            yield Loop(
                job=self.job,
                run=run,
                batches=StepBatches(self.rows, global_batch_size=self.job.global_batch_size, seed=self.job.seed),
                eval_rows=self.eval_rows,
                row_tokens=None if ids is None else len(ids),
                micro_batch_size=self.choice.plan.micro_batch_size,
                meter=self._meter,
                device=self.device.kind,
            )
        finally:
            run.release()
            self._run = None

    def _evaluates_after(self, step: int) -> bool:
        """Whether the run evaluates after a step (from 0)."""
        if self.eval_rows is None:
            return False
        every = self._evaluate_every
        return step == self.job.steps - 1 or (every is not None and (step + 1) % every == 0)

    def _measure_the_end(self, loop: Loop) -> None:
        """Measure evaluation and saving beside the optimizer state."""
        if self.eval_rows is not None:
            loop.measure_evaluation()
        if self.folder is not None:
            with self._meter.window("save", Phase.SAVE):
                self.save_model(self.folder.path / "model")

    def _held(self) -> Iterator[tuple[Kind, Tensor]]:
        if self._model is None:
            return iter(())
        if self._run is None:
            return held_by(self._model, None)
        return held_by(self._model, self._run.optimizer, self._run.sharded.buckets())


def _bytes(name: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
