"""The number formats that a job trains in: a fact, since each trains other numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from memtrain.require import require


@dataclass(frozen=True)
class Fp32:
    """Weights, gradients, optimizer state and activations in 32-bit floating point.

    Attributes:
        tf32: products and convolutions of a card round their inputs to TF32's 10 bits of mantissa, which its matrix units take
            (compute capability 8.0 or newer). No memory is freed.
    """

    tf32: bool = False

    def __str__(self) -> str:
        return f"fp32{' with TF32 products' if self.tf32 else ''} (weights, gradients and optimizer state)"


@dataclass(frozen=True)
class AutocastBf16:
    """Weights, gradients and optimizer state in fp32; products and their activations in bfloat16 by torch.autocast."""

    def __str__(self) -> str:
        return "autocast_bf16 (weights, gradients and optimizer state in fp32, products in bf16)"


@dataclass(frozen=True)
class AutocastFp16:
    """Weights, gradients and optimizer state in fp32; products and their activations in float16 by torch.autocast.

    The loss is scaled so that small gradients are not rounded to 0 (Micikevicius et al. 2018, arXiv 1710.03740): a step whose
    gradient overflows is taken again at half the scale, and after so many steps without one the scale doubles
    (torch.amp.GradScaler).

    Attributes:
        initial_scale: the first scale.
        growth_interval: steps without an overflow after which the scale doubles.
    """

    initial_scale: float = 65536.0
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        # What 20 halvings bring below the largest number of float16 where the gradient is 1.
        require(1 <= self.initial_scale <= 2**32, "initial_scale", self.initial_scale, "from 1 to 4294967296")
        whole = isinstance(self.growth_interval, int) and self.growth_interval >= 1
        require(whole, "growth_interval", self.growth_interval, "a whole number of steps, 1 or more")

    def __str__(self) -> str:
        return "autocast_fp16 (weights, gradients and optimizer state in fp32, products in fp16, the loss scaled)"


class Rounding(StrEnum):
    """How an update in bfloat16 is stored."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"
    COMPENSATED = "compensated"


_ROUNDED = {Rounding.NEAREST: "to nearest", Rounding.STOCHASTIC: "stochastically", Rounding.COMPENSATED: "with compensation"}


@dataclass(frozen=True)
class Bf16:
    """Weights, gradients, optimizer state and activations in bfloat16, nothing kept in 32 bits.

    Half the bytes of fp32. Rounded to nearest, a change of a weight below 1/256 of it is lost, so learning rates are not too
    small and the second moment decays in few steps (betas of 0.9 and 0.95 rather than 0.999). The other two roundings keep
    small changes.

    Attributes:
        rounding: ``nearest``; ``stochastic``: up or down with a chance by the distance, weights and state, so that the mean is
            right (Zamirai et al. 2020, arXiv 2010.06192); ``compensated``: what rounding a weight leaves is kept in bfloat16
            and added in the next update (Kahan), 2 bytes a parameter more.
    """

    rounding: Rounding = Rounding.NEAREST

    def __post_init__(self) -> None:
        known = self.rounding in set(Rounding)
        require(known, "rounding", self.rounding, f"one of {', '.join(Rounding)}")
        # Text from a configuration becomes the member that it names.
        object.__setattr__(self, "rounding", Rounding(self.rounding))

    def __str__(self) -> str:
        return f"bf16 (weights, gradients and optimizer state), updates rounded {_ROUNDED[self.rounding]}"


@dataclass(frozen=True)
class Bf16Master:
    """Weights, gradients and activations in bfloat16, updated through fp32 copies of the weights with state in fp32."""

    def __str__(self) -> str:
        return "bf16_master (weights and gradients in bf16, master weights and optimizer state in fp32)"


Precision = Fp32 | AutocastBf16 | AutocastFp16 | Bf16 | Bf16Master


def weight_type(precision: Precision) -> str:
    """The torch data type of the model's weights, by name."""
    return "bfloat16" if isinstance(precision, Bf16 | Bf16Master) else "float32"


def updates_in_fp32(precision: Precision) -> bool:
    """Whether an update goes through fp32 copies of what is held in 16 bits."""
    return isinstance(precision, Bf16Master) or (isinstance(precision, Bf16) and precision.rounding is not Rounding.NEAREST)


def product_type(precision: Precision) -> str:
    """The data type that products are computed in, as a device names its rates."""
    match precision:
        case Fp32(tf32=tf32):
            return "tf32" if tf32 else "float32"
        case AutocastFp16():
            return "float16"
        case _:
            return "bfloat16"
