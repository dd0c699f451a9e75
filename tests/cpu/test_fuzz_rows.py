"""Rows with anything in them: each is trained as it says or named with its number, and none is lost.

The tokenizer has a token per byte, so what is learnt of a row can be read back.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toys import BYTES
from transformers import LlamaConfig, LlamaForCausalLM

from memtrain import Trainer
from memtrain.data.options import DataOptions
from memtrain.data.rows import IGNORED
from memtrain.inputs import Reader
from memtrain.models.build import source

LENGTH, VOCABULARY = 48, len(BYTES)
MODEL = {"model_type": "llama", "vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "eos_token_id": BYTES.eos_token_id}

texts = st.text(max_size=20) | st.sampled_from(
    ["", " ", "\n", "\0", "\ud800", "\u2028", "\ufeff", "naïve 🙂", "x" * 100, BYTES.eos_token]
)
anything: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "Assistant", ""])
tokens = st.lists(st.integers(-2, VOCABULARY + 1) | st.sampled_from([0, 2**31, 2**70, True, 1.0, "1"]), max_size=60)
targets = st.lists(st.integers(-2, VOCABULARY + 1) | st.just(IGNORED), max_size=60)


def turns(role: str, content: str) -> st.SearchStrategy[Any]:
    turn = st.fixed_dictionaries({role: roles | anything, content: texts | anything})
    good = st.tuples(texts, texts).map(lambda said: [{role: "user", content: said[0]}, {role: "assistant", content: said[1]}])
    return good | st.lists(turn | anything, max_size=4)


LAYOUTS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "text": st.fixed_dictionaries({"text": texts}),
    "completion": st.fixed_dictionaries({"prompt": texts, "completion": texts}),
    "messages": st.fixed_dictionaries({"messages": turns("role", "content")}),
    "sharegpt": st.fixed_dictionaries({"conversations": turns("from", "value")}),
    "alpaca": st.fixed_dictionaries({"instruction": texts, "output": texts}, optional={"input": texts}),
    "tokens": st.fixed_dictionaries({"input_ids": tokens}, optional={"labels": targets}),
}


@st.composite
def rows_of(draw: st.DrawFn, layout: str) -> list[Any]:
    """Rows of a layout, a first one that tells it and others of which some are spoilt."""
    good = {
        "text": {"text": "a"},
        "completion": {"prompt": "a", "completion": "b"},
        "messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
        "alpaca": {"instruction": "a", "output": "b"},
        "tokens": {"input_ids": [70, 71], "labels": [70, 71]},
    }[layout]
    rows: list[Any] = [good]
    for row in draw(st.lists(LAYOUTS[layout], min_size=1, max_size=4)):
        spoilt = draw(st.sampled_from(["not", "not", "value", "missing", "whole"]))
        if spoilt == "value":
            row[draw(st.sampled_from(sorted(row)))] = draw(anything)
        if spoilt == "missing":
            del row[draw(st.sampled_from(sorted(row)))]
        rows.append(draw(anything) if spoilt == "whole" else row)
    return rows


def learnt_text(row: dict[str, torch.Tensor]) -> str:
    """What of a row is learnt, its end left out."""
    ids = row["input_ids"][row["labels"] != IGNORED].tolist()
    return str(BYTES.decode([token for token in ids if token != BYTES.eos_token_id]))


def answer_of(layout: str, row: dict[str, Any]) -> str | None:
    """What the answer of a row is, where that is plain."""
    match layout:
        case "text" | "completion":
            return str(row["text" if layout == "text" else "completion"])
        case "alpaca":
            return str(row["output"])
        case _:
            return None


@pytest.mark.parametrize("long_rows", ["truncate", "leave_out"])
@pytest.mark.parametrize("layout", LAYOUTS)
@given(data=st.data())
def test_each_row_is_learnt_as_it_says_or_named_with_its_number(layout: str, long_rows: str, data: st.DataObject) -> None:
    rows = data.draw(rows_of(layout))
    packing = {"packing": True} if layout == "text" else {}
    options = DataOptions(sequence_length=LENGTH, on_bad_row="skip", long_rows=long_rows, **packing)
    reader = Reader(source(MODEL), BYTES, options)
    try:
        made = reader.read(rows, "data")
    except ValueError as refusal:
        # A row may happen to have a column of another layout.
        if "which can be read as" in str(refusal):
            return
        raise
    reading = reader.readings["data"]
    assert reading.read == len(rows) == reading.kept + reading.left_out + reading.bad
    bad = {row.origin.number: row.reason for row in reading.first_bad}
    assert len(bad) == reading.bad
    for row in reading.first_bad:
        assert re.fullmatch(rf"data, row {row.origin.number}, \S.+", str(row), re.DOTALL), row
        assert "Traceback" not in str(row)
        assert len(str(row)) < 600
    stops = DataOptions(sequence_length=LENGTH, long_rows=long_rows, **packing)
    if bad:
        with pytest.raises(ValueError, match=r"data") as refused:
            Reader(source(MODEL), BYTES, stops).read(rows, "data")
        assert all(f"data, row {number}, " in str(refused.value) for number in bad)
    else:
        assert len(Reader(source(MODEL), BYTES, stops).read(rows, "data")) == len(made)
    if packing:
        return
    assert len(made) == reading.kept
    kept = [row for number, row in enumerate(rows) if number not in bad]
    for number in range(len(made)):
        row = made.rows[number]
        ids, labels = row["input_ids"], row["labels"]
        assert ids.shape == labels.shape
        assert 1 <= len(ids) <= LENGTH
        assert 0 <= int(ids.min()) <= int(ids.max()) < VOCABULARY
        counted = labels[1:] != IGNORED
        assert counted.any()
        if layout != "tokens":
            assert torch.equal(labels[1:][counted], ids[1:][counted])
        if not reading.left_out and (answer := answer_of(layout, kept[number])) is not None and BYTES.eos_token not in answer:
            said = learnt_text(row)
            whole = labels[-1] == BYTES.eos_token_id
            assert said == answer if whole else answer.startswith(said.rstrip("\ufffd"))


def alone(row: Any, length: int) -> tuple[float, int]:
    """The sum of the losses of a row that is put through the model by itself, and the number of its tokens that count."""
    ids, labels = row["input_ids"][None], row["labels"]
    with torch.no_grad():
        logits = llama()(input_ids=ids).logits[0, :-1]
    loss = torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=IGNORED, reduction="sum")
    return loss.item(), int((labels[1:] != IGNORED).sum())


def llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **shape))


@settings(max_examples=6)
@given(rows=rows_of("messages"), packing=st.booleans())
@example(
    packing=True,
    rows=[
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"role": "user", "content": "\u2028"}, {"role": "assistant", "content": "naïve 🙂"}]},
        {"messages": json.loads('[{"role": "user", "content": "a"}]')},
        {"messages": None},
        7,
    ],
)
def test_a_run_takes_the_loss_of_the_rows_that_can_be_used(rows: list[Any], packing: bool) -> None:
    options = DataOptions(sequence_length=LENGTH, on_bad_row="skip")
    made = Reader(source(MODEL), BYTES, options).read(rows, "data")
    sums = [alone(made.rows[number], LENGTH) for number in range(len(made))]
    trainer = Trainer(
        model=llama(),
        data=rows,
        tokenizer=BYTES,
        sequence_length=LENGTH,
        on_bad_row="skip",
        packing=packing,
        budget="64MiB",
        global_batch_size=8,
        steps=1,
        progress=False,
    )
    (row,) = trainer.train().metrics
    expected = sum(loss for loss, _ in sums) / sum(count for _, count in sums)
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
