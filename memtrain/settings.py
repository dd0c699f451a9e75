"""Settings: what a recipe and the command line say, checked and typed (:mod:`memtrain.config` reads them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memtrain.data.options import DataOptions
from memtrain.data.task import Task
from memtrain.job import Approximation, NotFinite, Optimizer, Schedule
from memtrain.method import Method, Quantization
from memtrain.precision import Precision


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is trained: weights at a path (local folder or hub id), a transformers configuration, or both.

    Without a path the weights start random; with both the configuration gives the architecture.

    Attributes:
        task: what it is trained for, None for what it was made for.
        settings: changes to the configuration that is at the path.
        trust_remote_code: whether code that comes with it is run.
    """

    path: str | None
    config: dict[str, Any] | None
    task: Task | None
    settings: dict[str, Any]
    trust_remote_code: bool


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer: a path, one to be trained, or with neither the one at the model's path."""

    path: str | None
    train_vocab_size: int | None


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which rows are trained on: a built-in source, paths or, to plan, neither.

    Attributes:
        path, eval_path: what is read; empty for nothing.
        options: how.
        held_out: the fraction that is evaluated on, where there is no ``eval_path``.
    """

    source: str | None
    path: tuple[str, ...]
    eval_path: tuple[str, ...]
    options: DataOptions
    held_out: float
    workers: int
    group_by_length: bool
    drop_last: bool
    tokenizer: TokenizerSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A checked configuration.

    Attributes:
        recipe: name of the recipe it started from.
        mode: ``train``, ``plan``, ``data`` or ``optimizers``.
        budget_bytes: memory asked for, None for all that a card has; headroom_bytes: the part of it to leave free.
        host_bytes: memory of a card's host asked for, None for as much as there is.
        steps, epochs: length of the run; exactly one is set.
        evaluate_every: optimizer steps between evaluations, or None for only before and after.
        early_stopping: evaluations without a better loss that end the run, or None.
        trackers: what else metrics go to.
        checkpoint_every: optimizer steps between checkpoints, or None for none but a stopped run's; keep_checkpoints: how many of the latest stay.
        resume: ``auto``, ``never``, or the path of a checkpoint or run.
        on_not_finite: what becomes of a step whose loss or gradient is not finite.
        stop_seconds: how long a run that is told to stop may take, or None.
        allow: approximations that a plan may use.
        device: what :func:`memtrain.machine.describe` takes: a kind and its fields. What it leaves to the machine is asked there.
        constraints: fields of :class:`memtrain.plan.Plan` that are fixed, each with its value; the planner chooses the rest.
        run_dir: folder of the run's files, not yet made.
        save_merged: whether the model is also written with its adapters added to its weights.
    """

    recipe: str
    mode: str
    budget_bytes: int | None
    headroom_bytes: int
    host_bytes: int | None
    seed: int
    global_batch_size: int
    steps: int | None
    epochs: int | None
    evaluate_every: int | None
    early_stopping: int | None
    trackers: tuple[str, ...]
    checkpoint_every: int | None
    keep_checkpoints: int
    resume: str
    on_not_finite: NotFinite
    stop_seconds: float | None
    max_grad_norm: float | None
    model: ModelSettings
    data: DataSettings
    optimizer: Optimizer
    schedule: Schedule
    precision: Precision
    method: Method
    quantization: Quantization
    allow: frozenset[Approximation]
    device: Mapping[str, Any]
    constraints: Mapping[str, Any]
    run_dir: Path
    save_merged: bool
