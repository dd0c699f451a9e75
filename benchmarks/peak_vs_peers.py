"""The same job through transformers' Trainer, TRL's SFTTrainer and memtrain: ``python benchmarks/peak_vs_peers.py``.

A Llama of 5 M parameters, 8 rows of 256 tokens per step, AdamW (fused) in fp32, gradient bounded to 1.0, constant learning
rate, no dropout. memtrain gets 60 % of what transformers' Trainer takes with its defaults, and once more as much as the
thriftiest peer takes. The peers also run with what they offer against memory: recomputed blocks (SFTTrainer's default),
and with those a quarter of the rows at a time. How peaks and seconds are measured, on all alike, is said in peers.py.

SFTTrainer's loss never has the whole logits: it works in tiles of up to 4096 tokens by 32768 entries of the vocabulary. That
is more than the logits of this job, and off a card it computes each tile by many operators of torch. So its rows here
say little about a card, where one kernel does that in place.

Prints a table and one line. Exits 1 if a loss of a step differs by more than 1e-5 from that of transformers' Trainer, or
memtrain takes more than its budget, and 2 if the environment cannot be made or a trainer fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import Contender, Failed, Run, Task, install, largest_difference, machine_line, measure_peak, measure_steps, steady

from memtrain.units import format_bytes

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
BATCH, LENGTH = 8, 256
# From the second step on all that lives between steps is there; the rest shows that the losses stay equal.
PEAK_STEPS = 3
TIMED_STEPS = 8
SHARE = 0.6
MOST_DIFFERENCE = 1e-5

PEERS = (
    Contender(name="HF Trainer", kind="hf"),
    Contender(name="HF Trainer, recomputed blocks", kind="hf", checkpointing=True),
    Contender(name="HF Trainer, recomputed, 4 × 2 rows", kind="hf", checkpointing=True, accumulation=4),
    Contender(name="SFTTrainer, nothing recomputed", kind="sft"),
    Contender(name="SFTTrainer", kind="sft", checkpointing=True),
    Contender(name="SFTTrainer, recomputed, 4 × 2 rows", kind="sft", checkpointing=True, accumulation=4),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table.

    Attributes:
        seconds_per_step: median over all repeats; None where none were asked for.
        largest_loss_difference: from the same step of the first contender, over all steps with and without the profiler.
        budget_bytes, predicted_bytes, plan: memtrain's.
    """

    contender: str
    peak_bytes: int
    seconds_per_step: float | None
    largest_loss_difference: float
    budget_bytes: int | None
    predicted_bytes: int | None
    plan: str | None


def budgets(peaks: Sequence[int]) -> list[Contender]:
    """memtrain in 60 % of the first peak, and in the smallest of all."""
    share, least = int(SHARE * peaks[0]), min(peaks)
    return [
        Contender(name=f"memtrain, {100 * SHARE:g} % of HF Trainer", kind="memtrain", budget_bytes=share),
        Contender(name="memtrain, the thriftiest peer's peak", kind="memtrain", budget_bytes=least),
    ]


def rows(contenders: Sequence[Contender], peaks: Sequence[Run], repeats: Sequence[Sequence[Run]]) -> list[Row]:
    """The table.

    Args:
        contenders: the first is the reference.
        peaks: a run of each with the profiler.
        repeats: of each repeat a run of each without.
    """
    found = []
    for at, (contender, peak) in enumerate(zip(contenders, peaks, strict=True)):
        assert peak.peak_bytes is not None
        timed = [repeat[at] for repeat in repeats]
        seconds = [second for run in timed for second in steady(run.seconds)]
        differences = [largest_difference(peak.losses, peaks[0].losses)]
        differences += [largest_difference(run.losses, repeat[0].losses) for run, repeat in zip(timed, repeats, strict=True)]
        found.append(
            Row(
                contender=contender.name,
                peak_bytes=peak.peak_bytes,
                seconds_per_step=statistics.median(seconds) if seconds else None,
                largest_loss_difference=max(differences),
                budget_bytes=contender.budget_bytes,
                predicted_bytes=peak.predicted_bytes,
                plan=peak.plan,
            )
        )
    return found


def report(table: Sequence[Row], header: Sequence[str], file: Path | None = None) -> int:
    """Print the table and its summary, write both to ``file``, and return the exit code."""
    for line in header:
        print(line)
    first = table[0]
    print(f"{'':38}{'peak bytes':>14}{'':11}{'× HF':>7}{'s/step':>9}{'× HF':>7}{'loss differs by':>17}")
    for row in table:
        seconds, ratio = "–", "–"
        if row.seconds_per_step is not None and first.seconds_per_step is not None:
            seconds, ratio = f"{row.seconds_per_step:.3f}", f"{row.seconds_per_step / first.seconds_per_step:.3f}"
        print(
            f"{row.contender:38}{row.peak_bytes:>14,}{format_bytes(row.peak_bytes):>11}{row.peak_bytes / first.peak_bytes:>7.3f}"
            f"{seconds:>9}{ratio:>7}{row.largest_loss_difference:>17.1e}"
        )
    ours = [row for row in table if row.budget_bytes is not None]
    for row in ours:
        assert row.budget_bytes is not None
        assert row.predicted_bytes is not None
        print(
            f"{row.contender}: budget {row.budget_bytes:,} B, predicted {row.predicted_bytes:,} B "
            f"({100 * (row.predicted_bytes / row.peak_bytes - 1):+.4f} %)\n  {row.plan}"
        )
    difference = max(row.largest_loss_difference for row in table)
    over = [row.contender for row in ours if row.budget_bytes is not None and row.peak_bytes > row.budget_bytes]
    kept = not over and difference <= MOST_DIFFERENCE
    main_row = ours[0]
    speed = ""
    if main_row.seconds_per_step is not None and first.seconds_per_step is not None:
        speed = f" and {main_row.seconds_per_step / first.seconds_per_step:.2f} of its time per step"
    print(
        f"peak vs peers: memtrain takes {100 * main_row.peak_bytes / first.peak_bytes:.1f} % of HF Trainer's peak{speed}, "
        f"losses equal to {difference:.1e}, {'over budget: ' + ', '.join(over) if over else 'within its budgets'}"
    )
    if file is not None:
        summary = {
            "kept": kept,
            "peak_ratio": main_row.peak_bytes / first.peak_bytes,
            "largest_loss_difference": difference,
            "over_budget": over,
        }
        content = {"summary": summary, "header": list(header), "records": [asdict(row) for row in table]}
        file.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0 if kept else 1


def main(environment: Path | None, repeats: int, threads: int, file: Path | None) -> int:
    """Make the environment, measure, report, and return the exit code."""
    job = Task(model=MODEL, batch=BATCH, length=LENGTH, steps=PEAK_STEPS)
    timed_job = Task(model=MODEL, batch=BATCH, length=LENGTH, steps=TIMED_STEPS)
    with tempfile.TemporaryDirectory() as temporary:
        try:
            python = install((environment or Path(temporary)).absolute())
            peaks = [measure_peak(python, job, peer, threads) for peer in PEERS]
            contenders = [*PEERS, *budgets([peak.peak_bytes or 0 for peak in peaks])]
            peaks += [measure_peak(python, job, contender, threads) for contender in contenders[len(PEERS) :]]
            timed = [measure_steps(python, timed_job, contenders, threads) for _ in range(repeats)]
        except Failed as failure:
            print(failure, file=sys.stderr)
            return 2
    versions = {name: text for peak in peaks for name, text in peak.versions.items()}
    header = (
        ", ".join(f"{name} {text}" for name, text in versions.items()),
        machine_line(threads),
        f"{BATCH} rows of {LENGTH} tokens per step; peak of {PEAK_STEPS} steps; seconds: median of {repeats} × "
        f"{len(steady(range(TIMED_STEPS - 1)))} steps, trainers in turns",
    )
    return report(rows(contenders, peaks, timed), header, file)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--environment", type=Path, help="folder for the environment, to be used again; temporary without it")
    parser.add_argument("--repeats", type=int, default=3, help="of the timed runs; 0 for peaks alone (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="per trainer (default 1)")
    parser.add_argument("--json", type=Path, dest="file", help="file for the same as data")
    arguments = parser.parse_args()
    sys.exit(main(arguments.environment, arguments.repeats, arguments.threads, arguments.file))
