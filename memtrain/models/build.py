"""Where a model comes from, and building it: from weights on disk or a hub, from a configuration, or as given.

A source is cheap to make and holds no weights (unless the user's module brought its own), so that planning can build a
data-less copy first and the weights are only loaded once a plan is chosen (rule 11).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memtrain.data.task import Task
from memtrain.models import gguf
from memtrain.models.tasks import model_class, needs_own_code, parse_task, refusal, unwrapped
from memtrain.models.vocabulary import grow_, rows_for, rows_of, set_rows_, tokens_of
from memtrain.precision import Precision, weight_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class FromModule:
    """A module of the user's; trained in place once a plan is chosen.

    Attributes:
        task: what it learns, where its class does not tell.
    """

    module: nn.Module
    task: Task | None = None

    @property
    def name(self) -> str:
        """The class name."""
        return type(self.module).__name__

    @property
    def model_class(self) -> type:
        """The class, below what peft may have put around it."""
        return type(unwrapped(self.module))

    @property
    def config(self) -> Any:
        """Its configuration, where it has one."""
        return getattr(self.module, "config", None)

    def load(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module itself, whose parameters are of ``dtype`` already."""
        return self.module

    build = load


@dataclass(frozen=True)
class FromConfig:
    """A transformers configuration; the weights are drawn at random.

    Attributes:
        task: what the model is to learn; by default what the class that the configuration names is for.
        trust_remote_code: whether code that comes with the configuration is run.
    """

    config: PretrainedConfig
    task: Task | None = None
    trust_remote_code: bool = False

    @property
    def name(self) -> str:
        """The class name of the model."""
        return str(self.model_class.__name__)

    @property
    def model_class(self) -> Any:
        """The class that is built."""
        return model_class(self.config, self.task, self.config.name_or_path if self.trust_remote_code else None)

    @property
    def stored_config(self) -> PretrainedConfig:
        """The configuration."""
        return self.config

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with random weights from torch's generator, on torch's default device."""
        model: nn.Module = self.model_class._from_config(self.config, dtype=dtype)
        return model

    load = build


@dataclass(frozen=True)
class FromPretrained:
    """A folder in HuggingFace format, the id of one on the hub, or a GGUF file.

    Attributes:
        config: of the model that is trained.
        task: what the model is to learn; by default what the class that the configuration names is for. A head that the weights
            do not have is drawn at random.
        trust_remote_code: whether code that comes with the weights is run.
        stored_rows: how many rows the embeddings have where they lie, if the configuration says more.
    """

    path: str
    config: PretrainedConfig
    task: Task | None = None
    trust_remote_code: bool = False
    stored_rows: int | None = None

    @property
    def name(self) -> str:
        """The path or id."""
        return self.path

    @property
    def model_class(self) -> Any:
        """The class that is built."""
        return model_class(self.config, self.task, self.path if self.trust_remote_code else None)

    @property
    def stored_config(self) -> PretrainedConfig:
        """The configuration of the weights as they lie there."""
        if self.stored_rows is None:
            return self.config
        config = copy.deepcopy(self.config)
        set_rows_(config, self.stored_rows)
        return config

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The architecture with random weights: what planning needs, without reading a weight file."""
        return self.grown_(self.model_class._from_config(self.stored_config, dtype=dtype))

    def load(self, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
        """The model with its weights in ``dtype``, whatever they are stored in.

        Args:
            settings: further ones of from_pretrained.

        Raises:
            ValueError: they are not there, or are of other sizes.
        """
        return self.read(dtype, **settings)[0]

    def read(self, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, list[str]]:
        """The model as :meth:`load` gives it, and the names of the weights that are not there and were drawn at random.

        Raises:
            ValueError: there are none, or they are of other sizes.
        """
        folder, file = gguf.pretrained(self.path)
        if file:
            settings = {**file, **gguf.unpacked(), **settings}
        settings = {"config": self.stored_config, "dtype": dtype, "output_loading_info": True, **settings}
        if self.task is not None:
            # A head for other labels than the stored one is drawn anew, and told of.
            settings = {"ignore_mismatched_sizes": True, **settings}
        try:
            with gguf.no_progress_bar() if file else nullcontext():
                model, found = self.model_class.from_pretrained(folder, **settings)
        except OSError as error:
            raise ValueError(
                f"the weights at {self.path!r} cannot be loaded ({_first_line(error)}): give a folder that save_pretrained "
                f"wrote, or fetch the model first."
            ) from error
        except RuntimeError as error:
            # Any other, such as memory that runs out, is what it says.
            if "ignore_mismatched_sizes" not in str(error):
                raise
            raise ValueError(self._of_other_sizes()) from error
        others = {name for name, *_ in found.get("mismatched_keys", ())}
        if any(name.startswith(f"{model.base_model_prefix}.") for name in others):
            raise ValueError(self._of_other_sizes())
        return self.grown_(gguf.settle_(model) if file else model), sorted({*found["missing_keys"], *others})

    def _of_other_sizes(self) -> str:
        return (
            f"the weights at {self.path!r} do not have the sizes that the configuration says: leave the settings out that change "
            f"them, or name a task to begin with a new head."
        )

    def grown_(self, model: nn.Module) -> nn.Module:
        """A model as it is stored, with the rows that its embeddings are to have. In place."""
        rows = None if self.stored_rows is None else rows_of(self.config)
        return model if rows is None else grow_(model, rows)


def weight_dtype(precision: Precision) -> torch.dtype:
    """The type of the weights that a precision trains."""
    dtype: torch.dtype = getattr(torch, weight_type(precision))
    return dtype


ModelSource = FromModule | FromConfig | FromPretrained


def bytes_on(source: ModelSource, kind: str) -> int:
    """Bytes that the module of a source holds on a torch device type already; 0 where it is yet to be built."""
    if not isinstance(source, FromModule):
        return 0
    tensors = (*source.module.parameters(), *source.module.buffers())
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type == kind)


def with_vocabulary(source: ModelSource, tokenizer: Any) -> tuple[ModelSource, str | None]:
    """The source of a model that has embeddings for every token, and what to tell where rows are added to them.

    Args:
        tokenizer: None where there is none.

    Raises:
        ValueError: the tokenizer is another model's, or the model has fewer embeddings and is a module of the user's, which is not
            changed before a plan is chosen (rule 11).
    """
    there = None if tokenizer is None else rows_of(source.config)
    if there is None or (needed := tokens_of(tokenizer)) <= there:
        return source, None
    # Without the tokens that were added to it.
    own = tokenizer.vocab_size
    if own > there:
        raise ValueError(
            f"the tokenizer has {own} tokens and {source.name} has embeddings for {there}: take the tokenizer that belongs to the "
            f"model, or a larger vocab_size."
        )
    short = f"the tokenizer has tokens up to {needed - 1}, and {source.name} has embeddings for {there}"
    if isinstance(source, FromModule):
        raise ValueError(
            f"{short}: call its resize_token_embeddings({needed}) before it is given, or take the tokenizer that belongs to it."
        )
    config, rows = copy.deepcopy(source.config), rows_for(needed)
    set_rows_(config, rows)
    said = f"{short[0].upper()}{short[1:]}: {rows - there} rows are added"
    if isinstance(source, FromConfig):
        return replace(source, config=config), f"{said}."
    stored = source.stored_rows or there
    return replace(source, config=config, stored_rows=stored), f"{said}, each the mean of the others."


def source(
    model: Any,
    config: Mapping[str, Any] | None = None,
    *,
    task: Task | str | None = None,
    settings: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> ModelSource:
    """The source that ``model`` names: a module, a configuration (object or mapping), a local path or a hub id.

    Args:
        config: the architecture of what is at the path or id, which is then not asked for before its weights are loaded.
        task: what the model is to learn, which chooses the class that is built; of a module it is only noted.
        settings: what the configuration is to say otherwise, such as ``num_labels``.
        trust_remote_code: whether code that comes with the model's files is run.

    Raises:
        ValueError: nothing of that name is there, it is none of the above, or it cannot be built so.
    """
    from transformers import PretrainedConfig

    task, settings = parse_task(task), dict(settings or {})
    if isinstance(model, ModelSource | nn.Module):
        if settings:
            raise ValueError(
                f"the model is a {type(model).__name__}, and {next(iter(settings))} would change its configuration: make it with that."
            )
        made: ModelSource = FromModule(model) if isinstance(model, nn.Module) else model
        return made if task is None else replace(made, task=task)
    if isinstance(model, PretrainedConfig):
        return _of_task(FromConfig(_changed(model, settings), task, trust_remote_code))
    if isinstance(model, Mapping):
        return _of_task(FromConfig(_config_of({**model, **settings}), task))
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model is {model!r}, and it must be a path, a hub id, a transformers config or an nn.Module.")
    path = os.fspath(model)
    if config is not None:
        found = _config_of({**config, **settings})
    elif gguf.names_gguf(path):
        found = _changed(gguf.read_config(path), settings)
    else:
        path = _located(path)
        found = _changed(_read_config(path, trust_remote_code=trust_remote_code), settings)
    return _of_task(_unpacked(FromPretrained(path, found, task, trust_remote_code)))


def _located(path: str) -> str:
    """A folder that holds a model, or a hub id."""
    local = Path(path).expanduser()
    if local.is_dir():
        path = str(local)
        if (local / "adapter_config.json").is_file():
            raise ValueError(f"model {path!r} holds adapters: give the model they belong to.")
        if not (local / "config.json").is_file():
            raise ValueError(f"model {path!r} is a folder without config.json: give a folder that save_pretrained wrote.")
    elif local.exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(
            f"model {path!r} is not a folder: give one that save_pretrained wrote, or a hub id such as 'org/name'."
        )
    return path


def _read_config(path: str, *, trust_remote_code: bool) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    try:
        described, _ = PretrainedConfig.get_config_dict(path)
        asks = not trust_remote_code and needs_own_code(path, described)
        # Said here, since transformers would ask on the terminal.
        found = None if asks else AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, StrictDataclassError) as error:
        if Path(path).is_dir():
            raise ValueError(
                f"the config.json of model {path!r} cannot be read ({_first_line(error)}): "
                f"give a folder that this version of transformers can read."
            ) from error
        raise ValueError(
            f"model {path!r} is neither a local folder nor a model that can be fetched ({_first_line(error)}): "
            f"give a folder that save_pretrained wrote, or fetch the model first."
        ) from error
    if found is None:
        raise ValueError(refusal(path, described))
    config: PretrainedConfig = found
    return config


def _changed(config: PretrainedConfig, settings: Mapping[str, Any]) -> PretrainedConfig:
    """A configuration with other settings; the one that is given stays as it is."""
    changed = copy.deepcopy(config) if settings else config
    for name, value in settings.items():
        if not hasattr(config, name):
            raise ValueError(
                f"the settings of the model have {name!r}, which a {config.model_type} configuration does not know: correct the name."
            )
        setattr(changed, name, value)
    return changed


def _of_task(made: FromConfig | FromPretrained) -> ModelSource:
    """The same, if there is a class for the task."""
    if made.task is not None:
        assert made.model_class is not None
    return made


def _unpacked(made: FromPretrained) -> FromPretrained:
    """The same, unless its weights are in few bits: what reads them would pack them again, or train them as if they were whole."""
    packing = getattr(made.config, "quantization_config", None)
    if packing is None or gguf.names_gguf(made.path):
        return made
    settings = packing if isinstance(packing, Mapping) else packing.to_dict()
    by_flag = next((bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit")), None)
    bits = by_flag or settings.get("bits")
    form = f"in {bits} bits" if bits else f"as {settings.get('quant_method')}"
    raise ValueError(
        f"model {made.name!r} is held {form} already, which cannot be trained or packed again: give the model it was made from, "
        f"with method lora and quantization nf4."
    )


def _config_of(described: Mapping[str, Any]) -> PretrainedConfig:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    settings = dict(described)
    kind = settings.pop("model_type", None)
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"model_type is {kind!r}, and it must be one that transformers knows, such as 'llama' or 'gpt2'.")
    try:
        config: PretrainedConfig = AutoConfig.for_model(kind, **settings)
    except StrictDataclassError as error:
        raise ValueError(
            f"transformers refuses these settings of a {kind} model ({_first_line(error)}): correct them."
        ) from error
    return config


def _first_line(error: Exception) -> str:
    """What happened, without the advice that follows."""
    first, *rest = str(error).strip().splitlines()
    if first.endswith(":") and rest:
        first = f"{first} {rest[0].strip()}"
    return first.rstrip(".")
