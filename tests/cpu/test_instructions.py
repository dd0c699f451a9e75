"""Pairs and their rows: what is learnt is the completion and its end, and nothing is on both sides or lost unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import BYTES
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from memtrain.data.instructions import CompletionRows, Pair, hold_out_groups, library_docstrings
from memtrain.data.rows import IGNORED, check_rows

EOS, PAD = 1, 2
CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|eos|>\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


def ids(text: str) -> list[int]:
    return list(BYTES.encode(text, add_special_tokens=False))


def tokenizer(**settings: Any) -> PreTrainedTokenizerFast:
    """One token per byte, with a begin, an end and a padding token, and what else is given."""
    specials = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    return PreTrainedTokenizerFast(tokenizer_object=BYTES.backend_tokenizer, **{**specials, **settings})


def beginning() -> PreTrainedTokenizerFast:
    """A tokenizer that sets its begin token before each text, as Llama's does."""
    from tokenizers import Tokenizer, processors

    backend = Tokenizer.from_str(BYTES.backend_tokenizer.to_str())
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>")


def pairs(*texts: tuple[str, str], group: str = "one") -> list[Pair]:
    return [Pair(prompt, completion, group) for prompt, completion in texts]


# ---------------------------------------------------------------------------------------------------------------- rows


def test_a_row_is_prompt_completion_end_and_padding_and_only_completion_and_end_count() -> None:
    row = CompletionRows.of(pairs(("ab", "cd")), tokenizer(), 9)[0]
    assert torch.equal(row["input_ids"], torch.tensor([*ids("ab\n\ncd"), EOS, PAD, PAD]))
    assert torch.equal(row["labels"], torch.tensor([IGNORED] * 4 + [*ids("cd"), EOS, IGNORED, IGNORED]))
    assert row["input_ids"].dtype == row["labels"].dtype == torch.int64


def test_the_begin_token_stands_once_before_the_prompt_where_the_tokenizer_sets_one() -> None:
    row = CompletionRows.of(pairs(("ab", "cd")), beginning(), 8)[0]
    assert torch.equal(row["input_ids"], torch.tensor([0, *ids("ab\n\ncd"), EOS]))
    assert torch.equal(row["labels"], torch.tensor([IGNORED] * 5 + [*ids("cd"), EOS]))


def test_a_chat_template_writes_the_prompt_and_what_follows_the_end_is_cut_off() -> None:
    made = beginning()
    made.chat_template = "<|bos|>" + CHAT
    row = CompletionRows.of(pairs(("ab", "cd")), made, 40)[0]
    asked = [0, *ids("<user>ab"), EOS, *ids("\n<assistant>")]
    filling = 40 - len(asked) - 3
    assert torch.equal(row["input_ids"], torch.tensor([*asked, *ids("cd"), EOS] + [PAD] * filling))
    assert torch.equal(row["labels"], torch.tensor([IGNORED] * len(asked) + [*ids("cd"), EOS] + [IGNORED] * filling))


def test_a_template_that_ends_no_answer_gets_the_end_token() -> None:
    made = tokenizer()
    made.chat_template = CHAT.replace("<|eos|>\n", "")
    row = CompletionRows.of(pairs(("ab", "cd")), made, 22)[0]
    assert torch.equal(row["input_ids"], torch.tensor([*ids("<user>ab<assistant>cd"), EOS]))


def test_a_template_that_does_not_go_on_from_the_prompt_is_refused() -> None:
    made = tokenizer()
    made.chat_template = CHAT + "{% if add_generation_prompt %}now:{% endif %}"
    with pytest.raises(ValueError, match=r"'.*<assistant>now:', and the answered conversation does not begin with that"):
        CompletionRows.of(pairs(("ab", "cd")), made, 40)


def test_without_a_padding_token_the_end_token_fills_up_and_only_the_real_one_counts() -> None:
    row = CompletionRows.of(pairs(("a", "b")), tokenizer(pad_token=None), 6)[0]
    assert torch.equal(row["input_ids"], torch.tensor([*ids("a\n\nb"), EOS, EOS]))
    assert torch.equal(row["labels"], torch.tensor([IGNORED] * 3 + [*ids("b"), EOS, IGNORED]))


def test_pairs_longer_than_a_row_are_left_out_and_counted() -> None:
    rows = CompletionRows.of(pairs(("ab", "cd"), ("ab", "cde"), ("a", "b")), tokenizer(), 7)
    assert len(rows) == 2
    assert rows.left_out == 1
    assert str(rows) == "2 of 3 pairs; 1 are longer than 7 tokens and left out"
    check_rows(rows, what="the rows")
    with pytest.raises(IndexError):
        rows[2]


def test_where_no_pair_fits_the_length_is_named() -> None:
    with pytest.raises(ValueError, match=r"none of 1 pairs fits into a row of 3 tokens.*raise sequence_length"):
        CompletionRows.of(pairs(("ab", "cd")), tokenizer(), 3)


def test_a_tokenizer_without_an_end_token_is_refused() -> None:
    with pytest.raises(ValueError, match="no end-of-sequence token, and one must follow each completion"):
        CompletionRows.of(pairs(("ab", "cd")), tokenizer(eos_token=None), 9)


def test_filling_up_without_a_mask_changes_no_loss() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=259, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(config)
    short, long = (CompletionRows.of(pairs(("ab", "cd")), tokenizer(), length)[0] for length in (7, 12))
    losses = [model(**{name: tensor[None] for name, tensor in row.items()}).loss for row in (short, long)]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)


# ---------------------------------------------------------------------------------------------------- holding out


def named(split: Sequence[Pair]) -> list[str]:
    return [pair.group for pair in split]


def test_a_group_is_on_one_side_only_and_no_more_than_the_fraction_is_held_out() -> None:
    made = [pair for name in "abcde" for pair in pairs(("p", "c"), ("q", "d"), group=name)]
    training, held_out = hold_out_groups(made, 0.4)
    assert len(held_out) == 4
    assert not set(named(training)) & set(named(held_out))
    assert sorted(named(training) + named(held_out)) == sorted(named(made))


def test_which_groups_are_held_out_depends_on_their_names_and_not_on_their_order() -> None:
    made = [pair for name in "abcde" for pair in pairs(("p", "c"), group=name)]
    assert set(named(hold_out_groups(made, 0.4)[1])) == set(named(hold_out_groups(made[::-1], 0.4)[1]))


def test_a_group_too_large_to_hold_out_is_trained_on() -> None:
    made = pairs(*[("p", "c")] * 8, group="large") + pairs(("p", "c"), group="small") + pairs(("p", "c"), group="other")
    training, held_out = hold_out_groups(made, 0.1)
    assert len(held_out) == 1
    assert named(training).count("large") == 8


def test_holding_out_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"holding out 0\.1 of 2 pairs leaves none to evaluate on, since the smallest group has 2"
    ):
        hold_out_groups(pairs(("p", "c"), ("q", "d")), 0.1)


# ------------------------------------------------------------------------------------------------ docstrings


MODULE = '''
@cached
def first(x):
    """Say what is first of all.

    And more.
    """
    # why
    return x


class Holder:
    def second(self):
        r"""Say what is second of all."""
        return "é"

    async def third(self):
        "Say what is third of all, waiting."
        await self


def only_says():
    """Say it, and do nothing beside."""


def short(x):
    """Too short."""
    return x


def on_one_line(x): "Say it on the line of the code."; return x


def again(x):
    """Say what is first of all.

    And more.
    """
    return 2 * x
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "_pythings.py").write_text(MODULE, encoding="utf-8")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "inner.py").write_text('def f():\n    """Say what is inside of it."""\n    return 1\n')
    for left_out in ("site-packages", "test", "lib2to3"):
        (tmp_path / left_out).mkdir()
        (tmp_path / left_out / "m.py").write_text('def g():\n    """Say what is not of it."""\n    return 1\n')
    (tmp_path / "old.py").write_text("print 'of another Python'\n")
    return tmp_path


def test_a_file_is_read_in_the_encoding_that_it_names_and_one_that_cannot_be_is_left_out(tmp_path: Path) -> None:
    for name, line in (("named", "# -*- coding: latin-1 -*-\n"), ("unnamed", ""), ("unknown", "# -*- coding: no-such -*-\n")):
        code = f'{line}def f():\n    """Say what is inside of {name}."""\n    return "\xe9\x0c"\n'
        (tmp_path / f"{name}.py").write_bytes(code.encode("latin-1"))
    (pair,) = library_docstrings(tmp_path)
    assert pair.completion == "Say what is inside of named."
    assert 'def f():\n    return "\xe9\x0c"\n```' in pair.prompt


def test_each_function_is_a_prompt_without_its_docstring_and_the_docstring(library: Path) -> None:
    found = library_docstrings(library)
    assert [(pair.group, pair.completion) for pair in found] == [
        ("things", "Say what is first of all.\n\nAnd more."),
        ("things", "Say what is second of all."),
        ("things", "Say what is third of all, waiting."),
        ("other", "Say what is inside of it."),
    ]
    opening = "Write the docstring of this Python function.\n\n```python\n"
    assert found[0].prompt == f"{opening}@cached\ndef first(x):\n    # why\n    return x\n```"
    assert found[1].prompt == f'{opening}def second(self):\n    return "é"\n```'
    assert found[2].prompt == f"{opening}async def third(self):\n    await self\n```"


def test_a_library_without_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no Python function with a docstring.*take data=text data.path=PATH instead"):
        library_docstrings(tmp_path)


def test_the_library_of_this_python_is_enough_to_train_on_and_holds_no_prompt_or_completion_twice() -> None:
    found = library_docstrings()
    assert len(found) > 3000
    assert len({pair.prompt for pair in found}) == len({pair.completion for pair in found}) == len(found)
    training, held_out = hold_out_groups(found, 0.02)
    assert 0.01 * len(found) < len(held_out) <= 0.02 * len(found)
    assert not {pair.group for pair in training} & {pair.group for pair in held_out}
