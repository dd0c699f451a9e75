"""Tiny configurations of real architectures, each with rows that suit it, for ``architectures.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.data.rows import IGNORED
from memtrain.models.build import ModelSource, source

ROWS, LENGTH, VOCABULARY = 4, 20, 96

Row = dict[str, Tensor]


# ---------------------------------------------------------------------- rows


def _ids(number: int, length: int = LENGTH) -> Tensor:
    return (torch.arange(length) * 7 + number * 13) % (VOCABULARY - 4) + 3


def causal(number: int) -> Row:
    """Tokens whose labels are themselves."""
    ids = _ids(number)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(number: int) -> Row:
    """Tokens of which every third is to be guessed; the last are padding."""
    attention = (torch.arange(LENGTH) < LENGTH - 1 - number % 4).long()
    labels = _ids(number).where((torch.arange(LENGTH) % 3 == 0) & attention.bool(), IGNORED)
    return {"input_ids": _ids(number), "attention_mask": attention, "labels": labels}


def classified(number: int) -> Row:
    """Tokens of one class."""
    return {"input_ids": _ids(number), "labels": torch.tensor(number % 3)}


def translated(number: int) -> Row:
    """Tokens of one language and of another."""
    return {"input_ids": _ids(number), "labels": _ids(number + 1, 12)}


def image(number: int) -> Row:
    """An image of one class."""
    generator = torch.Generator().manual_seed(number)
    return {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": torch.tensor(number % 3)}


def spoken(number: int) -> Row:
    """A spectrogram, and what is said."""
    generator = torch.Generator().manual_seed(number)
    return {"input_features": torch.randn(16, 40, generator=generator), "labels": _ids(number + 1, 12)}


def sequence(number: int) -> Row:
    """Vectors, and one number to be predicted for each."""
    generator = torch.Generator().manual_seed(number)
    return {"x": torch.randn(10, 24, generator=generator), "target": torch.randn(10, 24, generator=generator)}


# ---------------------------------------------------------------------- models that are no one's class


class Encoder(nn.Module):
    """torch's own transformer layers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(24, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.encoder(x), target)


class Perceptron(nn.Module):
    """Equal blocks with a dropout and a buffer, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 24)) for _ in range(4)
        )
        self.register_buffer("scale", torch.full((24,), 0.5))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x) * self.scale
        return nn.functional.mse_loss(x, target)


class Residual(nn.Module):
    """A block of a residual network as torchvision's BasicBlock has it (He et al. 2016, arXiv 1512.03385)."""

    def __init__(self, channels: int, wide: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wide, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(wide)
        self.second = nn.Conv2d(wide, wide, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(wide)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = (
            nn.Identity()
            if stride == 1
            else nn.Sequential(nn.Conv2d(channels, wide, 1, stride, bias=False), nn.BatchNorm2d(wide))
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.first_norm(self.first(x)))
        out = self.second_norm(self.second(out))
        out += self.shortcut(x)
        found: Tensor = self.relu(out)
        return found


class Convolutional(nn.Module):
    """A small residual network with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, 3)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        pooled = self.pool(self.blocks(self.stem(pixel_values)))
        return nn.functional.cross_entropy(self.head(torch.flatten(pooled, 1)), labels)


# ---------------------------------------------------------------------- architectures


@dataclass(frozen=True)
class Architecture:
    """A model and its rows.

    Attributes:
        build: makes the source anew, since training changes a module.
        row: makes row number i.
        whole_batch: whether it normalises over the batch, which then is one micro-batch.
    """

    build: Callable[[], ModelSource]
    row: Callable[[int], Row] = causal
    whole_batch: bool = False

    def rows(self) -> Row:
        """The rows of one effective batch, stacked."""
        found = [self.row(number) for number in range(ROWS)]
        return {name: torch.stack([row[name] for row in found]) for name in found[0]}


# The defaults of these lie outside this vocabulary, which transformers warns about.
_SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTHS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
_TEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **_WIDTHS, **_SPECIAL}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}


def _config(model_type: str, **settings: Any) -> Callable[[], ModelSource]:
    return lambda: source({"model_type": model_type, **settings})


_N = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, **_SPECIAL}
_WIDE = {"vocab_size": VOCABULARY, "d_model": 32, **_SPECIAL}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_BART = {
    **_WIDE,
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 2), ("attention_heads", 4))},
    **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_IMAGE = {"num_labels": 3, "image_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}


def _without(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != name}


def _causal(model_type: str, **settings: Any) -> Architecture:
    return Architecture(_config(model_type, **settings))


def _masked(model_type: str, **settings: Any) -> Architecture:
    return Architecture(_config(model_type, **settings), masked)


def _classes(model_type: str, name: str, row: Callable[[int], Row], **settings: Any) -> Architecture:
    """A classifier of texts or of images."""
    kind = "Sequence" if row is classified else "Image"
    return Architecture(_config(model_type, architectures=[f"{name}For{kind}Classification"], **settings), row)


ARCHITECTURES: Mapping[str, Architecture] = {
    # Decoders.
    "llama": _causal("llama", tie_word_embeddings=True, **_GROUPED),
    "mistral": _causal("mistral", sliding_window=8, **_GROUPED),
    "qwen2": _causal("qwen2", **_GROUPED),
    "qwen3": _causal("qwen3", head_dim=16, **_GROUPED),
    "gemma2": _causal("gemma2", head_dim=16, sliding_window=8, **_GROUPED),
    "gemma3": _causal("gemma3_text", head_dim=16, sliding_window=8, **_GROUPED),
    "phi": _causal("phi", **_TEXT),
    "phi3": _causal("phi3", **_GROUPED),
    "granite": _causal("granite", attention_bias=True, mlp_bias=True, **_TEXT),
    "gpt2": _causal("gpt2", **_N),
    "gpt_neox": _causal("gpt_neox", **_TEXT),
    "gpt_neo": _causal(
        "gpt_neo",
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "window_size": 8, **_SPECIAL},
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),
    "gptj": _causal("gptj", rotary_dim=4, **_N),
    "gpt_bigcode": _causal("gpt_bigcode", multi_query=True, **_N),
    "opt": _causal("opt", ffn_dim=48, word_embed_proj_dim=32, **_without(_TEXT, "intermediate_size")),
    "bloom": _causal("bloom", vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **_SPECIAL),
    "mpt": _causal("mpt", n_layers=2, n_heads=4, max_seq_len=64, **_WIDE),
    "falcon": _causal("falcon", **_TEXT),
    "olmo2": _causal("olmo2", **_GROUPED),
    "stablelm": _causal("stablelm", **_GROUPED),
    "starcoder2": _causal("starcoder2", **_GROUPED),
    "cohere": _causal("cohere", **_GROUPED),
    "smollm3": _causal("smollm3", **_GROUPED),
    "mamba": _causal("mamba", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4, **_SPECIAL),
    # Mixtures of experts.
    "mixtral": _causal("mixtral", **_LOCAL_EXPERTS, **_GROUPED),
    "qwen2_moe": _causal("qwen2_moe", shared_expert_intermediate_size=24, **_EXPERTS, **_GROUPED),
    "qwen3_moe": _causal("qwen3_moe", head_dim=16, **_EXPERTS, **_GROUPED),
    "deepseek_v3": _causal("deepseek_v3", num_key_value_heads=4, first_k_dense_replace=1, **_GROUPS, **_LATENT, **_TEXT),
    "olmoe": _causal("olmoe", **_without(_EXPERTS, "moe_intermediate_size"), **_GROUPED),
    "granitemoe": _causal("granitemoe", **_LOCAL_EXPERTS, **_GROUPED),
    "gpt_oss": _causal("gpt_oss", head_dim=16, sliding_window=8, **_LOCAL_EXPERTS, **_GROUPED),
    # Encoders and decoders.
    "t5": Architecture(_config("t5", **_T5), translated),
    "bart": Architecture(_config("bart", max_position_embeddings=64, **_BART), translated),
    "whisper": Architecture(
        _config(
            "whisper",
            architectures=["WhisperForConditionalGeneration"],
            decoder_start_token_id=1,
            **{"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 64, **_BART},
        ),
        spoken,
    ),
    # Encoders.
    "bert_masked_lm": _masked("bert", **_TEXT),
    "bert_classes": _classes("bert", "Bert", classified, num_labels=3, **_TEXT),
    "roberta": _masked("roberta", **_TEXT),
    "electra": _masked("electra", embedding_size=32, **_TEXT),
    "albert": _masked("albert", embedding_size=16, **_TEXT),
    "deberta_v2": _masked("deberta-v2", **_TEXT),
    "modernbert": _masked(
        "modernbert", global_attn_every_n_layers=2, local_attention=8, cls_token_id=1, sep_token_id=2, **_TEXT
    ),
    # Vision.
    "vit": _classes("vit", "ViT", image, patch_size=4, **_IMAGE, **_WIDTHS),
    "swin": _classes(
        "swin", "Swin", image, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4, **_IMAGE
    ),
    "convnext": _classes("convnext", "ConvNext", image, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, **_IMAGE),
    "mobilenet_v2": replace(_classes("mobilenet_v2", "MobileNetV2", image, **_IMAGE), whole_batch=True),
    "residual_network": Architecture(lambda: source(Convolutional()), image, whole_batch=True),
    # torch alone.
    "torch_encoder": Architecture(lambda: source(Encoder()), sequence),
    "plain_module": Architecture(lambda: source(Perceptron()), sequence),
}

MIXTURES = tuple(name for name, one in ARCHITECTURES.items() if "moe" in name or name in ("mixtral", "deepseek_v3", "gpt_oss"))
"""Architectures whose experts can also run one after another."""
