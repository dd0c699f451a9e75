"""Field reports about packing: sets smaller than a pack, packs that are not full, and rows longer than one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases.fixtures import column, tiny_llama
from toys import BYTES

from memtrain import Linear, Trainer
from memtrain.data.options import DataOptions
from memtrain.data.rows import IGNORED
from memtrain.inputs import Reader
from memtrain.job import AdamW

MODEL = tiny_llama(vocab_size=264)


def row(length: int) -> dict[str, list[int]]:
    ids = [70 + place for place in range(length)]
    return {"input_ids": ids, "labels": ids}


def packed(lengths: list[int], size: int, **options: Any) -> tuple[list[dict[str, torch.Tensor]], Reader]:
    reader = Reader(MODEL, BYTES, DataOptions(sequence_length=size, packing=True, **options))
    made = reader.read([row(length) for length in lengths], "data")
    return [made.rows[number] for number in range(len(made))], reader


def test_fewer_tokens_than_a_pack_are_one_pack_whose_padding_is_not_learnt() -> None:
    """pack-02: there were no samples, and an error that said nothing of it."""
    (pack,), _ = packed([3, 4, 5], 16)
    ids, labels, positions = (pack[name].tolist() for name in ("input_ids", "labels", "position_ids"))
    # Every token once; none of the four of padding counts, and nor does the first of each row, which nothing predicts.
    assert sorted(ids[:12]) == sorted(token for length in (3, 4, 5) for token in row(length)["input_ids"])
    assert labels[12:] == [IGNORED] * 4
    assert sum(label != IGNORED for label in labels) == 2 + 3 + 4
    assert positions == [*range(5), *range(4), *range(3), *range(4)]


def test_the_last_pack_is_kept_and_the_run_is_as_long_as_there_are_packs() -> None:
    """pack-02: the length was that of the set before packing, so that the schedule never reached its end."""
    packs, _ = packed([3, 4, 5], 8)
    # Five and three fill one; four and padding the other.
    assert [pack["position_ids"].tolist().count(0) for pack in packs] == [2, 2]
    assert sum(int((pack["labels"] != IGNORED).sum()) for pack in packs) == 9
    assert len(packs) == 2
    trainer = Trainer(
        model=MODEL.load(),
        data=[row(length) for length in (3, 4, 5)],
        tokenizer=BYTES,
        packing=True,
        sequence_length=8,
        epochs=1,
        global_batch_size=1,
        optimizer=AdamW(learning_rate=0.2),
        schedule=Linear(),
        budget="256MiB",
        progress=False,
    )
    assert trainer.job.steps == 2
    # A line that is at 0 when the run is over.
    assert column(trainer.train(), "learning_rate") == pytest.approx([0.2, 0.1])


def test_a_row_longer_than_a_pack_is_split_or_cut_as_it_is_told_and_counted() -> None:
    """pack-02: 20 tokens in packs of 8 are 8, 8 and 4 where they are split, and 8 where they are cut."""
    packs, reader = packed([20], 8, long_rows="split")
    assert sorted(int((pack["labels"] != IGNORED).sum()) for pack in packs) == [3, 7, 7]
    assert (reader.readings["data"].split, reader.readings["data"].examples) == (1, 3)
    packs, reader = packed([20], 8, long_rows="truncate")
    assert [pack["input_ids"].tolist() for pack in packs] == [row(8)["input_ids"]]
    assert (reader.readings["data"].truncated, reader.readings["data"].cut) == (1, 12)
