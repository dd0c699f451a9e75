"""The models of the xMem study: transformers by the sizes of their own config.json, networks for images by torchvision.

Nothing is fetched. Weights are data-less; libraries are imported where they are used, since a child process finds the
versions of the study there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from published.run import NotExpressible

_LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def _llama_like(sizes: tuple[int, ...], vocabulary: int, *, tied: bool, **more: Any) -> dict[str, Any]:
    return {**dict(zip(_LLAMA_SIZES, sizes, strict=True)), "vocab_size": vocabulary, "tie_word_embeddings": tied, **more}


_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "EleutherAI/gpt-neo-125M": (
        "GPTNeo",
        {"num_layers": 12, "hidden_size": 768, "num_heads": 12, "attention_types": [[["global", "local"], 6]]},
    ),
    "openai-community/gpt2": ("GPT2", {}),
    "distilbert/distilgpt2": ("GPT2", {"n_layer": 6}),
    "cerebras/Cerebras-GPT-111M": (
        "GPT2",
        {
            "n_layer": 10,
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "facebook/opt-125m": ("OPT", {}),
    "facebook/opt-350m": (
        "OPT",
        {
            "num_hidden_layers": 24,
            "hidden_size": 1024,
            "ffn_dim": 4096,
            "num_attention_heads": 16,
            "word_embed_proj_dim": 512,
            "do_layer_norm_before": False,
        },
    ),
    "T5-small": ("T5", {"decoder_start_token_id": 0}),
    "t5-base": ("T5", {"num_layers": 12, "d_model": 768, "d_ff": 3072, "num_heads": 12, "decoder_start_token_id": 0}),
    "Qwen/Qwen3-4B": ("Qwen3", _llama_like((36, 2560, 9728, 32, 8), 151936, tied=True, head_dim=128)),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": ("Qwen2", _llama_like((28, 1536, 8960, 12, 2), 151936, tied=False)),
    "meta-llama/Llama-3.2-3B-Instruct": ("Llama", _llama_like((28, 3072, 8192, 24, 8), 128256, tied=True, head_dim=128)),
    "google/gemma-2-2b-it": ("Gemma2", _llama_like((26, 2304, 9216, 8, 4), 256000, tied=True, head_dim=256)),
}
"""Of each model the family in transformers, and what its config.json says otherwise than the family's default."""

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
    if name not in _CONFIGS:
        raise NotExpressible(f"the sizes of {name} are not in the table of models.")
    import transformers

    family, settings = _CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    kind = transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model: nn.Module = kind.from_config(config, attn_implementation=attention)
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
