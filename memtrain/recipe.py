"""One job of the command line: from its settings to a Trainer, with what a person sees on the way."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from memtrain import machine
from memtrain.config import DataSettings, Settings
from memtrain.data.rows import TokenRows
from memtrain.data.text import hold_out, python_documentation, read_documents
from memtrain.data.tokenizer import train_tokenizer
from memtrain.inputs import load_tokenizer
from memtrain.models.build import source
from memtrain.report.terminal import choice_view
from memtrain.trainer import Trainer


def run_recipe(settings: Settings, config_yaml: str) -> None:
    """Plan the job and print the choice; unless only that was asked for, train, compare and save.

    Args:
        config_yaml: the resolved configuration, kept in the run folder.

    Raises:
        ValueError: the job cannot be trained, in one sentence.
    """
    console = Console()
    trainer = trainer_of(settings)
    assert trainer.folder is not None
    choice = trainer.choice
    trainer.folder.write_text("config.yaml", config_yaml)
    if settings.mode == "train":
        trainer.train()
    else:
        console.print(choice_view(choice))
    console.print(f"\nwritten to {trainer.folder.path}", soft_wrap=True, highlight=False)


def trainer_of(settings: Settings) -> Trainer:
    """The Trainer that the settings describe."""
    data = settings.data
    model = source(settings.model.path or settings.model.config)
    training, held_out = _text(data)
    if data.tokenizer.train_vocab_size is not None:
        tokenizer = train_tokenizer(training, data.tokenizer.train_vocab_size)
    else:
        # Asked for by path even where it is the model's, because without one there are no rows.
        tokenizer = load_tokenizer(data.tokenizer.path or settings.model.path, model)
    return Trainer(
        model=model,
        data=TokenRows.of(training, tokenizer, data.sequence_length),
        eval_data=TokenRows.of(held_out, tokenizer, data.sequence_length) if held_out else None,
        tokenizer=tokenizer,
        budget=machine.budget(settings.budget_bytes, settings.headroom_bytes),
        global_batch_size=settings.global_batch_size,
        steps=settings.steps,
        epochs=settings.epochs,
        optimizer=settings.optimizer,
        schedule=settings.schedule,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        evaluate_every=settings.evaluate_every,
        constraints=settings.constraints,
        device=machine.describe(**settings.device),
        run_dir=settings.run_dir,
    )


def _text(data: DataSettings) -> tuple[list[str], list[str]]:
    """The documents to train on and those to evaluate on."""
    documents = python_documentation() if data.path is None else read_documents(Path(data.path))
    if data.eval_path is not None:
        return documents, read_documents(Path(data.eval_path))
    return hold_out(documents, data.held_out) if data.held_out else (documents, [])
