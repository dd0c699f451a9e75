"""The job: every fact that changes the numbers trained, and the budget it has to fit into.

What only changes memory and speed is a choice and lives in :mod:`memtrain.plan` (rule 2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from memtrain.method import Full, Int8, Lora, Method, Quantization, Unquantized
from memtrain.precision import Fp32, Precision, updates_in_fp32, weight_type
from memtrain.require import require
from memtrain.units import format_bytes, parse_bytes


def _require_rates(optimizer: Optimizer) -> None:
    """What holds for the hyper-parameters that several rules have."""
    require(0 < optimizer.learning_rate < math.inf, "learning_rate", optimizer.learning_rate, "above 0 and finite")
    require(0 <= optimizer.weight_decay < math.inf, "weight_decay", optimizer.weight_decay, "0 or more")
    if isinstance(optimizer, AdamW | Adam | Lion | Muon):
        rule = "two numbers from 0 up to, not including, 1"
        require(len(optimizer.betas) == 2 and all(0 <= b < 1 for b in optimizer.betas), "betas", optimizer.betas, rule)
    if isinstance(optimizer, AdamW | Adam | Muon):
        require(0 < optimizer.eps < math.inf, "eps", optimizer.eps, "above 0")
    if isinstance(optimizer, Sgd | Muon):
        require(0 <= optimizer.momentum < 1, "momentum", optimizer.momentum, "from 0 up to, not including, 1")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """AdamW with decoupled weight decay (Loshchilov and Hutter, 2019, arXiv 1711.05101).

    Attributes:
        learning_rate: peak of the schedule.
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: applied to parameters of two or more dimensions, so not to biases and norm weights.
    """

    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_rates(self)


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam, whose weight decay is added to the gradient (Kingma and Ba, 2015, arXiv 1412.6980).

    Attributes:
        betas: decay rates of the first and the second moment.
        eps: added to the root of the second moment.
        weight_decay: of the squared weights in the loss, so scaled by the moments like the gradient; AdamW's is not.
    """

    learning_rate: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_rates(self)


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Gradient descent with momentum (Sutskever et al., 2013, proceedings.mlr.press/v28/sutskever13).

    Attributes:
        momentum: the part of the last step that goes on; 0 for none, and no state.
        weight_decay: added to the gradient.
    """

    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_rates(self)


@dataclass(frozen=True, kw_only=True)
class Adafactor:
    """Adafactor: second moments as a row and a column per matrix (Shazeer and Stern, 2018, arXiv 1804.04235).

    Steps are relative to the root mean square of a weight, and in step t the rate is at most 1/√t.

    Attributes:
        beta2_decay: in step t the new squared gradient counts t to this power.
        min_scale: the least root mean square that a weight is taken to have.
        clip_threshold: the most root mean square of a step before the rate.
        weight_decay: decoupled, as AdamW's.
    """

    learning_rate: float = 1e-3
    beta2_decay: float = -0.8
    min_scale: float = 1e-3
    clip_threshold: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_rates(self)
        require(-1 <= self.beta2_decay <= 0, "beta2_decay", self.beta2_decay, "from -1 to 0")
        require(0 < self.min_scale < math.inf, "min_scale", self.min_scale, "above 0")
        require(1 <= self.clip_threshold < math.inf, "clip_threshold", self.clip_threshold, "1 or more")


@dataclass(frozen=True, kw_only=True)
class Lion:
    """Lion: the sign of a momentum (Chen et al., 2023, arXiv 2302.06675).

    Rates a third to a tenth of AdamW's and a weight decay as many times as large.

    Attributes:
        betas: weight of the momentum in the step, and the momentum's decay rate.
        weight_decay: decoupled, as AdamW's.
    """

    learning_rate: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_rates(self)


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for the matrices of hidden layers, AdamW for embeddings, head, norms and biases.

    The momentum of a matrix is made orthogonal by five Newton-Schulz iterations (Jordan et al., 2024,
    kellerjordan.github.io/posts/muon) and scaled to the root mean square of AdamW's steps (Liu et al., 2025,
    arXiv 2502.16982), so that one learning rate and one weight decay serve both.

    Attributes:
        momentum: decay rate of the momentum, Nesterov's.
        weight_decay: decoupled, as AdamW's.
        betas, eps: of AdamW.
    """

    learning_rate: float = 5e-5
    momentum: float = 0.95
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _require_rates(self)


Optimizer = AdamW | Adam | Sgd | Adafactor | Lion | Muon


@dataclass(frozen=True, kw_only=True)
class Constant:
    """The learning rate stays at its peak after ``warmup_steps`` steps of linear warm-up."""

    warmup_steps: int = 0


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine down to ``final_fraction`` of the peak (arXiv 1608.03983, without restarts)."""

    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear warm-up, then a straight line that reaches ``final_fraction`` of the peak when the run is over.

    With no fraction the last step still trains, and the rate would be 0 after it, as with transformers' linear schedule.
    """

    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.final_fraction <= 1, "final_fraction", self.final_fraction, "from 0 to 1")


Schedule = Constant | Cosine | Linear

Loss = Callable[[Any, Any], Any]
"""Makes the loss, a scalar tensor that is the mean over the counted items, of what the model's forward returned and of the batch,
which maps names to tensors."""


class Approximation(StrEnum):
    """What changes the numbers trained beyond rounding, and is only planned where the job allows it."""

    EIGHT_BIT_STATE = "eight_bit_state"


def approximations(names: Collection[str]) -> frozenset[Approximation]:
    """The approximations of these names.

    Raises:
        ValueError: there is none of a name, or the names are one text.

    >>> sorted(approximations(["eight_bit_state"]))
    [<Approximation.EIGHT_BIT_STATE: 'eight_bit_state'>]
    """
    known = ", ".join(Approximation)
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ValueError(f"allow is {names!r}, and it must be a list of approximations: {known}.")
    for name in names:
        if name not in set(Approximation):
            raise ValueError(f"allow has {name!r}, which is none of the approximations that there are: {known}.")
    return frozenset(map(Approximation, names))


class NotFinite(StrEnum):
    """What becomes of a step whose loss or gradient is not finite: the run stops, or goes on without its update."""

    STOP = "stop"
    SKIP = "skip"


def not_finite(name: str) -> NotFinite:
    """What is done where a gradient is not finite, by its name.

    Raises:
        ValueError: there is no such thing.

    >>> not_finite("skip")
    <NotFinite.SKIP: 'skip'>
    """
    require(name in set(NotFinite), "on_not_finite", name, f"{NotFinite.STOP} or {NotFinite.SKIP}")
    return NotFinite(name)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained.

    Attributes:
        model: the model as printed: a path, a hub id, a configuration or a class name.
        global_batch_size: rows per optimizer step, whatever the micro-batch size.
        steps: optimizer steps of the whole run.
        optimizer: the update rule and its hyper-parameters.
        schedule: the learning rate over the steps.
        precision: the number formats trained in.
        method: what of the model is trained.
        quantization: in how many bits the weights that stay frozen are held.
        max_grad_norm: bound on the 2-norm of the whole gradient (arXiv 1211.5063), or None for no clipping.
        on_not_finite: whether a step whose gradient is not finite ends the run or is left out.
        loss: makes the loss of what the model returns and of the batch; None where the model returns its loss. It is told from
            another by its name alone.
        allow: approximations that a plan may use.
        seed: of the weights' initialisation (for a model built from a configuration), of dropout and of the row order.
    """

    model: str
    global_batch_size: int
    steps: int
    optimizer: Optimizer = field(default_factory=AdamW)
    schedule: Schedule = field(default_factory=Cosine)
    precision: Precision = field(default_factory=Fp32)
    method: Method = field(default_factory=Full)
    quantization: Quantization = field(default_factory=Unquantized)
    max_grad_norm: float | None = 1.0
    on_not_finite: NotFinite = NotFinite.STOP
    loss: Loss | None = None
    allow: frozenset[Approximation] = frozenset()
    seed: int = 0

    def __post_init__(self) -> None:
        require(
            isinstance(self.optimizer, Optimizer),
            "optimizer",
            self.optimizer,
            "an AdamW of memtrain or another optimizer of its job module, such as AdamW(learning_rate=5e-5)",
        )
        require(isinstance(self.schedule, Schedule), "schedule", self.schedule, "a Constant, a Cosine or a Linear of memtrain")
        require(
            self.loss is None or callable(self.loss), "loss", self.loss, "a function of what the model returns and of the batch"
        )
        for name, union, example in (
            ("precision", Precision, "Bf16()"),
            ("method", Method, "Lora(rank=16)"),
            ("quantization", Quantization, "Nf4()"),
        ):
            value = getattr(self, name)
            require(isinstance(value, union), name, value, f"one of memtrain's, such as {example}")
        if isinstance(self.method, Full) and not isinstance(self.quantization, Unquantized):
            bits = self.quantization.bits
            raise ValueError(
                f"quantization holds weights in {bits} bits, which cannot be trained, and method is full: "
                f"set method to lora, or quantization to unquantized."
            )
        if isinstance(self.quantization, Int8) and isinstance(self.method, Lora) and self.method.use_dora:
            # peft moves the layer's weight at each forward, which loses its scales.
            raise ValueError(
                "use_dora is true and quantization is int8, in which peft's DoRA does not run: "
                "set quantization to nf4, or use_dora to false."
            )
        not_finite(self.on_not_finite)
        approximations(self.allow)
        require(type(self.seed) is int and 0 <= self.seed < 2**32, "seed", self.seed, "a whole number from 0 to 4294967295")
        for name in ("global_batch_size", "steps"):
            require(
                type(getattr(self, name)) is int and getattr(self, name) >= 1,
                name,
                getattr(self, name),
                "a whole number of 1 or more",
            )
        warmup_steps = self.schedule.warmup_steps
        require(type(warmup_steps) is int and warmup_steps >= 0, "warmup_steps", warmup_steps, "a whole number of 0 or more")
        if self.max_grad_norm is not None:
            require(self.max_grad_norm > 0, "max_grad_norm", self.max_grad_norm, "above 0, or null for no clipping")

    @property
    def trained_type(self) -> str:
        """The torch data type of the weights that are trained, by name."""
        return self.method.dtype if isinstance(self.method, Lora) else weight_type(self.precision)

    @property
    def updates_in_fp32(self) -> bool:
        """Whether weights that are trained are updated through fp32 copies; adapters in fp32 need none."""
        return updates_in_fp32(self.precision) and self.trained_type == "bfloat16"


@dataclass(frozen=True)
class Limit:
    """One bound on bytes and where it comes from."""

    source: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The bytes a plan may take: on each side the smallest limit, on the device less the headroom.

    Attributes:
        limits: of the device: the number asked for, its usable bytes, what is free now; at least one.
        headroom_bytes: kept free below the smallest limit.
        host_limits: of the host's memory beside a card; none where there is no such bound.
    """

    limits: tuple[Limit, ...]
    headroom_bytes: int = 0
    host_limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        assert self.limits
        if self.device_bytes <= 0:
            raise ValueError(
                f"headroom {format_bytes(self.headroom_bytes)} leaves nothing of the {format_bytes(self.tightest.bytes)} "
                f"that are {self.tightest.source}: lower the headroom or raise the budget."
            )

    @classmethod
    def of(cls, text: str, host: str | None = None) -> Self:
        """The budget that ``text`` names (``"4GiB"``), with no other limit.

        >>> Budget.of("4GiB").device_bytes
        4294967296
        >>> Budget.of("24GiB", host="64GiB").host_bytes
        68719476736
        """
        host_limits = () if host is None else (Limit("asked for", parse_bytes(host)),)
        return cls(limits=(Limit("asked for", parse_bytes(text)),), host_limits=host_limits)

    @property
    def tightest(self) -> Limit:
        """The limit of the device that binds."""
        return min(self.limits, key=lambda limit: limit.bytes)

    @property
    def device_bytes(self) -> int:
        """Bytes on the device that a plan may take."""
        return self.tightest.bytes - self.headroom_bytes

    @property
    def host_bytes(self) -> int | None:
        """Bytes of host memory that a plan may take, None where nothing bounds them."""
        return min((limit.bytes for limit in self.host_limits), default=None)
