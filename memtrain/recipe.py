"""One job of the command line: from its settings to a Trainer, with what a person sees on the way."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from memtrain import machine
from memtrain.callbacks import EarlyStopping
from memtrain.config import check_text, names_text
from memtrain.data.rows import Rows
from memtrain.data.summary import chosen_examples, counted_lengths, summary
from memtrain.data.task import Task
from memtrain.device import Device
from memtrain.inputs import check_length
from memtrain.job import Budget, Job
from memtrain.metrics import RunFolder
from memtrain.models.build import ModelSource, source
from memtrain.plan import ranks_of
from memtrain.planner.choice import Choice
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.planner.updates import optimizer_table
from memtrain.precision import Bf16, Bf16Master, Fp32
from memtrain.recipe_rows import RecipeRows, rows_of_recipe
from memtrain.report.optimizers import optimizers_json, optimizers_view
from memtrain.report.terminal import choice_view
from memtrain.rows_view import examples_view, rows_view, speed_sentence
from memtrain.settings import Settings
from memtrain.trainer import Trainer


def run_recipe(settings: Settings, config_yaml: str) -> None:
    """Plan the job and print the choice; unless only that was asked for, train, compare and save. Or show rows or optimizers.

    Args:
        config_yaml: the resolved configuration, kept in the run folder.

    Raises:
        ValueError: the job cannot be trained, in one sentence.
    """
    rank = machine.processes().rank
    console = Console(quiet=rank > 0)
    device = machine.describe(**settings.device)
    if settings.mode != "train" and machine.processes().ranks > 1:
        raise ValueError(
            f"mode {settings.mode} trains nothing that {machine.processes().ranks} processes could share: start it without torchrun, "
            f"with plan.sharding=data_parallel plan.sharding.ranks=N to plan for N."
        )
    if settings.mode == "train":
        machine.require(device)
        check_text(settings)
        trainer = trainer_of(settings, device)
        if trainer.folder is not None:
            trainer.folder.write_text("config.yaml", config_yaml)
        trainer.train()
        if settings.save_merged:
            trainer.save_merged(settings.run_dir / "merged")
    elif settings.mode == "data":
        check_text(settings)
        show_rows(settings, device, console, config_yaml)
    elif settings.mode == "optimizers":
        folder, model = RunFolder(settings.run_dir), _model(settings)
        with console.status("updating without data"):
            table = optimizer_table(model, device, (Fp32(), Bf16(), Bf16Master()))
        folder.write_text("config.yaml", config_yaml)
        folder.write_json("optimizers.json", optimizers_json(model.name, table))
        console.print(optimizers_view(model.name, table))
    else:
        folder = RunFolder(settings.run_dir)
        with console.status("planning without data"):
            choice = choice_of(settings, device)
        folder.write_text("config.yaml", config_yaml)
        choice.write(folder)
        console.print(choice_view(choice))
    console.print(f"\nwritten to {settings.run_dir}", soft_wrap=True, highlight=False)


def choice_of(settings: Settings, device: Device) -> Choice:
    """The plan that the settings lead to on a device, and nothing written."""
    return trainer_of(settings, device).choice if names_text(settings.data) else _plan(settings, device)


def trainer_of(settings: Settings, device: Device) -> Trainer:
    """The Trainer that the settings describe, which must name rows."""
    rows = rows_of_recipe(settings, _model(settings))
    console = Console(quiet=machine.processes().rank > 0)
    for said in rows.reader.said:
        console.print(Text(said), soft_wrap=True)
    return _trainer(settings, device, rows, settings.run_dir)


def show_rows(settings: Settings, device: Device, console: Console, config_yaml: str) -> None:
    """Print what the rows are like, with three of them, and write it as ``data.json``; nothing is loaded or trained.

    Raises:
        ValueError: there are no rows, or, when all has been shown, rows that training would stop for.
    """
    data = settings.data
    # What can be read is read, since this is where people look for what cannot.
    lenient = replace(settings, data=replace(data, options=replace(data.options, on_bad_row="skip")))
    folder, rows = RunFolder(settings.run_dir), rows_of_recipe(lenient, _model(settings))
    choice, why = None, ""
    try:
        with console.status("planning without data"):
            choice = _trainer(lenient, device, rows, None).choice
    except ValueError as error:
        why = str(error).partition(": ")[0]
    micro_batch_size = settings.global_batch_size if choice is None else choice.plan.micro_batch_size
    written: dict[str, Any] = {}
    for name, given in (("data", rows.training), ("eval_data", rows.held_out)):
        if given is None:
            continue
        reading, store = rows.reader.readings.get(name), rows.reader.stores.get(name)
        # Of text that stands end to end, the last row may be filled up.
        lengths = store.lengths if store is not None else counted_lengths(given.rows)
        found = summary(
            lengths,
            int(lengths.sum()) - len(lengths) if reading is None else reading.learnt,
            given,
            sequence_length=given.shapes["input_ids"][0][0] if reading is None else reading.sequence_length,
            micro_batch_size=micro_batch_size,
            global_batch_size=settings.global_batch_size,
            drop_last=data.drop_last,
        )
        speed = f"How long it takes is not known: {why}." if choice is None else ""
        if choice is not None:
            speed = speed_sentence(found.steps, choice.step_seconds, device.name)
        said = [] if reading is None else reading.lines()
        size = micro_batch_size if name == "data" else None
        console.print(rows_view(name, found, said, speed, micro_batch_size=size, grouped=data.group_by_length), "")
        written[name] = asdict(found) | ({} if reading is None else {"reading": reading.counts()})
        if name == "data":
            shown: Rows = given.rows if store is None else store
            some = [(number, shown[number]) for number in chosen_examples(lengths)]
    console.print(examples_view(some, rows.tokenizer, shifted=rows.reader.task is Task.CAUSAL_LM))
    folder.write_text("config.yaml", config_yaml)
    folder.write_json("data.json", written)
    bad = sum(reading.bad for reading in rows.reader.readings.values())
    if bad and data.options.on_bad_row == "stop":
        which = f"{bad:,} rows cannot" if bad > 1 else "1 row cannot"
        raise ValueError(
            f"{which} be used, and training would stop for that: mend what is named, or set data.on_bad_row to skip."
        )


def _trainer(settings: Settings, device: Device, rows: RecipeRows, run_dir: Path | None) -> Trainer:
    data = settings.data
    return Trainer(
        model=rows.model,
        data=rows.training,
        eval_data=rows.held_out,
        tokenizer=rows.tokenizer,
        budget=_budget(settings, device),
        global_batch_size=settings.global_batch_size,
        group_by_length=data.group_by_length,
        drop_last=data.drop_last,
        steps=settings.steps,
        epochs=settings.epochs,
        optimizer=settings.optimizer,
        schedule=settings.schedule,
        precision=settings.precision,
        method=settings.method,
        quantization=settings.quantization,
        max_grad_norm=settings.max_grad_norm,
        allow=settings.allow,
        seed=settings.seed,
        evaluate_every=settings.evaluate_every,
        callbacks=[EarlyStopping(patience=settings.early_stopping)] if settings.early_stopping else [],
        trackers=settings.trackers,
        on_not_finite=settings.on_not_finite,
        workers=data.workers,
        constraints=settings.constraints,
        device=device,
        run_dir=run_dir,
        checkpoint_every=settings.checkpoint_every,
        keep_checkpoints=settings.keep_checkpoints,
        # Planning goes on with nothing.
        resume=settings.resume if settings.mode == "train" else "never",
        stop_seconds=settings.stop_seconds,
    )


def _plan(settings: Settings, device: Device) -> Choice:
    """The choice where no text is named: all rows have the length that is said, and are as many as it takes."""
    assert settings.steps is not None
    model, length = _model(settings), settings.data.options.sequence_length
    assert length is not None
    check_length(length, model)
    job = Job(
        model=model.name,
        global_batch_size=settings.global_batch_size,
        steps=settings.steps,
        optimizer=settings.optimizer,
        schedule=settings.schedule,
        precision=settings.precision,
        method=settings.method,
        quantization=settings.quantization,
        max_grad_norm=settings.max_grad_norm,
        allow=settings.allow,
        seed=settings.seed,
        on_not_finite=settings.on_not_finite,
    )
    rows = dict.fromkeys(("input_ids", "labels"), ((length,), torch.int64))
    evaluates = settings.data.held_out > 0 or bool(settings.data.eval_path)
    predictor = Predictor(
        job,
        model,
        rows,
        device,
        evaluation_rows=2 * job.global_batch_size if evaluates else 0,
        allocator=machine.allocator_settings(),
    )
    return choose(predictor, _budget(settings, device), settings.constraints)


def _model(settings: Settings) -> ModelSource:
    given = settings.model
    model, config = (given.config, None) if given.path is None else (given.path, given.config)
    return source(model, config, task=given.task, settings=given.settings, trust_remote_code=given.trust_remote_code)


def _budget(settings: Settings, device: Device) -> Budget:
    ranks = ranks_of(settings.constraints)
    return machine.budget_for(device, settings.budget_bytes, settings.headroom_bytes, settings.host_bytes, ranks=ranks)
