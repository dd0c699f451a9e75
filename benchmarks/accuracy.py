"""Peaks that others published, beside memtrain's predictions: ``python benchmarks/accuracy.py --records FILE.jsonl``.

Each record is told as a job, a plan and a model (published/), and simulated by the function that plans: no step is written here.
How much memory a model takes depends on the version of the library that holds it, so records are simulated with the versions they
were made with where these matter: installed into a folder beside what is there, found first by a child process. Nothing is fitted.

Prints a table and one line. What is not scored is counted with its reason. A run that ended for want of memory is right where more
is predicted than the card has. With ``--bound`` exits 1 if an error is larger or nothing is scored, and 2 if the libraries of an
environment cannot be installed or a simulation fails. Exits 2 if a file holds no records.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from published import environments, express, page, score
from published.environments import Failed
from published.record import Record, read
from published.run import Prediction
from published.score import Scored, Skipped


def predictions(records: Sequence[Record], folder: Path, told: Callable[[Prediction], None]) -> Iterator[Prediction]:
    """The predictions of records, one environment after another.

    Args:
        folder: of the environments' libraries.
        told: called with each prediction at once.
    """
    by_environment: dict[str, list[Record]] = {}
    for record in records:
        by_environment.setdefault(express.environment(record), []).append(record)
    command = [sys.executable, __file__, "--simulate"]
    for name, asked in by_environment.items():
        for prediction in _predictions_with(name, folder / name, asked, command):
            told(prediction)
            yield prediction


def _predictions_with(name: str, folder: Path, records: Sequence[Record], command: Sequence[str]) -> Iterator[Prediction]:
    try:
        environments.install(name, folder)
    except Failed as failure:
        yield from (Prediction(record.id, failed=str(failure)) for record in records)
    else:
        yield from environments.predict_in(name, folder, records, command)


def scores(
    records: Sequence[Record], asked: argparse.Namespace, folder: Path, told: Callable[[Prediction], None]
) -> tuple[list[Scored], list[Skipped]]:
    """The score of each record, or why it has none."""
    reasons = {record.id: score.why_not(record, asked.quality, asked.core, asked.scopes) for record in records}
    wanted = {record.id: record for record in records if not reasons[record.id]}
    decimals = score.decimals_by_source(records)
    scored: list[Scored] = []
    skipped = [Skipped(record, reasons[record.id]) for record in records if reasons[record.id]]
    for prediction in predictions(list(wanted.values()), folder, told):
        record = wanted[prediction.id]
        found = score.score(record, prediction, decimals[record.source_family, record.unit])
        if isinstance(found, Scored):
            scored.append(found)
        else:
            skipped.append(found)
    return scored, skipped


def report(scored: Sequence[Scored], skipped: Sequence[Skipped], file: Path | None = None, bound: float | None = None) -> int:
    """Print tables and summary, write them to ``file``, and return the exit code."""
    _print_scores(scored)
    _print_clusters(scored)
    _print_reasons(skipped)
    total = score.summary(scored, skipped)
    if file is not None:
        content = {
            "summary": total,
            "clusters": score.by_cluster(scored),
            "records": [score.as_data(one) for one in scored],
            "skipped": [{"id": one.record.id, "reason": one.reason, "failed": one.failed} for one in skipped],
        }
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(
        f"accuracy: {total['scored']} scored, {total['skipped']} skipped, median error {_percent(total['median_error'])}, "
        f"90th percentile {_percent(total['p90_error'])}, median signed error {_percent(total['median_signed_error'], '+')}, "
        f"under by more than 1 % {_percent(total['under_1pct'])}, than 3 % {_percent(total['under_3pct'])}, "
        f"out of memory {total['oom_right']} of {total['oom_total']} right, {total['unfit']} that trained called too large"
    )
    if bound is None:
        return 0
    if total["failed"]:
        return 2
    return 0 if total["scored"] and total["largest_error"] <= bound else 1


def _print_scores(scored: Sequence[Scored]) -> None:
    print(f"{'record':24}{'model':34}{'method':8}{'compared':11}{'published B':>17}{'predicted B':>17}{'error %':>11}")
    for one in scored:
        record = one.record
        if one.oom_right is None:
            numbers = f"{one.published_bytes:>17,.0f}{one.predicted_bytes:>17,}{100 * one.error:>+z11.4f}"
        else:
            numbers = f"{'out of memory':>17}{one.predicted_bytes:>17,}{'right' if one.oom_right else 'wrong':>11}"
        print(f"{record.id[:23]:24}{record.model[-33:]:34}{record.method[:7]:8}{one.compared:11}{numbers}")


def _print_clusters(scored: Sequence[Scored]) -> None:
    print(f"\n{'cluster':80}{'scored':>7}{'median %':>11}{'signed %':>11}")
    for cluster, found in score.by_cluster(scored).items():
        print(
            f"{cluster[:79]:80}{found['scored']:>7}{100 * found['median_error']:>11.4f}{100 * found['median_signed_error']:>+z11.4f}"
        )


def _print_reasons(skipped: Sequence[Skipped]) -> None:
    reasons: dict[str, list[str]] = {}
    for one in skipped:
        reasons.setdefault(f"{'failed: ' if one.failed else ''}{one.reason}", []).append(one.record.id)
    print("\nskipped" if reasons else "")
    for reason, ids in sorted(reasons.items(), key=lambda found: -len(found[1])):
        print(f"{len(ids):>5}  {reason.rstrip('.')}: {', '.join(ids)}")
    print()


def _percent(fraction: float | None, sign: str = "") -> str:
    return "none" if fraction is None else f"{100 * fraction:{sign}.4f} %"


def _check(records: Sequence[Record], asked: argparse.Namespace) -> None:
    """Refuse before anything is simulated what would lose its results.

    Raises:
        ValueError: there are no records, two have one id, or a file cannot be written.
    """
    if not records:
        raise ValueError(f"{', '.join(map(str, asked.records))} holds no record: give one JSON object a line.")
    twice = [name for name, count in Counter(record.id for record in records).items() if count > 1]
    if twice:
        raise ValueError(f"the id {twice[0]!r} is in two files: give each record its own.")
    for file in (asked.json, asked.published):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{file} cannot be written, since its folder is not there: make it first.")


def main(asked: argparse.Namespace) -> int:
    """Simulate the records of the files, report, and return the exit code."""
    try:
        records = [record for file in asked.records for record in read(file)]
        _check(records, asked)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as temporary:
        folder = (asked.environments or Path(temporary)).absolute()

        def told(prediction: Prediction) -> None:
            if sys.stderr.isatty():
                print(f"{prediction.id}: {prediction.seconds:.1f} s", file=sys.stderr)

        scored, skipped = scores(records, asked, folder, told)
    code = report(scored, skipped, asked.json, asked.bound)
    if asked.published is not None:
        page.write(asked.published, scored, " ".join(("python benchmarks/accuracy.py", *_shown(asked))))
    return code


def _shown(asked: argparse.Namespace) -> tuple[str, ...]:
    """The arguments that decide what a page says, as they are given."""
    files = " ".join(file.as_posix() for file in asked.records)
    core = ("--core",) if asked.core else ()
    return (f"--records {files}", f"--quality {','.join(asked.quality)}", *core, f"--published {asked.published.as_posix()}")


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, nargs="+", help="files of published peaks, a JSON object a line")
    parser.add_argument("--quality", type=_names, default=("A", "B"), help="which qualities, such as A,B")
    parser.add_argument("--core", action="store_true", help="the diverse subset alone")
    parser.add_argument(
        "--scopes", type=_names, default=score.WHOLE_STEPS, help="what was measured, such as train_step,component"
    )
    parser.add_argument("--json", type=Path, help="file for the same as data")
    parser.add_argument("--published", type=Path, help="file for a page of published peaks beside their predictions")
    parser.add_argument("--environments", type=Path, help="folder for the libraries, to be used again; temporary without it")
    parser.add_argument("--bound", type=float, help="largest error, as a fraction, that exits with 0")
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    parser = _arguments()
    arguments = parser.parse_args()
    if arguments.simulate:
        environments.answer()
        sys.exit(0)
    if not arguments.records:
        parser.error("--records names no file: give one of published peaks.")
    sys.exit(main(arguments))
