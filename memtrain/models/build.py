"""Where a model comes from, and building it: from weights on disk or a hub, from a configuration, or as given.

A source is cheap to make and holds no weights (unless the user's module brought its own), so that planning can build a
data-less copy first and the weights are only loaded once a plan is chosen (rule 11).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memtrain.models import gguf
from memtrain.precision import Precision, weight_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class FromModule:
    """A module of the user's; trained in place once a plan is chosen."""

    module: nn.Module

    @property
    def name(self) -> str:
        """The class name."""
        return type(self.module).__name__

    def load(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module itself, whose parameters are of ``dtype`` already."""
        return self.module

    build = load


@dataclass(frozen=True)
class FromConfig:
    """A transformers configuration; the weights are drawn at random."""

    config: PretrainedConfig

    @property
    def name(self) -> str:
        """The class name of the model."""
        return str(model_class(self.config).__name__)

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with random weights from torch's generator, on torch's default device."""
        model: nn.Module = model_class(self.config)._from_config(self.config, dtype=dtype)
        return model

    load = build


@dataclass(frozen=True)
class FromPretrained:
    """A folder in HuggingFace format, the id of one on the hub, or a GGUF file."""

    path: str
    config: PretrainedConfig

    @property
    def name(self) -> str:
        """The path or id."""
        return self.path

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The architecture with random weights: what planning needs, without reading a weight file."""
        return FromConfig(self.config).build(dtype)

    def load(self, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
        """The model with its weights in ``dtype``, whatever they are stored in.

        Args:
            settings: further ones of from_pretrained.

        Raises:
            ValueError: they are not there.
        """
        return self.read(dtype, **settings)[0]

    def read(self, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[nn.Module, list[str]]:
        """The model as :meth:`load` gives it, and the names of the weights that are not there and were drawn at random.

        Raises:
            ValueError: there are none.
        """
        folder, file = gguf.pretrained(self.path)
        if file:
            settings = {**file, **gguf.unpacked(), **settings}
        settings = {"config": self.config, "dtype": dtype, "output_loading_info": True, **settings}
        try:
            with gguf.no_progress_bar() if file else nullcontext():
                model, found = model_class(self.config).from_pretrained(folder, **settings)
        except OSError as error:
            raise ValueError(
                f"the weights at {self.path!r} cannot be loaded ({_first_line(error)}): give a folder that save_pretrained "
                f"wrote, or fetch the model first."
            ) from error
        return gguf.settle_(model) if file else model, sorted(found["missing_keys"])


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


def source(model: Any, config: Mapping[str, Any] | None = None) -> ModelSource:
    """The source that ``model`` names: a module, a configuration (object or mapping), a local path or a hub id.

    Args:
        config: the architecture of what is at the path or id, which is then not asked for before its weights are loaded.

    Raises:
        ValueError: nothing of that name is there, or it is none of the above.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(model, ModelSource):
        return model
    if isinstance(model, nn.Module):
        return FromModule(model)
    if isinstance(model, PretrainedConfig):
        return FromConfig(model)
    if isinstance(model, Mapping):
        return FromConfig(_config_of(model))
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model is {model!r}, and it must be a path, a hub id, a transformers config or an nn.Module.")
    path = os.fspath(model)
    if config is not None:
        return _unpacked(FromPretrained(path, _config_of(config)))
    if gguf.names_gguf(path):
        return FromPretrained(path, gguf.read_config(path))
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
    try:
        found = FromPretrained(path, AutoConfig.from_pretrained(path))
    except (OSError, ValueError, StrictDataclassError) as error:
        if local.is_dir():
            raise ValueError(
                f"the config.json of model {path!r} cannot be read ({_first_line(error)}): "
                f"give a folder that this version of transformers can read."
            ) from error
        raise ValueError(
            f"model {path!r} is neither a local folder nor a model that can be fetched ({_first_line(error)}): "
            f"give a folder that save_pretrained wrote, or fetch the model first."
        ) from error
    return _unpacked(found)


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


def model_class(config: PretrainedConfig) -> Any:
    """The model class of a configuration: the first of its ``architectures``, else the language model of its type.

    Raises:
        ValueError: the class is not in transformers, or the type has no language model.
    """
    import transformers
    from transformers.models.auto import modeling_auto as auto

    named = (getattr(config, "architectures", None) or [None])[0]
    if named is not None:
        found = getattr(transformers, named, None)
        if found is None:
            raise ValueError(
                f"architecture {named!r} is not in transformers {transformers.__version__}: give the model as an nn.Module."
            )
        return found
    # Encoders such as BERT have a causal class as well, which trains something else unless is_decoder is set.
    if getattr(config, "is_encoder_decoder", False):
        kinds = [auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING]
    elif getattr(config, "is_decoder", False):
        kinds = [auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    else:
        kinds = [auto.MODEL_FOR_MASKED_LM_MAPPING, auto.MODEL_FOR_CAUSAL_LM_MAPPING]
    for mapping in kinds:
        if type(config) in mapping:
            return mapping[type(config)]
    raise ValueError(
        f"model_type {config.model_type!r} has no language model in transformers: name the class in 'architectures'."
    )
