"""What this machine is: asked here and nowhere else, so that a prediction never depends on it (rules 3 and 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memtrain.device import Device
from memtrain.job import Budget, Limit


def facts(folder: str) -> Path:
    """The folder ``configs`` or ``recipes``: inside the package in a wheel, beside it in a checkout."""
    package = Path(__file__).parent
    return package / folder if (package / folder).is_dir() else package.parent / folder


def describe(**described: Any) -> Device:
    """A device from its description; a number of threads that it leaves open is the one torch uses here."""
    if described.get("threads") is None:
        import torch

        described["threads"] = torch.get_num_threads()
    return Device(**described)


def cpu() -> Device:
    """The processor, as ``configs/device/cpu.yaml`` describes it."""
    import yaml

    described = yaml.safe_load((facts("configs") / "device" / "cpu.yaml").read_text(encoding="utf-8"))
    # YAML 1.1 takes 1e11 for a string.
    rates = {name: float(described.pop(name)) for name in ("flops_per_second", "bytes_per_second", "operator_seconds")}
    return describe(**described, **rates)


def budget(asked_bytes: int, headroom_bytes: int = 0) -> Budget:
    """The budget on this machine's processor: the smallest of the bytes asked for, installed and available."""
    import psutil

    memory = psutil.virtual_memory()
    limits = (Limit("asked for", asked_bytes), Limit("installed", memory.total), Limit("free now", memory.available))
    return Budget(limits=limits, headroom_bytes=headroom_bytes)
