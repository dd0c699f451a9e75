"""What of a model is trained, and in how many bits the rest is held: facts of the job."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from memtrain.require import require

# In float16, small gradients and updates are lost and a large one is no number, since nothing scales them.
ADAPTER_TYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Full:
    """Every weight that the model leaves trainable."""

    def __str__(self) -> str:
        return "every weight"


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters on a frozen model (Hu et al. 2021, arXiv 2106.09685), by peft.

    Attributes:
        rank: of the two matrices that are added to each target.
        alpha: the product of the two is scaled by alpha / rank, or by alpha / √rank with ``use_rslora``.
        dropout: probability that an input of an adapter is zeroed in training.
        target_modules: ``all-linear`` (every linear layer but the head), one name or several: a module is a target if its
            path ends in one of them.
        modules_to_save: names of modules that are trained whole and saved with the adapters, such as ``lm_head``.
        use_rslora: the scale of Kalajdzievski 2023, arXiv 2312.03732.
        use_dora: a trained length of each column beside the adapters (Liu et al. 2024, arXiv 2402.09353).
        dtype: torch data type of the adapters' weights, gradients and state.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"
    modules_to_save: tuple[str, ...] = ()
    use_rslora: bool = False
    use_dora: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        require(type(self.rank) is int and self.rank >= 1, "rank", self.rank, "a whole number of 1 or more")
        require(0 < self.alpha < math.inf, "alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "from 0 up to, not including, 1")
        require(self.dtype in ADAPTER_TYPES, "dtype", self.dtype, f"one of {', '.join(ADAPTER_TYPES)}")
        for name, rule in (("target_modules", "all-linear or names of modules"), ("modules_to_save", "names of modules")):
            value: object = getattr(self, name)
            names = [value] if isinstance(value, str) else value
            require(isinstance(names, list | tuple) and all(type(one) is str and one for one in names), name, value, rule)
            if isinstance(names, list | tuple) and not (isinstance(value, str) and name == "target_modules"):
                object.__setattr__(self, name, tuple(names))
        require(bool(self.target_modules), "target_modules", self.target_modules, "all-linear or names of modules")

    def __str__(self) -> str:
        kind = f"{'rs' if self.use_rslora else ''}{'DoRA' if self.use_dora else 'LoRA'}"
        targets = self.target_modules if isinstance(self.target_modules, str) else ", ".join(self.target_modules)
        whole = f", {' and '.join(self.modules_to_save)} trained whole" if self.modules_to_save else ""
        return f"{kind} of rank {self.rank} in {self.dtype} on {targets}{whole}"


Method = Full | Lora


@dataclass(frozen=True)
class Unquantized:
    """The frozen weights in the type of the precision."""

    bits: ClassVar[int | None] = None

    def __str__(self) -> str:
        return "not quantised"


@dataclass(frozen=True)
class Nf4:
    """Frozen linear layers in 4-bit NormalFloat, 64 weights to a scale (Dettmers et al. 2023, arXiv 2305.14314), by bitsandbytes.

    Attributes:
        double_quantization: the scales in 8 bits, 256 to a scale: 4.13 bits a weight instead of 4.5.
    """

    bits: ClassVar[int | None] = 4

    double_quantization: bool = True

    def __str__(self) -> str:
        return f"the frozen linear layers in NF4{' with double quantisation' if self.double_quantization else ''}"


@dataclass(frozen=True)
class Int8:
    """Frozen linear layers in 8 bits, a scale to a row (Dettmers et al. 2022, arXiv 2208.07339), by bitsandbytes.

    Attributes:
        threshold: inputs of this size and above go through 16-bit products; 0 for none.
    """

    bits: ClassVar[int | None] = 8

    threshold: float = 6.0

    def __post_init__(self) -> None:
        require(0 <= self.threshold < math.inf, "threshold", self.threshold, "0 or more")

    def __str__(self) -> str:
        return "the frozen linear layers in 8 bits"


Quantization = Unquantized | Nf4 | Int8
