"""Data parallel: each process computes the gradients of its share of the rows, and the shares are added up.

torch's DistributedDataParallel (Li et al. 2020, arXiv 2006.15704) copies gradients into flat buckets as backward produces them
and adds each bucket up over all processes while backward goes on. Each loss is weighted by its items out of those of all
processes, so the sum is the gradient of the whole batch, up to the rounding of sums. Frees activations and logits, of which
a process has those of its own micro-batches; costs the buckets, which are as large as the gradients and stay for the whole
run, and the time to send them. Gradients are views of the buckets, but those of all micro-batches before the last add up
beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtrain.distributed import send_weights_, sum_over_ranks

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


class Sharded(Protocol):
    """One process's part of training: what the step calls, whatever is shared.

    Attributes:
        rank: number of this process, from 0.
        ranks: processes that train together.
    """

    rank: int
    ranks: int

    @property
    def forward_module(self) -> nn.Module:
        """What the step calls in place of the model."""
        ...

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes."""
        ...

    def accumulating(self, index: int, count: int) -> AbstractContextManager[None]:
        """Forward and backward of micro-batch ``index`` of ``count`` belong inside; with the last one gradients are whole."""
        ...

    def buckets(self) -> Sequence[Tensor]:
        """Gradient memory that is held between steps."""
        ...

    def release(self) -> None:
        """Give the model back; the share is over."""
        ...


class _Single:
    """The whole of the training: one process."""

    rank, ranks = 0, 1

    def __init__(self, model: nn.Module) -> None:
        self.forward_module = model

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The tensor."""
        return tensor

    def accumulating(self, index: int, count: int) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    def buckets(self) -> Sequence[Tensor]:
        """None."""
        return ()

    def release(self) -> None:
        """Nothing."""


@dataclass
class _Reduced:
    """The buckets that were added up in a step and how many gradients they hold. It must not know the model, whose reducer
    holds it below the reach of Python's collector."""

    group: Any
    buckets: list[Tensor] = field(default_factory=list)
    gradients: int = 0


class _DataParallel:
    """A share of the rows, with the whole model."""

    def __init__(self, model: nn.Module) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.rank, self.ranks = group.rank(), group.size()
        self._model = model
        self._trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._reduced = _Reduced(group)
        self._wrapped: DistributedDataParallel | None = None

    @property
    def forward_module(self) -> DistributedDataParallel:
        """The wrapped model. It is wrapped when it is first asked for, so that the buckets come when training begins."""
        if self._wrapped is None:
            self._wrapped = _wrapped(self._model, self._reduced)
        return self._wrapped

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        """The sum of a tensor over all processes, a new tensor."""
        return sum_over_ranks(tensor)

    @contextmanager
    def accumulating(self, index: int, count: int) -> Iterator[None]:
        """Gradients are added up over the processes in the backward of the last micro-batch.

        Raises:
            ValueError: a parameter that trains got no gradient in the last micro-batch.
        """
        if not index:
            # The first step's buckets make room for others, in the order in which gradients came, before the second.
            self._reduced.buckets.clear()
            self._reduced.gradients = 0
        if index < count - 1:
            with self.forward_module.no_sync():
                yield
        else:
            yield
            self._check_all_reduced()

    def _check_all_reduced(self) -> None:
        if self._reduced.gradients < len(self._trained):
            parameters = dict(self._model.named_parameters())
            without = next((name for name in self._trained if parameters[name].grad is None), "a parameter")
            raise ValueError(
                f"{without} got no gradient, and data parallel adds up those of all parameters that train: freeze what the loss "
                f"does not use (requires_grad_(False)), or train in one process."
            )

    def buckets(self) -> Sequence[Tensor]:
        """The buckets, each a flat tensor; they hold the gradients."""
        return self._reduced.buckets

    def release(self) -> None:
        """Drop the wrapper and with it the buckets and the hooks on the parameters."""
        self._reduced.buckets.clear()
        self._wrapped = None


def single(model: nn.Module) -> Sharded:
    """All of the training in this process: nothing is changed."""
    return _Single(model)


def data_parallel(model: nn.Module, ranks: int) -> Sharded:
    """This process's share of the rows among ``ranks`` that have joined (:func:`memtrain.distributed.start`).

    All processes get the first one's weights, in place.
    """
    assert dist.get_world_size() == ranks
    send_weights_(model)
    return _DataParallel(model)


def _wrapped(model: nn.Module, reduced: _Reduced) -> DistributedDataParallel:
    from torch.nn.parallel import DistributedDataParallel

    # The weights have been sent. Parameters that do not train are left out; one that trains and gets no gradient is an error.
    wrapped = DistributedDataParallel(
        model, process_group=reduced.group, init_sync=False, gradient_as_bucket_view=True, find_unused_parameters=False
    )
    # Buffers are functions of the configuration; those that training changes (running statistics) no plan shares.
    # Set here, because the argument goes by another name from torch 2.13 on.
    wrapped.broadcast_buffers = False
    # A lambda, because torch compares annotations that are there with classes, and here they are strings.
    wrapped.register_comm_hook(reduced, lambda state, bucket: _add_up(state, bucket))
    return wrapped


def _add_up(reduced: _Reduced, bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the processes: torch's own averages, and the losses are weighted for a sum."""
    buffer = bucket.buffer()
    reduced.buckets.append(buffer)
    reduced.gradients += len(bucket.parameters())
    work = dist.all_reduce(buffer, group=reduced.group, async_op=True)
    assert work is not None

    def summed(done: torch.futures.Future[Any]) -> Any:
        # It raises what the sum failed with; without it backward would go on with what this process alone has.
        done.value()
        return buffer

    future: torch.futures.Future[Tensor] = work.get_future().then(summed)
    return future
