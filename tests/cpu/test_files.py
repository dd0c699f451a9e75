"""Where rows come from: every path, pattern and object gives its rows once and in order, or is refused in one sentence."""

from __future__ import annotations

import gzip
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from memtrain.data.files import names_files, read_records
from memtrain.data.records import BadRow, Origin, Record


def records(data: Any) -> list[Record | BadRow]:
    return list(read_records(data, "the training rows"))


def values(data: Any) -> list[Any]:
    return [row.reason if isinstance(row, BadRow) else row.values for row in records(data)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, content: str | bytes | None = None) -> str:
    """A file that holds ``content``, else one row that holds the file's name."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    content = f'{{"a":"{name}"}}' if content is None else content
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return name


# --------------------------------------------------------------------------------------------------- paths and patterns


def test_a_folder_gives_its_files_in_the_order_of_their_paths(folder: Path) -> None:
    for name in ("d/b.jsonl", "d/a/z.ndjson", "d/c.JSONL", "d/.hidden.jsonl", "d/.git/x.jsonl", "d/picture.png", "d/README.md"):
        write(name)
    assert values("d") == [{"a": "d/a/z.ndjson"}, {"a": "d/b.jsonl"}, {"a": "d/c.JSONL"}]
    assert records(Path("d"))[0] == Record({"a": "d/a/z.ndjson"}, Origin("d/a/z.ndjson", 1))


def test_a_list_gives_its_items_one_after_the_other_whatever_their_formats(folder: Path) -> None:
    items = [write("b.jsonl", '\ufeff{"a":1}\r\n'), Path(write("a.jsonl", '\ufeff{"a":2}')), write("c.txt", "text")]
    assert values(items) == [{"a": 1}, {"a": 2}, {"text": "text"}]


@pytest.mark.parametrize("pattern", ["d[1] é/*.jsonl", "d[1] é/**/*.jsonl", "d[1] é/[ab]*.jsonl"])
def test_a_pattern_gives_the_files_that_match_also_below_a_folder_with_brackets(folder: Path, pattern: str) -> None:
    for name in ("d[1] é/b.jsonl", "d[1] é/a.jsonl", "d[1] é/c.txt", "d1 é/a.jsonl"):
        write(name)
    (folder / "d[1] é/bb.jsonl").mkdir()
    assert values(pattern) == [{"a": "d[1] é/a.jsonl"}, {"a": "d[1] é/b.jsonl"}]


def test_a_path_that_exists_is_no_pattern(folder: Path) -> None:
    write("a1.jsonl")
    write("a2*.jsonl")
    assert values(write("a[1] ü?.jsonl")) == [{"a": "a[1] ü?.jsonl"}]
    assert values("a2*.jsonl") == [{"a": "a2*.jsonl"}]


def test_a_name_that_is_not_utf8_can_be_printed(folder: Path) -> None:
    name = write(os.fsdecode(b"caf\xe9.jsonl"), '{"a":1}')
    assert str(records(name)[0].origin) == "caf\\xe9.jsonl, line 1"


def test_a_link_has_the_format_of_its_own_name_or_else_of_its_target(folder: Path) -> None:
    write("blob", '{"a":1}')
    write("table.csv", "a\n2\n")
    os.symlink("blob", "rows.jsonl")
    os.symlink("table.csv", "latest")
    assert values(["rows.jsonl", "latest"]) == [{"a": 1}, {"a": "2"}]


@pytest.mark.parametrize(("name", "content"), [("pipe", '{"a":1}\n{"a":2}'), ("p.json", '[{"a":1},{"a":2}]'), ("p.csv", None)])
def test_a_named_pipe_is_read_once_from_its_beginning(folder: Path, name: str, content: str | None) -> None:
    os.mkfifo(name)
    writer = threading.Thread(target=Path(name).write_text, args=[content or "a\n1\n2\n"])
    writer.start()
    assert [int(row["a"]) for row in values(name)] == [1, 2]
    writer.join()


def test_a_pipe_cannot_be_read_as_parquet(folder: Path) -> None:
    os.mkfifo("p.parquet")
    writer = threading.Thread(target=Path("p.parquet").write_text, args=["PAR1"])
    writer.start()
    with pytest.raises(
        ValueError, match=r"p\.parquet is a pipe, and this format is read from both ends: write it to a file first"
    ):
        records("p.parquet")
    writer.join()


def test_a_path_may_begin_with_the_home_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder))
    write("a.jsonl")
    assert values("~/a.jsonl") == [{"a": "a.jsonl"}]


def test_an_unreadable_file_is_named(folder: Path) -> None:
    os.symlink("loop.jsonl", "loop.jsonl")
    with pytest.raises(ValueError, match=r"loop\.jsonl cannot be read \(Too many levels of symbolic links\): allow reading it"):
        records("loop.jsonl")


def test_a_file_that_cannot_be_opened_and_a_folder_that_cannot_be_listed_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("d/a.jsonl")

    def refuse(path: Any, *_: Any) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr("builtins.open", refuse)
        with pytest.raises(
            ValueError, match=r"d/a\.jsonl cannot be read \(Permission denied\): allow reading it or leave it out"
        ):
            records("d/a.jsonl")
    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ValueError, match=r"^d cannot be read \(Permission denied\): allow reading it or leave it out\."):
        records("d")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.jsonl", r"^gone\.jsonl does not exist, and the training rows are read from files: correct the path\.$"),
        ("org/name", r"correct the path, or write hub:org/name for a data set of the Hugging Face Hub\.$"),
        ("some text", r'^some text does not exist, .*, or give text as \[\{"text": "\.\.\."\}\]\.$'),
        ("t" * 5000, r"^'t{60}'\.\.\. does not exist"),
        ("a\0b", r"^'a\\x00b'\.\.\. does not exist"),
        ("broken.jsonl", r"^broken\.jsonl is a link to nowhere\.jsonl, which does not exist: correct the link or give another"),
        (
            "*.csv",
            r"^\*\.csv is no file, and as a pattern no file matches it: correct it, or give a folder to read all files in it\.",
        ),
        ("", r"^the training rows came as '', and a path is needed: give that of a file or a folder\."),
        ("s3://b/a.jsonl", r"is an address, and files are read from this machine: download it, or write hub:ORGANISATION/NAME"),
        (
            "none",
            r"^none is a folder without files of a known format: give one with files named \.jsonl, .* each also with \.gz\.",
        ),
        (
            "none/x.bin",
            r"has the ending \.bin, by which its format is not known: convert it, or name it by what it holds \(\.jsonl, ",
        ),
        ("noending", r"^noending has no ending, by which its format is not known"),
        (
            "mixed",
            r"^mixed has 2 JSON Lines files and 1 text file, .* of one format: give a pattern .*, such as mixed/\*\.jsonl\.",
        ),
        ("mixed/*", r"^mixed/\* has 2 JSON Lines files and 1 text file, .*, such as mixed/\*\.jsonl\."),
        ("twice", r"^twice has twice/a\.jsonl and twice/a\.jsonl\.gz, whose rows would be read twice: remove one of them\."),
        (["mixed/b.jsonl", "gone.jsonl"], r"^gone\.jsonl does not exist"),
    ],
)
def test_a_name_that_gives_no_rows_is_refused_at_the_call(folder: Path, name: Any, message: str) -> None:
    for file in (
        "none/x.bin",
        "noending",
        "mixed/a.txt",
        "mixed/b.jsonl",
        "mixed/c.jsonl",
        "twice/a.jsonl",
        "twice/a.jsonl.gz",
    ):
        write(file)
    os.symlink("nowhere.jsonl", "broken.jsonl")
    with pytest.raises(ValueError, match=message):
        read_records(name, "the training rows")


@pytest.mark.parametrize("data", ["a.jsonl", "*.csv", "hub:a/b", Path("a"), ["a.jsonl", Path("b")], ("a",)])
def test_what_names_files_is_told(data: Any) -> None:
    assert names_files(data)


@pytest.mark.parametrize("data", [[], [{"text": "a"}], ["a", {"text": "a"}], iter(["a"]), {"text": ["a"]}, None])
def test_what_is_the_rows_is_told(data: Any) -> None:
    assert not names_files(data)


# -------------------------------------------------------------------------------------------------------------- objects


class _Numbered(Dataset[dict[str, int]]):
    def __len__(self) -> int:
        return 2

    # Without an end, by which Python would find one.
    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


class _Shared(IterableDataset[dict[str, int]]):
    def __iter__(self) -> Iterator[dict[str, int]]:
        worker = get_worker_info()
        return iter([{"id": number} for number in range(10)][slice(None) if worker is None else slice(worker.id, None, 2)])


@pytest.mark.parametrize("data", [_Numbered(), [{"id": 0}, {"id": 1}], iter([{"id": 0}, {"id": 1}])])
def test_any_object_of_rows_gives_them_by_number(data: Any) -> None:
    assert records(data) == [
        Record({"id": 0}, Origin("the training rows", 0, "row")),
        Record({"id": 1}, Origin("the training rows", 1, "row")),
    ]


def test_a_stream_gives_every_row_once() -> None:
    assert values(_Shared()) == [{"id": number} for number in range(10)]


def test_rows_that_are_no_mappings_are_bad_rows() -> None:
    tail = 'and a row must be a mapping of columns, such as {"text": "..."}'
    assert values([{"a": None}, (1, 2), "x", {1: 2}, {}, None]) == [
        {"a": None},
        f"is a tuple, {tail}",
        f"is a str, {tail}",
        "has the column 1, and names of columns must be strings",
        "is empty, and a row must have columns",
        f"is a NoneType, {tail}",
    ]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, r'came as NoneType, and rows are needed: give a path or mappings, such as \[\{"text": "\.\.\."\}\]\.'),
        ({"text": ["a"]}, r"the training rows came as dict, and rows are needed: give a path or mappings"),
        (b"a.jsonl", r"the training rows came as bytes"),
        ([], r"there is no row in the training rows, and training needs 1 or more: give rows\."),
        (iter([]), r"there is no row in the training rows, .*: make it anew, since an iterator gives its rows once\."),
        (_Shared, r"the training rows came as the class _Shared, and rows are needed: call it and give what it returns\."),
        (records, r"the training rows came as function, and rows are needed: call it and give what it returns\."),
        (DataLoader(_Numbered()), r"came as a DataLoader, which gives batches, and rows are needed: give its dataset\."),
        (type("DataFrame", (), {})(), r'came as a DataFrame, and rows are needed: give them as df\.to_dict\("records"\)\.'),
    ],
)
def test_an_object_that_gives_no_rows_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        records(data)


# -------------------------------------------------------------------------------------------------- Arrow, Hugging Face

CHATS = [
    {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "call": {"x": None, "y": 1}}],
        "n": None,
    },
    {"messages": [], "n": 3},
]
# As written, without what Arrow fills in.
READ = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "call": {"y": 1}}]},
    {"messages": [], "n": 3},
]


@pytest.mark.parametrize("name", ["a.parquet", "a.parquet.gz", "stream.arrow", "file.arrow"])
def test_arrow_files_give_rows_without_the_keys_that_arrow_fills_in(folder: Path, name: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(CHATS)
    if "parquet" in name:
        parquet.write_table(table, "a.parquet")
        Path("a.parquet.gz").write_bytes(gzip.compress(Path("a.parquet").read_bytes(), mtime=0))
    else:
        writer = pyarrow.ipc.new_stream if name == "stream.arrow" else pyarrow.ipc.new_file
        with writer(name, table.schema) as file:
            file.write_table(table)
    assert values(name) == READ
    assert records(name)[1].origin == Origin(name, 1, "row")


def test_data_sets_of_hugging_face_are_read(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_list(CHATS)
    assert values(data) == READ
    assert values(data.to_iterable_dataset()) == READ
    assert records(data)[0].origin == Origin("the training rows", 0, "row")
    data.save_to_disk("saved")
    assert values("saved") == READ
    splits = datasets.DatasetDict(train=data, test=data)
    with pytest.raises(
        ValueError, match=r"came as the splits 'train', 'test' of a data set, and the rows of one are needed: give"
    ):
        records(splits)
    write("saved/state.json", "{")
    with pytest.raises(ValueError, match=r"^saved cannot be loaded as a saved data set \(.*\): save it again, or give files\."):
        records("saved")


class _Splits(dict[str, Any]):
    pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """What is asked of a Hub that has one data set."""
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> list[dict[str, str]]:
        asked.append((name, configuration, split))
        if name != "org/set.1":
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub.\nMore lines.")
        return [{"text": "a"}]

    kinds = dict.fromkeys(("DatasetDict", "IterableDatasetDict", "Dataset", "IterableDataset"), _Splits)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset, **kinds))  # type: ignore[arg-type]
    return asked


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("hub:org/set.1", ("org/set.1", None, "train")),
        ("hub:org/set.1:test[:10%]", ("org/set.1", None, "test[:10%]")),
        ("hub:org/set.1/fr-en:test", ("org/set.1", "fr-en", "test")),
    ],
)
def test_a_name_of_the_hub_says_configuration_and_split(hub: list[Any], name: str, asked: tuple[Any, ...]) -> None:
    assert records(name) == [Record({"text": "a"}, Origin(name, 0, "row"))]
    assert hub == [asked]


def test_a_data_set_that_cannot_be_loaded_is_refused_in_one_sentence(hub: list[Any]) -> None:
    with pytest.raises(
        ValueError,
        match=r"^hub:org/gone cannot be loaded, split 'train' \(Couldn't reach 'org/gone' on the Hub\): check its name "
        r"\(hub:ORGANISATION/NAME\[/CONFIGURATION\]\[:SPLIT\]\) and the connection, or give files\.$",
    ):
        records("hub:org/gone")


def test_a_name_of_the_hub_needs_its_organisation(hub: list[Any]) -> None:
    with pytest.raises(
        ValueError, match=r"^hub:imdb is no name of a data set of the Hub: write hub:.*, such as hub:stanfordnlp/imdb"
    ):
        records("hub:imdb")
    assert not hub


@pytest.mark.parametrize(("name", "package"), [("hub:org/set", "datasets"), ("a.parquet", "pyarrow"), ("a.arrow", "pyarrow")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    write("a.parquet", "PAR1")
    write("a.arrow", "ARROW1")
    with pytest.raises(ValueError, match=rf'these rows are read by {package}, .*: pip install "memtrain\[data\]"\.$'):
        records(name)
