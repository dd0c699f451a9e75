"""Linear layers in GPTQ's 4 bits with torch's operators, as auto-gptq trains adapters on them.

auto_gptq/nn_modules/qlinear/qlinear_cuda.py holds eight weights in each 32-bit integer, zeros likewise, scales in float16 and the
group of each input, and for more than 128 tokens unpacks the whole weight and multiplies it, which autograd then keeps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

GROUP_SIZE = 128
_IN_ONE = 8


class PackedLinear(nn.Linear):
    """A linear layer whose frozen weight is packed; it is one for those that look for linear layers."""

    qweight: Tensor  # (inputs / 8, outputs), int32
    qzeros: Tensor  # (groups, outputs / 8), int32
    scales: Tensor  # (groups, outputs), float16
    g_idx: Tensor  # (inputs,), int64
    shifts: Tensor  # (1, 8), int32

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = layer.in_features, layer.out_features, layer.bias
        groups = -(-layer.in_features // GROUP_SIZE)
        self.register_parameter("weight", None)
        like: dict[str, Any] = {"device": layer.weight.device}
        self.register_buffer(
            "qweight", torch.empty(layer.in_features // _IN_ONE, layer.out_features, dtype=torch.int32, **like)
        )
        self.register_buffer("qzeros", torch.empty(groups, layer.out_features // _IN_ONE, dtype=torch.int32, **like))
        self.register_buffer("scales", torch.empty(groups, layer.out_features, dtype=torch.float16, **like))
        self.register_buffer("g_idx", torch.empty(layer.in_features, dtype=torch.int64, **like))
        self.register_buffer("shifts", torch.empty(1, _IN_ONE, dtype=torch.int32, **like))

    def unpacked(self) -> Tensor:
        """The weight in float16, (inputs, outputs), by the operators of the package."""
        zeros = torch.bitwise_right_shift(self.qzeros.unsqueeze(2).expand(-1, -1, _IN_ONE), self.shifts.unsqueeze(0)).to(
            torch.int8
        )
        zeros = torch.bitwise_and(zeros, 15).add(1).reshape(self.scales.shape)
        weight = torch.bitwise_right_shift(self.qweight.unsqueeze(1).expand(-1, _IN_ONE, -1), self.shifts.unsqueeze(-1))
        weight = torch.bitwise_and(weight.to(torch.int8), 15).reshape(self.in_features, self.out_features)
        return self.scales[self.g_idx] * (weight - zeros[self.g_idx])

    def forward(self, input: Tensor) -> Tensor:
        """The product in the type of the input."""
        weight = self.unpacked()
        out = torch.matmul(input.reshape(-1, self.in_features), weight.to(input.dtype))
        out = out.reshape(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias


def pack_(model: Any) -> None:
    """Pack every linear layer but the head. In place."""
    head = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if type(layer) is nn.Linear and layer is not head:
            for parameter in layer.parameters():
                parameter.requires_grad_(False)
            model.set_submodule(path, PackedLinear(layer))
