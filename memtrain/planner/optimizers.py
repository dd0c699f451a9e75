"""What each optimizer takes of memory on a model, as data; planner/updates.py finds it out. Pure Python, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class OptimizerBytes:
    """What one optimizer takes on one model, in bytes.

    Attributes:
        optimizer: class name of the rule.
        kernel: policy of ``plan.optimizer_kernel``, and ``state`` of ``plan.optimizer_state``.
        precision: of weights, gradients and state.
        parameters: trained elements of the model.
        weights, gradients: of the trained parameters.
        optimizer_state: after the first update.
        temporaries: the most that an update holds beside these, scratch inside kernels included.
    """

    optimizer: str
    kernel: str
    state: str
    precision: str
    parameters: int
    weights: int
    gradients: int
    optimizer_state: int
    temporaries: int

    @property
    def total(self) -> int:
        """The peak of an update after backward, without clipping."""
        return self.weights + self.gradients + self.optimizer_state + self.temporaries

    def per_parameter(self, size: int) -> float:
        """Bytes per trained element.

        >>> adamw = dict(optimizer="AdamW", kernel="fused", state="on_device", precision="fp32", parameters=10)
        >>> OptimizerBytes(**adamw, weights=40, gradients=40, optimizer_state=84, temporaries=0).per_parameter(84)
        8.4
        """
        return size / self.parameters


@dataclass(frozen=True)
class OptimizerTable:
    """What the optimizers take, and one sentence for each reason why some are not shown."""

    rows: tuple[OptimizerBytes, ...]
    left_out: tuple[str, ...]
