"""Pairs of Python's library: nothing is on both sides or lost unsaid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from memtrain.data.instructions import Pair, hold_out_groups, library_docstrings


def pairs(*texts: tuple[str, str], group: str = "one") -> list[Pair]:
    return [Pair(prompt, completion, group) for prompt, completion in texts]


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
    with pytest.raises(ValueError, match=r"holds no Python function with a docstring.*take data.path=PATH instead"):
        library_docstrings(tmp_path)


def test_the_library_of_this_python_is_enough_to_train_on_and_holds_no_prompt_or_completion_twice() -> None:
    found = library_docstrings()
    assert len(found) > 3000
    assert len({pair.prompt for pair in found}) == len({pair.completion for pair in found}) == len(found)
    training, held_out = hold_out_groups(found, 0.02)
    assert 0.01 * len(found) < len(held_out) <= 0.02 * len(found)
    assert not {pair.group for pair in training} & {pair.group for pair in held_out}
