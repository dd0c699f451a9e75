"""Metrics of an evaluation beside its loss: what a model returns, collected on the host, and a function of all of it.

Outputs are kept only where metrics are asked for. What is kept of each row is what ``reduce`` leaves: with
``lambda logits, labels: logits.argmax(-1)`` a number for each token, where the logits are as many as the vocabulary has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from memtrain import distributed
from memtrain.data.rows import IGNORED, Batch
from memtrain.plan import ChunkedLogits, WholeLogits

ComputeMetrics = Callable[[Any], Mapping[str, float]]
"""Takes a ``transformers.EvalPrediction`` and returns numbers by name."""
ReduceOutputs = Callable[[Any, Any], Any]
"""Takes logits and labels of a batch, on the device, and returns what is kept of the logits, with as many rows."""


@dataclass(frozen=True)
class Metrics:
    """What is computed of an evaluation.

    Attributes:
        compute: gets the predictions and labels of all rows, in their order: arrays of shape (rows, ...), in which rows that are
            shorter than others are filled up with -100.
        reduce: what is kept of a batch's logits; None for all of them.
    """

    compute: ComputeMetrics
    reduce: ReduceOutputs | None = None


def metrics_of(
    compute: ComputeMetrics | None, reduce: ReduceOutputs | None, constraints: Mapping[str, Any], *, evaluates: bool
) -> tuple[Metrics | None, dict[str, Any]]:
    """What is computed, and the constraints on the plan with that: a loss in chunks has no logits to show.

    Raises:
        ValueError: there is nothing to evaluate on, nothing to reduce for, or the constraints say that there are no logits.
    """
    if compute is None:
        if reduce is not None:
            raise ValueError(
                "reduce_outputs is given, and what it keeps is for compute_metrics alone: give that too, or neither."
            )
        return None, dict(constraints)
    if not evaluates:
        raise ValueError("compute_metrics is given, and there is nothing to evaluate on: give eval_data.")
    if isinstance(constraints.get("loss"), ChunkedLogits):
        raise ValueError(
            "compute_metrics reads logits, and the constraints say that the loss is chunked_logits, which has none: leave one out."
        )
    return Metrics(compute, reduce), {**constraints, "loss": WholeLogits()}


class Collected:
    """The outputs of one evaluation, batch by batch, on the host."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._predictions: list[Any] = []
        self._labels: list[Any] = []

    def see(self, batch: Batch, output: Any) -> None:
        """Keep of a batch what the metrics need.

        Raises:
            ValueError: what is to be kept does not have the rows of the batch.
        """
        found, labels = _beside_loss(output), batch.get("labels")
        reduced = found if self._metrics.reduce is None else self._metrics.reduce(found, labels)
        kept, rows = _on_host(reduced), len(next(iter(batch.values())))
        for one in _each(kept):
            if not isinstance(one, np.ndarray) or not one.ndim or len(one) != rows:
                is_a = f"an array of shape {one.shape}" if isinstance(one, np.ndarray) else f"a {type(one).__name__}"
                raise ValueError(
                    f"for metrics {is_a} was to be kept of a batch of {rows} rows, and tensors are needed whose first dimension is "
                    f"the rows: return such from reduce_outputs."
                )
        self._predictions.append(kept)
        self._labels.append(_on_host(labels))

    def result(self, order: Sequence[int]) -> dict[str, float]:
        """The metrics by name, ``eval_`` before each; of several processes the first computes them for all.

        Args:
            order: the numbers of the rows of this process as they were seen.

        Raises:
            ValueError: the function returned something else than numbers by name.
        """
        from transformers import EvalPrediction

        parts = distributed.gathered((list(order), self._predictions, self._labels))
        places = np.argsort([number for part in parts for number in part[0]], kind="stable")

        def computed() -> dict[str, float]:
            predictions, labels = (_whole([batch for part in parts for batch in part[kind]], places) for kind in (1, 2))
            return _named(self._metrics.compute(EvalPrediction(predictions=predictions, label_ids=labels)))

        return distributed.from_first(computed)


def _beside_loss(output: Any) -> Any:
    """What a model returned beside its loss: its logits, or all of it where nothing is called so."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple | list):
        rest = tuple(value for value in output if not (isinstance(value, Tensor) and not value.dim()))
    else:
        fields = dict(output) if isinstance(output, Mapping) else vars(output)
        if fields.get("logits") is not None:
            return fields["logits"]
        rest = tuple(value for name, value in fields.items() if name != "loss" and value is not None)
    return rest[0] if len(rest) == 1 else rest


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach()
        return (value.float() if value.dtype is torch.bfloat16 else value).cpu().numpy()
    return tuple(map(_on_host, value)) if isinstance(value, tuple | list) else value


def _each(kept: Any) -> Sequence[Any]:
    return kept if isinstance(kept, tuple) else (kept,)


def _whole(batches: Sequence[Any], places: Any) -> Any:
    """The batches as one, in the order of the rows; what is shorter is filled up at the right."""
    if batches[0] is None:
        return None
    if isinstance(batches[0], tuple):
        return tuple(_whole([batch[number] for batch in batches], places) for number in range(len(batches[0])))
    if batches[0].ndim > 1:
        widest = max(batch.shape[1] for batch in batches)
        fill = [[(0, 0), (0, widest - batch.shape[1]), *[(0, 0)] * (batch.ndim - 2)] for batch in batches]
        batches = [np.pad(batch, edges, constant_values=IGNORED) for batch, edges in zip(batches, fill, strict=True)]
    return np.concatenate(batches)[places]


def _named(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise ValueError(f"compute_metrics returned {found!r}, and it must return numbers by name: return a dict of them.")
    named = {}
    for name, value in found.items():
        try:
            named[name if str(name).startswith("eval_") else f"eval_{name}"] = float(value)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"compute_metrics returned a {type(value).__name__} for {name!r}, and what is logged are numbers: return one, or "
                f"leave it out."
            ) from error
    return named
