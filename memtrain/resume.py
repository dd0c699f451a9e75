"""Where a run goes on: which checkpoint it resumes from, and whether that is one of the same job.

What a job is, is written as plain data into the run folder and into every checkpoint, and compared before anything is loaded.
The plan is no part of it, since plans train the same numbers; nor is where the model's weights lie, since those that train are
in the checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from memtrain.check import micro_batch_sizes
from memtrain.checkpoint import MANIFEST, Checkpoint, latest, read
from memtrain.job import Job
from memtrain.metrics import RunFolder
from memtrain.models.build import FromModule, ModelSource
from memtrain.plan import POLICIES, Single, parse_constraints, policy_name, ranks_of

CHECKPOINTS = "checkpoints"
# Of a transformers configuration, what changes without the model's doing so.
_NOT_THE_MODEL = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
# Where the weights lie; and what to do about a step that has not been taken yet.
_MAY_CHANGE = ("model", "on_not_finite")


@dataclass(frozen=True)
class Start:
    """Where a run begins.

    Attributes:
        checkpoint: what it goes on from, None for the beginning.
        notes: sentences about what was found and not taken.
    """

    checkpoint: Checkpoint | None = None
    notes: tuple[str, ...] = ()


def identity(job: Job, source: ModelSource, data: str, eval_data: str) -> dict[str, Any]:
    """What makes a run this one, as plain data: the facts of the job, the model's architecture and the training rows.

    Args:
        data, eval_data: fingerprints of the rows to train on and to evaluate on.
    """
    facts = {name: value for name, value in _plain(job).items() if name not in _MAY_CHANGE}
    # A run of before there were such functions is of the same job.
    if job.loss is None:
        del facts["loss"]
    facts |= {"data": data, "eval_data": eval_data}
    if isinstance(source, FromModule):
        return {**facts, "model": {"class": source.name}}
    # The type first, since it is what others follow from.
    config = {"model_type": source.config.model_type, "class": source.model_class.__name__, **source.config.to_dict()}
    return {**facts, "model": {name: value for name, value in config.items() if name not in _NOT_THE_MODEL}}


def _plain(value: Any) -> Any:
    """A value of a job as JSON reads it back, a class of a union by its name."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return fields if isinstance(value, Job) else {"name": policy_name(type(value)), **fields}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, frozenset | set):
        return sorted(map(_plain, value))
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return name_of(value) if callable(value) else value


def name_of(function: Any) -> str:
    """A function by its module and name, and a callable object by those of its class; where it lies in memory says nothing."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """The first fact in which two identities differ, in words; empty where they are one job.

    >>> difference({"steps": 8, "optimizer": {"lr": 1}}, {"steps": 8, "optimizer": {"lr": 2}})
    'optimizer.lr is 1 here and 2 there'
    """
    ours, theirs = dict(_leaves(here)), dict(_leaves(there))
    for name in dict.fromkeys((*ours, *theirs)):
        # Another version of a library may know more settings of a model.
        if name.startswith("model.") and not (name in ours and name in theirs):
            continue
        mine, other = ours.get(name, "not set"), theirs.get(name, "not set")
        if mine != other:
            return f"{name} is {mine} here and {other} there"
    return ""


def _leaves(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            # JSON knows no tuples and its keys are text.
            yield f"{prefix}{name}", str(_plain(value))


def parse_resume(resume: object) -> str | Path:
    """``"auto"``, ``"never"``, or the path of a checkpoint or of a run.

    Raises:
        ValueError: it is none of these, or nothing is there.
    """
    if not isinstance(resume, str | os.PathLike) or not os.fspath(resume):
        raise ValueError(f"resume is {resume!r}, and it must be auto, never, or the path of a checkpoint or of a run folder.")
    if resume in ("auto", "never"):
        return str(resume)
    path = Path(resume).expanduser()
    if not path.is_dir():
        raise ValueError(
            f"resume is {str(path)!r}, and no folder is there: give that of a checkpoint or of a run, auto or never."
        )
    return path


def find_start(resume: str | Path, folder: RunFolder | None, here: Mapping[str, Any]) -> Start:
    """Where a run begins, by what ``resume`` says and what its folder holds.

    Args:
        resume: as :func:`parse_resume` gives it.
        folder: that of the run; None where nothing is written.
        here: the identity of the run's job.

    Raises:
        ValueError: there is a run of another job, no checkpoint is whole, or a later one would be mistaken for this run's.
    """
    if folder is not None and folder.identity is not None and (differs := difference(here, folder.identity)):
        raise ValueError(f"run.dir {folder.path} holds a run of another job ({differs}): choose another folder.")
    own = None if folder is None else folder.path / CHECKPOINTS
    if resume == "never":
        return Start()
    mine = Start() if own is None else _whole(own, here)
    if resume == "auto":
        return _begun(folder) if folder is not None and mine.checkpoint is None else mine
    assert isinstance(resume, Path)
    found = _at(resume, here)
    assert found.checkpoint is not None
    if mine.checkpoint is None or mine.checkpoint.path == found.checkpoint.path:
        return found
    # The same call again: this run began there and has come further.
    began = origin_of(found.checkpoint, own)
    if began is not None and mine.checkpoint.facts["origin"] == began:
        return mine
    raise ValueError(
        f"resume is {str(resume)!r}, which is step {found.checkpoint.step}, and {own} has step {mine.checkpoint.step} of a run that "
        f"did not begin there: choose another run.dir, or leave resume out to go on with that one."
    )


def origin_of(start: Checkpoint | None, own: Path | None) -> list[Any] | None:
    """The checkpoint of another run that a run began with, as path and step; None where it began by itself.

    Args:
        start: what the run goes on from.
        own: the folder of its own checkpoints.
    """
    if start is None:
        return None
    place = start.path.resolve()
    if own is not None and place.parent == own.resolve():
        found: list[Any] | None = start.facts["origin"]
        return found
    return [str(place), start.step]


def _begun(folder: RunFolder) -> Start:
    """The beginning, in a folder that has no checkpoint."""
    if (folder.path / "comparison.json").exists():
        raise ValueError(f"run.dir {folder.path} holds a run that is complete and has no checkpoint: choose another folder.")
    if folder.identity is None:
        return Start()
    return Start(notes=(f"The run in {folder.path} has saved no checkpoint, and begins anew.",))


def _whole(folder: Path, here: Mapping[str, Any]) -> Start:
    """The latest whole checkpoint in a folder, which must be of this job; none where there are none at all."""
    found, troubles = latest(folder)
    if found is None and troubles:
        raise ValueError(
            f"none of the {len(troubles)} checkpoints in {folder} is whole; of the latest: {troubles[0]} Choose another run.dir to "
            f"begin anew."
        )
    if found is None:
        return Start()
    _require_same(found, here)
    return Start(found, tuple(f"A later checkpoint is passed over: {trouble}" for trouble in troubles))


def _at(path: Path, here: Mapping[str, Any]) -> Start:
    """The checkpoint that a path names, or the latest below it."""
    for folder in (path / CHECKPOINTS, path):
        if (found := _whole(folder, here)).checkpoint is not None:
            return found
    if not (path / MANIFEST).exists():
        raise ValueError(
            f"resume is {str(path)!r}, and no checkpoint is there: give that of a checkpoint or of a run, auto or never."
        )
    checkpoint = read(path)
    _require_same(checkpoint, here)
    return Start(checkpoint)


def _require_same(found: Checkpoint, here: Mapping[str, Any]) -> None:
    if differs := difference(here, found.facts["job"]):
        raise ValueError(
            f"the checkpoint {found.path} is of another job ({differs}): give the same settings, or leave resume out to begin anew "
            f"in a run.dir of its own."
        )


def resumed_constraints(facts: Mapping[str, Any], constraints: Mapping[str, Any], job: Job) -> dict[str, Any]:
    """The plan of a checkpoint as constraints, in which fields that are now set otherwise than then take their new value.

    A run that went on with a smaller plan than it was told to begin with keeps the smaller one.

    Args:
        facts: those of the checkpoint.
        constraints: fields of the plan that are set now, with their values.
    """
    then = facts["constraints"]
    # How many processes there are is never carried over.
    now = {"sharding": Single(), **constraints}
    changed = {
        field: value for field, value in now.items() if field == "sharding" or plain_constraints(now)[field] != then.get(field)
    }
    kept = parse_constraints(facts["plan"])
    if "micro_batch_size" not in changed:
        # Among more processes a step's rows may be fewer than that for each.
        sizes = micro_batch_sizes(job, ranks_of(changed))
        kept["micro_batch_size"] = max((size for size in sizes if size <= kept["micro_batch_size"]), default=1)
    return {**kept, **changed}


def plain_constraints(constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Constraints as plain data, which :func:`memtrain.plan.parse_constraints` reads."""
    return {
        field: {"policy": policy_name(type(value)), **dataclasses.asdict(value)} if field in POLICIES else value
        for field, value in constraints.items()
    }
