"""Whether a finished quickstart run kept its promises: ``python benchmarks/quickstart_check.py RUN_DIR``.

The witness is a plain loop: the saved model and tokenizer are loaded with transformers alone and read the held-out text
row by row, without memtrain's rows, padding, step or plan. Prints a table and one line; exits 1 if a bound is missed.
"""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from memtrain.data.text import hold_out, python_documentation
from memtrain.units import format_bytes, parse_bytes

LEAST_FALL_NATS = 2.0
MOST_PEAK_ERROR = 0.005
MOST_RELOAD_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class Check:
    """One line of the table: what was found, and whether it is within its bound."""

    what: str
    found: str
    bound: str
    kept: bool


@torch.no_grad()
def plain_evaluation_loss(folder: Path, documents: list[str], sequence_length: int) -> float:
    """Mean cross-entropy in nats of the model in ``folder`` over every token but the first of each row."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens: list[int] = []
    for document in documents:
        tokens += [*tokenizer.encode(document, add_special_tokens=False, verbose=False), tokenizer.eos_token_id]
    total, counted = 0.0, 0
    for row in torch.tensor(tokens).split(sequence_length):
        logits = model(input_ids=row.unsqueeze(0)).logits[0]
        total += cross_entropy(logits[:-1], row[1:], reduction="sum").item()
        counted += len(row) - 1
    return total / counted


def checks(folder: Path) -> list[Check]:
    """The bounds that a quickstart run in ``folder`` has to keep."""
    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    comparison: dict[str, Any] = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    evaluations = [row["eval_loss"] for row in metrics if "eval_loss" in row]
    fall = evaluations[0] - evaluations[-1]
    _, held_out = hold_out(python_documentation(), config["data"]["held_out"])
    reloaded = plain_evaluation_loss(folder / "model", held_out, config["data"]["sequence_length"])
    difference = abs(reloaded - evaluations[-1])
    steps = metrics[-1]["step"]
    return [
        Check("optimizer steps", f"{steps}", f"{config['steps']}", steps == config["steps"]),
        Check(
            "evaluation loss, nats",
            f"{evaluations[0]:.4f} → {evaluations[-1]:.4f}",
            f"falls by more than {LEAST_FALL_NATS}",
            fall > LEAST_FALL_NATS,
        ),
        Check(
            "the same, reloaded",
            f"{reloaded:.6f}, {difference:.1e} away",
            f"at most {MOST_RELOAD_DIFFERENCE:g} away",
            difference <= MOST_RELOAD_DIFFERENCE,
        ),
        *peak_checks(comparison, config["budget"]),
    ]


def peak_checks(comparison: dict[str, Any], budget_text: str) -> list[Check]:
    """The bounds on the peak: near to what was predicted, and within the budget."""
    predicted, measured = (comparison[side]["peak_allocated_bytes"] for side in ("predicted", "measured"))
    error, budget = abs(predicted - measured) / measured, parse_bytes(budget_text)
    return [
        Check(
            "peak, predicted",
            f"{predicted:,} B, {100 * error:.3f} % away",
            f"at most {100 * MOST_PEAK_ERROR:g} % away",
            error <= MOST_PEAK_ERROR,
        ),
        Check("peak, measured", f"{measured:,} B", f"at most {format_bytes(budget)}", measured <= budget),
    ]


def main() -> int:
    """Check the run folder named on the command line and return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python benchmarks/quickstart_check.py RUN_DIR", file=sys.stderr)
        return 2
    transformers.logging.disable_progress_bar()
    return report("quickstart", checks(Path(sys.argv[1])))


def report(name: str, found: list[Check]) -> int:
    """Print the table and return the exit code."""
    print(
        f"torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}, "
        f"{torch.get_num_threads()} threads on {platform.machine()}"
    )
    print(f"{'':24}{'found':34}{'bound':26}")
    for check in found:
        print(f"{check.what:24}{check.found:34}{check.bound:26}{'kept' if check.kept else 'MISSED'}")
    missed = [check.what for check in found if not check.kept]
    print(f"{name}: {'missed ' + ', '.join(missed) if missed else f'all {len(found)} bounds kept'}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
