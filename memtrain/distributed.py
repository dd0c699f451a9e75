"""Several processes that train together: starting them, and what they have to agree on.

torchrun starts the processes and says to each which one it is; :func:`memtrain.machine.processes` reads that. Here they find
each other, over gloo on processors and nccl between cards, through torch.distributed. What one process says to all goes by
pickle, from this program to itself.

When memory runs out in one process, the others wait for it in a sum over all, and torch has nothing that ends such a wait over
gloo: a group keeps its connections for as long as anything refers to it. So the process that failed says in the store that it
leaves, and shuts its connections down; that ends each wait with an error, and all meet in a new group (:func:`together`).
"""

from __future__ import annotations

import atexit
import datetime
import gc
import hashlib
import os
import socket
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from memtrain.machine import Processes, take_card
from memtrain.out_of_memory import OutOfMemory, attempt
from memtrain.plan import DataParallel

T = TypeVar("T")
F = TypeVar("F")

# How long a process waits for another. The first process plans while the others wait, so it is longer than planning takes.
TIMEOUT = datetime.timedelta(minutes=30)
# How long one waits for the others to meet again: they may be computing, up to the next sum over all.
PATIENCE = datetime.timedelta(minutes=10)
# What the backends say when the other end is gone or silent; gloo raises plain RuntimeErrors.
_LOST = ("gloo", "nccl", "connection", "timed out", "timeout", "socket", "closed by peer")


@dataclass(frozen=True)
class Setback(Generic[F]):
    """Memory ran out in one process or more, and all of them have met again.

    Attributes:
        ran_out: for each process that its memory ran out, None where it lasted.
        facts: for each process what it said of itself.
    """

    ran_out: tuple[OutOfMemory | None, ...]
    facts: tuple[F, ...]


@dataclass(frozen=True)
class _Joined:
    """The group that there is, which torch keeps for the whole process too.

    Attributes:
        store: what they first found each other by. It outlives the groups and keeps old keys, so each group has a prefix.
        generation: number of the group, the same in all processes.
        connections: gloo's, by descriptor; empty where they are not known.
    """

    processes: Processes
    cards: bool
    store: Store
    generation: int = 0
    connections: Mapping[int, os.stat_result] = field(default_factory=dict)

    def kept(self) -> Store:
        """The part of the store that belongs to this group."""
        return PrefixStore(f"memtrain/{self.generation}", self.store)


_joined: _Joined | None = None


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
        store, _, _ = next(iter(rendezvous("env://", processes.rank, processes.ranks, timeout=TIMEOUT)))
        store.set_timeout(TIMEOUT)
        _join(_Joined(processes, cards, store))
        # gloo's threads end the process by an abort if they are still there when it ends.
        atexit.register(_stop)


def leave_foreign() -> None:
    """Leave a group that others have made, such as ``TrainingArguments``: it cannot be made anew when a process is lost."""
    if dist.is_initialized() and _joined is None:
        dist.destroy_process_group()


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(to: _Joined) -> None:
    """Make the group, and keep which connections are its own."""
    global _joined
    there = _connections()
    dist.init_process_group(
        # Plain data goes over gloo in either case.
        "cpu:gloo,cuda:nccl" if to.cards else "gloo",
        timeout=TIMEOUT,
        store=to.kept(),
        rank=to.processes.rank,
        world_size=to.processes.ranks,
    )
    new = {
        number: what
        for number, what in _connections().items()
        if number not in there or not os.path.samestat(what, there[number])
    }
    # gloo connects each process with each other one. Any other number, and something else came between.
    unknown = agree([len(new) != to.processes.ranks - 1])[0]
    _joined = replace(to, connections={} if unknown else new)


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


def agree(values: Sequence[int]) -> list[int]:
    """The largest of each of some whole numbers over all processes, in one collective; alone, just those."""
    if not dist.is_initialized():
        return list(values)
    # On the host, and so over gloo: a card does not have to be waited for.
    found = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [int(value) for value in found.tolist()]


def gathered(value: T) -> list[T]:
    """What each process says, plain data, by its number; alone, just its own."""
    if not dist.is_initialized():
        return [value]
    found = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


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


def together(work: Callable[[], T], facts: Callable[[], F], *, patience: datetime.timedelta = PATIENCE) -> T | Setback[F]:
    """What ``work`` returns, or that memory ran out in one process or more; all have then met again in a new group.

    Nothing is sent where nothing fails. So a process that has its result knows that the others took part in the last
    collective of ``work``, and not what they did after it. If one of them fails there, this one learns of it in its next
    collective, which may belong to the next call: that returns the setback, and ``facts`` tell how far each had come. Weights
    that some have updated and others not are for the caller to put back.

    What was made for the old group (DistributedDataParallel) is of no more use: release it, and make another.

    Args:
        facts: what this process says of itself after a failure, plain data: the step, and whether weights have changed.
        patience: how long to wait for the others.

    Raises:
        ValueError: another process did not come, or memory ran out where processes cannot meet again.
    """
    ran_out: OutOfMemory | None = None
    try:
        done = attempt(work)
        if not isinstance(done, OutOfMemory):
            return done
        ran_out = done
    except RuntimeError as error:
        if not _is_lost(error) or not _another_left():
            raise
    # What failed is held by the error's frames until here, and by cycles.
    gc.collect()
    if _joined is None:
        return Setback((ran_out,), (facts(),))
    if not _joined.connections or _joined.cards:
        assert ran_out is not None, "only a process that can come back leaves"
        raise ValueError(
            f"process {_joined.processes.rank} ran out of memory ({ran_out.said}), and processes over "
            f"{'nccl' if _joined.cards else 'gloo whose connections are not known'} cannot meet again: start all of them again "
            f"with a smaller micro-batch, from the last checkpoint."
        )
    rejoin(patience=patience)
    said = gathered((ran_out, facts()))
    return Setback(tuple(memory for memory, _ in said), tuple(fact for _, fact in said))


def rejoin(*, patience: datetime.timedelta = PATIENCE) -> None:
    """Leave the group, which ends what the others wait for in it with an error, and meet them again in a new one.

    Raises:
        ValueError: another process did not come, within ``patience`` or because it has ended.
    """
    assert _joined is not None
    processes, new = _joined.processes, replace(_joined, generation=_joined.generation + 1, connections={})
    try:
        # add, and not set, waits for the store's answer: whoever sees the connection closed has to find this.
        _joined.kept().add("left", 1)
        _shut_down(_joined.connections)
        _stop()
        new.kept().set(f"here/{processes.rank}", "")
        new.kept().wait([f"here/{rank}" for rank in range(processes.ranks)], patience)
        _join(new)
    except RuntimeError as error:
        raise ValueError(_lost(processes.rank, processes.ranks, error)) from error


def _another_left() -> bool:
    """Whether a process has left the group to come back; one that has died did not say so."""
    try:
        return _joined is not None and _joined.kept().check(["left"])
    except RuntimeError:
        # The store is gone, with the process that had it.
        return False


def _connections() -> dict[int, os.stat_result]:
    """The open TCP connections of this process but those with the store, by descriptor; none where the system lists none."""
    descriptors, found = Path("/dev/fd"), {}
    for name in os.listdir(descriptors) if descriptors.is_dir() else ():
        # Another thread may close one meanwhile, and the descriptor of the listing is closed.
        with suppress(OSError):
            what = os.fstat(int(name))
            if stat.S_ISSOCK(what.st_mode):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family in (socket.AF_INET, socket.AF_INET6):
                        ends = connection.getsockname()[1], connection.getpeername()[1]
                        if int(os.environ["MASTER_PORT"]) not in ends:
                            found[int(name)] = what
    return found


def _shut_down(connections: Mapping[int, os.stat_result]) -> None:
    for number, what in connections.items():
        # The other end may have been first; gloo has then closed the descriptor, and another file may have it.
        with suppress(OSError):
            copy = os.dup(number)
            if os.path.samestat(os.fstat(copy), what):
                with socket.socket(fileno=copy) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
            else:
                os.close(copy)


def _is_lost(error: RuntimeError) -> bool:
    told = f"{type(error).__name__} {error}".lower()
    return any(word in told for word in _LOST)


def _lost(rank: int, ranks: int, error: RuntimeError) -> str:
    return (
        f"process {rank} has lost another of the {ranks} processes ({str(error).splitlines()[0]}): look for what that one said, "
        f"and start all of them again."
    )


@contextmanager
def naming_a_lost_process() -> Iterator[None]:
    """Turn what the backend raises when another process is gone into one sentence; also a decorator.

    Raises:
        ValueError: another process has ended, or has been silent for longer than ``TIMEOUT``.
    """
    try:
        yield
    except RuntimeError as error:
        if not dist.is_initialized() or dist.get_world_size() == 1 or not _is_lost(error):
            raise
        raise ValueError(_lost(dist.get_rank(), dist.get_world_size(), error)) from error
