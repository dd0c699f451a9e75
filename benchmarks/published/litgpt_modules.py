"""The modules of LitGPT records: what a finetuning script does with a micro-batch, and layers that PyPI does not have any more.

The models are LitGPT's own. What is here was read in the sources that each class names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# bitsandbytes: weights to a scale, and scales to a scale of their own.
_BLOCK, _SCALES_BLOCK = 64, 256


class Finetuning(nn.Module):
    """A model with the loss of a finetuning script, and what the script's frame keeps of the micro-batch before.

    Source: ``train`` or ``fit`` in finetune/{lora,adapter,adapter_v2,full}.py. ``logits`` stays until the next forward has returned,
    and with it the nodes of its graph. Where the script prints ``loss.item()``, so does ``loss``; where it prints a running mean,
    that takes the name.

    Before the first micro-batch the script validates, to see that all is well. That decides which blocks the allocator has when
    training begins; and the attention of an adapter keeps the keys and values of its prompt, made without gradients, from then on.

    Args:
        cross_entropy: ``chunked_cross_entropy`` of the model's version.
        head_chunk: tokens that the head makes logits of at once; 0 for all.
        keeps_loss: whether the loss stays too.
    """

    def __init__(self, model: nn.Module, cross_entropy: Callable[..., Tensor], head_chunk: int, keeps_loss: bool) -> None:
        super().__init__()
        self.model = model
        self._cross_entropy = cross_entropy
        self._head_chunk = head_chunk
        self._keeps_loss = keeps_loss
        # Under the names that they have in the script.
        self._logits: Any = None
        self._loss: Tensor | None = None
        self._is_checked = False

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The loss of rows of tokens, (rows, tokens) both."""
        if not self._is_checked:
            self._is_checked = True
            self._validate(input_ids, labels)
        if self._head_chunk:
            self._logits = _in_default_type(self.model(input_ids, lm_head_chunk_size=self._head_chunk))
            self._logits[-1] = self._logits[-1][..., :-1, :]
            loss = self._cross_entropy(self._logits, labels[..., 1:])
        else:
            self._logits = _in_default_type(self.model(input_ids))
            loss = self._cross_entropy(self._logits[..., :-1, :], labels[..., 1:])
        if self._keeps_loss:
            self._loss = loss
        return loss

    @torch.no_grad()
    def _validate(self, input_ids: Tensor, labels: Tensor) -> None:
        """``validate`` in the same files, on two batches of the same shape."""
        self.model.eval()
        for _ in range(2):
            logits = _in_default_type(self.model(input_ids))
            self._cross_entropy(logits[..., :-1, :], labels[..., 1:], chunk_size=0)
        self.model.train()


def _in_default_type(output: Any) -> Any:
    """The model's output as Fabric hands it on: all of it in torch's default type (``convert_output`` in
    lightning/fabric/plugins/precision/half.py and bitsandbytes.py)."""
    if isinstance(output, list):
        return [one.to(torch.get_default_dtype()) for one in output]
    return output.to(torch.get_default_dtype())


class RmsNormOf2023(nn.Module):
    """The norm of 2023, which multiplied by its weight in fp32 (lit_gpt/rmsnorm.py at commit 98898ca); PyPI has later ones only."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """The normalised input, in its type."""
        wide = x.float()
        scale = torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + self._eps)
        normed = wide * scale
        return (self.weight * normed).to(x.dtype)


class PackedLinear(nn.Module):
    """A linear layer whose frozen weight is in 4 bits, as bitsandbytes 0.41 and 0.42 held and multiplied it.

    Neither version runs without a card. Source: Linear4bit in nn/modules.py, quantize_4bit in functional.py; Fabric packs a weight
    from fp16 (``_quantize_weight`` in lightning/fabric/plugins/precision/bitsandbytes.py), which is then what it is unpacked to.

    Args:
        layer: the layer that is packed, on ``meta``.
        double_quantization: whether the scales are in 8 bits, with scales of their own.
    """

    def __init__(self, layer: nn.Linear, double_quantization: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        count = layer.weight.numel()
        blocks = -(-count // _BLOCK)
        self.weight = nn.Parameter(_empty(-(-count // 2), 1, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("absmax", _empty(blocks, dtype=torch.uint8 if double_quantization else torch.float32))
        self.register_buffer("code", _empty(16))
        if double_quantization:
            self.register_buffer("offset", _empty())
            self.register_buffer("absmax_of_absmax", _empty(-(-blocks // _SCALES_BLOCK)))

    def forward(self, x: Tensor) -> Tensor:
        """The product with the unpacked weight."""
        product: Tensor = _ProductIn4Bits.apply(x, self.bias, self)
        return product

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """The weight, unpacked to fp16 and then cast (dequantize_4bit in functional.py)."""
        wide_scales = self.absmax.float() if self.absmax.dtype is torch.uint8 else None
        weight = torch.empty(self.out_features, self.in_features, dtype=torch.float16, device=self.weight.device)
        del wide_scales
        return weight.to(dtype)


class _ProductIn4Bits(torch.autograd.Function):
    """MatMul4Bit in autograd/_functions.py.

    The input is an attribute of the node and not among the tensors saved for backward, so it lives as long as the graph does,
    though no gradient needs it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, layer: PackedLinear) -> Tensor:
        ctx.layer = layer
        ctx.kept = x if ctx.needs_input_grad[0] else None
        return functional.linear(x, layer.unpacked(x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (grad,) = grads
        return torch.matmul(grad, ctx.layer.unpacked(grad.dtype)) if ctx.needs_input_grad[0] else None, None, None


class FeedForward(nn.Module):
    """The example of Lightning's page on tensor parallelism, with the loss of its loop: the sum of the output."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)
        self._kept: Any = None

    def forward(self, x: Tensor) -> Tensor:
        """The loss of rows of inputs, (rows, width)."""
        output = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        loss: Tensor = output.sum()
        # The loop's frame keeps both until they are made anew.
        self._kept = output, loss
        return loss


def pack_(model: nn.Module, double_quantization: bool) -> None:
    """Pack every linear layer, the head among them. In place (``module_init_context`` of Fabric's BitsandbytesPrecision)."""
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear:
            model.set_submodule(path, PackedLinear(layer, double_quantization))


def use_norms_of_2023_(model: nn.Module) -> None:
    """Put the norm of 2023 in the place of each later one. In place."""
    for path, norm in list(model.named_modules()):
        if type(norm).__name__ == "RMSNorm":
            eps: Any = norm.eps
            weight: Any = norm.weight
            model.set_submodule(path, RmsNormOf2023(weight, eps))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
