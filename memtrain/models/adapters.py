"""Low-rank adapters on a model, in place, and what is written of them.

peft makes the adapters. What it leaves open is decided here: which layers are linear, the data type, also where tensors have no
data, and what a frozen model cannot have.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from memtrain.method import Lora
from memtrain.models.objective import predicts_next_token
from memtrain.models.quietly import quietly

NAME = "default"
"""The name that peft gives adapters; it is not written to files."""


def add_adapters_(model: nn.Module, lora: Lora, base: str | None = None) -> nn.Module:
    """Freeze the model, and add adapters that train, drawn from torch's generator. In place; the class stays.

    Args:
        base: where the model came from, which is written with the adapters; by default what the model says itself.

    Raises:
        ValueError: a name is that of no module, a module takes no adapter or would train nothing, the model has adapters already,
            or it has what moves though it is frozen.
    """
    if adapted(model):
        raise ValueError(f"{type(model).__name__} has adapters already, and method lora adds new ones: set method to full.")
    _refuse_saved(model, lora.modules_to_save)
    targets = _targets(model, lora)
    with quietly(), torch.device("cpu"):
        from peft import LoraConfig, inject_adapter_in_model
    with quietly():
        config = LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]
            lora_dropout=lora.dropout,
            target_modules=targets,
            modules_to_save=list(lora.modules_to_save) or None,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
            base_model_name_or_path=base or getattr(model, "name_or_path", None) or None,
        )
        try:
            inject_adapter_in_model(config, model, NAME)
        except (ValueError, TypeError, NotImplementedError) as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise ValueError(
                f"no adapters can be added to {type(model).__name__} ({reason}): name linear layers in target_modules."
            ) from error
    dtype = getattr(torch, lora.dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # peft leaves the type as it is where tensors have no data.
            parameter.data = parameter.data.to(dtype)
    _cast_around_saved_(model)
    _leave_fast_path_(model)
    return model


def adapted(model: nn.Module) -> bool:
    """Whether peft has put adapters on the model, or on one that it holds."""
    return any(getattr(module, "peft_config", None) for module in model.modules())


def has_own_adapters(model: nn.Module) -> bool:
    """Whether the adapters on the model are like those of :func:`add_adapters_`: what peft wraps whole, it writes itself."""
    found = getattr(model, "peft_config", {})
    is_lora = list(found) == [NAME] and getattr(found[NAME].peft_type, "value", None) == "LORA"
    return is_lora and not hasattr(model, "get_base_model")


def head_path(model: nn.Module) -> str | None:
    """The path of the layer that gives the logits, where the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return next((path for path, module in model.named_modules() if module is head), None)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's or one made from it, such as bitsandbytes' and Falcon's, or the Conv1D of GPT-2.

    The projection of torch's MultiheadAttention is none: its weights are read past its forward. Routers of experts, which give
    more than the product, are none either.
    """
    if is_transposed(module) or type(module) is nn.Linear:
        return True
    if not isinstance(module, nn.Linear) or isinstance(module, NonDynamicallyQuantizableLinear):
        return False
    return type(module).__module__.startswith("bitsandbytes.") or _maps_features(module)


def _maps_features(layer: nn.Linear) -> bool:
    """Whether forward takes rows of inputs to rows of outputs, in two or in three dimensions; tried without data."""
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    bare = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors}
    for rows in ((1,), (1, 1)):
        given = torch.empty(*rows, layer.in_features, dtype=layer.weight.dtype, device="meta")
        try:
            out = torch.func.functional_call(layer, bare, (given,))
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError):
            continue
        if isinstance(out, Tensor) and out.shape == (*rows, layer.out_features):
            return True
    return False


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the Conv1D of transformers, whose weight is (inputs, outputs)."""
    utilities = sys.modules.get("transformers.pytorch_utils")
    return utilities is not None and isinstance(module, utilities.Conv1D)


def is_named(path: str, names: tuple[str, ...]) -> bool:
    """Whether a module's path ends in one of the names."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def is_inside(path: str, names: Collection[str]) -> bool:
    """Whether a module, or one that it is in, has a path that ends in one of the names."""
    parts = path.split(".")
    return any(is_named(".".join(parts[:end]), tuple(names)) for end in range(1, len(parts) + 1))


# ---------------------------------------------------------------------------------------------- which modules


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    if lora.target_modules == "all-linear":
        head = head_path(model)
        found = [
            path
            for path, module in model.named_modules()
            if is_linear(module) and path != head and path and not is_inside(path, lora.modules_to_save)
        ]
        if not found:
            raise ValueError(
                f"target_modules is all-linear, and {type(model).__name__} has no linear layer below its head: "
                f"name the modules that get adapters."
            )
        _refuse_shared(model, found)
        return found
    names = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    for name in names:
        if not _ending_in(model, name):
            raise ValueError(
                f"target_modules has {name!r}, and no module of {type(model).__name__} is called so: "
                f"name some of {', '.join(sorted(_leaf_names(model)))}, or all-linear."
            )
    # Inside what trains whole, peft adds none.
    outside = [path for path, _ in model.named_modules() if is_named(path, names) and not is_inside(path, lora.modules_to_save)]
    if not outside:
        raise ValueError(
            f"every target of target_modules={list(names)} is trained whole by modules_to_save={list(lora.modules_to_save)}: "
            f"take one of the two out."
        )
    _refuse_shared(model, outside)
    return list(names)


def _refuse_shared(model: nn.Module, targets: list[str]) -> None:
    first: dict[int, str] = {}
    for path in targets:
        weight = getattr(model.get_submodule(path), "weight", None)
        other = path if weight is None else first.setdefault(id(weight), path)
        if other != path:
            raise ValueError(
                f"{other} and {path} share one weight, and the adapter of each would be added to both when merged: "
                f"name only one of them in target_modules."
            )


def _refuse_saved(model: nn.Module, saved: tuple[str, ...]) -> None:
    """Refuse names of modules to train whole that are none, that would train nothing, or that are missing."""
    unknown = [name for name in saved if not _ending_in(model, name)]
    if unknown:
        raise ValueError(
            f"modules_to_save has {unknown[0]!r}, and no module of {type(model).__name__} is called so: "
            f"name some of {', '.join(sorted(_leaf_names(model)))}."
        )
    # A table of embeddings that only lends its weight to other tables, as in encoder-decoder models.
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    lent: dict[str, list[str]] = {}
    for pair in ties.items():
        borrower, lender = (path.rpartition(".")[0] for path in pair)
        if all(isinstance(model.get_submodule(path), nn.Embedding) for path in (borrower, lender)):
            lent.setdefault(lender, []).append(borrower)
    for lender, borrowers in lent.items():
        if is_named(lender, saved):
            raise ValueError(
                f"modules_to_save has {lender}, whose weight {type(model).__name__} uses in {' and '.join(borrowers)}, so a copy "
                f"of it would train nothing: name {' and '.join(borrowers)} instead."
            )
    for path, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None and not is_inside(path, saved):
            raise ValueError(
                f"{path} of {type(model).__name__} keeps running statistics, which move though the model is frozen and are not "
                f"saved with adapters: name it in modules_to_save."
            )


def _ending_in(model: nn.Module, name: str) -> list[str]:
    return [path for path, _ in model.named_modules() if path and is_named(path, (name,))]


def _leaf_names(model: nn.Module) -> set[str]:
    return {path.rpartition(".")[2] for path, module in model.named_modules() if is_linear(module) and path}


# ---------------------------------------------------------------------------------------------- modules trained whole


def _cast_around_saved_(model: nn.Module) -> None:
    """Let modules that train whole in another type than the model's take and give what the layers around them do."""
    from peft.utils import ModulesToSaveWrapper

    for module in model.modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        outside, inside = (_type_of(one) for one in (module.original_module, module.modules_to_save[NAME]))
        if outside is None or inside is None or outside == inside:
            continue
        module.register_forward_pre_hook(_Cast(inside).given, with_kwargs=True)
        module.register_forward_hook(_Cast(outside).returned)


def _type_of(module: nn.Module) -> torch.dtype | None:
    return next((one.dtype for one in module.parameters() if one.is_floating_point()), None)


class _Cast:
    """Hooks that cast floating-point tensors, given or returned; autocast casts by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def given(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cast(args), self._cast(kwargs)

    def returned(self, _: nn.Module, __: Any, returned: Any) -> Any:
        return self._cast(returned)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(self._dtype) if value.is_floating_point() else value
        if type(value) in (tuple, list):
            return type(value)(map(self._cast, value))
        if isinstance(value, dict):
            # The outputs of transformers are such.
            return type(value)(**{name: self._cast(one) for name, one in value.items()})
        return value


def _leave_fast_path_(model: nn.Module) -> None:
    """Let torch's encoder layers call the layers in them: in evaluation they read weights past adapters and packed layers.

    They do so only for two activations, so this one is said to be neither. It stays so after training.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


# ---------------------------------------------------------------------------------------------- what is written


def written_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What trains of an adapted model, and the buffers of modules that train whole, each under every path that it has."""
    found = {path: one for path, one in model.named_parameters(remove_duplicate=False) if one.requires_grad}
    found_beside = {path: one for path, one in model.named_buffers() if f".modules_to_save.{NAME}." in path}
    return {**found, **found_beside}


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is written of an adapted model, by the names that peft gives it in files."""
    from peft import get_peft_model_state_dict

    tensors = {path: tensor.detach() for path, tensor in written_tensors(model).items()}
    # A quantised model's own state dict would be packed for nothing.
    found = get_peft_model_state_dict(model, state_dict=tensors, adapter_name=NAME, save_embedding_layers=False)
    return {f"base_model.model.{path}": tensor for path, tensor in found.items()}


def config_of(model: nn.Module) -> Any:
    """peft's configuration of the adapters, as written: with what peft's own classes ask for to load the base."""
    config: Any = copy.copy(model.peft_config[NAME])  # type: ignore[index]
    config.inference_mode = True
    # In a set, they would be written in another order each time.
    config.target_modules = sorted(config.target_modules)
    if predicts_next_token(model):
        config.task_type = "CAUSAL_LM"
    elif hasattr(model, "save_pretrained"):
        config.auto_mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    return config
