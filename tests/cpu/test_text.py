"""Text and tokenizers: no character is lost, doubled or moved, and bad input is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toys import BYTES

from memtrain.data.text import hold_out, python_documentation
from memtrain.data.tokenizer import train_tokenizer

# ---------------------------------------------------------------------------------------------------------------- text


def test_the_documentation_of_python_is_text_enough_to_train_on() -> None:
    documents = python_documentation()
    assert len(documents) > 70
    assert sum(map(len, documents)) > 400_000
    assert documents[0].startswith('The "assert" statement')


def test_the_tail_of_every_document_is_held_out_from_the_nearest_paragraph_on() -> None:
    first = "a" * 70 + "\n\n" + "b" * 28
    second = "c" * 40 + "\n\n" + "d" * 58  # no boundary near its cut
    assert hold_out([first, second], 0.25) == (
        ["a" * 70 + "\n\n", "c" * 40 + "\n\n" + "d" * 33],
        ["b" * 28, "d" * 25],
    )


@pytest.mark.parametrize(
    ("document", "held_out"),
    [
        ("a" * 58 + "\n" + "b" * 2 + "\n\n" + "c" * 37, "c" * 37),  # a paragraph before a nearer line
        ("a" * 56 + "\n" + "b" * 4 + "\n" + "c" * 38, "c" * 38),  # the nearer of two lines
        ("a" * 59 + "\n\n" + "b" * 39, "b" * 39),  # a paragraph's end on both sides of the cut
        ("a" * 56 + " " + "b" * 43, "b" * 43),  # a word where there is no line
    ],
)
def test_the_cut_prefers_paragraphs_to_lines_to_words(document: str, held_out: str) -> None:
    assert hold_out([document], 0.4)[1] == [held_out]


@given(
    documents=st.lists(st.lists(st.sampled_from(["a", "bcdef", " g", "h\n", "\n\n"]), min_size=1, max_size=60).map("".join)),
    fraction=st.floats(0.1, 0.5),
)
def test_holding_out_neither_loses_nor_doubles_a_character(documents: list[str], fraction: float) -> None:
    documents = [*documents, "x" * 10]
    training, held_out = hold_out(documents, fraction)
    tails = iter(held_out)
    assert len(training) == len(documents)
    for document, part in zip(documents, training, strict=True):
        assert document.startswith(part)
        assert part
        if part != document:
            tail = next(tails)
            assert part + tail == document
            assert len(tail) <= 1.25 * len(document) * fraction + 1
    assert next(tails, None) is None


def test_holding_out_is_the_same_each_time_and_near_the_fraction() -> None:
    documents = python_documentation()
    training, held_out = hold_out(documents, 0.05)
    assert (training, held_out) == hold_out(documents, 0.05)
    assert sum(map(len, held_out)) / sum(map(len, documents)) == pytest.approx(0.05, rel=0.02)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 0.51, float("nan")])
def test_a_held_out_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"the held-out fraction is {fraction}, and it must be above 0 and at most 0\.5"):
        hold_out(["some text"], fraction)


@pytest.mark.parametrize("documents", [[], ["ab"], ["text" + " " * 20]])
def test_holding_out_nothing_to_evaluate_is_refused(documents: list[str]) -> None:
    with pytest.raises(ValueError, match=r"holding out 0\.1 of \d+ characters leaves no text to evaluate on"):
        hold_out(documents, 0.1)


# ----------------------------------------------------------------------------------------------------------- tokenizer


def test_a_tokenizer_learns_merges_up_to_the_size_asked_for() -> None:
    tokenizer = train_tokenizer(python_documentation()[:5], 300)
    assert len(tokenizer) == 300
    assert len(tokenizer.encode("assert", add_special_tokens=False)) < 6


def test_a_text_with_few_merges_gives_a_smaller_tokenizer() -> None:
    assert len(train_tokenizer(["ab ab"], 1000)) == 256 + 3 + 2  # the merges "ab" and " ab"


@given(text=st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


def test_without_merges_each_byte_is_a_token_except_in_the_names_of_special_tokens() -> None:
    text = "\x00\t\x7f é世🙂"
    assert len(BYTES.encode(text)) == len(text.encode())
    assert BYTES.encode("<|bos|><|eos|><|pad|>") == [0, 1, 2]


def test_no_text_is_too_long_and_punctuation_keeps_its_spaces() -> None:
    assert BYTES.model_max_length > 10**12
    assert BYTES.decode(BYTES.encode("a , b . <s> I 'm")) == "a , b . <s> I 'm"


def test_a_saved_tokenizer_reloads_with_the_same_ids(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    documents = python_documentation()[:5]
    tokenizer = train_tokenizer(documents, 400)
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    text = documents[3] + " Grüße, 世界 🙂 <|eos|>"
    assert reloaded.encode(text) == tokenizer.encode(text)
    assert reloaded.get_vocab() == tokenizer.get_vocab()
    assert (reloaded.bos_token_id, reloaded.eos_token_id, reloaded.pad_token_id) == (0, 1, 2)
    assert reloaded.model_max_length == tokenizer.model_max_length


def test_training_a_tokenizer_twice_gives_the_same_one() -> None:
    documents = python_documentation()[:5]
    assert train_tokenizer(documents, 350).get_vocab() == train_tokenizer(documents, 350).get_vocab()


def test_a_vocabulary_without_room_for_all_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 258, and it must be 259 or more: 256 bytes and three special tokens"):
        train_tokenizer(["text"], 258)
