"""The schema: every key that a run may be configured with, its type, and what ``--help`` says about it.

Mutable dataclasses, which let Hydra refuse unknown keys and wrong types. Where a key chooses one class of a union (an
optimizer, a schedule, a precision, a policy of the plan), its schema is derived from that class, so that its defaults are
written once (:data:`ALTERNATIVES`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, get_args, get_origin, get_type_hints

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from memtrain.data.layouts import Layout
from memtrain.data.task import Task
from memtrain.job import Adafactor, Adam, AdamW, Approximation, Constant, Cosine, Linear, Lion, Muon, Sgd
from memtrain.method import Method, Quantization
from memtrain.plan import POLICIES, policy_name
from memtrain.precision import Precision

SOURCES = ("python_docs", "stdlib_docstrings")
TASKS = tuple(task for task in Task if task is not Task.OTHER)


def _key(default: Any, sentence: str) -> Any:
    """A key of the schema; ``sentence`` is what ``--help`` says about it."""
    return field(default=default, metadata={"sentence": sentence})


@dataclass
class ModelSchema:
    path: str | None = _key(
        None, "for weights and tokenizer: a local folder, a hub id, a .gguf file, or package:NAME/FILE.gguf"
    )
    task: str | None = _key(None, f"{', '.join(TASKS)}; null: what the model was made for")
    trust_remote_code: bool = _key(False, "run code that comes with the model's files")
    # What can be a dictionary or a list is mutable to the linter, so such fields are spelled out.
    config: dict[str, Any] | None = field(
        default=None,
        metadata={"sentence": "a transformers configuration, model_type first; without a path weights start random"},
    )
    settings: dict[str, Any] = field(
        default_factory=dict, metadata={"sentence": "changes to the model's own configuration, such as {num_labels: 5}"}
    )


@dataclass
class TokenizerSchema:
    path: str | None = _key(None, "a local folder or hub id; null: the tokenizer of model.path")
    train_vocab_size: int | None = _key(None, "train a tokenizer of so many tokens on the training text instead")


@dataclass
class DataSchema:
    source: str | None = _key(None, f"text that needs no file: {', '.join(SOURCES)}; or else data.path, or neither to plan")
    # A path or a list of paths, which memtrain.config checks.
    path: Any = field(
        default=None,
        metadata={
            "sentence": "rows or text: a file, a folder, a pattern, hub:NAME, or a list of these; in place of data.source"
        },
    )
    layout: str = _key("auto", f"what the columns of rows mean: auto, {', '.join(Layout)}")
    sequence_length: int = _key(MISSING, "tokens per row, at the most where rows are padded")
    train_on: str = _key("auto", "completions (answers alone), everything; auto: completions where rows have them")
    chat_template: str | None = _key(None, "of conversations: a Jinja template, its file, or chatml; null: the tokenizer's")
    packing: bool = _key(False, "put short rows into one of sequence_length tokens, where they do not see each other")
    long_rows: str = _key("truncate", "what becomes of longer rows: truncate, split, leave_out")
    on_bad_row: str = _key("stop", "where rows cannot be used: stop, with their lines; or skip, they are counted and shown")
    group_by_length: bool = _key(False, "rows of like length in one step, which pads less and orders rows otherwise")
    drop_last: bool = _key(False, "leave out the short step at an epoch's end")
    limit: int | None = _key(None, "read so many rows at the most")
    held_out: float = _key(0.1, "fraction that is evaluated on and not trained on; unused with data.eval_path")
    eval_path: Any = field(default=None, metadata={"sentence": "rows or text to evaluate on, as data.path"})
    workers: int = _key(0, "processes that make rows ahead of the step")
    tokenizer: TokenizerSchema = field(default_factory=TokenizerSchema)


@dataclass
class DeviceSchema:
    name: str = _key(MISSING, "the device as printed")
    kind: str = _key(MISSING, "cpu, cuda, or auto: this machine's card, without one its processor")
    threads: int | None = _key(None, "of a processor: its threads; null: as many as torch uses")
    # A number or a mapping, which memtrain.device checks.
    flops_per_second: Any = field(
        default=None, metadata={"sentence": "fp32 operations; of a card: by data type, {float32: 8e13, bfloat16: 16e13}"}
    )
    bytes_per_second: float | None = _key(None, "sustained memory bandwidth")
    operator_seconds: float | None = _key(None, "time to dispatch one operator")
    compute_capability: list[int] | None = field(default=None, metadata={"sentence": "of a card: such as [8, 9]"})
    multiprocessors: int | None = _key(None, "of a card: its streaming multiprocessors")
    usable_bytes: str | None = _key(None, "of a card: memory as torch reports it, such as 23.52GiB")
    context_bytes: str | None = _key(None, "of a card: memory outside torch's allocator, such as 500MiB")
    link_bytes_per_second: float | None = _key(None, "of a card: copies between host and card, each way")
    host_bytes_per_second: float | None = _key(None, "of a card: memory bandwidth of its host")


@dataclass
class PlanSchema:
    micro_batch_size: int | None = _key(None, "rows in one forward and backward; null: the planner's choice")
    activations: Any = MISSING
    loss: Any = MISSING
    update: Any = MISSING
    optimizer_kernel: Any = MISSING
    optimizer_state: Any = MISSING
    attention: Any = MISSING
    sharding: Any = MISSING


@dataclass
class RunSchema:
    dir: str | None = _key(None, "folder of the run's files; null: runs/<recipe>/<date-time>")
    stop_seconds: float | None = _key(None, "how long a run that is told to stop may take to save; null: as long as it takes")
    save_merged: bool = _key(False, "also write the model with its adapters added to its weights, below merged/")


@dataclass
class Schema:
    recipe: str = MISSING
    mode: str = _key(
        "train", "train; plan: choose the plan and print it; data: show the rows; optimizers: print what each takes of memory"
    )
    budget: str | None = _key(None, "memory training may take, such as 400MiB or 24GiB; null: all that a card has")
    headroom: str | None = _key(None, "part of the budget to leave free, such as 50MiB; null: none")
    host_bytes: str | None = _key(
        None, "memory of a card's host that a plan may take, such as 64GiB; null: as much as there is"
    )
    seed: int = _key(0, "of weights, dropout and row order")
    global_batch_size: int = _key(MISSING, "rows per optimizer step, whatever the micro-batch size")
    steps: int | None = _key(None, "optimizer steps of the run; or else epochs")
    epochs: int | None = _key(None, "passes over the training rows")
    evaluate_every: int | None = _key(None, "steps between evaluations; null: before and after the run")
    early_stopping: int | None = _key(None, "end the run after so many evaluations without a better loss; null: never")
    trackers: list[str] = field(
        default_factory=list,
        metadata={"sentence": "where metrics also go: tensorboard, wandb, mlflow; to metrics.jsonl and .csv always"},
    )
    checkpoint_every: int | None = _key(500, "steps between checkpoints; null: none but that of a run that is stopped")
    keep_checkpoints: int = _key(2, "so many of the latest stay, and the one that was evaluated best")
    resume: str = _key(
        "auto", "auto: go on with the run in run.dir; a path: with the checkpoint or run there; never: begin anew"
    )
    on_not_finite: str = _key("stop", "where a loss or gradient is not finite: stop; or skip, the step is left out")
    max_grad_norm: float | None = _key(1.0, "bound on the gradient's 2-norm; null: no clipping")
    allow: list[str] = field(
        default_factory=list,
        metadata={"sentence": f"approximations that a plan may use, such as [{next(iter(Approximation))}]"},
    )
    model: ModelSchema = field(default_factory=ModelSchema)
    data: DataSchema = field(default_factory=DataSchema)
    optimizer: Any = MISSING
    schedule: Any = MISSING
    precision: Any = MISSING
    method: Any = MISSING
    quantization: Any = MISSING
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
    "optimizer": Alternatives(
        "name", {"adamw": AdamW, "adam": Adam, "sgd": Sgd, "adafactor": Adafactor, "lion": Lion, "muon": Muon}
    ),
    "schedule": Alternatives("name", {"constant": Constant, "cosine": Cosine, "linear": Linear}),
    **{
        group: Alternatives("name", {policy_name(cls): cls for cls in get_args(union)})
        for group, union in (("precision", Precision), ("method", Method), ("quantization", Quantization))
    },
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
    types = {name: _node_type(kind) for name, kind in get_type_hints(cls).items()}
    settings = [(setting.name, types[setting.name], field(default=setting.default)) for setting in dataclasses.fields(cls)]
    return dataclasses.make_dataclass(cls.__name__, [(tag, str, field(default=option)), *settings])


def _node_type(kind: Any) -> Any:
    """The type as OmegaConf has it: its unions hold scalars only, and it knows enumerations by the names of their members."""
    parts = get_args(kind)
    if str in parts and any(get_origin(part) is tuple for part in parts):
        return Any
    return str if isinstance(kind, type) and issubclass(kind, StrEnum) else kind


NONE = "None"
"""What people who write Python write for null."""


def with_nulls(value: Any) -> Any:
    """What YAML has read, with Python's word for null as null."""
    if isinstance(value, dict):
        return {key: with_nulls(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_nulls(one) for one in value]
    return None if value == NONE else value
