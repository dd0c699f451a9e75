"""One published measurement: a line of a file in the schema that ground_truth/README.md of the shared data describes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Record:
    """A training run and the peak that was published of it; what a source does not say is None.

    Attributes:
        arch: layers, hidden, heads, kv_heads, ffn, vocab, tied_embeddings and, in words, extra.
        gpus: count and type.
        peak_value: as published, in ``unit``; ``peak_gib`` is the same in units of 2**30 bytes.
        outcome: "ok", or "oom" where the run ended for want of memory.
        scope: "train_step", "fwd_bwd", or what else was measured.
        quality: "A" where all settings are known, "B" where ``assume`` says which were guessed, "C" for a headline.
        core: whether it belongs to the diverse subset.
        cluster: source, model and method.
    """

    id: str
    source: str = ""
    model: str = ""
    peak_value: float | None = None
    peak_gib: float | None = None
    source_family: str = ""
    arch: Mapping[str, Any] = field(default_factory=dict)
    params_b: float | None = None
    method: str = "full"
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    lora_dropout: float | None = None
    precision: str = ""
    optimizer: str = ""
    optimizer_in_backward: bool = False
    batch_size_per_gpu: int | None = None
    seq_len: int | None = None
    grad_accum: int | None = None
    checkpointing: str = ""
    attention: str = ""
    loss: str = ""
    compile: bool = False
    gpus: Mapping[str, Any] = field(default_factory=dict)
    sharding: str = "none"
    offload: str = "none"
    metric: str = ""
    unit: str = ""
    unit_interpreted: str = ""
    outcome: str = "ok"
    scope: str = "train_step"
    quality: str = "C"
    assume: tuple[str, ...] = ()
    core: bool = False
    cluster: str = ""
    notes: str = ""
    nvidia_smi_mib: float | None = None
    throughput_tok_s_gpu: float | None = None

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Record:
        """The record of one parsed line; keys that it does not know are left out, and nulls are the defaults."""
        known = {one.name for one in fields(cls)}
        said: dict[str, Any] = {name: _plain(value) for name, value in line.items() if name in known and value is not None}
        said["id"] = str(said["id"])
        for name in ("lora_targets", "assume"):
            if name in said:
                said[name] = (said[name],) if isinstance(said[name], str) else tuple(said[name])
        for name in ("arch", "gpus"):
            given = said.get(name, {})
            # A word in place of the whole says nothing that is asked for.
            said[name] = {key: _plain(value) for key, value in dict(given).items() if value is not None} if _maps(given) else {}
        for name in ("peak_value", "peak_gib"):
            if name in said:
                said[name] = float(said[name])
        for name in (
            "checkpointing",
            "attention",
            "loss",
            "precision",
            "optimizer",
            "sharding",
            "offload",
            "method",
            "outcome",
        ):
            if name in said:
                said[name] = str(said[name])
        said["outcome"] = said.get("outcome", "ok").lower()
        return cls(**said)


def _maps(given: Any) -> bool:
    return isinstance(given, Mapping)


def _plain(value: Any) -> Any:
    """A whole number as one, whatever it was written as."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def read(file: Path) -> Iterator[Record]:
    """The records of a file.

    Raises:
        ValueError: it cannot be read, a line is no record, or two have one id.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read ({error}): give a file of JSON objects, one a line.") from error
    seen: set[str] = set()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = Record.of(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number} of {file} is no record ({error}): give one JSON object a line.") from error
        if record.id in seen:
            raise ValueError(f"line {number} of {file} has the id {record.id!r} of a line before: give each record its own.")
        seen.add(record.id)
        yield record
