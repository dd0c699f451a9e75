"""Which family of records a record belongs to; the family says in which environment it runs and how it is told.

A family is a module of this package with two functions: ``environment(record)`` names a key of
``environments.ENVIRONMENTS`` and loads neither torch nor transformers; ``express(record)`` gives the ``PublishedRun`` in a
process that finds the libraries of that environment first, or raises ``NotExpressible``.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from published.record import Record
from published.run import PublishedRun


def family(record: Record) -> str:
    """The name of the module that tells a record; ``general`` where its source has none of its own."""
    source = f"{record.source_family} {record.source}".lower()
    if "fms-acceleration" in source:
        return "fms"
    return "litgpt" if "litgpt" in source or "pytorch-lightning" in source else "general"


def environment(record: Record) -> str:
    """The key of ``environments.ENVIRONMENTS`` with whose libraries the record is simulated."""
    return str(_module(record).environment(record))


def express(record: Record) -> PublishedRun:
    """The run that a record tells of.

    Raises:
        NotExpressible: it cannot be told as one of memtrain's.
    """
    told: PublishedRun = _module(record).express(record)
    return told


def _module(record: Record) -> ModuleType:
    return importlib.import_module(f"published.{family(record)}")
