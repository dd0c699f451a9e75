"""A model with its adapters added to its weights, or without them, on the host.

Adapters are added in by peft. What it leaves open is decided here: in which type, which tied weights part, and what becomes of the
buffers of modules that were trained whole.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.models.adapters import NAME, written_tensors
from memtrain.models.quietly import quietly


def merged(model: nn.Module, base: nn.Module) -> nn.Module:
    """``base``, on the host, with the adapters of ``model`` added to its weights and its whole-trained modules put in.

    Weights that are tied are untied first if one of them is changed, so that the others stay as they are.

    Args:
        model: an adapted model, which is left as it is.
        base: the same architecture without adapters and not quantised. Changed in place.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    trained = written_tensors(model)
    config: Any = model.peft_config[NAME]  # type: ignore[index]
    with quietly():
        _untie_(base, trained)
        inject_adapter_in_model(copy.deepcopy(config), base, NAME)
        _take_(base, trained)
        for path, module in list(base.named_modules()):
            if isinstance(module, LoraLayer):
                module.merge()
                base.set_submodule(path, module.get_base_layer())
            elif isinstance(module, ModulesToSaveWrapper):
                whole = module.modules_to_save[NAME]
                for own, given in zip(whole.parameters(), module.original_module.parameters(), strict=False):
                    own.data = own.data.to(given.dtype)
                base.set_submodule(path, whole)
    del base.peft_config
    return base.requires_grad_(True)


def bare(model: nn.Module) -> nn.Module:
    """A copy, on the host, of an adapted model without its adapters; the head and embeddings that are tied stay so.

    Weights that no adapter is added to are not copied where they are on the host already: they are read and no more.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils import ModulesToSaveWrapper

    changed = {id(one) for module in model.modules() if isinstance(module, LoraLayer) for one in module.parameters()}
    memo: dict[int, Any] = {}
    for tensor in model.parameters():
        own = tensor.detach().to("cpu", copy=id(tensor) in changed)
        memo[id(tensor)] = nn.Parameter(own, requires_grad=tensor.requires_grad)
    copied = copy.deepcopy(model, memo)
    for path, module in list(copied.named_modules()):
        if isinstance(module, LoraLayer):
            copied.set_submodule(path, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            copied.set_submodule(path, module.original_module)
    del copied.peft_config
    return copied


def _take_(base: nn.Module, trained: Mapping[str, Tensor]) -> None:
    for path, parameter in base.named_parameters():
        if path in trained:
            # In 32 bits, so that the product of the two matrices is rounded once, as a part of the weight.
            parameter.data = trained[path].detach().to("cpu", torch.float32, copy=True)
    for path, buffer in base.named_buffers():
        if path in trained:
            buffer.data = trained[path].detach().to("cpu", copy=True)


def _untie_(base: nn.Module, trained: Mapping[str, Tensor]) -> None:
    """Give each tied weight memory of its own if one of those that it is tied to has been trained."""
    ties: dict[str, str] = getattr(base, "all_tied_weights_keys", None) or {}
    owners = {path.rpartition(".")[0] for path in (*ties, *ties.values())}
    if owners.isdisjoint(map(_owner, trained)):
        return
    for path in ties:
        owner, _, name = path.rpartition(".")
        layer = base.get_submodule(owner)
        setattr(layer, name, nn.Parameter(getattr(layer, name).detach().clone()))
    # Both say that a model that is read shares them.
    base.all_tied_weights_keys = {}  # type: ignore[assignment]
    for config in _configs(base):
        config.tie_word_embeddings = False


def _owner(path: str) -> str:
    """The module of the base that a trained tensor belongs to."""
    plain, adapter, _ = path.replace(f".modules_to_save.{NAME}", "").partition(".lora_")
    return plain if adapter else plain.rpartition(".")[0]


def _configs(base: nn.Module) -> Iterator[Any]:
    config: Any = base.config
    yield config
    text = config.get_text_config()
    if text is not config:
        yield text
