"""Tiny causal language models of many families, and attention by a stand-in for the flash-attn package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_flash_attention_utils
from transformers.integrations import flash_attention

from memtrain.models.build import source

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

# Those that keep packed rows apart.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6},
    "phi3": {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt2": _GPT2,
    "gpt_neox": {},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16, "output_router_logits": True},
}
# In transformers 5.0 the blocks of GPT-2 hand on nothing that attention of flash-attn is told, so it is refused there. And SDPA
# does not cap scores.
NOT_TOLD = (("gpt2", "flash_attention_2"), ("gemma2", "sdpa"))
# Those that take positions and let rows see each other.
LEAKING: dict[str, dict[str, Any]] = {
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bert": {"is_decoder": True},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default"}},
}


def model_of(kind: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = {**CONFIGS, **LEAKING}.get(kind, {})
    return source({"model_type": kind, **TINY, **config, **settings}).load()


def attend_with(model: Any, attention: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model with an implementation of attention, that of flash-attn with a stand-in for its kernels."""
    if attention.startswith("flash"):
        # transformers asks for a card when it is set, and for the package when it is used; both are answered here.
        for name in ("_check_and_adjust_attn_implementation", "get_correct_attn_implementation"):
            monkeypatch.setattr(PreTrainedModel, name, lambda self, implementation, *_, **__: implementation)
        package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
        vars(package).update(flash_attn_func=_attend, flash_attn_varlen_func=_attend_each, flash_attn_with_kvcache=None)
        vars(padding).update(pad_input=None, unpad_input=None)
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
        monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True)
        monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
        # The real kernels take 16 bits only, so it would look for a type to cast to.
        monkeypatch.setattr(flash_attention, "get_target_dtype", lambda query, module: None)
    model.set_attn_implementation(attention)
    return model


def _attend(
    query: Tensor,  # (rows, tokens, heads, width)
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """What flash_attn_func computes, a window included: so many tokens to the left besides the token itself."""
    assert causal
    assert not dropout_p
    length, heads, dtype = query.shape[1], query.shape[2], query.dtype
    query, key, value = (tensor.transpose(1, 2).float() for tensor in (query, key, value))
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    before = torch.arange(length).unsqueeze(1) - torch.arange(length)
    seen = (before >= 0) & ((before <= window_size[0]) | (window_size[0] < 0))
    return (scores.masked_fill(~seen, -torch.inf).softmax(dim=-1) @ value).transpose(1, 2).to(dtype)


def _attend_each(
    query: Tensor,  # (tokens, heads, width)
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> Tensor:
    """What flash_attn_varlen_func computes: each sequence by itself."""
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) <= min(max_seqlen_q, max_seqlen_k)
    parts = zip(*(tensor.split(lengths) for tensor in (query, key, value)), strict=True)
    settings = dropout_p, softmax_scale, causal, window_size, softcap
    return torch.cat([_attend(*(one.unsqueeze(0) for one in part), *settings)[0] for part in parts])
