"""The models of the xMem study: language models by the table of models.py, networks for images by torchvision.

Nothing is fetched. Weights are data-less; libraries are imported where they are used, since a child process finds the
versions of the study there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from published.models import model_config
from published.record import Record
from published.run import NotExpressible

_NETWORKS: Mapping[str, str] = {
    "ConvNeXtBase": "convnext_base",
    "ConvNeXtTiny": "convnext_tiny",
    "MnasNet": "mnasnet1_0",
    "MobeNetV3Large": "mobilenet_v3_large",  # as the study writes it
    "MobeNetV3Small": "mobilenet_v3_small",
    "MobileNetV3Large": "mobilenet_v3_large",
    "MobileNetV3Small": "mobilenet_v3_small",
    "MobileNetV2": "mobilenet_v2",
    "RegNetX400MF": "regnet_x_400mf",
    "RegNetY400MF": "regnet_y_400mf",
    "ResNet101": "resnet101",
    "ResNet152": "resnet152",
    "VGG16": "vgg16",
    "VGG19": "vgg19",
}
"""Networks for images by their names in the study, and the functions of torchvision that build them."""


def language_model(name: str, attention: str) -> nn.Module:
    """The model on data-less tensors, as the study's ``from_config`` makes it.

    Args:
        attention: "eager" or "sdpa".

    Raises:
        NotExpressible: its sizes are not known here.
    """
    import transformers

    kind, settings = model_config(Record(id=name, model=name))
    config = transformers.CONFIG_MAPPING[kind](**settings)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 0
    builder = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = builder.from_config(config, attn_implementation=attention)
    return model


def network(name: str, classes: int) -> nn.Module:
    """The network for images on data-less tensors.

    Raises:
        NotExpressible: torchvision has none of that name.
    """
    if name not in _NETWORKS:
        raise NotExpressible(f"{name} is in the table of networks for images under no name of torchvision's.")
    build: Callable[..., nn.Module] = getattr(_torchvision_models(), _NETWORKS[name])
    try:
        with torch.device("meta"):
            return build(weights=None, num_classes=classes)
    except NotImplementedError:
        # RegNet computes its widths with tensors, which need data.
        return build(weights=None, num_classes=classes).to("meta")


_declared: list[torch.library.Library] = []


def _torchvision_models() -> Any:
    """torchvision's models, whose code is Python and torch.

    Its compiled operators belong to the torch of the study. The networks call none of them, but importing the package
    describes one of them to torch, so that it has to be declared.
    """
    import importlib

    if not _declared:
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        _declared[0].define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return importlib.import_module("torchvision.models")
