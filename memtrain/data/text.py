"""Documents: the text that every Python brings along, and the part of a text that is held out for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

TEXT_SUFFIXES: Final = (".txt", ".md")
"""Files of plain text, each one document."""


def python_documentation() -> list[str]:
    """The topics of Python's ``help()`` in the order of their names: about 80 documents, 0.46 million characters.

    Real English and code (PSF licence) that is there without a download. It differs a little from one version of Python to
    the next.
    """
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def hold_out(documents: Sequence[str], fraction: float) -> tuple[list[str], list[str]]:
    """Split into training and held-out text: the last ``fraction`` of the characters of every document is held out.

    The tail of each document, because both parts then speak of every subject in the same proportion (the last documents
    alone may all be of one kind), one document is enough, and only one place per document has training text next to
    held-out text. Each cut moves to the nearest end of a paragraph, else of a line, else of a word, if there is one within a
    quarter of the held-out length; together the parts are the document, character for character. A document too short to
    hold out a character is trained on whole.

    Args:
        documents: the text.
        fraction: of the characters, above 0 and at most 0.5.

    Returns:
        The training parts and the held-out parts, each in the order of the documents.

    Raises:
        ValueError: the fraction is out of range, or nothing but white space would be held out.
    """
    if not 0 < fraction <= 0.5:
        raise ValueError(f"the held-out fraction is {fraction!r}, and it must be above 0 and at most 0.5 of the text.")
    cuts = [_cut(document, round(len(document) * fraction)) for document in documents]
    training = [document[:cut] for document, cut in zip(documents, cuts, strict=True) if cut > 0]
    held_out = [document[cut:] for document, cut in zip(documents, cuts, strict=True) if cut < len(document)]
    if not any(part.strip() for part in held_out):
        raise ValueError(
            f"holding out {fraction} of {sum(map(len, documents))} characters leaves no text to evaluate on: "
            "give more text or a larger fraction."
        )
    return training, held_out


def _cut(document: str, held_out: int) -> int:
    """Where the held-out part of about ``held_out`` characters begins."""
    target = len(document) - held_out
    reach = held_out // 4
    for boundary in ("\n\n", "\n", " "):
        before = document.rfind(boundary, target - reach, target + len(boundary) - 1)
        after = document.find(boundary, target, target + reach)
        ends = [start + len(boundary) for start in (before, after) if start >= 0]
        if ends:
            return min(ends, key=lambda end: abs(end - target))
    return target
