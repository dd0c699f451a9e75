"""Linear layers in GPTQ's 4 bits, as fms-acceleration loads them for training: its own modules on data-less tensors.

``fms_acceleration_peft`` brings the layer (gptqmodel/nn_modules/qlinear/qlinear_tritonv2.py): packed weights and zeros in 32-bit
integers, scales in fp16 and the group of each input. Forward and backward each unpack the whole weight to fp16 and multiply it
(triton_utils/dequant.py). Adapters are peft's for GPTQ, without its own test of the layer's class (gptqmodel/utils/peft.py).
"""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from published.fms_kernels import lead_to_dataless_, stand_ins

_PACKAGE = "fms_acceleration_peft"
_FOLDERS = ("", ".gptqmodel", ".gptqmodel.nn_modules", ".gptqmodel.nn_modules.triton_utils")
BITS = 4
# TheBloke's repositories say so in quantize_config.json: groups of 128 inputs share a scale, and from 30 billion parameters on all
# inputs do. The bytes that are published of the end of training are those.
GROUP_SIZE, ONE_GROUP = 128, -1
WITHOUT_GROUPS_FROM = 30e9


def quantize_(model: nn.Module) -> nn.Module:
    """Replace every linear layer by one of GPTQ, but the head and the gates of experts. In place; returns the model."""
    layer_class = _layer_class()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    group_size = ONE_GROUP if parameters > WITHOUT_GROUPS_FROM else GROUP_SIZE
    head = model.get_output_embeddings()  # type: ignore[operator]
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not head and path.rpartition(".")[2] != "gate":
            packed = layer_class(BITS, group_size, layer.in_features, layer.out_features, layer.bias is not None)
            model.set_submodule(path, packed)
    _let_peft_adapt(layer_class)
    # peft then casts nothing to fp32, and the framework fuses adapters.
    model.quantization_method = "gptq"  # type: ignore[assignment]
    return model


def _layer_class() -> Any:
    with stand_ins(*(_PACKAGE + folder for folder in _FOLDERS)):
        found = importlib.import_module(f"{_PACKAGE}.gptqmodel.nn_modules.qlinear.qlinear_tritonv2")
    lead_to_dataless_(f"{_PACKAGE}.gptqmodel.nn_modules.triton_utils")
    return found.QuantLinear


def _let_peft_adapt(layer_class: type[nn.Module]) -> None:
    """Let peft put adapters around these layers, as it does around those of auto_gptq, which is not installed."""
    chosen: Any = importlib.import_module("peft.tuners.lora.model")
    adapted: Any = importlib.import_module("peft.tuners.lora.gptq").QuantLinear

    def dispatch(target: nn.Module, adapter_name: str, **settings: Any) -> nn.Module | None:
        return adapted(target, adapter_name, **settings) if isinstance(target, layer_class) else None

    chosen.dispatch_gptq = dispatch
