"""The folder of a run: what was planned, what happened, and how the two compare."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILES = (
    "config.yaml",
    "plan.yaml",
    "prediction.json",
    "metrics.jsonl",
    "comparison.json",
    "memory.png",
    "model",
    "optimizers.json",
)


class RunFolder:
    """Writes one run's files; the folder is made with the first of them.

    Raises:
        ValueError: the folder holds a run already.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        found = [name for name in _FILES if (path / name).exists()]
        if found:
            raise ValueError(f"run.dir {path} already holds a run ({', '.join(found)}): choose another folder or remove it.")

    def write_text(self, name: str, text: str) -> None:
        """Write a text file.

        Raises:
            ValueError: it cannot be written.
        """
        self._write(name, text, mode="w")

    def _write(self, name: str, text: str, mode: str) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with (self.path / name).open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise ValueError(f"run.dir {self.path} cannot be written ({error.strerror}): choose another folder.") from error

    def write_yaml(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a YAML file, keys in the given order."""
        import yaml

        self.write_text(name, yaml.safe_dump(dict(content), sort_keys=False))

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write an indented JSON file."""
        self.write_text(name, json.dumps(content, indent=2) + "\n")

    def log(self, row: Mapping[str, float]) -> None:
        """Add one line to ``metrics.jsonl``.

        Raises:
            ValueError: it cannot be written.
        """
        self._write("metrics.jsonl", json.dumps(row) + "\n", mode="a")


@dataclass
class RunLog:
    """The rows written so far, here and in the run folder."""

    folder: RunFolder | None
    rows: list[Mapping[str, float]] = field(default_factory=list)

    def add(self, row: Mapping[str, float]) -> None:
        """Add a row, also to ``metrics.jsonl``."""
        self.rows.append(row)
        if self.folder is not None:
            self.folder.log(row)

    @property
    def steps(self) -> list[Mapping[str, float]]:
        """The rows of optimizer steps."""
        return [row for row in self.rows if "loss" in row]

    @property
    def evaluations(self) -> tuple[tuple[int, float], ...]:
        """(step, loss) of each evaluation."""
        return tuple((int(row["step"]), row["eval_loss"]) for row in self.rows if "eval_loss" in row)
