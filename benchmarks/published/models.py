"""Which model a record names: its family in transformers and the settings that decide its shapes.

A table by name, of what the models' own config.json files say; for a name that is not there, the architecture that the record
gives, as a model of the Llama, the Mixtral or the GPT-NeoX kind. Nothing is fetched, and no library is loaded.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from published.record import Record
from published.run import NotExpressible

# The families of these name their sizes alike. In this order: layers, hidden size, heads, key-value heads, size of the
# MLP, vocabulary; "tied" where the head is the embedding; then what else is not the family's default.
_SIZES = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads"),
    *("intermediate_size", "vocab_size"),
)
_TABLE = """
llama-7b              llama     32  4096  32  32 11008  32000
llama-13b             llama     40  5120  40  40 13824  32000
llama-30b             llama     60  6656  52  52 17920  32000
llama-33b             llama     60  6656  52  52 17920  32000
llama-65b             llama     80  8192  64  64 22016  32000
llama-2-7b            llama     32  4096  32  32 11008  32000
llama-2-13b           llama     40  5120  40  40 13824  32000
llama-2-70b           llama     80  8192  64   8 28672  32000
vicuna-7b             llama     32  4096  32  32 11008  32000
vicuna-13b            llama     40  5120  40  40 13824  32000
codellama-7b          llama     32  4096  32  32 11008  32016
codellama-13b         llama     40  5120  40  40 13824  32016
codellama-34b         llama     48  8192  64   8 22016  32000
open-llama-3b         llama     26  3200  32  32  8640  32000
open-llama-7b         llama     32  4096  32  32 11008  32000
open-llama-13b        llama     40  5120  40  40 13824  32000
llama-3-8b            llama     32  4096  32   8 14336 128256
llama-3-70b           llama     80  8192  64   8 28672 128256
llama-3.1-8b          llama     32  4096  32   8 14336 128256
llama-3.1-70b         llama     80  8192  64   8 28672 128256
llama-3.1-405b        llama    126 16384 128   8 53248 128256
llama-3.2-1b          llama     16  2048  32   8  8192 128256 tied head_dim=64
llama-3.2-3b          llama     28  3072  24   8  8192 128256 tied head_dim=128
llama-3.3-70b         llama     80  8192  64   8 28672 128256
deepseek-r1-distill-llama-8b llama 32 4096 32 8 14336 128256
tinyllama-1.1b        llama     22  2048  32   4  5632  32000
smollm-135m           llama     30   576   9   3  1536  49152 tied
smollm-360m           llama     32   960  15   5  2560  49152 tied
smollm-1.7b           llama     24  2048  32  32  8192  49152 tied
smollm2-135m          llama     30   576   9   3  1536  49152 tied
smollm2-360m          llama     32   960  15   5  2560  49152 tied
smollm2-1.7b          llama     24  2048  32  32  8192  49152 tied
yi-6b                 llama     32  4096  32   4 11008  64000
yi-34b                llama     60  7168  56   8 20480  64000
deepseek-llm-7b       llama     30  4096  32  32 11008 102400
internlm2-7b          llama     32  4096  32   8 14336  92544
internlm2-20b         llama     48  6144  48   8 16384  92544
baichuan2-7b          llama     32  4096  32  32 11008 125696
mistral-7b            mistral   32  4096  32   8 14336  32000
mistral-7b-v0.3       mistral   32  4096  32   8 14336  32768
zephyr-7b             mistral   32  4096  32   8 14336  32000
mistral-nemo          mistral   40  5120  32   8 14336 131072 head_dim=128
mistral-small-24b     mistral   40  5120  32   8 32768 131072 head_dim=128
mixtral-8x7b          mixtral   32  4096  32   8 14336  32000
mixtral-8x22b         mixtral   56  6144  48   8 16384  32000
qwen-1.8b             qwen2     24  2048  16  16  5504 151936
qwen-7b               qwen2     32  4096  32  32 11008 151936
qwen-14b              qwen2     40  5120  40  40 13696 152064
qwen-72b              qwen2     80  8192  64  64 24576 152064
qwen1.5-0.5b          qwen2     24  1024  16  16  2816 151936 tied
qwen1.5-1.8b          qwen2     24  2048  16  16  5504 151936
qwen1.5-4b            qwen2     40  2560  20  20  6912 151936
qwen1.5-7b            qwen2     32  4096  32  32 11008 151936
qwen1.5-14b           qwen2     40  5120  40  40 13696 152064
qwen1.5-32b           qwen2     64  5120  40   8 27392 152064
qwen1.5-72b           qwen2     80  8192  64  64 24576 152064
qwen2-0.5b            qwen2     24   896  14   2  4864 151936 tied
qwen2-1.5b            qwen2     28  1536  12   2  8960 151936 tied
qwen2-7b              qwen2     28  3584  28   4 18944 152064
qwen2-72b             qwen2     80  8192  64   8 29568 152064
qwen2.5-0.5b          qwen2     24   896  14   2  4864 151936 tied
qwen2.5-1.5b          qwen2     28  1536  12   2  8960 151936 tied
qwen2.5-3b            qwen2     36  2048  16   2 11008 151936 tied
qwen2.5-7b            qwen2     28  3584  28   4 18944 152064
qwen2.5-14b           qwen2     48  5120  40   8 13824 152064
qwen2.5-32b           qwen2     64  5120  40   8 27648 152064
qwen2.5-72b           qwen2     80  8192  64   8 29568 152064
deepseek-r1-distill-qwen-1.5b qwen2 28 1536 12 2  8960 151936
deepseek-r1-distill-qwen-7b   qwen2 28 3584 28 4 18944 152064
mimo-7b               qwen2     36  4096  32   8 11008 151680
qwen3-0.6b            qwen3     28  1024  16   8  3072 151936 tied head_dim=128
qwen3-1.7b            qwen3     28  2048  16   8  6144 151936 tied head_dim=128
qwen3-4b              qwen3     36  2560  32   8  9728 151936 tied head_dim=128
qwen3-8b              qwen3     36  4096  32   8 12288 151936 head_dim=128
qwen3-14b             qwen3     40  5120  40   8 17408 151936 head_dim=128
qwen3-32b             qwen3     64  5120  64   8 25600 151936 head_dim=128
qwen3-30b-a3b         qwen3_moe 48  2048  32   4  6144 151936 head_dim=128 moe_intermediate_size=768 num_experts=128 num_experts_per_tok=8
gemma-2b              gemma     18  2048   8   1 16384 256000 tied head_dim=256
gemma-7b              gemma     28  3072  16  16 24576 256000 tied head_dim=256
gemma-2-2b            gemma2    26  2304   8   4  9216 256000 tied head_dim=256
gemma-2-9b            gemma2    42  3584  16   8 14336 256000 tied head_dim=256
gemma-2-27b           gemma2    46  4608  32  16 36864 256000 tied head_dim=128
gemma-3-270m          gemma3_text 18 640   4   1  2048 262144 tied head_dim=256
gemma-3-1b            gemma3_text 26 1152  4   1  6912 262144 tied head_dim=256
gemma-3-4b            gemma3_text 34 2560  8   4 10240 262208 tied head_dim=256
gemma-3-12b           gemma3_text 48 3840 16   8 15360 262208 tied head_dim=256
gemma-3-27b           gemma3_text 62 5376 32  16 21504 262208 tied head_dim=128
phi-1                 phi       24  2048  32  32  8192  51200
phi-1.5               phi       24  2048  32  32  8192  51200
phi-2                 phi       32  2560  32  32 10240  51200
phi-3-mini            phi3      32  3072  32  32  8192  32064
phi-3.5-mini          phi3      32  3072  32  32  8192  32064
phi-3-medium          phi3      40  5120  40  10 17920  32064
phi-4                 phi3      40  5120  40  10 17920 100352
phi-4-mini            phi3      32  3072  24   8  8192 200064 tied
stablelm-3b-4e1t      stablelm  32  2560  32  32  6912  50304
stablelm-2-1.6b       stablelm  24  2048  32  32  5632 100352 use_qkv_bias=1
starcoder2-3b         starcoder2 30 3072  24   2 12288  49152 tied
starcoder2-7b         starcoder2 32 4608  36   4 18432  49152 tied
powerlm-3b            granite   40  2304  36  36  9216  49152 tied attention_bias=1 mlp_bias=1
granite-3.0-2b        granite   40  2048  32   8  8192  49155 tied
granite-3.1-2b        granite   40  2048  32   8  8192  49155 tied
granite-3.0-8b        granite   40  4096  32   8 12800  49155 tied
granite-3.1-8b        granite   40  4096  32   8 12800  49155 tied
olmo-1b               olmo      16  2048  16  16  8192  50304 tied
olmo-7b               olmo      32  4096  32  32 11008  50304
olmo-2-7b             olmo2     32  4096  32  32 11008 100352
olmo-3-7b             olmo3     32  4096  32  32 11008 100278
olmo-3-1025-7b        olmo3     32  4096  32  32 11008 100278
chatglm2-6b           glm       28  4096  32   2 13696  65024 head_dim=128 attention_bias=1 pad_token_id=0
chatglm3-6b           glm       28  4096  32   2 13696  65024 head_dim=128 attention_bias=1 pad_token_id=0
glm-4-9b              glm       40  4096  32   2 13696 151552 head_dim=128 attention_bias=1 pad_token_id=0
hunyuan-0.5b          hunyuan_v1_dense 24 1024 16 8 3584 120818 tied head_dim=128
gpt-oss-20b           gpt_oss   24  2880  64   8  2880 201088 head_dim=64 num_local_experts=32 num_experts_per_tok=4
pythia-70m            gpt_neox   6   512   8   -  2048  50304
pythia-160m           gpt_neox  12   768  12   -  3072  50304
pythia-410m           gpt_neox  24  1024  16   -  4096  50304
pythia-1b             gpt_neox  16  2048   8   -  8192  50304
pythia-1.4b           gpt_neox  24  2048  16   -  8192  50304
pythia-2.8b           gpt_neox  32  2560  32   - 10240  50304
pythia-6.9b           gpt_neox  32  4096  32   - 16384  50432
pythia-12b            gpt_neox  36  5120  40   - 20480  50688
gpt-neox-20b          gpt_neox  44  6144  64   - 24576  50432
stablelm-base-alpha-3b gpt_neox 16  4096  32   - 16384  50688
stablelm-base-alpha-7b gpt_neox 16  6144  48   - 24576  50432
falcon-7b             falcon    32  4544  71   -     -  65024 tied multi_query=1 parallel_attn=1
falcon-40b            falcon    60  8192 128   -     -  65024 tied num_kv_heads=8 new_decoder_architecture=1
bert-base-uncased     bert      12   768  12   -  3072  30522 tied
bert-base-cased       bert      12   768  12   -  3072  28996 tied
bert-large-uncased    bert      24  1024  16   -  4096  30522 tied
bert-large-cased      bert      24  1024  16   -  4096  28996 tied
roberta-base          roberta   12   768  12   -  3072  50265 tied max_position_embeddings=514 type_vocab_size=1
roberta-large         roberta   24  1024  16   -  4096  50265 tied max_position_embeddings=514 type_vocab_size=1
modernbert-base       modernbert 22  768  12   -  1152  50368 tied
modernbert-large      modernbert 28 1024  16   -  2624  50368 tied
"""

# Families with names of their own, or with sizes that follow from others.
_GPT2 = ("n_layer", "n_embd", "n_head", "vocab_size")
_OPT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "ffn_dim")
_T5 = ("num_layers", "d_model", "d_kv", "d_ff", "num_heads")
_VIT = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "patch_size")
_OTHERS: dict[str, tuple[str, tuple[str, ...], tuple[int, ...], Mapping[str, Any]]] = {
    **{
        name: ("gpt2", _GPT2, sizes, {})
        for name, sizes in {
            "distilgpt2": (6, 768, 12, 50257),
            "gpt2": (12, 768, 12, 50257),
            "gpt2-medium": (24, 1024, 16, 50257),
            "gpt2-large": (36, 1280, 20, 50257),
            "gpt2-xl": (48, 1600, 25, 50257),
        }.items()
    },
    "cerebras-gpt-111m": (
        "gpt2",
        _GPT2,
        (10, 768, 12, 50257),
        {
            "n_inner": 3072,
            "n_positions": 2048,
            "activation_function": "gelu",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
    "gpt-bigcode-santacoder": ("gpt_bigcode", _GPT2, (24, 2048, 16, 49280), {"n_inner": 8192, "n_positions": 2048}),
    "santacoder": ("gpt_bigcode", _GPT2, (24, 2048, 16, 49280), {"n_inner": 8192, "n_positions": 2048}),
    "starcoder": ("gpt_bigcode", _GPT2, (40, 6144, 48, 49152), {"n_inner": 24576, "n_positions": 8192}),
    **{
        f"lfm2-{size}": (
            "lfm2",
            _SIZES,
            sizes,
            {"full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_word_embeddings": True},
        )
        for size, sizes in {"350m": (16, 1024, 16, 8, 6656, 65536), "1.2b": (16, 2048, 32, 8, 12288, 65536)}.items()
    },
    "gpt-j-6b": ("gptj", _GPT2, (28, 4096, 16, 50400), {"rotary_dim": 64, "tie_word_embeddings": False}),
    **{
        f"gpt-neo-{size}": (
            "gpt_neo",
            ("num_layers", "hidden_size", "num_heads"),
            sizes,
            {"attention_types": [[["global", "local"], sizes[0] // 2]], "vocab_size": 50257},
        )
        for size, sizes in {"125m": (12, 768, 12), "1.3b": (24, 2048, 16), "2.7b": (32, 2560, 20)}.items()
    },
    **{
        f"bloom-{size}": ("bloom", ("n_layer", "hidden_size", "n_head"), sizes, {"vocab_size": 250880})
        for size, sizes in {
            "560m": (24, 1024, 16),
            "1b1": (24, 1536, 16),
            "1b7": (24, 2048, 16),
            "3b": (30, 2560, 32),
            "7b1": (30, 4096, 32),
        }.items()
    },
    **{
        f"opt-{size}": (
            "opt",
            _OPT,
            sizes,
            {"word_embed_proj_dim": sizes[1], "vocab_size": 50272, "tie_word_embeddings": True},
        )
        for size, sizes in {
            "125m": (12, 768, 12, 3072),
            "1.3b": (24, 2048, 32, 8192),
            "2.7b": (32, 2560, 32, 10240),
            "6.7b": (32, 4096, 32, 16384),
            "13b": (40, 5120, 40, 20480),
            "30b": (48, 7168, 56, 28672),
            "66b": (64, 9216, 72, 36864),
        }.items()
    },
    "opt-350m": (
        "opt",
        _OPT,
        (24, 1024, 16, 4096),
        {"word_embed_proj_dim": 512, "do_layer_norm_before": False, "vocab_size": 50272, "tie_word_embeddings": True},
    ),
    **{
        name: ("t5", _T5, sizes, {"vocab_size": 32128, "feed_forward_proj": "relu", "tie_word_embeddings": True})
        for name, sizes in {
            "t5-small": (6, 512, 64, 2048, 8),
            "t5-base": (12, 768, 64, 3072, 12),
            "t5-large": (24, 1024, 64, 4096, 16),
            "t5-3b": (24, 1024, 128, 16384, 32),
        }.items()
    },
    **{
        name: ("t5", _T5, sizes, {"vocab_size": 32128, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False})
        for name, sizes in {
            "flan-t5-small": (8, 512, 64, 1024, 6),
            "flan-t5-base": (12, 768, 64, 2048, 12),
            "flan-t5-large": (24, 1024, 64, 2816, 16),
            "flan-t5-xl": (24, 2048, 64, 5120, 32),
            "flan-t5-xxl": (24, 4096, 64, 10240, 64),
            "t0_3b": (24, 2048, 64, 5120, 32),
        }.items()
    },
    **{
        name: ("vit", _VIT, sizes, {"num_labels": 1000, "architectures": ["ViTForImageClassification"]})
        for name, sizes in {
            "vit-b-16": (12, 768, 12, 3072, 16),
            "vit-b-32": (12, 768, 12, 3072, 32),
            "vit-l-16": (24, 1024, 16, 4096, 16),
            "vit-l-32": (24, 1024, 16, 4096, 32),
            "vit-h-14": (32, 1280, 16, 5120, 14),
        }.items()
    },
    "distilbert-base-uncased": (
        "distilbert",
        ("n_layers", "dim", "hidden_dim", "n_heads"),
        (6, 768, 3072, 12),
        {"vocab_size": 30522},
    ),
}

# Words that tell a publisher's copy, a training stage or a packaging from another, and change no shape.
_SAME = re.compile(
    r"(^|-)(meta|torchvision|hf|chat|instruct|it|sft|dpo|rl|beta|gptq|awq|bnb-4bit|v0\.[12]|v1\.[0-9]|128k|100k|8k|4k|deduped|preview"
    r"|intermediate-step.*)(?=-|$)"
)


def model_config(record: Record) -> tuple[str, dict[str, Any]]:
    """The model type of transformers and the settings that decide the model's shapes, as published.

    Raises:
        NotExpressible: the name is unknown, and the record's architecture is missing or of no kind that is known.
    """
    table, name = _by_spelling(), spelled(record.model)
    # Publishers call the model that is not tuned for chats by this word, and some models have it in their own name.
    known = table.get(name) or table.get(name.removesuffix("base"))
    if known is not None:
        kind, settings = known
        return kind, dict(settings)
    if record.arch.get("layers") is None:
        raise NotExpressible(f"the model {record.model!r} is unknown, and the record gives no architecture of it")
    return _from_architecture(record)


def names() -> tuple[str, ...]:
    """The names of the table."""
    return (*_sizes(), *_OTHERS)


def spelled(model: str) -> str:
    """A model's name without its publisher, the words that change no shape, and what separates the others.

    >>> spelled("mistralai/Mistral-7B-Instruct-v0.2"), spelled("Qwen/Qwen-1_8B-Chat"), spelled("torchvision vit_l_16")
    ('mistral7b', 'qwen1.8b', 'vitl16')
    """
    name = re.sub(r"(?<=\d)_(?=\d)", ".", model.rsplit("/", 1)[-1].strip().lower())
    return re.sub(r"[-_]", "", _SAME.sub("", re.sub(r"[\s_]+", "-", name)))


@functools.cache
def _by_spelling() -> dict[str, tuple[str, dict[str, Any]]]:
    others = {
        name: (kind, {**dict(zip(keys, sizes, strict=True)), **special})
        for name, (kind, keys, sizes, special) in _OTHERS.items()
    }
    return {spelled(name): found for name, found in (_sizes() | others).items()}


@functools.cache
def _sizes() -> dict[str, tuple[str, dict[str, Any]]]:
    """The table, read."""
    read: dict[str, tuple[str, dict[str, Any]]] = {}
    for line in filter(None, _TABLE.splitlines()):
        name, kind, *rest = line.split()
        settings: dict[str, Any] = {
            key: int(size) for key, size in zip(_SIZES, rest[: len(_SIZES)], strict=True) if size != "-"
        }
        special = rest[len(_SIZES) :]
        settings["tie_word_embeddings"] = "tied" in special
        for key, value in (one.split("=") for one in special if one != "tied"):
            # What a family asks is a flag or a number; a 1 of the flags is True.
            settings[key] = bool(int(value)) if key.endswith(("_bias", "_query", "_attn", "_architecture")) else int(value)
        read[name] = (kind, settings)
    return read


def _from_architecture(record: Record) -> tuple[str, dict[str, Any]]:
    """A model of the sizes that a record gives, for a name that is not known."""
    arch, words = record.arch, str(record.arch.get("extra", "")).lower()
    missing = [key for key in ("hidden", "heads", "ffn", "vocab") if arch.get(key) is None]
    if missing:
        raise NotExpressible(f"the model {record.model!r} is unknown, and its architecture lacks {', '.join(missing)}")
    if any(word in words for word in ("mamba", "ssm", "deltanet", "hybrid", "convolution", "encoder-decoder")):
        raise NotExpressible(f"the model {record.model!r} is unknown, and {words!r} names no kind of which the sizes tell all")
    settings: dict[str, Any] = {
        "num_hidden_layers": arch["layers"],
        "hidden_size": arch["hidden"],
        "num_attention_heads": arch["heads"],
        "intermediate_size": arch["ffn"],
        "vocab_size": arch["vocab"],
        "tie_word_embeddings": bool(arch.get("tied_embeddings")),
    }
    if "encoder" in words:
        return "bert", {**settings, "tie_word_embeddings": True}
    if (
        any(word in words for word in ("gelu", "layernorm", "learned position", "2-mat", "parallel block"))
        and "geglu" not in words
    ):
        if "learned position" in words:
            sizes = (arch["layers"], arch["hidden"], arch["heads"], arch["vocab"])
            kind = "gpt_bigcode" if arch.get("kv_heads") == 1 else "gpt2"
            return kind, {**dict(zip(_GPT2, sizes, strict=True)), "n_inner": arch["ffn"]}
        return "gpt_neox", settings
    settings["num_key_value_heads"] = arch.get("kv_heads") or arch["heads"]
    head_dim = arch.get("head_dim")
    if head_dim is not None:
        settings["head_dim"] = head_dim
    experts = re.search(r"(\d+) experts?.*?top-?(\d+)", words)
    if experts:
        return "mixtral", {**settings, "num_local_experts": int(experts[1]), "num_experts_per_tok": int(experts[2])}
    if "moe" in words.split():
        raise NotExpressible(f"the model {record.model!r} is unknown, and the record does not say how many experts it has")
    if "qk" in words and "norm" in words:
        return "qwen3", settings
    if "bias" in words and ("qkv" in words or "attention" in words):
        return "qwen2", settings
    return "llama", settings
