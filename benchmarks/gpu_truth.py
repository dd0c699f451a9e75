"""What ten training jobs take of the card that is here, predicted and measured: ``python benchmarks/gpu_truth.py``.

Each job runs in a process of its own, so that it starts with an empty allocator. There it is planned as a Trainer plans it,
every field of the plan being given, and then its model is loaded and its steps are run. Beside each other stand

* allocated and reserved bytes: the prediction and torch's max_memory_allocated and max_memory_reserved over the whole run;
* total bytes: the prediction, and what nvidia-smi (NVML) says that the device has given out, less what it had before;
* seconds of a step: those of the cost model and the median of the steps after the second.

One job is also recorded by torch's allocator, and the allocations and frees of its second step are compared with those of
the simulated one, in order and in bytes asked for.

Writes the same as data to ``benchmarks/results/gpu_truth_CARD.json``; the card is called as nvidia-smi calls it. Exits 1 if a
job fails, and 2 where there is no card. Nothing is fitted, and no error makes it fail: it is a measurement.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_jobs import JOBS, RECORDED, GpuJob, batches, constraints_of, row_shapes

RESULTS = Path(__file__).parent / "results"
STEPS = 7
# Before a job is given up.
MOST_SECONDS = 120


@dataclass(frozen=True)
class Result:
    """A job, predicted and measured; bytes and seconds.

    Attributes:
        total_measured_bytes: what nvidia-smi counts more than before the process had a context.
        planning_seconds: of simulation and allocator.
        assumed: what the simulation had to assume.
        events, events_equal: of the second step's allocations and frees, how many were recorded and how many of these the
            simulation has, in order; None where the job was not recorded.
        first_difference: the first place where the two part, in words.
    """

    job: str
    plan: str
    allocated_predicted_bytes: int
    allocated_measured_bytes: int
    reserved_predicted_bytes: int
    reserved_measured_bytes: int
    total_predicted_bytes: int
    total_measured_bytes: int
    step_predicted_seconds: float
    step_measured_seconds: float
    planning_seconds: float
    assumed: tuple[str, ...] = ()
    events: int | None = None
    events_equal: int | None = None
    first_difference: str = ""

    def error(self, what: str) -> float:
        """(predicted - measured) / measured of "allocated", "reserved" or "total" bytes, as a fraction."""
        predicted, measured = (getattr(self, f"{what}_{side}_bytes") for side in ("predicted", "measured"))
        return float(predicted / measured - 1)


# ---------------------------------------------------------------------- the child: one job on the card


def measure(job: GpuJob) -> Result:
    """Plan a job and run it on the card, in a process that has not used it."""
    import torch

    from memtrain import machine
    from memtrain.models.build import source as model_source
    from memtrain.models.load import load_model
    from memtrain.models.quantize import move_unpacked_
    from memtrain.planner.predict import Predictor
    from memtrain.planner.search import choose
    from memtrain.recovery import step_until_finite
    from memtrain.run import prepare
    from memtrain.trace.event import DEVICE

    before = used_bytes()
    device = machine.named("auto")
    source = model_source(job.model)
    predictor = Predictor(job.job, source, row_shapes(job), device, allocator=machine.allocator_settings())
    choice = choose(predictor, machine.stated_budget(device, None), constraints_of(job.plan))
    recorded = job.name == RECORDED
    marks: list[int] = []
    torch.manual_seed(0)
    model = move_unpacked_(load_model(source, job.job, "cuda"), "cuda")
    run = prepare(job.job, choice.plan, model)
    if recorded:
        torch.cuda.memory._record_memory_history(stacks="python")
    seconds = []
    for number in range(STEPS):
        started = time.perf_counter()
        step_until_finite(run, lambda: batches(job, "cuda"))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        if recorded and number < 2:
            marks.append(len(torch.cuda.memory._snapshot()["device_traces"][0]))
    found = Result(
        job=job.name,
        plan=str(choice.plan),
        allocated_predicted_bytes=choice.footprint.peak_allocated_bytes,
        allocated_measured_bytes=torch.cuda.max_memory_allocated(),
        reserved_predicted_bytes=choice.footprint.peak_reserved_bytes,
        reserved_measured_bytes=torch.cuda.max_memory_reserved(),
        total_predicted_bytes=choice.footprint.total_device_bytes,
        total_measured_bytes=used_bytes() - before,
        step_predicted_seconds=choice.step_seconds,
        step_measured_seconds=statistics.median(seconds[2:]),
        planning_seconds=choice.planning_seconds,
        assumed=choice.trace.assumed,
    )
    if not recorded:
        return found
    entries = torch.cuda.memory._snapshot()["device_traces"][0][slice(*marks)]
    start, stop = choice.trace.section("step 2")
    simulated = [event.bytes for event in choice.trace.events[start:stop] if event.place == DEVICE and event.bytes]
    return with_events(found, list(recorded_bytes(entries)), simulated)


def used_bytes() -> int:
    """Bytes that NVML says the first card has given out to all processes."""
    command = ["nvidia-smi", "--id=0", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]) << 20


def recorded_bytes(entries: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    """Bytes asked for by each allocation of an allocator's trace, and of each free as a negative number."""
    for entry in entries:
        if entry["action"] == "alloc":
            yield entry["size"]
        elif entry["action"] == "free_requested":
            yield -entry["size"]


def in_one_order(events: Sequence[int]) -> list[int]:
    """The same with the frees between two allocations sorted: C++ frees the members of one object in any order."""
    found: list[int] = []
    for frees, group in groupby(events, lambda size: size < 0):
        sizes = list(group)
        found += sorted(sizes) if frees else sizes
    return found


def with_events(result: Result, recorded: Sequence[int], simulated: Sequence[int]) -> Result:
    """The result with the comparison of two lists of events in it."""
    recorded, simulated = in_one_order(recorded), in_one_order(simulated)
    matcher = SequenceMatcher(None, recorded, simulated, autojunk=False)
    equal = sum(block.size for block in matcher.get_matching_blocks())
    first = next((code for code in matcher.get_opcodes() if code[0] != "equal"), None)
    words = ""
    if first is not None:
        _, begin, end, other_begin, other_end = first
        words = f"at event {begin}: recorded {recorded[begin:end][:6]}, simulated {simulated[other_begin:other_end][:6]}"
    return replace(result, events=len(recorded), events_equal=equal, first_difference=words)


# ---------------------------------------------------------------------- the parent: one process a job, table, file


def measure_apart(job: GpuJob) -> Result | str:
    """The result of a job from a process of its own, or in a sentence why there is none."""
    command = [sys.executable, __file__, "--job", job.name]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        return f"{job.name} was not done after {MOST_SECONDS} s."
    if found.returncode:
        return f"{job.name} failed: {(found.stderr.strip().splitlines() or ['without a word'])[-1]}"
    # Libraries may print while they are imported; the result is the last line.
    written = json.loads(found.stdout.splitlines()[-1])
    return Result(**{**written, "assumed": tuple(written["assumed"])})


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """What the last line says, as data; errors are fractions."""
    found: dict[str, Any] = {"jobs": len(results)}
    for what in ("allocated", "reserved", "total"):
        errors = [abs(result.error(what)) for result in results]
        found |= {f"median_{what}_error": statistics.median(errors), f"largest_{what}_error": max(errors)}
    ratios = [result.step_predicted_seconds / result.step_measured_seconds for result in results]
    found["median_step_ratio"] = statistics.median(ratios)
    found |= {name: value for result in results if result.events for name, value in _events(result).items()}
    return found


def _events(result: Result) -> dict[str, Any]:
    return {"events": result.events, "events_equal": result.events_equal, "events_of": result.job}


def table(results: Sequence[Result]) -> str:
    """Predicted beside measured, a line for each job."""
    headings = ("allocated MiB", "error %", "reserved MiB", "error %", "total MiB", "error %", "step s", "predicted s")
    lines = [f"{'job':28}" + "".join(f"{heading:>15}" for heading in headings)]
    for row in results:
        numbers: list[str] = []
        for what in ("allocated", "reserved", "total"):
            numbers += [f"{getattr(row, f'{what}_measured_bytes') / 2**20:,.1f}", f"{100 * row.error(what):+z.4f}"]
        numbers += [f"{row.step_measured_seconds:.4f}", f"{row.step_predicted_seconds:.4f}"]
        lines.append(f"{row.job:28}" + "".join(f"{number:>15}" for number in numbers))
        if row.events is not None:
            lines.append(
                f"{'':28}  events of step 2: {row.events_equal} of {row.events} simulated in order {row.first_difference}"
            )
    return "\n".join(lines)


def main(folder: Path, names: Sequence[str]) -> int:
    """Measure the jobs, print and write what is found, and return the exit code."""
    import torch

    if not torch.cuda.is_available():
        print("torch finds no CUDA card here: run this where there is one.", file=sys.stderr)
        return 2
    card = torch.cuda.get_device_name(0)
    found = [measure_apart(job) for job in JOBS if not names or job.name in names]
    results = [one for one in found if isinstance(one, Result)]
    problems = [one for one in found if isinstance(one, str)]
    print(card, "torch", torch.__version__)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not results:
        return 1
    print(table(results))
    total = {"card": card, "torch": torch.__version__, "failed": problems, **summary(results)}
    print(
        f"gpu truth: {len(results)} jobs, median error of allocated bytes {100 * total['median_allocated_error']:.4f} %, "
        f"of reserved {100 * total['median_reserved_error']:.4f} %, of total {100 * total['median_total_error']:.4f} %"
    )
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu_truth_{'_'.join(card.lower().split())}.json"
    file.write_text(
        json.dumps({"summary": total, "records": [asdict(row) for row in results]}, indent=1) + "\n", encoding="utf-8"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="jobs; all by default")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the file of results")
    parser.add_argument("--job", choices=[job.name for job in JOBS], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        print(json.dumps(asdict(measure(next(job for job in JOBS if job.name == arguments.job)))))
        sys.exit(0)
    sys.exit(main(arguments.results, arguments.names))
