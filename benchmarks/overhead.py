"""What a step costs beside the mathematics, in processor time: ``python benchmarks/overhead.py``.

A plain loop is the measure. Per step it stacks the batch from the same rows, sets the learning rate of a cosine, runs forward
and backward, bounds the gradient to 1.0, updates with fused AdamW, frees the gradients, and reads and keeps loss, gradient
norm and learning rate. Beside it, on the same job with the same losses:

* memtrain's Trainer, whose plan is fixed to what the loop does (whole batch, nothing recomputed, whole logits), so that the
  difference is the Trainer. It does and logs the same, and also the time, the tokens per second, a check that the loss is
  finite and a count of the bytes that are held;
* transformers' Trainer and TRL's SFTTrainer, which log each step too. SFTTrainer computes another form of the loss, with
  entropy and accuracy per token, so its ratio is that of other work, and not of overhead alone. Blocks are not recomputed.

Nobody draws a bar, writes files or reports to a service. A repeat starts all four anew, and they take turns, one step each
(peers.py). The time of a step is that of its process (``time.process_time``, one thread), from one ``optimizer.step`` to the
next. Left out for all four alike: set-up, planning, the first two times and the last, which touch the steps that memtrain
watches with the profiler (1, 2 and the last). What those cost memtrain is printed by itself.

A repeat gives one ratio: the sum of the contender's times by the sum of the loop's. Printed are the median over the repeats
and, as its interval, order statistics of the ratios, with the chance that they enclose the true median.

Exits 1 if the median of memtrain is above 1.02 or losses differ, and 2 if the environment cannot be made or a trainer fails.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import Contender, Failed, Run, Task, install, largest_difference, machine_line, measure_steps, steady

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
BATCH, LENGTH = 4, 128
STEPS = 24
MOST_RATIO = 1.02
MOST_DIFFERENCE = 1e-5
_AS_THE_LOOP = {"micro_batch_size": BATCH, "activations": "keep", "loss": "whole_logits", "update": "after_backward"}
CONTENDERS = (
    Contender(name="plain loop", kind="loop"),
    Contender(name="memtrain", kind="memtrain", budget_bytes=8 * 2**30, constraints=_AS_THE_LOOP),
    Contender(name="HF Trainer", kind="hf"),
    Contender(name="SFTTrainer", kind="sft"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        seconds_per_step: of processor time, the median over all steps of all repeats.
        ratios: to the loop, one per repeat.
        low, high: the interval of their median.
        watched_seconds: processor time that the steps around the first two and the last took above the median, all together;
            the median over the repeats.
        largest_loss_difference: from the loop's loss of the same step.
    """

    contender: str
    seconds_per_step: float
    ratios: list[float]
    ratio: float
    low: float
    high: float
    watched_seconds: float
    largest_loss_difference: float


def interval(values: Sequence[float], coverage: float = 0.95) -> tuple[float, float, float]:
    """The narrowest pair of order statistics, as far from either end, that encloses the true median with ``coverage``.

    With n values from one continuous distribution, the k-th from below and the k-th from above enclose its median with chance
    1 - 2 · (C(n, 0) + … + C(n, k - 1)) / 2^n (Conover, Practical Nonparametric Statistics, section 3.2).

    Returns:
        The two, and that chance; with too few values for ``coverage`` the smallest and the largest.

    >>> interval([5, 1, 2, 3, 4, 6, 7, 8, 9, 10])
    (2, 9, 0.978515625)
    """
    ordered, n = sorted(values), len(values)
    chance, at = 1 - 2 / 2**n, 0
    outside = 1 / 2**n
    while 2 * (at + 2) <= n:
        outside += math.comb(n, at + 1) / 2**n
        if 1 - 2 * outside < coverage:
            break
        chance, at = 1 - 2 * outside, at + 1
    return ordered[at], ordered[-1 - at], chance


def rows(contenders: Sequence[Contender], repeats: Sequence[Sequence[Run]]) -> list[Row]:
    """The table; the first contender is the measure."""
    found = []
    for at, contender in enumerate(contenders):
        runs = [repeat[at] for repeat in repeats]
        ratios = [
            sum(steady(run.cpu_seconds)) / sum(steady(repeat[0].cpu_seconds)) for run, repeat in zip(runs, repeats, strict=True)
        ]
        low, high, _ = interval(ratios)
        found.append(
            Row(
                contender=contender.name,
                seconds_per_step=statistics.median(second for run in runs for second in steady(run.cpu_seconds)),
                ratios=ratios,
                ratio=statistics.median(ratios),
                low=low,
                high=high,
                watched_seconds=statistics.median(watched(run.cpu_seconds) for run in runs),
                largest_loss_difference=max(
                    largest_difference(run.losses, repeat[0].losses) for run, repeat in zip(runs, repeats, strict=True)
                ),
            )
        )
    return found


def watched(seconds: Sequence[float]) -> float:
    """What the times that :func:`peers.steady` leaves out are longer than its median, all together.

    >>> watched([9, 8, 2, 2, 3, 7])
    18
    """
    usual = statistics.median(steady(seconds))
    return sum(second - usual for second in (*seconds[:2], seconds[-1]))


def report(table: Sequence[Row], header: Sequence[str], file: Path | None = None) -> int:
    """Print the table and its summary, write both to ``file``, and return the exit code."""
    for line in header:
        print(line)
    _, _, chance = interval(table[0].ratios)
    print(
        f"{'':14}{'CPU s/step':>12}{'× loop':>10}{f'{100 * chance:.1f} % interval':>20}{'watching, s':>14}{'loss differs by':>18}"
    )
    for row in table:
        print(
            f"{row.contender:14}{row.seconds_per_step:>12.4f}{row.ratio:>10.4f}{f'{row.low:.4f} to {row.high:.4f}':>20}"
            f"{row.watched_seconds:>14.3f}{row.largest_loss_difference:>18.1e}"
        )
    difference = max(row.largest_loss_difference for row in table)
    ours = next(row for row in table if row.contender == "memtrain")
    kept = ours.ratio <= MOST_RATIO and difference <= MOST_DIFFERENCE
    print(
        f"overhead: memtrain takes {ours.ratio:.4f} of the plain loop's processor time per step "
        f"({ours.low:.4f} to {ours.high:.4f}, bound {MOST_RATIO:g} {'kept' if ours.ratio <= MOST_RATIO else 'MISSED'}), "
        f"losses equal to {difference:.1e}"
    )
    if file is not None:
        summary = {
            "kept": kept,
            "ratio": ours.ratio,
            "low": ours.low,
            "high": ours.high,
            "coverage": chance,
            "bound": MOST_RATIO,
        }
        content = {"summary": summary, "header": list(header), "records": [asdict(row) for row in table]}
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if kept else 1


def main(environment: Path | None, repeats: int, steps: int, file: Path | None) -> int:
    """Make the environment, measure, report, and return the exit code."""
    task = Task(model=MODEL, batch=BATCH, length=LENGTH, steps=steps, schedule="cosine")
    with tempfile.TemporaryDirectory() as temporary:
        try:
            python = install((environment or Path(temporary)).absolute())
            found = []
            for repeat in range(repeats):
                found.append(measure_steps(python, task, CONTENDERS, threads=1))
                print(f"repeat {repeat + 1} of {repeats}", file=sys.stderr, flush=True)
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 2
    versions = {name: text for run in found[0] for name, text in run.versions.items()}
    header = (
        ", ".join(f"{name} {text}" for name, text in versions.items()),
        machine_line(1),
        f"{BATCH} rows of {LENGTH} tokens per step, {repeats} repeats of {len(steady(range(steps - 1)))} steps that count",
    )
    return report(rows(CONTENDERS, found), header, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="folder for the environment, to be used again; temporary without it")
    parser.add_argument("--repeats", type=int, default=10, help="ratios (default 10)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps of a repeat (default {STEPS})")
    parser.add_argument("--json", type=Path, dest="file", help="file for the same as data")
    arguments = parser.parse_args()
    sys.exit(main(arguments.environment, arguments.repeats, arguments.steps, arguments.file))
