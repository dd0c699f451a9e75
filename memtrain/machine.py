"""What this machine is: asked here and nowhere else, so that a prediction never depends on it (rules 3 and 4)."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

from memtrain.device import Cpu, Cuda, Device, from_dict
from memtrain.job import Budget, Limit

# Words in the names of cards that tell none from another.
_MAKERS = {"nvidia", "geforce", "tesla", "quadro"}


@dataclass(frozen=True)
class Processes:
    """Which of the processes that train together this one is.

    Attributes:
        rank: its number among all, from 0.
        ranks: how many there are.
        local_rank, local_ranks: the same of those on this machine.
    """

    rank: int = 0
    ranks: int = 1
    local_rank: int = 0
    local_ranks: int = 1


def processes() -> Processes:
    """What torchrun says of this process; one started by itself is alone."""
    names = {"rank": "RANK", "ranks": "WORLD_SIZE", "local_rank": "LOCAL_RANK", "local_ranks": "LOCAL_WORLD_SIZE"}
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return Processes()
    if missing := [name for name in names.values() if name not in os.environ]:
        raise ValueError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} and {missing[0]} is not set: start with torchrun, or unset WORLD_SIZE."
        )
    return Processes(**{field: int(os.environ[name]) for field, name in names.items()})


def take_card(local_rank: int) -> None:
    """Make the card of this number on this machine the one that this process trains on.

    Raises:
        ValueError: there are fewer.
    """
    import torch

    cards = torch.cuda.device_count()
    if local_rank >= cards:
        raise ValueError(
            f"process {local_rank} of this machine has no card of its own, since there {'is' if cards == 1 else 'are'} {cards}: "
            f"start one process per card."
        )
    torch.cuda.set_device(local_rank)


def facts(folder: str) -> Path:
    """The folder ``configs`` or ``recipes``: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return package / folder if (package / folder).is_dir() else package.parent / folder


def described_devices() -> tuple[str, ...]:
    """The names that ``device=NAME`` takes: the files of ``configs/device``."""
    return tuple(sorted(path.stem for path in (facts("configs") / "device").glob("*.yaml")))


def named(name: str) -> Device:
    """The device that ``configs/device`` describes under that name; ``auto`` reads this machine.

    Raises:
        ValueError: nothing of that name is described there, or this machine's card is not.
    """
    if not isinstance(name, str):
        raise ValueError(f"device is {name!r}, and it must be a name, such as {', '.join(described_devices())}.")
    if name not in described_devices():
        raise ValueError(not_described(name))
    return describe(**_written(name))


def cpu() -> Device:
    """The processor, as ``configs/device/cpu.yaml`` describes it."""
    return named("cpu")


def describe(**description: Any) -> Device:
    """The device of a description, with what it leaves to this machine: threads that are None are those of torch here.

    Of kind ``auto`` it is this machine's card, or without one its processor, with what the description says beside.

    Raises:
        ValueError: a key is wrong for its kind, or this machine's card is described nowhere.
    """
    if description.get("kind") == "auto":
        own = {key: value for key, value in description.items() if key not in ("kind", "name") and value is not None}
        description = {**_this_machine(), **own}
    if description.get("kind") == "cpu" and description.get("threads") is None:
        import torch

        description["threads"] = torch.get_num_threads()
    return from_dict(description)


def not_described(device: str) -> str:
    """One sentence for a device that no file describes, with the nearest names and how to describe one."""
    candidates = [name for name in described_devices() if name not in ("auto", "cpu")]
    spelled = "_".join(word for word in re.findall(r"[a-z0-9]+", device.lower()) if word not in _MAKERS)
    near = [name for name in candidates if name.startswith(f"{spelled}_")] or get_close_matches(spelled, candidates, n=2)
    known = f"the nearest {'are' if len(near) > 1 else 'is'}" if near else "there are"
    keys = ", ".join(("kind", *(field.name for field in fields(Cuda))))
    return (
        f"device {device!r} is not described: {known} {', '.join(near or described_devices())}; "
        f"describe a card in the device section of a recipe, with the keys {keys}."
    )


def stated_budget(device: Device, asked_bytes: int | None, headroom_bytes: int = 0, host_bytes: int | None = None) -> Budget:
    """The budget as far as it needs no machine: the bytes asked for and the usable bytes of a card.

    Args:
        device: what is trained on.
        asked_bytes: memory asked for; None for all that a card has.
        headroom_bytes: kept free of it.
        host_bytes: host memory asked for beside a card.

    Raises:
        ValueError: nothing is asked for of a processor, host memory is asked for beside one, or the headroom leaves nothing.
    """
    asked = () if asked_bytes is None else (Limit("asked for", asked_bytes),)
    host = () if host_bytes is None else (Limit("asked for", host_bytes),)
    if isinstance(device, Cuda):
        usable = Limit(f"usable on {device.name}", device.usable_bytes)
        return Budget(limits=(*asked, usable), headroom_bytes=headroom_bytes, host_limits=host)
    if not asked:
        raise ValueError("budget has no value: say how much memory of a processor training may take, such as 8GiB.")
    if host:
        raise ValueError(f"host_bytes is set and device {device.name} has no memory beside the host's: leave host_bytes out.")
    return Budget(limits=asked, headroom_bytes=headroom_bytes)


def budget_for(
    device: Device,
    asked_bytes: int | None,
    headroom_bytes: int = 0,
    host_bytes: int | None = None,
    held_bytes: int = 0,
    ranks: int = 1,
) -> Budget:
    """The budget of a device: what is asked for and what it has, and if it is in this machine what is installed and free.

    A plan for a card that is not here says nothing of this machine (rule 4). Arguments and errors as of
    :func:`stated_budget`; ``held_bytes`` are on the card already and counted by the plan, so they are free to it. Of
    ``ranks`` processes of a plan each has its share of a processor's memory.
    """
    budget = stated_budget(device, asked_bytes, headroom_bytes, host_bytes)
    if isinstance(device, Cpu):
        return replace(budget, limits=budget.limits + _host_limits(ranks))
    if not _is_here(device):
        return budget
    return replace(
        budget,
        limits=(*budget.limits, Limit("free now", _free_bytes(device, held_bytes))),
        host_limits=budget.host_limits + _host_limits(),
    )


def allocator_settings() -> str:
    """How the user has set torch's allocator for cards; empty for its defaults."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def require(device: Device) -> None:
    """Refuse to train on a card that this machine does not have.

    Raises:
        ValueError: it is not here.
    """
    if isinstance(device, Cpu) or _is_here(device):
        return
    import torch

    here = f"has a {torch.cuda.get_device_properties().name}" if torch.cuda.is_available() else "has no CUDA card"
    raise ValueError(
        f"device {device.name} is not in this machine, which {here}: plan for it here (mode=plan, or Trainer.choice) "
        f"and train on a machine that has it."
    )


def _host_limits(ranks: int = 1) -> tuple[Limit, Limit]:
    import psutil

    # Processes that are here, or where they are only planned for, as many as there will be.
    memory, sharing = psutil.virtual_memory(), max(ranks if processes().ranks == 1 else 1, processes().local_ranks)
    share = f", a share of 1/{sharing}" if sharing > 1 else ""
    return Limit(f"installed{share}", memory.total // sharing), Limit(f"free now{share}", memory.available // sharing)


def _free_bytes(device: Cuda, held_bytes: int) -> int:
    """What this process could take of the card, its context included."""
    import torch

    free, total = torch.cuda.mem_get_info()
    # Asking opens this process's context, which a plan counts; what torch's allocator keeps for reuse is free to a plan.
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return min(total, free + kept + held_bytes + device.context_bytes)


def _is_here(device: Cuda) -> bool:
    import torch

    return torch.cuda.is_available() and _names(device.name, torch.cuda.get_device_properties().name)


def _names(name: str, card: str) -> bool:
    """Whether all words of ``name`` (rtx_4090) are in the name that a card says (NVIDIA GeForce RTX 4090)."""
    words, said = (set(re.findall(r"[a-z0-9]+", text.lower())) for text in (name, card))
    return bool(words) and words <= said


def _this_machine() -> dict[str, Any]:
    """The description of this machine's card, or without one of its processor."""
    import torch

    if not torch.cuda.is_available():
        return _written("cpu")
    card = torch.cuda.get_device_properties()
    for name in described_devices():
        if _names(name, card.name):
            return {
                **_written(name),
                "name": card.name,
                "compute_capability": (card.major, card.minor),
                "multiprocessors": card.multi_processor_count,
                "usable_bytes": card.total_memory,
            }
    raise ValueError(not_described(card.name))


def _written(name: str) -> dict[str, Any]:
    import yaml

    written: Mapping[str, Any] = yaml.safe_load((facts("configs") / "device" / f"{name}.yaml").read_text(encoding="utf-8"))
    return dict(written)


def used_bytes(device: Device) -> int | None:
    """Bytes in use now, to be compared with those of another moment: of a card those handed out by torch's allocator.

    Of a processor those handed out by the C library, to all threads and to libraries too, without Python's small objects. None
    where it does not tell them: elsewhere than with glibc, 2.33 or later. With another malloc preloaded it tells the same each time.
    """
    if isinstance(device, Cuda):
        import torch

        return torch.cuda.memory_allocated()
    ask = _mallinfo2()
    if ask is None:
        return None
    said = ask()
    # Blocks of all threads' arenas, and those large enough for a mapping of their own; malloc/malloc.c, int_mallinfo.
    return int(said.uordblks + said.hblkhd)


@cache
def _mallinfo2() -> Callable[[], Any] | None:
    """glibc's function of that name, None with another C library."""
    try:
        ask: Any = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError, TypeError):
        return None
    ask.argtypes, ask.restype = (), _MallInfo
    return cast(Callable[[], Any], ask)


class _MallInfo(ctypes.Structure):
    """``struct mallinfo2`` of malloc.h."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
    ]


def release_cached(device: Device) -> None:
    """Give memory that a card's allocator keeps for later back to the card; a processor's keeps none."""
    if isinstance(device, Cuda):
        import torch

        torch.cuda.empty_cache()
