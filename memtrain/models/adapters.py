"""Low-rank adapters on a model, in place, and what is written of it: the adapters, or the model with them added in.

peft makes the adapters and adds them in. What it leaves open is decided here: which layers are linear, the data type, also
where tensors have no data, and what happens to weights that are tied to a head that has an adapter.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.method import Lora
from memtrain.models.quietly import quietly

# The name that peft gives adapters; it is not written to files.
_NAME = "default"


def add_adapters_(model: nn.Module, lora: Lora) -> nn.Module:
    """Freeze the model, and add adapters that train, drawn from torch's generator. In place; the class stays.

    Raises:
        ValueError: a name is that of no module, a module takes no adapter, or the model has adapters already.
    """
    if adapted(model):
        raise ValueError(f"{type(model).__name__} has adapters already, and method lora adds new ones: set method to full.")
    saved = [name for name in lora.modules_to_save if not _ending_in(model, name)]
    if saved:
        raise ValueError(
            f"modules_to_save has {saved[0]!r}, and no module of {type(model).__name__} is called so: "
            f"name some of {', '.join(sorted(_leaf_names(model)))}."
        )
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
            base_model_name_or_path=getattr(model, "name_or_path", None) or None,
        )
        try:
            inject_adapter_in_model(config, model, _NAME)
        except (ValueError, TypeError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0].rstrip(".")
            raise ValueError(
                f"no adapters can be added to {type(model).__name__} ({reason}): name linear layers in target_modules."
            ) from error
    dtype = getattr(torch, lora.dtype)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # peft leaves the type as it is where tensors have no data.
            parameter.data = parameter.data.to(dtype)
    _cast_around_saved_(model)
    return model


def adapted(model: nn.Module) -> bool:
    """Whether peft has put adapters on the model."""
    return bool(getattr(model, "peft_config", None))


def has_own_adapters(model: nn.Module) -> bool:
    """Whether the adapters on the model are those of :func:`add_adapters_`: what peft wraps whole, it writes itself."""
    return list(getattr(model, "peft_config", {})) == [_NAME] and not hasattr(model, "get_base_model")


def head_path(model: nn.Module) -> str | None:
    """The path of the layer that gives the logits, where the model names it."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None else None
    return next((path for path, module in model.named_modules() if module is head), None)


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, bitsandbytes', or the Conv1D of GPT-2.

    The projection of torch's MultiheadAttention is none: its weights are read past its forward.
    """
    if is_transposed(module) or type(module) is nn.Linear:
        return True
    return isinstance(module, nn.Linear) and type(module).__module__.startswith("bitsandbytes.")


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the Conv1D of transformers, whose weight is (inputs, outputs)."""
    utilities = sys.modules.get("transformers.pytorch_utils")
    return utilities is not None and isinstance(module, utilities.Conv1D)


def is_named(path: str, names: tuple[str, ...]) -> bool:
    """Whether a module's path ends in one of the names."""
    return any(path == name or path.endswith(f".{name}") for name in names)


def _targets(model: nn.Module, lora: Lora) -> list[str]:
    if lora.target_modules == "all-linear":
        head = head_path(model)
        found = [
            path
            for path, module in model.named_modules()
            if is_linear(module) and path != head and path and not is_named(path, lora.modules_to_save)
        ]
        if not found:
            raise ValueError(
                f"target_modules is all-linear, and {type(model).__name__} has no linear layer below its head: "
                f"name the modules that get adapters."
            )
        return found
    names = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    for name in names:
        if not _ending_in(model, name):
            raise ValueError(
                f"target_modules has {name!r}, and no module of {type(model).__name__} is called so: "
                f"name some of {', '.join(sorted(_leaf_names(model)))}, or all-linear."
            )
    return list(names)


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
        outside = next((p.dtype for p in module.original_module.parameters() if p.is_floating_point()), None)
        inside = next(module.modules_to_save[_NAME].parameters()).dtype
        if outside is None or outside == inside:
            continue
        module.register_forward_pre_hook(_Cast(inside))
        module.register_forward_hook(_Cast(outside))


class _Cast:
    """A hook that casts floating-point tensors, given or returned; autocast casts by itself."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, _: nn.Module, given: Any, returned: Any = None) -> Any:
        if returned is not None:
            return self._cast(returned)
        return tuple(map(self._cast, given))

    def _cast(self, value: Any) -> Any:
        return value.to(self._dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


# ---------------------------------------------------------------------------------------------- what is written


def adapter_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is written of an adapted model, by the names that peft gives it in files."""
    from peft import get_peft_model_state_dict

    parameters: dict[str, Tensor] = {path: parameter.detach() for path, parameter in model.named_parameters()}
    for path, buffer in model.named_buffers():
        if "modules_to_save" in path:
            parameters[path] = buffer
    # A quantised model's own state dict would be packed for nothing.
    found = get_peft_model_state_dict(model, state_dict=parameters, adapter_name=_NAME, save_embedding_layers=False)
    return {f"base_model.model.{path}": tensor for path, tensor in found.items()}


def config_of(model: nn.Module) -> Any:
    """peft's configuration of the adapters, as written."""
    config: Any = copy.copy(_config(model))
    config.inference_mode = True
    # In a set, they would be written in another order each time.
    config.target_modules = sorted(config.target_modules)
    return config


def merged(model: nn.Module, base: nn.Module) -> nn.Module:
    """``base``, on the host, with the adapters of ``model`` added to its weights and its whole-trained modules put in.

    A head that is tied to the embeddings is untied first if either is changed, so that the other stays as it is.

    Args:
        model: an adapted model, which is left as it is.
        base: the same architecture without adapters and not quantised. Changed in place.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    trained = {path: parameter for path, parameter in model.named_parameters() if parameter.requires_grad}
    with quietly():
        _untie_(base, model)
        inject_adapter_in_model(copy.deepcopy(_config(model)), base, _NAME)
        _take_(base, trained)
        for path, module in list(base.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                base.set_submodule(path, module.get_base_layer())
            elif isinstance(module, ModulesToSaveWrapper):
                whole = module.modules_to_save[_NAME].to(next(module.original_module.parameters()).dtype)
                base.set_submodule(path, whole)
    del base.peft_config
    return base.requires_grad_(True)


def bare(model: nn.Module) -> nn.Module:
    """A copy, on the host, of an adapted model without its adapters; the head and embeddings that are tied stay so."""
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    memo: dict[int, Any] = {}
    for tensor in model.parameters():
        memo[id(tensor)] = nn.Parameter(tensor.detach().to("cpu", copy=True), requires_grad=tensor.requires_grad)
    copied = copy.deepcopy(model, memo)
    for path, module in list(copied.named_modules()):
        if isinstance(module, LoraLayer):
            copied.set_submodule(path, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            copied.set_submodule(path, module.original_module)
    del copied.peft_config
    return copied


def _config(model: Any) -> Any:
    return model.peft_config[_NAME]


def _take_(base: nn.Module, trained: Mapping[str, Tensor]) -> None:
    for path, parameter in base.named_parameters():
        if path in trained:
            # In 32 bits, so that the product of the two matrices is rounded once, as a part of the weight.
            parameter.data = trained[path].detach().to("cpu", torch.float32, copy=True)


def _untie_(base: nn.Module, model: nn.Module) -> None:
    """Give a tied head a weight of its own if the head or the embeddings have been trained."""
    head, find = head_path(base), getattr(base, "get_input_embeddings", None)
    if head is None or find is None:
        return
    layer, embeddings = base.get_submodule(head), find()
    if getattr(layer, "weight", None) is not getattr(embeddings, "weight", object()):
        return
    table = next(path for path, module in base.named_modules() if module is embeddings)
    if not any(path.startswith((f"{head}.", f"{table}.")) for path in _trained_paths(model)):
        return
    layer.weight = nn.Parameter(layer.weight.detach().clone())  # type: ignore[operator]
    # Both say that a model that is read shares the two.
    base.all_tied_weights_keys = {}  # type: ignore[assignment]
    for config in _configs(base):
        config.tie_word_embeddings = False


def _configs(base: nn.Module) -> Iterator[Any]:
    config: Any = base.config
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text


def _trained_paths(model: nn.Module) -> list[str]:
    return [path for path, parameter in model.named_parameters() if parameter.requires_grad]
