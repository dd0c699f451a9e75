"""Memory-aware training for PyTorch: plan the real step inside a memory budget, then train with exactly that plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Resolved on first use, so that `import memtrain` loads neither torch nor
# anything else that is heavy (tests/cpu/test_lean_import.py).
_PUBLIC = {
    "Adafactor": "memtrain.job",
    "Adam": "memtrain.job",
    "AdamW": "memtrain.job",
    "Approximation": "memtrain.job",
    "Bf16": "memtrain.job",
    "Budget": "memtrain.job",
    "Constant": "memtrain.job",
    "Cosine": "memtrain.job",
    "Cpu": "memtrain.device",
    "Cuda": "memtrain.device",
    "Device": "memtrain.device",
    "Fp32": "memtrain.job",
    "Job": "memtrain.job",
    "Lion": "memtrain.job",
    "Muon": "memtrain.job",
    "NoPlanFits": "memtrain.planner.choice",
    "Plan": "memtrain.plan",
    "Sgd": "memtrain.job",
    "Trainer": "memtrain.trainer",
}

__all__ = [
    "Adafactor",
    "Adam",
    "AdamW",
    "Approximation",
    "Bf16",
    "Budget",
    "Constant",
    "Cosine",
    "Cpu",
    "Cuda",
    "Device",
    "Fp32",
    "Job",
    "Lion",
    "Muon",
    "NoPlanFits",
    "Plan",
    "Sgd",
    "Trainer",
]

if TYPE_CHECKING:
    from memtrain.device import Cpu, Cuda, Device
    from memtrain.job import (
        Adafactor,
        Adam,
        AdamW,
        Approximation,
        Bf16,
        Budget,
        Constant,
        Cosine,
        Fp32,
        Job,
        Lion,
        Muon,
        Sgd,
    )
    from memtrain.plan import Plan
    from memtrain.planner.choice import NoPlanFits
    from memtrain.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
