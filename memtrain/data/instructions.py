"""Prompts with the completions that are to be learnt, and rows of them.

Each pair is a row of its own, filled up at the right: packed into one row, the second pair would see the first, unless
attention were told where each begins. Only the completion and its end are learnt.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
import tokenize
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Final, Self

import torch
from torch.nn.functional import pad
from torch.utils.data import Dataset

from memtrain.data.rows import IGNORED, Batch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
            f"take data=text data.path=PATH instead."
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


class CompletionRows(Dataset[Batch]):
    """Pairs as rows: ``{"input_ids", "labels"}``, int64, each of shape (sequence_length,).

    A row is the prompt, the completion and the end-of-sequence token, filled up at the right. Labels are the tokens of the
    completion and its end, and :data:`memtrain.data.rows.IGNORED` elsewhere. There is no attention mask: in a causal model
    no real token sees what stands to its right, so filling changes neither a loss that counts nor a gradient.

    Attributes:
        left_out: how many pairs are longer than a row, and so are not here.
    """

    def __init__(self, rows: list[tuple[list[int], list[int]]], left_out: int, sequence_length: int, pad_token_id: int) -> None:
        """Take (prompt, completion) tokens, each together as long as a row or shorter; :meth:`of` makes them from text."""
        self._rows = rows
        self.left_out = left_out
        self._sequence_length = sequence_length
        self._pad_token_id = pad_token_id

    @classmethod
    def of(cls, pairs: Iterable[Pair], tokenizer: PreTrainedTokenizerBase, sequence_length: int) -> Self:
        """Tokenise the pairs, in the tokenizer's chat template where it has one, and keep those that fit.

        Prompt and completion are tokenised apart, as a model that is asked for a completion sees them. Without a chat
        template an empty line stands between the two, and the token that begins a text, if the tokenizer sets one, before
        the prompt. What a template writes after the end of the answer is cut off.

        Raises:
            ValueError: the tokenizer has no end-of-sequence token, its template does not continue the prompt with the
                answer, or no pair fits.
        """
        eos = tokenizer.eos_token_id
        if eos is None:
            raise ValueError(
                "the tokenizer has no end-of-sequence token, and one must follow each completion: set its eos_token."
            )
        texts = [_in_template(pair, tokenizer) for pair in pairs]
        # What the tokenizer puts around a text, of which a template has written its own.
        begin = [] if tokenizer.chat_template else tokenizer.encode("")[:1]
        begin = begin if begin == [tokenizer.bos_token_id] else []
        prompts, completions = (_encode([text[part] for text in texts], tokenizer) for part in (0, 1))
        rows = [([*begin, *prompt], _ended(completion, eos)) for prompt, completion in zip(prompts, completions, strict=True)]
        fitting = [row for row in rows if sum(map(len, row)) <= sequence_length]
        if not fitting:
            raise ValueError(
                f"none of {len(rows)} pairs fits into a row of {sequence_length} tokens, and a row must hold a whole pair: "
                f"raise sequence_length."
            )
        pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        return cls(fitting, len(rows) - len(fitting), sequence_length, pad_token_id)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        prompt, completion = self._rows[index]
        missing = self._sequence_length - len(prompt) - len(completion)
        return {
            "input_ids": pad(torch.tensor([*prompt, *completion]), (0, missing), value=self._pad_token_id),
            "labels": pad(torch.tensor([IGNORED] * len(prompt) + completion), (0, missing), value=IGNORED),
        }

    def __str__(self) -> str:
        """How many pairs there are and how many are not, for people."""
        total = len(self) + self.left_out
        return f"{len(self)} of {total} pairs; {self.left_out} are longer than {self._sequence_length} tokens and left out"


def _in_template(pair: Pair, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """The prompt as the model is asked with it, and what it is to answer."""
    if not tokenizer.chat_template:
        return f"{pair.prompt}\n\n", pair.completion
    question = {"role": "user", "content": pair.prompt}
    answer = {"role": "assistant", "content": pair.completion}
    asked = str(tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True))
    answered = str(tokenizer.apply_chat_template([question, answer], tokenize=False))
    if not answered.startswith(asked):
        raise ValueError(
            f"the tokenizer's chat template asks with {asked[-40:]!r}, and the answered conversation does not begin with that, "
            f"so what is to be learnt cannot be told: set another chat_template, or None."
        )
    return asked, answered.removeprefix(asked)


def _encode(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    # verbose=False: no warning that a text is longer than the model's context; it is measured here.
    encoded: list[list[int]] = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    return encoded


def _ended(completion: list[int], eos: int) -> list[int]:
    """The tokens up to and with the last end of sequence, which is added where there is none."""
    if eos not in completion:
        return [*completion, eos]
    return completion[: len(completion) - completion[::-1].index(eos)]
