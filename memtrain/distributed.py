"""Several processes that train together: starting them, and what they have to agree on.

torchrun starts the processes and says to each which one it is; :func:`memtrain.machine.processes` reads that. Here they find
each other, over gloo on processors and nccl between cards, through torch.distributed. What one process says to all goes by
pickle, from this program to itself.
"""

from __future__ import annotations

import atexit
import datetime
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memtrain.machine import Processes, take_card
from memtrain.plan import DataParallel

T = TypeVar("T")

# How long a process waits for another. The first process plans while the others wait, so it is longer than planning takes.
TIMEOUT = datetime.timedelta(minutes=30)
# What the backends say when the other end is gone or silent; gloo raises plain RuntimeErrors.
_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "closed by peer")


def start(processes: Processes, *, cards: bool) -> None:
    """Join the processes, unless this one has joined already; alone there is nothing to join.

    Args:
        cards: whether each process trains on a card, the one of its number on its machine.

    Raises:
        ValueError: there are fewer cards than processes.
    """
    if processes.ranks > 1 and not dist.is_initialized():
        if cards:
            take_card(processes.local_rank)
        # Plain data goes over gloo in either case.
        dist.init_process_group("cpu:gloo,cuda:nccl" if cards else "gloo", timeout=TIMEOUT)
        # gloo's threads end the process by an abort if they are still there when it ends.
        atexit.register(_stop)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def shared_by(ranks: int, constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Constraints of a plan that ``ranks`` processes share.

    Raises:
        ValueError: they ask for another sharding.

    >>> shared_by(2, {"micro_batch_size": 1})
    {'micro_batch_size': 1, 'sharding': DataParallel(ranks=2)}
    """
    if ranks == 1:
        return dict(constraints)
    asked, sharding = constraints.get("sharding"), DataParallel(ranks)
    if asked not in (None, sharding):
        raise ValueError(
            f"plan.sharding is {asked}, and {ranks} processes were started: leave it out, or start {asked.ranks} of them."
            if isinstance(asked, DataParallel)
            else f"plan.sharding is {asked}, and {ranks} processes were started: leave it out, or start it without torchrun."
        )
    return {**constraints, "sharding": sharding}


def require(ranks: int) -> None:
    """Refuse a plan for another number of processes than there are.

    Raises:
        ValueError: with both numbers.
    """
    running = dist.get_world_size() if dist.is_initialized() else 1
    if ranks != running:
        raise ValueError(
            f"the plan is for {ranks} process{'es' if ranks > 1 else ''} and {running} run{'s' if running == 1 else ''}: start it "
            f"with torchrun --nproc_per_node={ranks} -m memtrain, or only plan with mode=plan in one process."
        )


def from_first(make: Callable[[], T]) -> T:
    """What ``make`` returns in the first process, in all of them; where it is the only one, just that.

    Raises:
        ValueError: ``make`` raised one in the first process; the others say that it did.
    """
    if not dist.is_initialized():
        return make()
    said: list[object] = [None, False]
    failure: ValueError | None = None
    if dist.get_rank() == 0:
        try:
            said = [make(), True]
        except ValueError as error:
            failure = error
    # Over gloo: pickled data is on the host.
    dist.broadcast_object_list(said, src=0, device=torch.device("cpu"))
    if failure is not None:
        raise failure
    if not said[1]:
        raise ValueError("the first process has stopped and says why: nothing was trained here.")
    made: T = said[0]  # type: ignore[assignment]
    return made


def check_same(facts: Mapping[str, object]) -> None:
    """Refuse what is not the same in all processes, which would each train something else.

    Args:
        facts: what each is called, and its value, which is compared.

    Raises:
        ValueError: with the first that differs, in all processes.
    """
    if not dist.is_initialized():
        return
    found: list[Mapping[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, dict(facts))
    for rank, others in enumerate(found):
        for name, value in found[0].items():
            if others[name] != value:
                raise ValueError(
                    f"{name} of process {rank} is {others[name]} and that of process 0 is {value}, and all train one job: give every "
                    f"process the same arguments and the same rows in the same order."
                )


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, a new tensor on each of them."""
    # gloo reads the wrong memory of a tensor that is not contiguous.
    total = tensor.detach().clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total


@torch.no_grad()
def send_weights_(model: nn.Module) -> None:
    """Give all processes the parameters and buffers of the first. In place."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_contiguous():
            dist.broadcast(tensor, src=0)
        else:
            # gloo reads the wrong memory of a tensor that is not contiguous.
            sent = tensor.contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)


def differ_by_rank(seed: int, rank: int) -> None:
    """Let each process draw other random numbers, so that dropout differs; the first draws what it would draw alone."""
    if rank:
        # A hash, because seed + rank would give process 1 of seed 0 the numbers of process 0 of seed 1.
        digest = hashlib.sha256(f"dropout, seed {seed}, rank {rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8]))


@contextmanager
def naming_a_lost_process() -> Iterator[None]:
    """Turn what the backend raises when another process is gone into one sentence; also a decorator.

    Raises:
        ValueError: another process has ended, or has been silent for longer than ``TIMEOUT``.
    """
    try:
        yield
    except RuntimeError as error:
        told = f"{type(error).__name__} {error}".lower()
        if not dist.is_initialized() or dist.get_world_size() == 1 or not any(word in told for word in _LOST):
            raise
        raise ValueError(
            f"process {dist.get_rank()} has lost another of the {dist.get_world_size()} processes "
            f"({str(error).splitlines()[0]}): look for what that one said, and start all of them again."
        ) from error
