"""Where rows come from: files and folders, data sets of the Hugging Face Hub, and objects that give rows.

What names files, and what does not:

- A path that exists is that file or folder, whatever characters are in it. A folder stands for all known files below it, in the
  order of their paths; those must be of one format. Names that begin with a dot are passed over, links to folders not followed.
- A path that does not exist and has one of ``*?[`` in it is a pattern, ``**`` for any folders.
- ``hub:ORGANISATION/NAME``, with ``/CONFIGURATION`` and ``:SPLIT`` after it where needed, is a data set of the Hub; the split
  is ``train`` if none is given.
- A list of these stands for one after the other.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Final

from torch.utils.data import DataLoader

from memtrain.data.formats import KNOWN_ENDINGS, format_by_name, format_of, rows_of_file, without_gz
from memtrain.data.reading import Rows, as_record
from memtrain.data.records import Origin
from memtrain.data.tables import library, without_missing

_HUB: Final = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(?:/(?P<configuration>[\w.-]+))?(?::(?P<split>.+))?")
_HUB_FORM: Final = "hub:ORGANISATION/NAME[/CONFIGURATION][:SPLIT]"
# Beside data of another format these are about the data.
_ABOUT: Final = ("readme", "license", "licence")
# What datasets writes by save_to_disk: a data set, or several by the names of splits.
_SAVED: Final = ({"state.json", "dataset_info.json"}, {"dataset_dict.json"})


def names_files(data: Any) -> bool:
    """Whether ``data`` names files or a data set of the Hub (a path, a pattern, or a list of these) and is not the rows."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str | os.PathLike)


def read_records(data: Any, what: str) -> Rows:
    """The rows of ``data``, one at a time, in order.

    Args:
        data: a path, pattern or name of a data set, or a list of these (see the top of this module); a ``datasets.Dataset`` or
            ``IterableDataset``; a list, iterator, torch ``Dataset`` or any other iterable of mappings.
        what: the name of the rows in messages, such as ``"the training rows"``.

    Returns:
        Records, and a :class:`~memtrain.data.records.BadRow` in the place of each row that cannot be used.

    Raises:
        ValueError: there is nothing to be read by that name, or no rows in what was given. Missing files are found at the call,
            what is wrong inside a file when its turn comes.
    """
    if names_files(data):
        items = [os.fspath(item) for item in ([data] if isinstance(data, str | os.PathLike) else data)]
        return chain.from_iterable([_named(item, what) for item in items])
    return _given(data, what)


def _named(name: str | bytes, what: str) -> Rows:
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f"{what} came as {name!r}, and a path is needed: give that of a file or a folder.")
    if name.startswith("hub:"):
        return _given(_from_hub(name), name)
    if re.match(r"[a-zA-Z][\w+.-]+://", name):
        raise ValueError(
            f"{name} is an address, and files are read from this machine: download it, or write {_HUB_FORM} for a data set of the Hugging Face Hub."
        )
    path = os.path.expanduser(name)
    mode = _mode(path)
    if mode is None:
        paths = _matches(path, what)
    elif stat.S_ISDIR(mode):
        if any(all(os.path.exists(os.path.join(path, file)) for file in marks) for marks in _SAVED):
            return _given(_saved(path), path)
        paths = _known_files(path)
    else:
        paths = [path]
    return chain.from_iterable([rows_of_file(path, format_of(path)) for path in paths])


# --------------------------------------------------------------------------------------------------------------- files


def _mode(path: str) -> int | None:
    """The kind of file that is at ``path``; None if there is nothing."""
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ValueError(f"{path} cannot be read ({error.strerror}): allow reading it or leave it out.") from error


def _matches(pattern: str, what: str) -> list[str]:
    if not glob.has_magic(pattern):
        raise ValueError(_missing(pattern, what))
    # Brackets in the name of a folder that exists are part of the name.
    parts = Path(pattern).parts
    there = max((count for count in range(len(parts)) if count and os.path.exists(Path(*parts[:count]))), default=0)
    escaped = os.path.join(glob.escape(str(Path(*parts[:there]))), *parts[there:]) if there else pattern
    found = [path for path in glob.glob(escaped, recursive=True) if not os.path.isdir(path)]
    if not found:
        raise ValueError(
            f"{pattern} is no file, and as a pattern no file matches it: correct it, or give a folder to read all files in it."
        )
    return _of_one_format(sorted(found, key=Path), pattern)


def _missing(path: str, what: str) -> str:
    if os.path.islink(path):
        return f"{path} is a link to {os.readlink(path)}, which does not exist: correct the link or give another path."
    shown = path if len(path) <= 200 and path.isprintable() else f"{path[:60]!r}..."
    sentence = f"{shown} does not exist, and {what} are read from files: correct the path"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", path) and format_by_name(path) is None:
        return f"{sentence}, or write hub:{path} for a data set of the Hugging Face Hub."
    if " " in shown and format_by_name(path) is None:
        return f'{sentence}, or give text as [{{"text": "..."}}].'
    return f"{sentence}."


def _known_files(folder: str) -> list[str]:
    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror}): allow reading it or leave it out.") from error

    files = []
    # Path.rglob passes over folders that it may not read, and so would train on a part of the rows without a word.
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [os.path.join(parent, name) for name in names if format_by_name(name) and not name.startswith(".")]
    if not files:
        raise ValueError(f"{folder} is a folder without files of a known format: give one with files named {KNOWN_ENDINGS}.")
    return _of_one_format(sorted(files, key=Path), folder)


def _of_one_format(files: list[str], where: str) -> list[str]:
    """``files``, if they are of one format and none is there twice."""
    counts = Counter(format_of(file).name for file in files)
    if len(counts) > 1:
        data = [file for file in files if Path(file).name.lower().partition(".")[0] not in _ABOUT]
        if data and len(data) < len(files):
            return _of_one_format(data, where)
        held = " and ".join(f"{count} {name} file{'s' * (count > 1)}" for name, count in counts.most_common())
        most = next(file for file in files if format_of(file).name == counts.most_common(1)[0][0])
        raise ValueError(
            f"{where} has {held}, and files read together must be of one format: "
            f"give a pattern that matches those meant, such as {os.path.join(os.path.dirname(most), '*' + Path(without_gz(most)).suffix)}."
        )
    unpacked = {without_gz(file): file for file in files if file != without_gz(file)}
    twice = next((file for file in files if file in unpacked), None)
    if twice:
        raise ValueError(f"{where} has {twice} and {unpacked[twice]}, whose rows would be read twice: remove one of them.")
    return files


# ---------------------------------------------------------------------------------------------------------- Hugging Face


def _from_hub(name: str) -> Any:
    match = _HUB.fullmatch(name)
    if match is None:
        raise ValueError(f"{name} is no name of a data set of the Hub: write {_HUB_FORM}, such as hub:stanfordnlp/imdb:train.")
    datasets = library("datasets")
    split = match["split"] or "train"
    try:
        return datasets.load_dataset(match["name"], match["configuration"], split=split)
    # Whatever the network, the Hub and the reader of the files raise.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(
            f"{name} cannot be loaded, split {split!r} ({reason}): check its name ({_HUB_FORM}) and the connection, or give files."
        ) from error


def _saved(folder: str) -> Any:
    datasets = library("datasets")
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"{folder} cannot be loaded as a saved data set ({reason}): save it again, or give files.") from error


# ------------------------------------------------------------------------------------------------------- objects of rows


def _given(data: Any, what: str) -> Rows:
    # Who has such an object has imported the package.
    datasets = sys.modules.get("datasets")
    if datasets is not None and isinstance(data, datasets.DatasetDict | datasets.IterableDatasetDict):
        splits = ", ".join(map(repr, data))
        raise ValueError(f"{what} came as the splits {splits} of a data set, and the rows of one are needed: give one of them.")
    if isinstance(data, DataLoader):
        raise ValueError(f"{what} came as a DataLoader, which gives batches, and rows are needed: give its dataset.")
    if type(data).__name__ == "DataFrame":
        raise ValueError(f'{what} came as a DataFrame, and rows are needed: give them as df.to_dict("records").')
    by_number = not hasattr(data, "__iter__") and hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if isinstance(data, Mapping | bytes | bytearray | type) or not (by_number or hasattr(data, "__iter__")):
        remedy = "call it and give what it returns" if callable(data) else 'give a path or mappings, such as [{"text": "..."}]'
        kind = f"the class {data.__name__}" if isinstance(data, type) else type(data).__name__
        raise ValueError(f"{what} came as {kind}, and rows are needed: {remedy}.")
    of_arrow = datasets is not None and isinstance(data, datasets.Dataset | datasets.IterableDataset)
    # Without __iter__ Python would read a torch Dataset until an IndexError, which not all of them raise.
    rows = map(data.__getitem__, range(len(data))) if by_number else data
    return _numbered(rows, what, of_arrow=of_arrow)


def _numbered(rows: Iterable[Any], what: str, *, of_arrow: bool) -> Rows:
    number = -1
    for number, values in enumerate(rows):
        yield as_record(without_missing(values) if of_arrow else values, Origin(what, number, "row"))
    if number < 0:
        remedy = "make it anew, since an iterator gives its rows once" if isinstance(rows, Iterator) else "give rows"
        raise ValueError(f"there is no row in {what}, and training needs 1 or more: {remedy}.")
