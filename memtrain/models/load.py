"""The model that a job trains: that of its source, packed in few bits and with adapters where the job says so.

One order everywhere, with data and without: the base, packed block by block as it is built or tensor by tensor as it is
read, and then the adapters on it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memtrain.job import Job
from memtrain.method import Lora, Unquantized
from memtrain.models import gguf
from memtrain.models.adapters import add_adapters_, is_inside
from memtrain.models.build import FromModule, FromPretrained, ModelSource, weight_dtype
from memtrain.models.quantize import build_quantized, quantize_, read_by_tensor, settings_for, settle_
from memtrain.models.quietly import quietly
from memtrain.precision import product_type


def load_model(
    source: ModelSource, job: Job, card: str | None = None, tell: Callable[[str], object] = lambda _: None
) -> nn.Module:
    """The model with its weights; a module that was given is itself, changed in place.

    Args:
        tell: is told, in a sentence each, of weights that are not there and begin as they are drawn, and of rows of the embeddings
            that are new and do not train.
        card: the torch device that packed layers lie on, None for the processor. What is not packed may be in the host's memory
            still: :func:`memtrain.models.quantize.move_unpacked_` moves it.

    Raises:
        ValueError: the weights are not there, cannot be packed, or no adapters can be added.
    """
    model = _loaded_base(source, job, card, tell)
    if (said := _new_rows_rest(model, source, job)) is not None:
        tell(said)
    return _with_adapters(model, source, job)


def build_model(source: ModelSource, job: Job, card: str | None = None) -> nn.Module:
    """The same with random weights on torch's default device: what planning makes, on "meta", without reading a weight file.

    Raises:
        ValueError: it cannot be packed, or no adapters can be added.
    """
    return _with_adapters(_built_base(source, job, card), source, job)


def product_dtype(job: Job) -> torch.dtype:
    """The type that packed weights are multiplied in: that of the precision's products.

    Under autocast these have 16 bits, though the weights that are not packed have 32.
    """
    found: torch.dtype = getattr(torch, product_type(job.precision).replace("tf32", "float32"))
    return found


def _with_adapters(model: nn.Module, source: ModelSource, job: Job) -> nn.Module:
    if not isinstance(job.method, Lora):
        return model
    return add_adapters_(model, job.method, source.path if isinstance(source, FromPretrained) else None)


def _trained_whole(job: Job) -> tuple[str, ...]:
    return job.method.modules_to_save if isinstance(job.method, Lora) else ()


def _built_base(source: ModelSource, job: Job, card: str | None) -> nn.Module:
    dtype, products, whole = weight_dtype(job.precision), product_dtype(job), _trained_whole(job)
    if isinstance(job.quantization, Unquantized):
        # A module may bring packed layers of its own.
        return settle_(source.module) if isinstance(source, FromModule) else source.build(dtype)
    if isinstance(source, FromModule):
        return quantize_(source.module, job.quantization, products, keep=whole, card=card)
    made, config = source.model_class, source.stored_config
    return _grown_(source, build_quantized(made, config, dtype, job.quantization, products, keep=whole, card=card))


def _grown_(source: ModelSource, model: nn.Module) -> nn.Module:
    return source.grown_(model) if isinstance(source, FromPretrained) else model


def _loaded_base(source: ModelSource, job: Job, card: str | None, tell: Callable[[str], object]) -> nn.Module:
    dtype, products = weight_dtype(job.precision), product_dtype(job)
    if not isinstance(source, FromPretrained):
        return _built_base(source, job, card)
    if isinstance(job.quantization, Unquantized):
        return _read(source, job, tell)
    if gguf.names_gguf(source.path):
        # transformers does not pack what it unpacks.
        return quantize_(_read(source, job, tell), job.quantization, products, keep=_trained_whole(job), card=card)
    with torch.device("meta"):
        architecture = source.build(dtype)
    settings = settings_for(architecture, job.quantization, products, _trained_whole(job))
    with quietly(), read_by_tensor():
        model = _read(source, job, tell, quantization_config=settings, device_map={"": card or "cpu"})
    return settle_(model, products)


def _read(source: FromPretrained, job: Job, tell: Callable[[str], object], **settings: Any) -> nn.Module:
    """The weights that are there; those that are not may be drawn only where they train."""
    model, missing = source.read(weight_dtype(job.precision), **settings)
    layers = sorted({path.rpartition(".")[0] for path in missing if not is_inside(path, _trained_whole(job))})
    own = next(iter(getattr(source.config, "architectures", None) or ()), None)
    if layers and own == type(model).__name__ and not isinstance(job.method, Lora):
        # Another class, such as a classifier on a language model, has weights that were never trained.
        raise ValueError(
            f"the weights of {', '.join(layers)} are not at {source.name!r}, though a {own} was saved there: give a folder that is "
            f"whole."
        )
    if layers and isinstance(job.method, Lora):
        raise ValueError(
            f"the weights of {', '.join(layers)} are not at {source.name!r}, so they would stay as they are drawn: "
            f"name {'it' if len(layers) == 1 else 'them'} in modules_to_save."
        )
    if layers:
        tell(f"The weights of {', '.join(layers)} are not at {source.name!r}, and begin as they are drawn from the seed.")
    return model


def _new_rows_rest(model: nn.Module, source: ModelSource, job: Job) -> str | None:
    """What to tell of rows that were added to the embeddings, if adapters leave them as they are."""
    if not isinstance(job.method, Lora) or not isinstance(source, FromPretrained) or source.stored_rows is None:
        return None
    layers = (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
    paths = [path for path, module in model.named_modules() if any(module is layer for layer in layers)]
    resting = [path for path in paths if not is_inside(path, job.method.modules_to_save)]
    if not resting:
        return None
    return (
        f"The rows that were added to {' and '.join(resting)} stay as they are, since adapters neither train nor carry them: name "
        f"{'it' if len(resting) == 1 else 'them'} in modules_to_save, or save the merged model."
    )
