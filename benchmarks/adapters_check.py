"""Whether a finished smollm2_cpu run kept its promises: ``python benchmarks/adapters_check.py RUN_DIR``.

The witness is a plain loop: transformers loads the base model and peft the saved adapters and writes the conversations, and the
held-out rows go through both, one by one, without memtrain's encoding, step, plan or padding. Prints a table and one line; exits 1 if a bound is missed.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from quickstart_check import Check, peak_checks, report
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from memtrain.data.instructions import Pair, hold_out_groups, library_docstrings
from memtrain.models.build import source

LEAST_FALL_NATS = 0.2
MOST_DIFFERENCE = 1e-4


def conversation(pair: Pair, tokenizer: Any) -> tuple[list[int], int]:
    """The tokens of a pair up to the end of the answer, and how many of them are the question."""
    question = {"role": "user", "content": pair.prompt}
    asked = tokenizer.apply_chat_template([question], add_generation_prompt=True)["input_ids"]
    answer = {"role": "assistant", "content": pair.completion}
    ids = tokenizer.apply_chat_template([question, answer])["input_ids"]
    assert ids[: len(asked)] == asked
    end = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    return ids[:end], len(asked)


@torch.no_grad()
def plain_loss(model: Any, rows: list[tuple[list[int], int]]) -> float:
    """Mean cross-entropy in nats of the model over the tokens of the answers."""
    total, counted = 0.0, 0
    for ids, asked in rows:
        tokens = torch.tensor(ids)
        logits = model(input_ids=tokens.unsqueeze(0)).logits[0, asked - 1 : -1]
        total += cross_entropy(logits, tokens[asked:], reduction="sum").item()
        counted += len(ids) - asked
    return total / counted


def checks(folder: Path) -> list[Check]:
    """The bounds that a run in ``folder`` has to keep."""
    from peft import PeftModel

    config: dict[str, Any] = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    comparison: dict[str, Any] = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    first, *_, last = [row["eval_loss"] for row in metrics if "eval_loss" in row]

    _, held_out = hold_out_groups(library_docstrings(), config["data"]["held_out"])
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    whole = [conversation(pair, tokenizer) for pair in held_out]
    rows = [(ids, asked) for ids, asked in whole if len(ids) <= config["data"]["sequence_length"]]
    base = source(config["model"]["path"]).load().eval()
    alone = plain_loss(base, rows)
    adapted = plain_loss(PeftModel.from_pretrained(base, str(folder / "model")).eval(), rows)
    return [
        Check(
            "held-out loss, nats",
            f"{first:.4f} → {last:.4f}",
            f"falls by more than {LEAST_FALL_NATS}",
            first - last > LEAST_FALL_NATS,
        ),
        _same("base alone", alone, first),
        _same("adapters in peft", adapted, last),
        *peak_checks(comparison, config["budget"]),
    ]


def _same(what: str, found: float, logged: float) -> Check:
    difference = abs(found - logged)
    return Check(
        what, f"{found:.6f}, {difference:.1e} away", f"at most {MOST_DIFFERENCE:g} away", difference <= MOST_DIFFERENCE
    )


def main() -> int:
    """Check the run folder named on the command line and return the exit code."""
    if len(sys.argv) != 2:
        print("usage: python benchmarks/adapters_check.py RUN_DIR", file=sys.stderr)
        return 2
    transformers.logging.disable_progress_bar()
    with warnings.catch_warnings():
        # peft calls names of transformers that are on their way out.
        warnings.simplefilter("ignore")
        return report("adapters", checks(Path(sys.argv[1])))


if __name__ == "__main__":
    sys.exit(main())
