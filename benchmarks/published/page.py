"""A page of published peaks beside their predictions, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from published.score import GIB, Scored

_HEADINGS = ("model", "method", "rows × length", "numbers", "recomputed", "attention", "loss", "card", "source")


def write(file: Path, scored: Sequence[Scored], command: str) -> None:
    """Write the page of all records that trained.

    Args:
        command: what makes it.
    """
    file.write_text(text([one for one in scored if one.oom_right is None], command), encoding="utf-8")


def text(scored: Sequence[Scored], command: str) -> str:
    """The page: what was published, with its settings and source, beside what is predicted."""
    versions = sorted({_versions(one) for one in scored})
    return "\n".join(
        (
            "# Published peaks beside predictions",
            "",
            f"{len(scored)} peaks that others measured on their cards and published, and what memtrain predicts of the same settings.",
            "Nothing is fitted to them. In units of 2^30 bytes for one card; *allocated* is what tensors hold, *reserved* what torch's",
            "allocator has taken, *total* adds the CUDA context. An error is 0 within what the published digits leave open. What is called numbers is",
            "in the words of the source. Made by",
            "",
            f"    {command}",
            "",
            "Libraries that simulated them, for runs of different years:",
            "",
            *(f"- {one}" for one in versions),
            "",
            _row(("published", "predicted", "error", "compared", *_HEADINGS)),
            _row(("---:", "---:", "---:", *["---"] * (1 + len(_HEADINGS)))),
            *(_row(_cells(one)) for one in scored),
            "",
        )
    )


def _cells(one: Scored) -> tuple[str, ...]:
    record = one.record
    cards = "" if record.gpus.get("count", 1) == 1 else f"{record.gpus['count']} × "
    return (
        f"{one.published_bytes / GIB:.4f}",
        f"{one.predicted_bytes / GIB:.4f}",
        f"{100 * one.error:+z.3f} %",
        one.compared,
        record.model,
        record.method if record.lora_rank is None else f"{record.method}, rank {record.lora_rank}",
        f"{record.batch_size_per_gpu or '?'} × {record.seq_len or '?'}",
        record.precision,
        record.checkpointing,
        record.attention,
        record.loss,
        f"{cards}{record.gpus.get('type', '')}",
        record.source,
    )


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _versions(one: Scored) -> str:
    return ", ".join(f"{name} {version}" for name, version in one.prediction.versions.items())
