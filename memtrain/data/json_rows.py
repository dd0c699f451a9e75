"""JSON Lines and JSON: one object is one row, read strictly, so that no row is trained on that says something else.

Refused are what Python's parser takes without a word: a key that occurs twice, ``NaN`` and ``Infinity``, numbers beyond the
largest float, and halves of surrogate pairs, which no tokenizer takes.
"""

from __future__ import annotations

import io
import json
import math
import re
from typing import Any, BinaryIO, Final

from memtrain.data import reading
from memtrain.data.reading import Lines, Rows, as_record, whole, whole_text
from memtrain.data.records import BadRow, Origin, RowRefused

_HALF_OF_A_PAIR: Final = re.compile(r"\\u[dD][89a-fA-F]")
_BLANK: Final = re.compile(r"[ \t\n\r]*")
# One row of these would look like an object that wraps a list of rows.
_ROWS_WITH_A_LIST: Final = ("messages", "conversations", "conversation")
_NAMES: Final = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise RowRefused(f"has the key {name!r} twice in one object, and only one value can be meant: remove the other")
            seen.add(name)
    return values


def _no_constant(name: str) -> None:
    raise RowRefused(f"holds {name}, which is no JSON: write null or leave the key out")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise RowRefused(f"holds {digits}, which is beyond the largest float: correct the number")
    return number


# Control characters inside strings are taken as they are, although JSON wants them escaped: nothing else can be meant by them.
_STRICT: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite, strict=False)
# Finds where a value ends that the other refuses.
_LENIENT: Final = json.JSONDecoder(parse_int=str, strict=False)


def _decoded(text: str, at: int = 0) -> tuple[Any, int]:
    """The JSON value that begins at ``at``, and where it ends.

    Raises:
        json.JSONDecodeError: it is no JSON.
        RowRefused: it is, and cannot be used.
    """
    try:
        value, end = _STRICT.raw_decode(text, at)
    except (RowRefused, json.JSONDecodeError):
        raise
    except RecursionError as error:
        raise RowRefused("is nested too deeply to be read") from error
    except ValueError as error:
        # Python's guard against numbers that take minutes to convert.
        raise RowRefused("holds an integer of more digits than Python converts: write it as a string") from error
    if _HALF_OF_A_PAIR.search(text, at, end):
        for name, part in value.items() if isinstance(value, dict) else ():
            try:
                json.dumps([name, part], ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                half = ord(error.object[error.start])
                raise RowRefused(
                    f"has \\u{half:04x} in {name!r}, which is half of a surrogate pair and no character: correct the text"
                ) from error
    return value, end


def json_lines(file: BinaryIO, source: str) -> Rows:
    """One JSON object on each line; blank lines are no rows.

    Raises:
        ValueError: the first row shows that the file is a JSON list, or that its objects are spread over several lines.
    """
    lines = Lines(file)
    first = True
    while True:
        try:
            line = next(lines, None)
            if line is None:
                return
            if not line.strip():
                continue
            text = lines.text(line).rstrip("\r\n")
            if first:
                _refuse_spread(text, source)
            row = as_record(_object(_only_value(text)), Origin(source, lines.number))
        except RowRefused as error:
            row = BadRow(Origin(source, lines.number), str(error))
        first = False
        yield row


def _refuse_spread(text: str, source: str) -> None:
    if re.match(r"\s*\[\s*(\{|$)", text):
        raise ValueError(
            f"{source} is a JSON list, and a JSON Lines file has one object on each line: name it .json, or write it again "
            "(jq -c '.[]')."
        )
    if text.strip() == "{":
        raise ValueError(
            f"{source} has JSON objects that are spread over several lines, and a JSON Lines file has one object on each line: "
            "write it again (jq -c .), or name it .json if it is a single object."
        )


def _only_value(text: str) -> Any:
    """The one JSON value of a line."""
    start = _end_of_blank(text, 0)
    try:
        value, end = _decoded(text, start)
    except json.JSONDecodeError as error:
        raise RowRefused(f"is no valid JSON ({_said(error)} at column {error.pos + 1})") from error
    end = _end_of_blank(text, end)
    if end == len(text):
        return value
    if text[end] == "{":
        raise RowRefused(f"holds more than one JSON object (another begins at column {end + 1}): give each a line of its own")
    raise RowRefused(f"is no valid JSON (the first value is followed by {text[end]!r} at column {end + 1})")


def _said(error: json.JSONDecodeError) -> str:
    # Some of Python's messages end in the word that goes on here.
    return error.msg.removesuffix(" at")


def _object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    raise RowRefused(f'is {_name(value)}, and a row must be a JSON object, such as {{"text": "..."}}')


def _name(value: Any) -> str:
    return _NAMES.get(type(value), "null")


def _end_of_blank(text: str, at: int) -> int:
    match = _BLANK.match(text, at)
    assert match is not None
    return match.end()


def json_file(file: BinaryIO, source: str) -> Rows:
    """A JSON list of objects, an object with one list of objects inside, a single row, or JSON Lines under a wrong name.

    A list is read whole, up to :data:`LARGEST_WHOLE_BYTES`, and its objects are made one at a time.

    Raises:
        ValueError: the file is too large, is not UTF-8 or no JSON, or it is not clear which of its lists holds the rows.
    """
    if not file.seekable():
        file = io.BytesIO(whole(file, source))
    one_a_line = _has_an_object_on_each_line(file)
    file.seek(0)
    if one_a_line:
        yield from json_lines(file, source)
        return
    text = whole_text(whole(file, source), source)
    if isinstance(text, BadRow):
        raise ValueError(f"{text}.")
    start = _end_of_blank(text, 0)
    try:
        if text.startswith("[", start):
            yield from _listed(text, start, source)
        elif start < len(text):
            value, end = _decoded(text, start)
            _refuse_more(text, end)
            yield from _wrapped(value, source)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{source} is no valid JSON ({_said(error)} at line {error.lineno}, column {error.colno}): correct it, or download it "
            "again if it was cut off."
        ) from error
    except RowRefused as error:
        raise ValueError(f"{source} {error}.") from error


def _has_an_object_on_each_line(file: BinaryIO) -> bool:
    """Whether the first line that is not blank is a complete object, and not the only one."""
    lines = (line for line in iter(lambda: file.readline(reading.LONGEST_LINE_BYTES), b"") if line.strip())
    first = next(lines, b"").removeprefix(reading.BYTE_ORDER_MARK).strip()
    if not (first.startswith(b"{") and first.endswith(b"}")):
        return False
    try:
        _LENIENT.decode(first.decode("utf-8"))
    except (ValueError, RecursionError):
        return False
    return next(lines, None) is not None


def _listed(text: str, start: int, source: str) -> Rows:
    at = _end_of_blank(text, start + 1)
    number = 0
    while number or not text.startswith("]", at):
        origin = Origin(source, number, "row")
        try:
            value, end = _decoded(text, at)
            row = as_record(_object(value), origin)
        except RowRefused as error:
            row = BadRow(origin, str(error))
            try:
                end = _LENIENT.raw_decode(text, at)[1]
            except RecursionError:
                raise RowRefused(f"has a row {number} that is nested too deeply to be read: leave it out") from error
        yield row
        number += 1
        at = _end_of_blank(text, end)
        if text.startswith("]", at):
            break
        if not text.startswith(",", at):
            raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _end_of_blank(text, at + 1)
    _refuse_more(text, at + 1)


def _refuse_more(text: str, end: int) -> None:
    end = _end_of_blank(text, end)
    if end < len(text):
        raise json.JSONDecodeError("more than one value, where a list of objects should be: another begins", text, end)


def _wrapped(value: Any, source: str) -> Rows:
    if not isinstance(value, dict):
        raise RowRefused(f"holds {_name(value)}, and rows are a list of objects: write them as one")
    lists = [
        name
        for name, part in value.items()
        if name not in _ROWS_WITH_A_LIST and isinstance(part, list) and any(isinstance(item, dict) for item in part)
    ]
    if len(lists) > 1:
        names = ", ".join(map(repr, lists))
        raise RowRefused(f"holds {len(lists)} lists of objects ({names}), and rows are one list: write each to its own file")
    if value and all(isinstance(part, dict) for part in value.values()):
        raise RowRefused(
            f"holds columns ({', '.join(map(repr, value))}), and rows are objects: "
            'with pandas write them by to_json(path, orient="records", lines=True)'
        )
    for number, row in enumerate(value[lists[0]] if lists else [value]):
        origin = Origin(source, number, "row")
        try:
            yield as_record(_object(row), origin)
        except RowRefused as error:
            yield BadRow(origin, str(error))
