"""How a composed configuration becomes typed settings.

Hydra composes what :mod:`memtrain.schema` describes; :func:`settings` turns the result into frozen values, whose own checks
refuse what a type cannot. Nothing here loads torch: a mistake is reported at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import datetime
from glob import has_magic
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.check import check
from memtrain.data.options import DataOptions
from memtrain.data.task import Task
from memtrain.data.tokenizer import SMALLEST_VOCABULARY
from memtrain.device import Device, from_dict
from memtrain.job import Job, approximations, not_finite
from memtrain.machine import facts, stated_budget
from memtrain.method import Full
from memtrain.metrics import RunFolder
from memtrain.plan import POLICIES, Plan, parse_policy
from memtrain.require import require
from memtrain.schema import ALTERNATIVES, SOURCES, TASKS
from memtrain.settings import DataSettings, ModelSettings, Settings, TokenizerSettings
from memtrain.trackers import check_trackers
from memtrain.units import parse_bytes

CONFIGS = facts("configs")
RECIPES = facts("recipes")

MODES = ("train", "plan", "data", "optimizers")
# fmt: off
_AS_WRITTEN = (
    "recipe", "mode", "seed", "global_batch_size", "steps", "epochs", "evaluate_every", "early_stopping",
    "checkpoint_every", "keep_checkpoints", "resume", "max_grad_norm",
)
# fmt: on


def recipes() -> dict[str, str]:
    """The recipes that come with memtrain: name to the first comment line of the file."""
    return {path.stem: _first_comment(path) for path in sorted(RECIPES.glob("*.yaml"))}


def _first_comment(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").rstrip()
    return ""


def settings(cfg: DictConfig) -> Settings:
    """Check a composed configuration and give its values their types.

    Raises:
        ValueError: one sentence with the value, the rule and the remedy.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(cfg))
        values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(f"{error.full_key}: {str(error).splitlines()[0]}.") from error
    if missing:
        raise ValueError(f"{missing[0]} has no value: set {missing[0]}=VALUE on the command line or in the recipe.")
    require(values["mode"] in MODES, "mode", values["mode"], f"one of {', '.join(MODES)}")
    for key in ("epochs", "evaluate_every", "early_stopping", "checkpoint_every"):
        require(values[key] is None or values[key] >= 1, key, values[key], "1 or more, or null")
    require(values["keep_checkpoints"] >= 1, "keep_checkpoints", values["keep_checkpoints"], "1 or more")
    stop_seconds = values["run"]["stop_seconds"]
    require(stop_seconds is None or 0 < stop_seconds < math.inf, "run.stop_seconds", stop_seconds, "above 0, or null")
    _not_both(values, "steps", "epochs")
    _not_neither(values, "steps", "epochs", "set one of them to say how long the run is")
    read = Settings(
        **{key: values[key] for key in _AS_WRITTEN},
        on_not_finite=not_finite(values["on_not_finite"]),
        stop_seconds=stop_seconds,
        budget_bytes=_bytes("budget", values["budget"]),
        headroom_bytes=_bytes("headroom", values["headroom"]) or 0,
        host_bytes=_bytes("host_bytes", values["host_bytes"]),
        model=_model(values["model"]),
        data=_data(values["data"]),
        optimizer=_alternative("optimizer", values["optimizer"]),
        schedule=_alternative("schedule", values["schedule"]),
        precision=_alternative("precision", values["precision"]),
        method=_alternative("method", values["method"]),
        quantization=_alternative("quantization", values["quantization"]),
        allow=approximations(values["allow"]),
        trackers=tuple(values["trackers"]),
        device={key: value for key, value in values["device"].items() if value is not None},
        constraints=_constraints(values["plan"]),
        save_merged=values["run"]["save_merged"],
        run_dir=Path(values["run"]["dir"] or default_run_dir(values["recipe"], datetime.now())).expanduser(),
    )
    if read.epochs is not None and not names_text(read.data):
        raise ValueError(f"epochs is {read.epochs}, and without a text nothing says how many steps that is: set steps instead.")
    if read.mode == "data" and not names_text(read.data):
        raise ValueError("mode is data, and no rows are named: set data.path, or choose a data=NAME.")
    if read.save_merged and isinstance(read.method, Full):
        raise ValueError("run.save_merged is true, and method full has no adapters to add: set method to lora, or it to false.")
    # A table of optimizers needs a model and nothing else.
    if read.mode != "optimizers":
        _check_tokenizer(read.model, read.data)
    _check_job(read)
    return read


def check_folders(read: Settings) -> None:
    """Refuse a run folder that is used, and files and trackers that are not there, before anything heavy is loaded.

    Raises:
        ValueError: with the path, or the tracker.
    """
    check_trackers(read.trackers, has_folder=True)
    RunFolder(read.run_dir, goes_on=read.mode == "train" and read.resume != "never")
    require(
        read.resume in ("auto", "never") or Path(read.resume).expanduser().is_dir(),
        "resume",
        read.resume,
        "auto, never, or the folder of a checkpoint or of a run",
    )
    for key in ("path", "eval_path"):
        for named in getattr(read.data, key):
            # Patterns and names of the Hub are looked up when they are read.
            there = named.startswith("hub:") or has_magic(named) or Path(named).expanduser().exists()
            require(there, f"data.{key}", named, "a file or folder that exists, a pattern, or hub:NAME")


def default_run_dir(recipe: str, started: datetime) -> Path:
    """The folder of a run that names none."""
    return Path("runs") / recipe / f"{started:%Y-%m-%d_%H-%M-%S}"


def _not_both(values: Mapping[str, Any], first: str, second: str, prefix: str = "") -> None:
    if values[first] is not None and values[second] is not None:
        raise ValueError(f"{prefix}{first} and {prefix}{second} are both set, and only one can hold: set the other to null.")


def _not_neither(values: Mapping[str, Any], first: str, second: str, remedy: str, prefix: str = "") -> None:
    if values[first] is None and values[second] is None:
        raise ValueError(f"neither {prefix}{first} nor {prefix}{second} is set: {remedy}.")


def _bytes(key: str, text: str | None) -> int | None:
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _alternative(group: str, written: Mapping[str, Any]) -> Any:
    alternatives = ALTERNATIVES[group]
    # YAML has lists where the domain has tuples.
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
    option = str(arguments.pop(alternatives.tag))
    return alternatives.classes[option](**arguments)


def _model(values: Mapping[str, Any]) -> ModelSettings:
    _not_neither(values, "path", "config", "write model.path=PATH or choose a model=NAME", "model.")
    config = values["config"]
    if config is not None and not config.get("model_type"):
        raise ValueError(
            "model.config has no model_type, which names the transformers architecture: set model.config.model_type."
        )
    task, settings = values["task"], values["settings"]
    require(task is None or task in TASKS, "model.task", task, f"one of {', '.join(TASKS)}, or null")
    if settings and config is not None:
        raise ValueError(f"model.settings is {settings}, and model.config says all of it: put them there.")
    return ModelSettings(
        path=values["path"],
        config=config,
        task=None if task is None else Task(task),
        settings=settings,
        trust_remote_code=values["trust_remote_code"],
    )


def _data(values: Mapping[str, Any]) -> DataSettings:
    path, eval_path = (_paths(f"data.{key}", values[key]) for key in ("path", "eval_path"))
    # A path takes the place of a source, which a recipe has set.
    source, vocab_size = None if path else values["source"], values["tokenizer"]["train_vocab_size"]
    require(source is None or source in SOURCES, "data.source", source, f"one of {', '.join(SOURCES)}")
    if source == "stdlib_docstrings" and eval_path:
        raise ValueError(
            f"data.eval_path is {values['eval_path']}, and data.source {source} holds out pairs of its own: "
            f"set data.eval_path to null, and data.held_out to what is held out."
        )
    require(values["workers"] >= 0, "data.workers", values["workers"], "0 or more processes")
    require(0 <= values["held_out"] <= 0.5, "data.held_out", values["held_out"], "from 0 (evaluate on nothing) to 0.5")
    require(
        vocab_size is None or vocab_size >= SMALLEST_VOCABULARY,
        "data.tokenizer.train_vocab_size",
        vocab_size,
        f"{SMALLEST_VOCABULARY} or more, or null",
    )
    return DataSettings(
        source=source,
        path=path,
        eval_path=eval_path,
        options=_options(values),
        **{key: values[key] for key in ("held_out", "workers", "group_by_length", "drop_last")},
        tokenizer=TokenizerSettings(**values["tokenizer"]),
    )


def _options(values: Mapping[str, Any]) -> DataOptions:
    try:
        return DataOptions(**{option.name: values[option.name] for option in fields(DataOptions)})
    except ValueError as error:
        raise ValueError(f"data.{error}") from None


def _paths(key: str, given: Any) -> tuple[str, ...]:
    paths = [] if given is None else given if isinstance(given, list) else [given]
    for path in paths:
        # YAML reads 2024 as a number.
        require(isinstance(path, str | int) and str(path) != "", key, path, "a path, a list of paths, or null")
    return tuple(map(str, paths))


def names_text(data: DataSettings) -> bool:
    """Whether there is a text to make rows of."""
    return data.source is not None or bool(data.path)


def check_text(read: Settings) -> None:
    """Refuse to train on nothing. Asked when the device is known to be there, which is the larger obstacle.

    Raises:
        ValueError: no text is named.
    """
    if not names_text(read.data):
        raise ValueError(
            "neither data.source nor data.path is set: write data.path=PATH or choose data=python_docs, "
            "or only plan with mode=plan."
        )


def _check_tokenizer(model: ModelSettings, data: DataSettings) -> None:
    tokenizer = data.tokenizer
    if tokenizer.path is not None and tokenizer.train_vocab_size is not None:
        raise ValueError("data.tokenizer.path and data.tokenizer.train_vocab_size are both set: set one of them to null.")
    if model.path is None and tokenizer.path is None and tokenizer.train_vocab_size is None and names_text(data):
        raise ValueError(
            "a model built from model.config brings no tokenizer: set data.tokenizer.train_vocab_size or data.tokenizer.path."
        )
    if model.path is not None and tokenizer.train_vocab_size is not None:
        raise ValueError(
            f"data.tokenizer.train_vocab_size is {tokenizer.train_vocab_size}, and the weights at model.path know only the tokens "
            f"they were trained with: set data.tokenizer.train_vocab_size to null."
        )


def _described(device: Mapping[str, Any]) -> Device | None:
    """The device, checked; how many threads torch uses and what ``auto`` is are asked when the configuration is valid."""
    return None if device["kind"] == "auto" else from_dict({"threads": 1, **device} if device["kind"] == "cpu" else device)


def _constraints(values: Mapping[str, Any]) -> dict[str, Any]:
    constraints = {
        name: parse_policy(name, values[name])
        for name in POLICIES
        if values[name] != {ALTERNATIVES[f"plan/{name}"].tag: "auto"}
    }
    size = values["micro_batch_size"]
    if size is not None:
        require(size >= 1, "plan.micro_batch_size", size, "1 or more, or null")
        constraints["micro_batch_size"] = size
    return constraints


def _check_job(read: Settings) -> None:
    # The job itself is made when the data is read, since only then are an epoch's steps known; its rules, the plan's and the
    # budget's hold now.
    job = Job(
        model=str(read.model.path),
        global_batch_size=read.global_batch_size,
        steps=1 if read.steps is None else read.steps,
        optimizer=read.optimizer,
        schedule=read.schedule,
        precision=read.precision,
        method=read.method,
        quantization=read.quantization,
        max_grad_norm=read.max_grad_norm,
        allow=read.allow,
        seed=read.seed,
        on_not_finite=read.on_not_finite,
    )
    device = _described(read.device)
    whole = Plan(**{"micro_batch_size": read.global_batch_size, **read.constraints})
    if "micro_batch_size" not in read.constraints:
        whole = replace(whole, micro_batch_size=max(1, read.global_batch_size // whole.ranks))
    check(whole, job, device)
    if device is not None and read.mode != "optimizers":
        stated_budget(device, read.budget_bytes, read.headroom_bytes, read.host_bytes)
