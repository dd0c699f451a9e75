"""Prompts with the completions that are to be learnt, which every Python brings along."""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Final

SHORTEST_DOCSTRING: Final = 20
"""Characters; shorter ones are mostly placeholders."""

# Tests and their data, bundled copies of other projects, demonstrations, text and tools, none of it library code. Installed
# packages lie in folders whose names are no identifiers.
NO_LIBRARY: Final = frozenset(
    ("test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip", "pydoc_data", "__phello__")
)


@dataclass(frozen=True)
class Pair:
    """A prompt and what is to be said to it.

    Attributes:
        group: pairs of one group are alike, so they are all trained on or all held out.
    """

    prompt: str
    completion: str
    group: str


def library_docstrings(library: Path | None = None) -> list[Pair]:
    """Every function of the running Python's standard library without its docstring, and that docstring.

    About 5,000 pairs (PSF licence), there without a download, in the order of files and lines. They differ from one version
    of Python to the next. Left out are functions that are nothing but a docstring, docstrings of fewer than
    :data:`SHORTEST_DOCSTRING` characters, and those whose code or docstring has occurred before, which could otherwise be
    trained on and held out at once. A group is a top-level module or package; ``_pydecimal`` is of ``decimal``'s.

    Args:
        library: the folder of the library; None for that of the running Python.

    Raises:
        ValueError: there is no such function.
    """
    folder = Path(sysconfig.get_path("stdlib")) if library is None else library
    pairs: list[Pair] = []
    seen: set[str] = set()
    for file in sorted(folder.rglob("*.py")):
        parts = file.relative_to(folder).with_suffix("").parts
        if NO_LIBRARY.isdisjoint(parts) and all(part.isidentifier() for part in parts):
            group = parts[0].removeprefix("_py").lstrip("_")
            for code, docstring in _documented(file):
                if seen.isdisjoint((code, docstring)):
                    prompt = f"Write the docstring of this Python function.\n\n```python\n{code}\n```"
                    pairs.append(Pair(prompt, docstring, group))
                seen |= {code, docstring}
    if not pairs:
        raise ValueError(
            f"{folder} holds no Python function with a docstring, so this Python comes without the source of its library: "
            f"take data.path=PATH instead."
        )
    return pairs


def _documented(file: Path) -> Iterator[tuple[str, str]]:
    """The code without docstring, and the docstring, of each function of a file, in the order of lines."""
    try:
        # In the encoding that the file names, UTF-8 by default.
        with tokenize.open(file) as opened, warnings.catch_warnings():
            # Of the library's own old escapes, which are not this caller's to mend.
            warnings.simplefilter("ignore")
            source = opened.read()
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        # What this Python cannot read is not of its library.
        return
    # Python takes no other character for the end of a line.
    lines = source.split("\n")
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for function in sorted(functions, key=lambda node: node.lineno):
        docstring = ast.get_docstring(function)
        if docstring is None or len(docstring) < SHORTEST_DOCSTRING or len(function.body) == 1:
            continue
        literal, follows = function.body[0], function.body[1]
        assert literal.end_lineno is not None
        # On a line with other code it cannot be taken out by lines.
        if lines[literal.lineno - 1][: literal.col_offset].strip() or follows.lineno == literal.end_lineno:
            continue
        first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)]) - 1
        kept = [*lines[first : literal.lineno - 1], *lines[literal.end_lineno : function.end_lineno]]
        yield dedent("\n".join(kept)).strip(), docstring


def hold_out_groups(pairs: Sequence[Pair], fraction: float) -> tuple[list[Pair], list[Pair]]:
    """Split into pairs to train on and pairs held out, so that no group is on both sides.

    Groups are taken in an order that looks random and depends on their names alone, each as long as no more than
    ``fraction`` of the pairs is held out with it; so many small groups are, rather than one large.

    Args:
        fraction: of the pairs, above 0 and at most 0.5.

    Raises:
        ValueError: each group is larger than that.
    """
    allowed = round(len(pairs) * fraction)
    sizes = Counter(pair.group for pair in pairs)
    held_out: set[str] = set()
    for group in sorted(sizes, key=lambda group: hashlib.sha256(group.encode()).digest()):
        if sizes[group] <= allowed:
            held_out.add(group)
            allowed -= sizes[group]
    if not held_out:
        raise ValueError(
            f"holding out {fraction} of {len(pairs)} pairs leaves none to evaluate on, since the smallest group has "
            f"{min(sizes.values(), default=0)}: give more pairs or a larger fraction."
        )
    return [pair for pair in pairs if pair.group not in held_out], [pair for pair in pairs if pair.group in held_out]
