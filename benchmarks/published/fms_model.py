"""The model of a run of fms-hf-tuning, as it is before its first step: built by the libraries of its time, without data.

What it takes from where stands in fms.py. The model is built while the simulation records its loading: in which order tensors come
to a card decides which blocks its allocator has left.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memtrain.method import Nf4
from memtrain.models.build import FromConfig
from memtrain.place import placed
from memtrain.trace.event import DEVICE
from published.bitsandbytes_043 import quantize_as_loaded_
from published.fms import framework
from published.models import model_config
from published.record import Record

# Tokens that fms-hf-tuning adds by the size of a vocabulary (set_special_tokens_dict in data/tokenizer_utils.py): Llama's first
# tokenizers have none for padding, and that of Llama 3, which is no LlamaTokenizer, none for unknown words either.
_ADDED = {32000: 1, 128256: 2}
# santacoder's embeddings and head are cut from 49280 to the tokens there are: 49152, five more of the tokenizer and the one for
# padding.
_CUT = {49280: 49158}


@dataclass(frozen=True, kw_only=True)
class FmsModel(FromConfig):
    """A source whose model is that of a record.

    Attributes:
        config: of the environment's transformers.
        record: what the model is changed by.
    """

    record: Record

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model on torch's default device; ``dtype`` is the record's own."""
        return _built(self.config, self.record)

    load = build


def source(record: Record) -> FmsModel:
    """The source of the model of a record."""
    _take_flash_attention()
    transformers: Any = importlib.import_module("transformers")
    kind, settings = model_config(record)
    config = transformers.CONFIG_MAPPING[kind](**_as_trained_on(kind, settings, record))
    config._attn_implementation = "flash_attention_2"
    return FmsModel(config, record=record)


def _as_trained_on(kind: str, settings: Mapping[str, Any], record: Record) -> dict[str, Any]:
    """The published settings, with the tokens that there were and room for the rows."""
    published = settings["vocab_size"]
    tokens = _CUT.get(published, published + _ADDED.get(published, 0))
    room = {} if "n_positions" in settings else {"max_position_embeddings": record.seq_len}
    window = {"sliding_window": 4096} if kind == "mistral" else {}
    return {**settings, **room, **window, "vocab_size": tokens}


def _built(config: Any, record: Record) -> nn.Module:
    auto: Any = importlib.import_module("transformers.models.auto.modeling_auto")
    dtype = torch.float16 if "fp16" in record.precision else torch.bfloat16
    model: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).to(dtype)
    if record.method == "qlora" and "gptq" in record.precision.lower():
        model = importlib.import_module("published.gptq").quantize_(model)
    elif record.method == "qlora":
        quantize_as_loaded_(model, Nf4(double_quantization=True), dtype, "meta")
    if record.method != "full":
        model = _with_adapters(model, record)
    if "foak" in framework(record):
        model = importlib.import_module("published.fms_kernels").apply(model, record)
    # Each block by checkpoint's older form, which transformers takes where nothing else is said. Most families let their cache go
    # then, and GPT-BigCode keeps it.
    model.gradient_checkpointing_enable()
    base = model if record.method == "full" else model.get_base_model()
    model.forward = _as_called(model.forward, dtype if "autocast" in record.precision else None, _divides_by_items(base))
    return model  # type: ignore[no-any-return]


def _with_adapters(model: Any, record: Record) -> Any:
    """The model with LoRA adapters in fp32, by this environment's peft."""
    peft: Any = importlib.import_module("peft")
    by_trl = framework(record).startswith("baseline")
    if by_trl:
        # Of packed layers the biases, which stay where they are from here on.
        with placed(DEVICE):
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    # The embedded tokens are then a leaf of the graph, which keeps them.
    model.enable_input_require_grads()
    adapters = peft.LoraConfig(
        r=record.lora_rank,
        lora_alpha=16,
        lora_dropout=record.lora_dropout or 0.0,
        # What is not the name of a module is found in no model.
        target_modules=list(record.lora_targets or ()),
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(model, adapters)
    for parameter in model.parameters():
        if parameter.requires_grad:
            # peft does this to tensors with data, and leaves those without as they are.
            parameter.data = parameter.data.to(torch.float32)
    return _cast_by_trl_(model) if by_trl else model


def _cast_by_trl_(model: nn.Module) -> nn.Module:
    """Norms in fp32, embeddings and head in bfloat16 (peft_module_casting_to_bf16)."""
    for path, module in model.named_modules():
        if isinstance(module, nn.LayerNorm) or "norm" in path:
            module.to(torch.float32)
        elif any(name in path for name in ("lm_head", "embed_tokens", "wte", "wpe")) and hasattr(module, "weight"):
            module.to(torch.bfloat16)
    return model


def _divides_by_items(model: nn.Module) -> bool:
    """Whether the Trainer gives forward the number of items that the loss is a mean over: from 4.46 on, where it takes any name."""
    transformers: Any = importlib.import_module("transformers")
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    parameters = inspect.signature(type(model).forward).parameters.values()
    return version >= (4, 46) and any(one.kind is one.VAR_KEYWORD for one in parameters)


def _as_called(forward: Callable[..., Any], autocast: torch.dtype | None, divides: bool) -> Callable[..., Any]:
    """What the Trainer calls: forward, and under autocast what it returns in fp32; nothing said about a cache."""
    to_fp32 = importlib.import_module("accelerate.utils.operations").convert_to_fp32

    def called(*args: Any, **kwargs: Any) -> Any:
        if divides:
            # Rows are packed, and every token but the first of each counts.
            kwargs["num_items_in_batch"] = kwargs["labels"].numel()
        if autocast is None:
            return forward(*args, **kwargs)
        with torch.autocast("cuda", dtype=autocast):
            found = forward(*args, **kwargs)
        return to_fp32(found)

    return called


def _take_flash_attention() -> None:
    """Let transformers take the package flash-attn for installed, and torch's own build of those kernels for its function."""
    transformers: Any = importlib.import_module("transformers")
    utilities: Any = importlib.import_module("transformers.modeling_flash_attention_utils")
    # Before a model's module is imported, which takes these functions only where the package is there.
    importlib.import_module("transformers.utils").is_flash_attn_2_available = lambda: True  # type: ignore[attr-defined]
    utilities.flash_attn_func = _flash_attention
    utilities._flash_supports_window_size = True
    transformers.PreTrainedModel._check_and_enable_flash_attn_2 = classmethod(lambda cls, config, *args, **kwargs: config)


def _flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False
) -> Tensor:
    """Of shape (rows, length, heads, size of a head), as the package takes them."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    attended = nn.functional.scaled_dot_product_attention(
        query, key, value, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return attended.transpose(1, 2)
