"""What a run may be configured with, and how the composed configuration becomes typed settings.

Three layers. The *schema* below is mutable dataclasses, which let Hydra refuse unknown keys and wrong types. Where a key
chooses one class of a union (an optimizer, a schedule, a policy of the plan), the schema is derived from that class, so
that its defaults are written once (:data:`ALTERNATIVES`). :func:`settings` turns the composed result into frozen values,
whose own checks refuse what a type cannot. Nothing here loads torch: a mistake is reported at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, cast, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from memtrain.data.tokenizer import SMALLEST_VOCABULARY
from memtrain.device import Device
from memtrain.job import AdamW, Budget, Constant, Cosine, Job, Limit, Optimizer, Schedule
from memtrain.machine import facts
from memtrain.metrics import RunFolder
from memtrain.plan import POLICIES, Plan, check, parse_policy, policy_name
from memtrain.units import parse_bytes

CONFIGS = facts("configs")
RECIPES = facts("recipes")

MODES = ("train", "plan")
SOURCES = ("python_docs",)


def _key(default: Any, sentence: str) -> Any:
    """A key of the schema; ``sentence`` is what ``--help`` says about it."""
    return field(default=default, metadata={"sentence": sentence})


@dataclass
class ModelSchema:
    path: str | None = _key(None, "a local folder or hub id; or else model.config")
    # A dictionary of any keys is mutable to the linter, so the field is spelled out.
    config: dict[str, Any] | None = field(
        default=None, metadata={"sentence": "a transformers configuration, model_type first; weights start random"}
    )


@dataclass
class TokenizerSchema:
    path: str | None = _key(None, "a local folder or hub id; null: the tokenizer of model.path")
    train_vocab_size: int | None = _key(None, "train a tokenizer of so many tokens on the training text instead")


@dataclass
class DataSchema:
    source: str | None = _key(None, f"text that needs no file: {', '.join(SOURCES)}; or else data.path")
    path: str | None = _key(None, "a text file, or a folder of them")
    sequence_length: int = _key(MISSING, "tokens per row")
    held_out: float = _key(0.1, "fraction of the text that is evaluated on and not trained on; unused with data.eval_path")
    eval_path: str | None = _key(None, "text to evaluate on")
    tokenizer: TokenizerSchema = field(default_factory=TokenizerSchema)


@dataclass
class DeviceSchema:
    name: str = _key(MISSING, "the device as printed")
    kind: str = _key(MISSING, "the torch device type")
    threads: int | None = _key(None, "processor threads; null: as many as torch uses")
    flops_per_second: float = _key(MISSING, "sustained fp32 operations")
    bytes_per_second: float = _key(MISSING, "sustained memory bandwidth")
    operator_seconds: float = _key(MISSING, "time to dispatch one operator")


@dataclass
class PlanSchema:
    micro_batch_size: int | None = _key(None, "rows in one forward and backward; null: the planner's choice")
    activations: Any = MISSING
    loss: Any = MISSING
    update: Any = MISSING
    optimizer_kernel: Any = MISSING


@dataclass
class RunSchema:
    dir: str | None = _key(None, "folder of the run's files; null: runs/<recipe>/<date-time>")


@dataclass
class Schema:
    recipe: str = MISSING
    mode: str = _key("train", "train, or plan: choose the plan, print it and stop")
    budget: str = _key(MISSING, "memory the training step may take, such as 400MiB or 24GiB")
    headroom: str | None = _key(None, "part of the budget to leave free, such as 50MiB; null: none")
    seed: int = _key(0, "of weights, dropout and row order")
    global_batch_size: int = _key(MISSING, "rows per optimizer step, whatever the micro-batch size")
    steps: int | None = _key(None, "optimizer steps of the run; or else epochs")
    epochs: int | None = _key(None, "passes over the training rows")
    evaluate_every: int | None = _key(None, "steps between evaluations; null: before and after the run")
    max_grad_norm: float | None = _key(1.0, "bound on the gradient's 2-norm; null: no clipping")
    model: ModelSchema = field(default_factory=ModelSchema)
    data: DataSchema = field(default_factory=DataSchema)
    optimizer: Any = MISSING
    schedule: Any = MISSING
    device: DeviceSchema = field(default_factory=DeviceSchema)
    plan: PlanSchema = field(default_factory=PlanSchema)
    run: RunSchema = field(default_factory=RunSchema)


@dataclass(frozen=True)
class Auto:
    """The planner chooses."""


@dataclass(frozen=True)
class Alternatives:
    """A Hydra group whose options are classes.

    Attributes:
        tag: the key that holds the option's name in the composed configuration.
        classes: option name to class.
    """

    tag: str
    classes: Mapping[str, type]

    def settings(self, option: str) -> list[str]:
        """The keys that ``option`` has beside the tag."""
        return [setting.name for setting in dataclasses.fields(self.classes[option])]


ALTERNATIVES: dict[str, Alternatives] = {
    "optimizer": Alternatives("name", {"adamw": AdamW}),
    "schedule": Alternatives("name", {"constant": Constant, "cosine": Cosine}),
    **{
        f"plan/{field}": Alternatives("policy", {"auto": Auto, **{policy_name(policy): policy for policy in policies}})
        for field, policies in POLICIES.items()
    },
}


def register_schema() -> None:
    """Put the schema and the options of :data:`ALTERNATIVES` where Hydra finds them."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Schema)
    for group, alternatives in ALTERNATIVES.items():
        for option, cls in alternatives.classes.items():
            store.store(group=group, name=option, node=_mutable(cls, alternatives.tag, option))


def _mutable(cls: type, tag: str, option: str) -> type:
    # The domain's classes are frozen, and a frozen dataclass is a read-only node to OmegaConf.
    types = get_type_hints(cls)
    settings = [(setting.name, types[setting.name], field(default=setting.default)) for setting in dataclasses.fields(cls)]
    return dataclasses.make_dataclass(cls.__name__, [(tag, str, field(default=option)), *settings])


def recipes() -> dict[str, str]:
    """The recipes that come with memtrain: name to the first comment line of the file."""
    return {path.stem: _first_comment(path) for path in sorted(RECIPES.glob("*.yaml"))}


def _first_comment(path: Path) -> str:
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and "@package" not in line:
            return line.lstrip("# ").rstrip()
    return ""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model is trained: exactly one of a path (local folder or hub id) and a transformers configuration."""

    path: str | None
    config: dict[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """Which tokenizer: a path, one to be trained, or with neither the one at the model's path."""

    path: str | None
    train_vocab_size: int | None


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which text is trained on: exactly one of a built-in source and a path; ``sequence_length`` is in tokens."""

    source: str | None
    path: str | None
    sequence_length: int
    held_out: float
    eval_path: str | None
    tokenizer: TokenizerSettings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A checked configuration.

    Attributes:
        recipe: name of the recipe it started from.
        mode: ``train`` or ``plan``.
        budget_bytes: memory asked for; headroom_bytes: the part of it to leave free.
        steps, epochs: length of the run; exactly one is set.
        evaluate_every: optimizer steps between evaluations, or None for only before and after.
        device: the fields of :class:`memtrain.device.Device`; ``threads`` is None for torch's own number.
        constraints: fields of :class:`memtrain.plan.Plan` that are fixed, each with its value; the planner chooses the rest.
        run_dir: folder of the run's files, not yet made.
    """

    recipe: str
    mode: str
    budget_bytes: int
    headroom_bytes: int
    seed: int
    global_batch_size: int
    steps: int | None
    epochs: int | None
    evaluate_every: int | None
    max_grad_norm: float | None
    model: ModelSettings
    data: DataSettings
    optimizer: Optimizer
    schedule: Schedule
    device: Mapping[str, Any]
    constraints: Mapping[str, Any]
    run_dir: Path


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
    _require(values["mode"] in MODES, "mode", values["mode"], f"one of {', '.join(MODES)}")
    for key in ("epochs", "evaluate_every"):
        _require(values[key] is None or values[key] >= 1, key, values[key], "1 or more, or null")
    _one_of(values, "steps", "epochs", "set one of them to say how long the run is")
    read = Settings(
        **{key: values[key] for key in ("recipe", "mode", "seed", "global_batch_size", "steps", "epochs", "evaluate_every")},
        max_grad_norm=values["max_grad_norm"],
        budget_bytes=_bytes("budget", values["budget"]),
        headroom_bytes=0 if values["headroom"] is None else _bytes("headroom", values["headroom"]),
        model=_model(values["model"]),
        data=_data(values["data"]),
        optimizer=_alternative("optimizer", values["optimizer"]),
        schedule=_alternative("schedule", values["schedule"]),
        device=_device(values["device"]),
        constraints=_constraints(values["plan"]),
        run_dir=Path(values["run"]["dir"] or default_run_dir(values["recipe"], datetime.now())),
    )
    _check_tokenizer(read.model, read.data.tokenizer)
    _check_job(read)
    return read


def check_folders(read: Settings) -> None:
    """Refuse a run folder that is used and text that is not there, before anything heavy is loaded.

    Raises:
        ValueError: with the path.
    """
    RunFolder(read.run_dir)
    for key in ("path", "eval_path"):
        named = getattr(read.data, key)
        _require(named is None or Path(named).exists(), f"data.{key}", named, "a file or folder that exists")


def default_run_dir(recipe: str, started: datetime) -> Path:
    """The folder of a run that names none."""
    return Path("runs") / recipe / f"{started:%Y-%m-%d_%H-%M-%S}"


def _require(condition: bool, key: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{key} is {value!r}, and it must be {rule}.")


def _one_of(values: Mapping[str, Any], first: str, second: str, remedy: str, prefix: str = "") -> None:
    first_set, second_set = values[first] is not None, values[second] is not None
    if first_set and second_set:
        raise ValueError(f"{prefix}{first} and {prefix}{second} are both set, and only one can hold: set the other to null.")
    if not first_set and not second_set:
        raise ValueError(f"neither {prefix}{first} nor {prefix}{second} is set: {remedy}.")


def _bytes(key: str, text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None


def _alternative(group: str, written: Mapping[str, Any]) -> Any:
    alternatives = ALTERNATIVES[group]
    # YAML has lists where the domain has tuples.
    arguments = {key: tuple(value) if isinstance(value, list) else value for key, value in written.items()}
    option = str(arguments.pop(alternatives.tag))
    return alternatives.classes[option](**arguments)


def _model(values: Mapping[str, Any]) -> ModelSettings:
    _one_of(values, "path", "config", "write model.path=PATH or choose a model=NAME", "model.")
    config = values["config"]
    if config is not None and not config.get("model_type"):
        raise ValueError(
            "model.config has no model_type, which names the transformers architecture: set model.config.model_type."
        )
    return ModelSettings(path=values["path"], config=config)


def _data(values: Mapping[str, Any]) -> DataSettings:
    _one_of(values, "source", "path", "write data=text data.path=PATH or choose data=python_docs", "data.")
    source, vocab_size = values["source"], values["tokenizer"]["train_vocab_size"]
    _require(source is None or source in SOURCES, "data.source", source, f"one of {', '.join(SOURCES)}")
    _require(values["sequence_length"] >= 2, "data.sequence_length", values["sequence_length"], "2 or more tokens")
    _require(0 <= values["held_out"] <= 0.5, "data.held_out", values["held_out"], "from 0 (evaluate on nothing) to 0.5")
    _require(
        vocab_size is None or vocab_size >= SMALLEST_VOCABULARY,
        "data.tokenizer.train_vocab_size",
        vocab_size,
        f"{SMALLEST_VOCABULARY} or more, or null",
    )
    return DataSettings(**{**values, "tokenizer": TokenizerSettings(**values["tokenizer"])})


def _check_tokenizer(model: ModelSettings, tokenizer: TokenizerSettings) -> None:
    if tokenizer.path is not None and tokenizer.train_vocab_size is not None:
        raise ValueError("data.tokenizer.path and data.tokenizer.train_vocab_size are both set: set one of them to null.")
    if model.config is not None and tokenizer.path is None and tokenizer.train_vocab_size is None:
        raise ValueError(
            "a model built from model.config brings no tokenizer: set data.tokenizer.train_vocab_size or data.tokenizer.path."
        )
    if model.path is not None and tokenizer.train_vocab_size is not None:
        raise ValueError(
            f"data.tokenizer.train_vocab_size is {tokenizer.train_vocab_size}, and the weights at model.path know only the tokens "
            f"they were trained with: set data.tokenizer.train_vocab_size to null."
        )


def _device(values: dict[str, Any]) -> dict[str, Any]:
    # Device checks the description; how many threads torch uses is asked at the edge, after the configuration is valid.
    Device(**{**values, "threads": 1 if values["threads"] is None else values["threads"]})
    return values


def _constraints(values: Mapping[str, Any]) -> dict[str, Any]:
    constraints = {
        name: parse_policy(name, values[name])
        for name in POLICIES
        if values[name] != {ALTERNATIVES[f"plan/{name}"].tag: "auto"}
    }
    size = values["micro_batch_size"]
    if size is not None:
        _require(size >= 1, "plan.micro_batch_size", size, "1 or more, or null")
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
        max_grad_norm=read.max_grad_norm,
        seed=read.seed,
    )
    check(Plan(**{"micro_batch_size": read.global_batch_size, **read.constraints}), job)
    Budget(limits=(Limit("asked for", read.budget_bytes),), headroom_bytes=read.headroom_bytes)
