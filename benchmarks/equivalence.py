"""The same numbers as others: ``python benchmarks/equivalence.py [--steps 50] [--json FILE]``.

Four small models are trained three times on the same rows, from the same weights, in fp32 and without dropout:

- by memtrain's Trainer, with rows padded or packed and micro-batches of the size that is said;
- by transformers' Trainer, on the same rows in the same order;
- by a loop written by hand, which puts each row through the model by itself, without padding, packing or micro-batches: the sum
  of its tokens' cross-entropies over the number of tokens that count in the whole step.

Printed is the largest relative difference of the losses of all steps. memtrain has to agree with the loop by hand, which is what
the mathematics says; where transformers does not, the reason stands beside it. Exits 1 if memtrain differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from memtrain import Trainer
from memtrain.data.batches import StepBatches
from memtrain.data.packing import PackedRows
from memtrain.data.rows import IGNORED
from memtrain.data.rowset import alike
from memtrain.data.sets import padded
from memtrain.data.store import RaggedRows
from memtrain.data.text import python_documentation
from memtrain.data.tokenizer import train_tokenizer
from memtrain.job import AdamW, Linear

MOST_DIFFERENCE = 1e-5
VOCABULARY, ROWS, GLOBAL_BATCH, SEED, PACK = 512, 100, 8, 3, 128
RATE, EPSILON = 1e-3, 1e-6
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NO_DROPOUT: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A model, how its rows are made of tokens, and what of a row is counted."""

    name: str
    build: Callable[[], nn.Module]
    row: Callable[[list[int], int], Row]
    packs: bool = False


def llama() -> nn.Module:
    """A Llama."""
    config = transformers.LlamaConfig(**SHAPE, intermediate_size=64, num_key_value_heads=2, max_position_embeddings=PACK)
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    """A GPT-2, whose positions are learnt."""
    config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=PACK, n_embd=32, n_layer=2, n_head=4, **NO_DROPOUT)
    return transformers.GPT2LMHeadModel(config)


def t5() -> nn.Module:
    """A T5, which reads one text and writes another."""
    shape: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, **shape))


def bert() -> nn.Module:
    """A BERT that tells three classes apart."""
    rest: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "num_labels": 3}
    config = transformers.BertConfig(**SHAPE, intermediate_size=64, max_position_embeddings=PACK, **rest)
    return transformers.BertForSequenceClassification(config)


def continued(ids: list[int], number: int) -> Row:
    """Text of which the last two thirds are learnt, as an answer is."""
    asked = len(ids) // 3
    return {"input_ids": ids, "labels": [IGNORED] * asked + ids[asked:]}


def translated(ids: list[int], number: int) -> Row:
    """Text, and another text a third as long."""
    return {"input_ids": ids, "labels": ids[:: -3 if number % 2 else 3]}


def classified(ids: list[int], number: int) -> Row:
    """Text of one of three classes."""
    return {"input_ids": ids, "labels": sum(ids) % 3}


MODELS = (
    Model("Llama", llama, continued, packs=True),
    Model("GPT-2", gpt2, continued, packs=True),
    Model("T5", t5, translated),
    Model("BERT classification", bert, classified),
)


@dataclass(frozen=True)
class Setting:
    """One comparison."""

    model: Model
    packed: bool
    accumulation: int
    steps: int

    def fresh(self) -> nn.Module:
        """The model with the weights that all begin with."""
        torch.manual_seed(SEED)
        return self.model.build()


@dataclass(frozen=True)
class Found:
    """What came of one comparison."""

    model: str
    rows: str
    accumulation: int
    steps: int
    to_loop: float
    transformers_to_loop: float
    reason: str


def rows_of(model: Model) -> list[Row]:
    """Rows of 6 to 60 tokens of Python's documentation."""
    tokenizer, texts = _tokenizer(), [line for topic in python_documentation() for line in topic.splitlines() if len(line) > 30]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    ids = [tokens[: 6 + 7 * number % 55] for number, tokens in enumerate(encoded[:ROWS])]
    return [model.row(tokens, number) for number, tokens in enumerate(ids)]


def _tokenizer() -> Any:
    return train_tokenizer(python_documentation()[:20], VOCABULARY)


# ---------------------------------------------------------------------- memtrain


def order_of(setting: Setting) -> tuple[Any, list[list[int]]]:
    """The rows as memtrain holds them, packed or not, and the numbers of those of each step."""
    stored = RaggedRows.of(rows_of(setting.model))
    held = PackedRows(stored, PACK, 2) if setting.packed else stored
    found = alike(held) if setting.packed else padded(stored, "data", pad_token_id=2, mask=False)
    batches = StepBatches(found, global_batch_size=GLOBAL_BATCH, seed=SEED, drop_last=True)
    return held, [batches.indices(step) for step in range(setting.steps)]


def by_memtrain(setting: Setting) -> list[float]:
    """The losses of memtrain's Trainer."""
    made = Trainer(
        model=setting.fresh(),
        data=rows_of(setting.model),
        tokenizer=_tokenizer(),
        sequence_length=PACK,
        packing=setting.packed,
        budget="2GiB",
        global_batch_size=GLOBAL_BATCH,
        # transformers knows no short step in the midst of a run.
        drop_last=True,
        steps=setting.steps,
        optimizer=AdamW(learning_rate=RATE, eps=EPSILON),
        schedule=Linear(),
        constraints={"micro_batch_size": GLOBAL_BATCH // setting.accumulation},
        seed=SEED,
        progress=False,
    )
    return [row["loss"] for row in made.train().metrics]


# ---------------------------------------------------------------------- by hand


def by_hand(setting: Setting) -> list[float]:
    """The losses of a loop that puts each row through the model by itself."""
    model = setting.fresh().train()
    rows, (held, steps) = rows_of(setting.model), order_of(setting)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, eps=EPSILON, weight_decay=0.0)
    losses = []
    for step, numbers in enumerate(steps):
        optimizer.param_groups[0]["lr"] = RATE * (1 - step / setting.steps)
        alone = [rows[row] for pack in numbers for row in held.packs[pack]] if setting.packed else [rows[n] for n in numbers]
        sums = [_summed(model, row) for row in alone]
        counted = sum(count for _, count in sums)
        loss = torch.stack([total for total, _ in sums]).sum() / counted
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _summed(model: nn.Module, row: Row) -> tuple[Tensor, int]:
    """The sum of a row's cross-entropies, from its logits, and how many they are."""
    ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
    if isinstance(model, transformers.T5ForConditionalGeneration):
        # It writes what comes after what is written.
        before = torch.cat([torch.tensor([model.config.decoder_start_token_id]), labels[:-1]])
        logits = model(input_ids=ids, decoder_input_ids=before[None]).logits[0]
    elif labels.dim() == 0:
        logits, labels = model(input_ids=ids).logits, labels[None]
    else:
        logits, labels = model(input_ids=ids).logits[0, :-1], labels[1:]
    return nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum"), int((labels != IGNORED).sum())


# ---------------------------------------------------------------------- transformers


def by_transformers(setting: Setting) -> list[float]:
    """The losses of transformers' Trainer, unrounded: what it logs has four digits."""
    model: Any = setting.fresh()
    # With its cache a transformers model lets packed rows see each other.
    model.config.use_cache = False
    held, steps = order_of(setting)
    collate = transformers.DataCollatorForSeq2Seq(_tokenizer()) if not setting.packed else transformers.default_data_collator
    plain = [{name: tensor.tolist() for name, tensor in held[number].items()} for numbers in steps for number in numbers]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=GLOBAL_BATCH // setting.accumulation,
            gradient_accumulation_steps=setting.accumulation,
            max_steps=setting.steps,
            learning_rate=RATE,
            adam_epsilon=EPSILON,
            lr_scheduler_type="linear",
            optim="adamw_torch",
            use_cpu=True,
            bf16=False,
            train_sampling_strategy="sequential",
            dataloader_pin_memory=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=1,
        )
        losses: list[float] = []
        trainer: Any = transformers.Trainer(
            model=model, args=arguments, train_dataset=_Listed(plain), data_collator=_for_classes(collate, setting)
        )
        taken: list[float] = []
        step_of = trainer.training_step

        def kept(*given: Any, **named: Any) -> Any:
            loss = step_of(*given, **named)
            taken.append(float(loss))
            if len(taken) == setting.accumulation:
                losses.append(sum(taken))
                taken.clear()
            return loss

        trainer.training_step = kept
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return losses


class _Listed(torch.utils.data.Dataset[Row]):
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return dict(self._rows[index])


def _for_classes(collate: Any, setting: Setting) -> Any:
    """A collator for rows whose label is one number, which that of sequences would pad."""
    if setting.model.row is not classified:
        return collate

    def collated(rows: list[Row]) -> Any:
        labels = [row.pop("labels") for row in rows]
        return {**_tokenizer_padding(rows), "labels": torch.tensor(labels)}

    return collated


def _tokenizer_padding(rows: list[Row]) -> Any:
    return _tokenizer().pad(rows, return_tensors="pt")


# ---------------------------------------------------------------------- comparing


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest of the steps' relative differences."""
    return max(abs(mine - other) / abs(other) for mine, other in zip(ours, theirs, strict=True))


def reason_of(setting: Setting, theirs: Sequence[float], loop: Sequence[float]) -> str:
    """Why transformers' losses are others, where they are."""
    if largest_difference(theirs, loop) <= MOST_DIFFERENCE:
        return ""
    count = setting.accumulation
    if not 0.9 * count < theirs[0] / loop[0] < 1.1 * count:
        return "not known"
    divided = largest_difference([loss / count for loss in theirs], loop)
    return (
        f"its forward takes any keyword, so transformers counts on it to divide by num_items_in_batch; its loss is a mean all the "
        f"same, and the means of {count} micro-batches are added up, as are their gradients. Divided by {count} the losses are "
        f"{divided:.1e} away: the gradient is clipped as the {count} times larger one that it is, and where rows differ in length a "
        f"mean weighs a token by its micro-batch"
    )


def compare(setting: Setting) -> Found:
    """Train three times."""
    loop, ours, theirs = by_hand(setting), by_memtrain(setting), by_transformers(setting)
    return Found(
        setting.model.name,
        "packed" if setting.packed else "padded",
        setting.accumulation,
        setting.steps,
        largest_difference(ours, loop),
        largest_difference(theirs, loop),
        reason_of(setting, theirs, loop),
    )


def main() -> int:
    """Compare all settings, print a table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {given.steps} steps, fp32, {ROWS} rows\n")
    print(f"{'model':<20} {'rows':<7} {'micro-batches':>13} {'memtrain':>9} {'transformers':>13}   beside the loop by hand")
    found = []
    for model in MODELS:
        for packed in (False, True) if model.packs else (False,):
            for accumulation in (1, 4):
                one = compare(Setting(model, packed, accumulation, given.steps))
                found.append(one)
                print(f"{one.model:<20} {one.rows:<7} {accumulation:>13} {one.to_loop:>9.1e} {one.transformers_to_loop:>13.1e}")
                if one.reason:
                    print(textwrap.indent(textwrap.fill(one.reason, 90), " " * 4))
    worst = max(one.to_loop for one in found)
    print(f"\nlargest relative difference of memtrain: {worst:.1e} (at most {MOST_DIFFERENCE:g})")
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n")
    return 0 if worst <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
