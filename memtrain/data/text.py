"""Documents: reading plain text, the text that every Python brings along, and the part held out for evaluation.

Text is taken as it stands, line endings included; only a byte order mark at the start of a file is removed, which says how
the file is encoded and is no part of its text.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

TEXT_SUFFIXES: Final = (".txt", ".md")
REFUSED_SUFFIXES: Final = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".gz")
READ: Final = "plain UTF-8 text is read, each file as one document: give a .txt or .md file, or a folder of them"

_BYTE_ORDER_MARK: Final = "\ufeff"


def read_documents(path: Path) -> list[str]:
    """The documents under ``path``: one file, or the ``*.txt`` and ``*.md`` files of a folder and its subfolders.

    The files of a folder come in the order of their paths. Links to folders are not followed.

    Raises:
        ValueError: the path is missing or unreadable, names a format that is not plain text, is a folder without text files,
            or a file is not UTF-8 or holds only white space. The message names the file.
    """
    try:
        return [_read_document(file) for file in (_text_files(path) if path.is_dir() else [path])]
    except FileNotFoundError as error:
        raise ValueError(
            f"{error.filename or path} does not exist: give the path of a .txt or .md file, or a folder of them."
        ) from error
    except OSError as error:
        raise ValueError(
            f"{error.filename or path} cannot be read ({error.strerror}): allow reading it or leave it out."
        ) from error


def _text_files(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    # Path.rglob passes over folders that it may not read, and so would train on a part of the text without a word.
    files = [
        Path(parent, name)
        for parent, _, names in os.walk(folder, onerror=refuse)
        for name in names
        if name.lower().endswith(TEXT_SUFFIXES)
    ]
    if not files:
        raise ValueError(f"{folder} is a folder without .txt or .md files, and only {READ}.")
    return sorted(files)


def _read_document(file: Path) -> str:
    if file.suffix.lower() in REFUSED_SUFFIXES:
        raise ValueError(f"{file} is a {file.suffix.lower()} file, and only {READ}.")
    data = file.read_bytes()
    try:
        text = data.decode("utf-8").removeprefix(_BYTE_ORDER_MARK)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{file}, line {line}, is not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}): "
            "convert the file to UTF-8."
        ) from error
    if not text.strip():
        state = "holds only white space" if text else "is empty"
        raise ValueError(f"{file} {state}, and a document must have text: remove the file or fill it.")
    return text


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
