"""One job of the command line: from its settings to a Trainer, with what a person sees on the way."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from memtrain import machine
from memtrain.config import DataSettings, Settings, check_text, names_text
from memtrain.data.instructions import CompletionRows, hold_out_groups, library_docstrings
from memtrain.data.rows import Rows, TokenRows
from memtrain.data.text import hold_out, python_documentation, read_documents
from memtrain.data.tokenizer import train_tokenizer
from memtrain.device import Device
from memtrain.inputs import check_length, load_tokenizer
from memtrain.job import Budget, Job
from memtrain.metrics import RunFolder
from memtrain.models.build import ModelSource, source
from memtrain.plan import ranks_of
from memtrain.planner.choice import Choice
from memtrain.planner.predict import Predictor
from memtrain.planner.search import choose
from memtrain.planner.updates import optimizer_table
from memtrain.precision import Bf16, Bf16Master, Fp32
from memtrain.report.optimizers import optimizers_json, optimizers_view
from memtrain.report.terminal import choice_view
from memtrain.trainer import Trainer


def run_recipe(settings: Settings, config_yaml: str) -> None:
    """Plan the job and print the choice; unless only that was asked for, train, compare and save. Or print the optimizers.

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
    """The Trainer that the settings describe, which must name a text."""
    data = settings.data
    model = _model(settings)
    rows = _completion_rows if data.source == "stdlib_docstrings" else _text_rows
    training, held_out, tokenizer = rows(data, model, settings.model.path)
    return Trainer(
        model=model,
        data=training,
        eval_data=held_out,
        tokenizer=tokenizer,
        budget=_budget(settings, device),
        global_batch_size=settings.global_batch_size,
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
        on_not_finite=settings.on_not_finite,
        workers=data.workers,
        constraints=settings.constraints,
        device=device,
        run_dir=settings.run_dir,
        checkpoint_every=settings.checkpoint_every,
        keep_checkpoints=settings.keep_checkpoints,
        # Planning goes on with nothing.
        resume=settings.resume if settings.mode == "train" else "never",
        stop_seconds=settings.stop_seconds,
    )


def _plan(settings: Settings, device: Device) -> Choice:
    """The choice where no text is named: all rows have the length that is said, and are as many as it takes."""
    assert settings.steps is not None
    model, length = _model(settings), settings.data.sequence_length
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
    evaluates = settings.data.held_out > 0 or settings.data.eval_path is not None
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
    path, config = settings.model.path, settings.model.config
    return source(config) if path is None else source(path, config)


def _budget(settings: Settings, device: Device) -> Budget:
    ranks = ranks_of(settings.constraints)
    return machine.budget_for(device, settings.budget_bytes, settings.headroom_bytes, settings.host_bytes, ranks=ranks)


def _text_rows(data: DataSettings, model: ModelSource, model_path: str | None) -> tuple[Rows, Rows | None, Any]:
    """Rows of text to train on and to evaluate on, and the tokenizer that made them."""
    training, held_out = _text(data)
    tokenizer = _tokenizer(data, model, model_path, training)
    rows = TokenRows.of(training, tokenizer, data.sequence_length)
    return rows, TokenRows.of(held_out, tokenizer, data.sequence_length) if held_out else None, tokenizer


def _completion_rows(data: DataSettings, model: ModelSource, model_path: str | None) -> tuple[Rows, Rows | None, Any]:
    """The same of docstrings to be written; how many do not fit is printed, since nothing else tells."""
    pairs = library_docstrings()
    training, held_out = hold_out_groups(pairs, data.held_out) if data.held_out else (pairs, [])
    tokenizer = _tokenizer(data, model, model_path, (f"{pair.prompt}\n\n{pair.completion}" for pair in training))
    rows = CompletionRows.of(training, tokenizer, data.sequence_length)
    console = Console(quiet=machine.processes().rank > 0)
    console.print(f"trained on: {rows}", soft_wrap=True, highlight=False)
    if not held_out:
        return rows, None, tokenizer
    evaluated = CompletionRows.of(held_out, tokenizer, data.sequence_length)
    console.print(f"evaluated on: {evaluated}", soft_wrap=True, highlight=False)
    return rows, evaluated, tokenizer


def _tokenizer(data: DataSettings, model: ModelSource, model_path: str | None, text: Iterable[str]) -> Any:
    if data.tokenizer.train_vocab_size is not None:
        return train_tokenizer(text, data.tokenizer.train_vocab_size)
    # Asked for by path even where it is the model's, because without one there are no rows.
    return load_tokenizer(data.tokenizer.path or model_path, model)


def _text(data: DataSettings) -> tuple[list[str], list[str]]:
    """The documents to train on and those to evaluate on."""
    documents = python_documentation() if data.path is None else read_documents(Path(data.path))
    if data.eval_path is not None:
        return documents, read_documents(Path(data.eval_path))
    return hold_out(documents, data.held_out) if data.held_out else (documents, [])
