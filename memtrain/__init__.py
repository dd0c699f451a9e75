"""Memory-aware training for PyTorch: plan the real step inside a memory budget, then train with exactly that plan."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Resolved on first use, so that `import memtrain` loads neither torch nor
# anything else that is heavy (tests/cpu/test_lean_import.py).
_PUBLIC = {
    "Action": "memtrain.callbacks",
    "Adafactor": "memtrain.job",
    "Adam": "memtrain.job",
    "AdamW": "memtrain.job",
    "Approximation": "memtrain.job",
    "AutocastBf16": "memtrain.precision",
    "AutocastFp16": "memtrain.precision",
    "Bf16": "memtrain.precision",
    "Bf16Master": "memtrain.precision",
    "Budget": "memtrain.job",
    "Constant": "memtrain.job",
    "Cosine": "memtrain.job",
    "Cpu": "memtrain.device",
    "Cuda": "memtrain.device",
    "Device": "memtrain.device",
    "EarlyStopping": "memtrain.callbacks",
    "Fp32": "memtrain.precision",
    "Full": "memtrain.method",
    "Int8": "memtrain.method",
    "Job": "memtrain.job",
    "Linear": "memtrain.job",
    "Lion": "memtrain.job",
    "Lora": "memtrain.method",
    "Muon": "memtrain.job",
    "Nf4": "memtrain.method",
    "NoPlanFits": "memtrain.planner.choice",
    "Plan": "memtrain.plan",
    "Record": "memtrain.callbacks",
    "Sgd": "memtrain.job",
    "Trainer": "memtrain.trainer",
    "Unquantized": "memtrain.method",
}

__all__ = [
    "Action",
    "Adafactor",
    "Adam",
    "AdamW",
    "Approximation",
    "AutocastBf16",
    "AutocastFp16",
    "Bf16",
    "Bf16Master",
    "Budget",
    "Constant",
    "Cosine",
    "Cpu",
    "Cuda",
    "Device",
    "EarlyStopping",
    "Fp32",
    "Full",
    "Int8",
    "Job",
    "Linear",
    "Lion",
    "Lora",
    "Muon",
    "Nf4",
    "NoPlanFits",
    "Plan",
    "Record",
    "Sgd",
    "Trainer",
    "Unquantized",
]

if TYPE_CHECKING:
    from memtrain.callbacks import Action, EarlyStopping, Record
    from memtrain.device import Cpu, Cuda, Device
    from memtrain.job import Adafactor, Adam, AdamW, Approximation, Budget, Constant, Cosine, Job, Linear, Lion, Muon, Sgd
    from memtrain.method import Full, Int8, Lora, Nf4, Unquantized
    from memtrain.plan import Plan
    from memtrain.planner.choice import NoPlanFits
    from memtrain.precision import AutocastBf16, AutocastFp16, Bf16, Bf16Master, Fp32
    from memtrain.trainer import Trainer


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'memtrain' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return __all__
