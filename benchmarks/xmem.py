"""The runs of the xMem study, predicted by memtrain beside that study's four tools: ``python benchmarks/xmem.py --records FILE``.

The study (Stone-ResearchLife/xMem, doi 10.1145/3721462.3770773) trained models for four steps each and watched the memory of
the whole card. Its peaks leave out the CUDA context. So a prediction is what the caching allocator of the study's torch
reserves, and what is loaded besides it while the run is watched (``LOADED_BYTES``): one number per type of card, the median of
what shared records show, which ``--derive-constants`` prints. Nothing else is fitted. On the two small cards that median is
nothing, though runs of the study's later records (era E2) show about 30 MiB: between them the study's environment changed, and
what it measured of its framework after a run moved by as much.

The study hands an estimate to the card as a cap on the allocator, in whole percents of the card rounded to the nearest, so
that even a prediction without any error can lose half a percent of the card, 200 MiB on an A100. The estimate is therefore the
least that is not below the prediction and whose cap holds what the allocator is predicted to reserve. All figures are those of
this estimate; what they are of the bare prediction is printed beside them.

A run is predicted to run out of memory where the allocator, replayed in what the card has beside its context, does.

The study's libraries are installed beside what is there, and a child process finds them there first. Of small batches the
lengths are chance (benchmarks/published/xmem_runs.py says which are taken), and the measured peaks of one configuration differ
by up to 20 %.

Prints a table, the study's figures for all tools and a last line. Exits 2 if the file cannot be read, the libraries cannot be
installed or the child ends early.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from published.environments import Failed, install
from published.xmem_scores import TOOLS, Aggregate, Score, aggregate, least_estimate, score, score_of_tool

LANGUAGE = "transformers-4.51.3"
# By itself, since transformers imports torchvision where it finds it, and here it belongs to another torch.
IMAGES = "torchvision-0.21.0"
TORCH = "2.6.0"
MIB = 2**20
LARGE_BATCH = 16
# Without these there is nothing to simulate, or to compare with.
_NEEDED = ("model", "optimizer", "batch_size", "gpu", "ground_bytes", "total_gpu_memory", "real_oom")
LOADED_BYTES: Mapping[str, int] = {
    "NVIDIA GeForce RTX 3060": 0,
    "NVIDIA GeForce RTX 4060": 0,
    "NVIDIA A100-SXM4-40GB": 94 * MIB,
}
"""Modules and library workspaces that a run loads besides the allocator, by the card's name."""


@dataclass(frozen=True)
class Prediction:
    """What the simulation of a record says; without bytes, why there is none.

    Attributes:
        reserved_bytes: peak of the allocator on a card of unlimited memory.
        reached_bytes: peak on the record's card, up to where it ran out of memory.
        out_of_memory: whether it did.
        seconds: of building the model, simulating and replaying.
        assumed: what the record or the simulation had to take to be so.
        skipped: why the record cannot be told.
        failed: the error with which telling or simulating it ended.
    """

    id: str
    reserved_bytes: int = 0
    reached_bytes: int = 0
    out_of_memory: bool = False
    seconds: float = 0.0
    assumed: tuple[str, ...] = ()
    skipped: str = ""
    failed: str = ""


# ---------------------------------------------------------------------- the child: one record after another


def predict(line: Mapping[str, Any]) -> Prediction:
    """The prediction of a record; a failure is told and not raised."""
    from published.run import NotExpressible

    if missing := [name for name in _NEEDED if line.get(name) is None or (line[name] == 0 and line[name] is not False)]:
        return Prediction(line["id"], skipped=f"the record does not say {' and '.join(missing)}.")
    try:
        return _simulated(line)
    except NotExpressible as reason:
        return Prediction(line["id"], skipped=str(reason))
    except Exception as error:
        return Prediction(line["id"], failed=f"{type(error).__name__}: {_last_line(str(error))}")


def _simulated(line: Mapping[str, Any]) -> Prediction:
    from published.xmem_runs import Setting, express

    from memtrain.device import Cuda
    from memtrain.memory.allocator import OutOfMemory
    from memtrain.memory.allocator_config import AllocatorConfig
    from memtrain.memory.replay import replay
    from memtrain.trace.simulate import simulate

    started = time.perf_counter()
    run = express(Setting.of(line))
    assert isinstance(run.device, Cuda)
    trace = simulate(run.job, run.plan, run.source, run.rows, run.device)
    allocator = AllocatorConfig.of("", TORCH)
    reserved = replay(trace, allocator).peak_reserved_bytes
    capacity = run.device.usable_bytes - run.device.context_bytes
    reached, out_of_memory = reserved, False
    if reserved > capacity:
        try:
            reached = replay(trace, allocator, capacity).peak_reserved_bytes
        except OutOfMemory as end:
            reached, out_of_memory = end.reserved_bytes, True
    seconds = time.perf_counter() - started
    return Prediction(line["id"], reserved, reached, out_of_memory, seconds, (*run.assumed, *trace.assumed))


# ---------------------------------------------------------------------- the parent


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file, one JSON object a line.

    Raises:
        Failed: it cannot be read.
    """
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
        names = [line["id"] for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Failed(f"{file} cannot be read ({error}): give a file of JSON objects with an id, one a line.") from error
    if not lines or len(set(names)) < len(names):
        raise Failed(f"{file} has {len(lines)} records with {len(set(names))} ids: give one or more, each with its own.")
    return lines


def environment(record: Mapping[str, Any]) -> str:
    """The key of ``environments.ENVIRONMENTS`` with whose libraries a record is simulated."""
    return LANGUAGE if record.get("input_size") is None else IMAGES


def predict_all(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Prediction]:
    """The predictions of all records, each by a child process that finds the study's libraries first.

    Args:
        folder: of the libraries.

    Raises:
        Failed: pip cannot install them, or a child ends early.
    """
    made: dict[str, Prediction] = {}
    for name in sorted({environment(record) for record in records}):
        install(name, folder / name)
        made |= _predict_in(folder / name, [record for record in records if environment(record) == name])
    return [made[record["id"]] for record in records]


def _predict_in(folder: Path, records: Sequence[Mapping[str, Any]]) -> dict[str, Prediction]:
    path = os.pathsep.join(part for part in (str(folder), os.environ.get("PYTHONPATH")) if part)
    found = subprocess.run(
        [sys.executable, __file__, "--simulate"],
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
        input="".join(json.dumps(record) + "\n" for record in records),
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise Failed(f"the simulations ended early: {_last_line(found.stderr)}")
    # Libraries may print while they are imported; the results are the last line.
    written = json.loads(found.stdout.splitlines()[-1])
    return {one["id"]: Prediction(**{**one, "assumed": tuple(one["assumed"])}) for one in written}


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["without a word"])[-1]


@dataclass(frozen=True)
class Result:
    """A record beside its prediction.

    Attributes:
        predicted_bytes: comparable with ``measured_bytes``.
        estimate_bytes: the same, raised to where its cap holds what the allocator reserves.
        error: of the estimate, as a fraction of the measured bytes, signed; of no meaning where memory ran out.
        c1, c2, saved_bytes: of the estimate, as ``Score`` has them.
        bare_error, bare_c2: of the bytes that are predicted.
    """

    id: str
    model: str
    optimizer: str
    batch: int
    gpu: str
    era: str
    measured_bytes: int
    measured_out_of_memory: bool
    predicted_bytes: int
    estimate_bytes: int
    predicted_out_of_memory: bool
    error: float
    c1: bool
    c2: bool
    saved_bytes: float
    bare_error: float
    bare_c2: bool
    seconds: float
    assumed: tuple[str, ...]


def results(records: Sequence[Mapping[str, Any]], predictions: Sequence[Prediction]) -> list[Result]:
    """The records that have a prediction, with their scores."""
    made = []
    for record, prediction in zip(records, predictions, strict=True):
        if prediction.skipped or prediction.failed:
            continue
        predicted = estimate = prediction.reached_bytes + LOADED_BYTES.get(record["gpu"], 0)
        if not prediction.out_of_memory:
            estimate = least_estimate(predicted, prediction.reached_bytes, record["total_gpu_memory"])
        bare = score(record, predicted, prediction.out_of_memory)
        found = score(record, estimate, prediction.out_of_memory)
        made.append(
            Result(
                id=record["id"],
                model=record["model"],
                optimizer=record["optimizer"],
                batch=record["batch_size"],
                gpu=record["gpu"],
                era=record.get("era") or "",
                measured_bytes=record["ground_bytes"],
                measured_out_of_memory=record["real_oom"],
                predicted_bytes=predicted,
                estimate_bytes=estimate,
                predicted_out_of_memory=prediction.out_of_memory,
                error=found.error,
                c1=found.c1,
                c2=bool(found.c2),
                saved_bytes=found.saved_bytes or 0.0,
                bare_error=bare.error,
                bare_c2=bool(bare.c2),
                seconds=prediction.seconds,
                assumed=prediction.assumed,
            )
        )
    return made


def summary(found: Sequence[Result], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """What the last line says, as data; errors are fractions, of the runs that did not run out of memory."""
    trained = [one for one in found if not one.measured_out_of_memory]
    reasons = Counter(one.skipped or one.failed for one in predictions if one.skipped or one.failed)
    return {
        "scored": len(found),
        "skipped": len(predictions) - len(found),
        "median_error": _median(abs(one.error) for one in trained),
        "median_error_batch16": _median(abs(one.error) for one in trained if one.batch >= LARGE_BATCH),
        "median_signed_error": _median(one.error for one in trained),
        "estimation_failure": sum(not one.c2 for one in found) / len(found) if found else None,
        "seconds_per_prediction": statistics.mean(one.seconds for one in found) if found else None,
        "reasons": dict(reasons),
        "bare_median_error": _median(abs(one.bare_error) for one in trained),
        "bare_median_error_batch16": _median(abs(one.bare_error) for one in trained if one.batch >= LARGE_BATCH),
        "bare_median_signed_error": _median(one.bare_error for one in trained),
        "bare_estimation_failure": sum(not one.bare_c2 for one in found) / len(found) if found else None,
    }


def _median(values: Any) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def tools_beside(records: Sequence[Mapping[str, Any]], found: Sequence[Result]) -> dict[str, Aggregate]:
    """The study's figures for memtrain and for its tools, over the records that have an estimate of each, and ours of all."""
    ours, told = [Score(one.error, one.c1, one.c2, one.saved_bytes) for one in found], {one.id for one in found}
    same = [record for record in records if record["id"] in told]
    theirs = {tool: [one for record in same if (one := score_of_tool(record, tool))] for tool in TOOLS}
    return {"memtrain": aggregate(ours), **{tool: aggregate(scores) for tool, scores in theirs.items()}}


def report(records: Sequence[Mapping[str, Any]], predictions: Sequence[Prediction], file: Path | None = None) -> dict[str, Any]:
    """Print the tables and the last line, write the same to ``file``, and return the summary."""
    found = results(records, predictions)
    for row in sorted(found, key=lambda one: (one.model, one.gpu, one.optimizer, one.batch)):
        print(_line(row))
    for name, of in (("card", _card), ("model", lambda one: one.model), ("optimizer", lambda one: one.optimizer)):
        _print_slices(name, found, of)
    _print_slices("batch", found, lambda one: f"{LARGE_BATCH} or more" if one.batch >= LARGE_BATCH else f"below {LARGE_BATCH}")
    beside = tools_beside(records, found)
    print(f"\n{'by the study':14}{'runs':>6}{'error %':>10}{'PEF %':>9}{'C1 %':>9}{'MCP GiB':>10}")
    for tool, figures in beside.items():
        shares = (_percent(figures.median_error), _percent(figures.pef, 1), _percent(figures.c1, 1))
        mcp = "-" if figures.mcp is None else f"{figures.mcp:.2f}"
        print(f"{tool:14}{figures.runs:6}{shares[0]:>10}{shares[1]:>9}{shares[2]:>9}{mcp:>10}")
    for one in predictions:
        if one.skipped or one.failed:
            print(f"{one.id}: {'skipped' if one.skipped else 'failed'}: {one.skipped or one.failed}")
    constants = ", ".join(f"{name.removeprefix('NVIDIA ')} {size // MIB} MiB" for name, size in LOADED_BYTES.items())
    print(f"\nloaded besides the allocator: {constants}")
    total = summary(found, predictions)
    print(
        f"bare predictions: median error {_percent(total['bare_median_error'])} % "
        f"({_percent(total['bare_median_error_batch16'])} % with {LARGE_BATCH} rows or more), signed "
        f"{_percent(total['bare_median_signed_error'])} %, estimation failure {_percent(total['bare_estimation_failure'], 1)} %"
    )
    seconds = total["seconds_per_prediction"]
    print(
        f"xmem: {total['scored']} runs scored and {total['skipped']} skipped, median error {_percent(total['median_error'])} % "
        f"({_percent(total['median_error_batch16'])} % with {LARGE_BATCH} rows or more), signed "
        f"{_percent(total['median_signed_error'])} %, estimation failure {_percent(total['estimation_failure'], 1)} %, "
        f"{'-' if seconds is None else f'{seconds:.2f}'} s a prediction"
    )
    if file is not None:
        data = {
            "summary": total,
            "by_the_study": {tool: asdict(figures) for tool, figures in beside.items()},
            "records": [asdict(row) for row in found],
        }
        file.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return total


def _card(row: Result) -> str:
    return row.gpu.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _line(row: Result) -> str:
    verdict = "right" if row.c2 else "fails"
    if row.measured_out_of_memory or row.predicted_out_of_memory:
        sides = [("out of memory" if out else "trains") for out in (row.measured_out_of_memory, row.predicted_out_of_memory)]
        verdict += f", {sides[0]}, predicted {sides[1]}"
    numbers = f"{row.measured_bytes // MIB:8}{row.estimate_bytes // MIB:8}{100 * row.error:+9.2f} %"
    return f"{row.model[-26:]:28}{row.optimizer:10}{row.batch:4} {_card(row):17}{row.era:4}{numbers}{row.seconds:6.2f} s  {verdict}"


def _print_slices(name: str, found: Sequence[Result], of: Callable[[Result], str]) -> None:
    print(f"\n{name:28}{'runs':>6}{'error %':>10}{'signed %':>10}{'PEF %':>8}")
    for value in sorted({of(one) for one in found}):
        part = [one for one in found if of(one) == value]
        trained = [one.error for one in part if not one.measured_out_of_memory]
        failures = sum(not one.c2 for one in part) / len(part)
        medians = (_percent(_median(map(abs, trained))), _percent(_median(trained)))
        print(f"{value[-26:]:28}{len(part):6}{medians[0]:>10}{medians[1]:>10}{_percent(failures, 1):>8}")


def _percent(share: float | None, digits: int = 2) -> str:
    return "-" if share is None else f"{100 * share:.{digits}f}"


def derive_constants(records: Sequence[Mapping[str, Any]], predictions: Sequence[Prediction]) -> None:
    """Print, by card, the median of what was measured beyond the reserved bytes, where lengths are no chance."""
    beyond: dict[str, list[tuple[float, str]]] = {}
    for record, prediction in zip(records, predictions, strict=True):
        fixed = record["batch_size"] >= LARGE_BATCH or (record.get("seq_padding") or "").startswith("fixed")
        if fixed and not record["real_oom"] and prediction.reserved_bytes == prediction.reached_bytes > 0:
            rest = (record["ground_bytes"] - prediction.reserved_bytes) / MIB
            beyond.setdefault(record["gpu"], []).append((rest, record.get("era") or ""))
    for gpu, rests in sorted(beyond.items()):
        # A run cannot have loaded less than nothing.
        median = max(0, statistics.median(rest for rest, _ in rests))
        print(f"{gpu}: median {median:.0f} MiB of {len(rests)} runs")
        for era in sorted({era for _, era in rests}):
            print(f"  {era}: " + ", ".join(f"{rest:.0f}" for rest, of in sorted(rests) if of == era))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, help="file of records, one JSON object a line")
    parser.add_argument("--json", type=Path, dest="file", help="file for the same as data")
    parser.add_argument("--environments", type=Path, help="folder for the libraries, to be used again; temporary without it")
    parser.add_argument("--derive-constants", action="store_true", help="print what was measured beyond the allocator, and end")
    parser.add_argument("--simulate", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.simulate:
        print(json.dumps([asdict(predict(json.loads(line))) for line in sys.stdin]))
        sys.exit(0)
    if arguments.records is None:
        parser.error("--records names the file of records")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            lines = read(arguments.records)
            predicted = predict_all(lines, (arguments.environments or Path(temporary)).absolute())
        except Failed as failure:
            print(failure, file=sys.stderr)
            sys.exit(2)
    if arguments.derive_constants:
        derive_constants(lines, predicted)
    else:
        report(lines, predicted, arguments.file)
