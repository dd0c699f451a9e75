"""Which modules of a model get adapters, read from the names that a record gives: those of many libraries for the same layers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from published.run import NotExpressible

_ROLES = {
    **dict.fromkeys(("q", "q_proj", "query", "wq"), ("q",)),
    **dict.fromkeys(("k", "k_proj", "key", "wk"), ("k",)),
    **dict.fromkeys(("v", "v_proj", "value", "wv"), ("v",)),
    **dict.fromkeys(("o", "o_proj", "output_proj", "out_proj", "wo", "proj"), ("o",)),
    **dict.fromkeys(("qkv", "c_attn", "qkv_proj", "query_key_value", "wqkv", "w_pack"), ("q", "k", "v")),
    **dict.fromkeys(("gate", "gate_proj", "w1"), ("gate",)),
    **dict.fromkeys(("up", "up_proj", "w3", "fc1", "c_fc", "dense_h_to_4h"), ("up",)),
    **dict.fromkeys(("down", "down_proj", "w2", "fc2", "dense_4h_to_h"), ("down",)),
    **dict.fromkeys(("mlp", "ffn"), ("gate", "up", "down")),
    **dict.fromkeys(("attn", "attention"), ("q", "k", "v", "o")),
    **dict.fromkeys(("wte", "embed_tokens", "embedding", "embeddings"), ("embedding",)),
    **dict.fromkeys(("lm_head", "head"), ("head",)),
}
# In the files that come with the first Qwen models, w2 goes with the gate, w1 goes up, and both c_proj go down.
_QWEN = {"w1": ("up",), "w2": ("gate",), "c_proj": ("o", "down")}
_GATED: dict[str, tuple[str, ...]] = {
    **{role: (f"{role}_proj",) for role in ("q", "k", "v", "o", "gate", "up", "down")},
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
}
_FUSED_NEOX: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v"), ("query_key_value",)),
    "o": ("dense",),
    "gate": ("dense_h_to_4h",),
    "up": ("dense_h_to_4h",),
    "down": ("dense_4h_to_h",),
}
_GPT2: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("q", "k", "v"), ("c_attn",)),
    "o": ("attn.c_proj",),
    "gate": ("c_fc",),
    "up": ("c_fc",),
}
_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "phi": {**_GATED, "o": ("dense",), "gate": ("fc1",), "up": ("fc1",), "down": ("fc2",)},
    "phi3": {**_GATED, **dict.fromkeys(("q", "k", "v"), ("qkv_proj",)), **dict.fromkeys(("gate", "up"), ("gate_up_proj",))},
    "glm": {**_GATED, **dict.fromkeys(("gate", "up"), ("gate_up_proj",))},
    "opt": {**_GATED, "o": ("out_proj",), "gate": ("fc1",), "up": ("fc1",), "down": ("fc2",)},
    "starcoder2": {**_GATED, "gate": ("c_fc",), "up": ("c_fc",), "down": ("c_proj",)},
    "gpt2": {**_GPT2, "down": ("mlp.c_proj",)},
    "gpt_bigcode": {**_GPT2, "down": ("mlp.c_proj",)},
    **dict.fromkeys(("gpt_neox", "falcon", "bloom"), _FUSED_NEOX),
    **{kind: {"q": ("query",), "k": ("key",), "v": ("value",)} for kind in ("bert", "roberta", "vit")},
    "t5": {"q": ("q",), "k": ("k",), "v": ("v",), "o": ("o",), "gate": ("wi_0", "wi"), "up": ("wi_1",), "down": ("wo",)},
}


@dataclass(frozen=True)
class Targets:
    """Which modules get adapters, by name or "all-linear", and which train whole."""

    modules: str | tuple[str, ...]
    whole: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()


def targets(said: Sequence[str] | None, model_type: str) -> Targets:
    """What the words of ``lora_targets`` say, as names of modules of a model type of transformers.

    Raises:
        NotExpressible: a word is the name of no module that is known.
    """
    assumed: tuple[str, ...] = ()
    if not said:
        said, assumed = ("q", "v"), ("adapters are on the queries and values, peft's default",)
    text = " ".join(said).lower()
    if re.search(r"\ball(?:[ -_]*(?:linear|layers|modules))\b", text):
        return Targets("all-linear", assumed=assumed)
    qwen = model_type == "qwen2" and re.search(r"c_attn|c_proj", text) is not None
    if "?" in text or "default" in text:
        assumed = (*assumed, f"the adapters' targets are {', '.join(said)}")
    known = {**_ROLES, **_QWEN} if qwen else _ROLES
    names = _NAMES.get(model_type, _GATED)
    modules: list[str] = []
    for one in said:
        words = re.findall(r"[a-z]\w*", one.lower())
        roles = [role for word in words for role in known.get(word, ())]
        here = [name for role in roles for name in names.get(role, ())]
        # A name that is the model's own, such as that of a norm, is taken as it stands.
        modules += here or ([] if roles else words[:1])
    if qwen and "c_attn" in text:
        assumed = (*assumed, "the one projection of queries, keys and values is three")
    whole = tuple(one for one in dict.fromkeys(modules) if one in ("embed_tokens", "lm_head"))
    inner = tuple(one for one in dict.fromkeys(modules) if one not in whole)
    if not inner:
        raise NotExpressible(f"the adapters' targets {list(said)} name no module of a {model_type} model")
    return Targets(inner, whole, assumed)
