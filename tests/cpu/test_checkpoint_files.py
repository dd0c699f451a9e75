"""A checkpoint is there whole or not at all, and what is read is what was written, byte by byte."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import resource
import shutil
import subprocess
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from memtrain import checkpoint
from memtrain.checkpoint import FORMAT, Checkpoint, NotReadable, NotWritten, latest, read, remove_older, write

GROUPS = {
    "model": {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor([1.0, -2.0])},
    "random": {"cpu": torch.arange(5).byte()},
}
FACTS = {"tokens": 96, "loss": 0.1, "name": "größe"}


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    return tensor.dtype, tensor.shape, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def held(found: Checkpoint, group: str = "model") -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {name: bits(tensor) for name, tensor in found.tensors(group)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def number(value: int) -> dict[str, dict[str, Tensor]]:
    return {"model": {"w": torch.full((3,), float(value))}}


def write_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        write(folder, step, number(step), {})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return write(tmp_path / "run", 7, GROUPS, FACTS)


# ---------------------------------------------------------------------- what is written


def test_what_is_read_is_what_was_written(place: Path) -> None:
    found = read(place)
    assert (found.path.name, found.step, found.facts) == ("step-000000007", 7, FACTS)
    assert names(place) == ["checkpoint.json", "model-00001.safetensors", "random-00001.safetensors"]
    for group, tensors in GROUPS.items():
        assert held(found, group) == {name: bits(tensor) for name, tensor in tensors.items()}
    assert list(found.tensors("optimizer")) == []


def test_tensors_of_every_type_and_layout_keep_every_bit(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    tensors = {
        **{str(one): torch.arange(6).to(one) for one in checkpoint._DTYPES},
        "nan": torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16),
        "0-dim": torch.tensor(3, dtype=torch.int64),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).t(),
        "expanded": torch.tensor([2.0]).expand(3),
        "strided": torch.arange(8, dtype=torch.uint8)[1::3],
        "channels last": torch.arange(16.0).view(1, 2, 2, 4).contiguous(memory_format=torch.channels_last),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "odd bytes": torch.ones(3, dtype=torch.bool),
    }
    tied = {"embedding": shared, "head": shared, "part": shared[1:3]}
    found = read(write(tmp_path, 1, {"model": tensors, "tied": tied}, {}))
    assert held(found) == {name: bits(tensor.detach()) for name, tensor in tensors.items()}
    assert held(found, "tied") == {name: bits(tensor) for name, tensor in tied.items()}


def test_a_group_is_written_in_files_that_hold_at_most_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 20)
    tensors = {name: torch.full((2,), float(value)) for value, name in enumerate("abcd")} | {"large": torch.arange(9.0)}
    found = read(write(tmp_path, 1, {"model": tensors}, {}))
    assert found.files == {"model": tuple(f"model-{part:05d}.safetensors" for part in (1, 2, 3))}
    assert held(found) == {name: bits(tensor) for name, tensor in tensors.items()}


def test_a_tensor_is_written_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "_PIECE_BYTES", 8)
    tensors = {"w": torch.arange(7.0).bfloat16(), "n": torch.arange(2)}
    pieces = list(checkpoint._pieces(tensors))
    assert [memoryview(piece).nbytes for piece in pieces[1:]] == [8, 8, 8, 6]
    assert b"".join(pieces[1:]) == bits(tensors["n"])[2] + bits(tensors["w"])[2]
    assert held(read(write(tmp_path, 1, {"model": tensors}, {}))) == {name: bits(one) for name, one in tensors.items()}


def test_a_type_that_no_file_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        NotWritten, match=r"^w is torch\.complex64, which safetensors files cannot hold: keep it in another dtype\.$"
    ):
        write(tmp_path, 1, {"model": {"w": torch.ones(1, dtype=torch.complex64)}}, {})
    assert names(tmp_path) == []


def test_a_step_that_is_written_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        place = write(tmp_path, 5, number(value), {})
        assert held(read(place)) == {"w": bits(torch.full((3,), float(value)))}
    assert names(tmp_path) == ["step-000000005"]


@pytest.mark.parametrize("moment", [1, 2, 3])
def test_one_of_a_step_is_there_at_every_moment_while_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    write_steps(tmp_path, 5)

    class Killed(BaseException):
        pass

    calls = 0
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        nonlocal calls
        calls += 1
        if calls == moment:
            raise Killed
        return real(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with contextlib.suppress(Killed):
        write(tmp_path, 5, number(6), {})
    monkeypatch.setattr(Path, "rename", real)
    found, wrong = latest(tmp_path)
    assert found is not None
    assert (found.step, wrong) == (5, ())
    assert held(found) == {"w": bits(torch.full((3,), 6.0 if moment == 3 else 5.0))}


# ---------------------------------------------------------------------- what cannot be written


def left_as_it_was(folder: Path) -> None:
    assert names(folder) == ["step-000000001"]
    assert held(read(folder / "step-000000001")) == {"w": bits(torch.ones(3))}


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_steps(tmp_path, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**20 + 11))
    sentence = rf"of step 2 cannot be written to {tmp_path} \(it takes 12 B and 1\.00 MiB are free\): free space there, or name"
    with pytest.raises(NotWritten, match=sentence):
        write_steps(tmp_path, 2)
    left_as_it_was(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**20 + 12))
    write_steps(tmp_path, 2)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Python ignores SIGXFSZ, so that a write fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 50_000])
def test_a_limit_of_file_sizes_leaves_the_checkpoint_before(tmp_path: Path, size: int) -> None:
    write_steps(tmp_path, 1)
    sentence = r"\(File too large\): raise the limit on the size of a file, or name another folder\.$"
    with files_of_at_most(size), pytest.raises(NotWritten, match=sentence):
        write(tmp_path, 2, {"model": {"w": torch.ones(20_000)}}, {})
    left_as_it_was(tmp_path)


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.strip()}")
    # Somebody else fills the disk between the look at it and the writing.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("Usage", "free")(2**40))
    try:
        write_steps(tmp_path, 1)
        with pytest.raises(NotWritten, match=r"\(No space left on device\): free space there, or name another folder\.$"):
            write(tmp_path, 2, {"model": {"a": torch.ones(100_000), "b": torch.ones(400_000)}}, {})
        left_as_it_was(tmp_path)
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@contextmanager
def without_privileges() -> Iterator[None]:
    """For the superuser no folder is read-only."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_read_only_folder_leaves_the_checkpoint_before() -> None:
    # Where everyone may look: the folders of a test belong to its user alone.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_steps(folder, 1)
        folder.chmod(0o555)
        with (
            without_privileges(),
            pytest.raises(NotWritten, match=r"\(Permission denied\): make it writable, or name another folder\.$"),
        ):
            write_steps(folder, 2)
        folder.chmod(0o755)
        left_as_it_was(folder)


def test_a_file_where_the_folder_should_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(NotWritten, match=r"run \(File exists\): see to that, or name another folder\.$"):
        write_steps(tmp_path / "run", 1)
    assert latest(tmp_path / "run") == (None, ())


def test_a_mistake_in_the_program_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    write_steps(tmp_path, 1)
    with pytest.raises(TypeError, match="not JSON serializable"):
        write(tmp_path, 2, number(2), {"loss": torch.ones(1)})
    left_as_it_was(tmp_path)


# ---------------------------------------------------------------------- what cannot be read


@pytest.mark.parametrize("name", ["checkpoint.json", "model-00001.safetensors", "random-00001.safetensors"])
def test_a_file_with_any_byte_changed_is_refused(place: Path, name: str) -> None:
    whole = (place / name).read_bytes()
    # Every byte of the small ones is one region or another: lengths, header, values, digests.
    for position in range(0, len(whole), 3):
        (place / name).write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.raises(NotReadable, match=r"step-000000007 (is no whole checkpoint: |is no checkpoint: |has format )"):
            read(place)
    (place / name).write_bytes(whole)
    assert read(place).step == 7


@pytest.mark.parametrize("name", ["checkpoint.json", "model-00001.safetensors", "random-00001.safetensors"])
def test_a_file_that_is_cut_short_or_longer_or_gone_is_refused(place: Path, name: str) -> None:
    whole = (place / name).read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        (place / name).write_bytes(whole[:length])
        with pytest.raises(NotReadable, match=r"is no whole checkpoint: |has format None"):
            read(place)
    (place / name).write_bytes(whole + b"0")
    with pytest.raises(NotReadable, match=f"is no whole checkpoint: {name} "):
        read(place)
    (place / name).unlink()
    with pytest.raises(NotReadable, match=rf"checkpoint: {name} cannot be read \(No such file or directory\)\.$"):
        read(place)


def test_what_is_wrong_with_a_file_is_said(place: Path) -> None:
    file = place / "model-00001.safetensors"
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        NotReadable, match=rf"is no whole checkpoint: model-00001\.safetensors has {size - 1} of {size} bytes\.$"
    ):
        read(place)
    file.write_bytes(bytes(size))
    with pytest.raises(NotReadable, match=r"is no whole checkpoint: model-00001\.safetensors is not as it was written\.$"):
        read(place)


def forge(place: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A manifest with a right digest: whoever writes one can write the other too."""
    content = json.loads((place / "checkpoint.json").read_bytes())
    del content["sha256"]
    change(content)
    (place / "checkpoint.json").write_text(json.dumps({**content, "sha256": checkpoint._digest(content)}))


def test_the_manifest_of_another_format_is_refused(place: Path) -> None:
    forge(place, lambda content: content.update(format=FORMAT + 1))
    with pytest.raises(NotReadable, match="has format 2, and this version reads 1: take that one"):
        read(place)


@pytest.mark.parametrize("content", [b"[]", b"3", b"null", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_manifest_that_is_something_else_is_refused(place: Path, content: bytes) -> None:
    (place / "checkpoint.json").write_bytes(content)
    with pytest.raises(NotReadable, match=r"is no JSON object|is not JSON"):
        read(place)


@pytest.mark.parametrize(
    "change", [{"files": []}, {"files": {"model": 3}}, {"files": {"model": {"model-00001.safetensors": {}}}}]
)
def test_a_manifest_that_lacks_something_is_refused(place: Path, change: Mapping[str, Any]) -> None:
    forge(place, lambda content: content.update(change))
    with pytest.raises(NotReadable, match=r"checkpoint\.json does not have the form of format 1\.$"):
        read(place)


@pytest.mark.parametrize("absolute", [False, True])
def test_a_name_that_leads_out_of_the_folder_is_refused(place: Path, absolute: bool) -> None:
    outside = place.parent / "model-00001.safetensors"
    shutil.copy(place / outside.name, outside)
    name = str(outside) if absolute else "../model-00001.safetensors"
    forge(place, lambda content: content["files"]["model"].update({name: content["files"]["model"].pop(outside.name)}))
    with pytest.raises(NotReadable, match=r"checkpoint\.json does not have the form of format 1\.$"):
        read(place)


@pytest.mark.parametrize("name", ["model-00001.safetensors", "checkpoint.json"])
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_ordinary_files_are_read(place: Path, name: str, kind: str) -> None:
    (place / name).rename(place.parent / name)
    if kind == "link":
        (place / name).symlink_to(place.parent / name)
    elif kind == "pipe":
        os.mkfifo(place / name)
    else:
        (place / name).mkdir()
    with pytest.raises(NotReadable, match=rf"checkpoint: {name} cannot be read \(it is no regular file\)\.$"):
        read(place)


class Malicious:
    """Makes a file when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (self.mark,)


def test_a_pickle_is_never_loaded(place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    malicious = pickle.dumps(Malicious(mark))
    for name in ("model.pt", "pytorch_model.bin", "data.pkl", "optimizer-00001.safetensors"):
        (place / name).write_bytes(malicious)
    found = read(place)
    assert held(found) == {name: bits(tensor) for name, tensor in GROUPS["model"].items()}
    (place / "model-00001.safetensors").write_bytes(malicious)
    with pytest.raises(NotReadable, match=r"model-00001\.safetensors has \d+ of \d+ bytes"):
        read(place)
    (place / "model-00001.safetensors").unlink()
    (place / "model-00001.safetensors").write_bytes(malicious)
    described = {"bytes": len(malicious), "sha256": hashlib.sha256(malicious).hexdigest()}
    forge(place, lambda content: content["files"]["model"].update({"model-00001.safetensors": described}))
    with pytest.raises(NotReadable, match=r"is no whole checkpoint: model-00001\.safetensors holds no tensors \("):
        held(read(place))
    (place / "checkpoint.json").write_bytes(malicious)
    with pytest.raises(NotReadable, match="is not JSON"):
        read(place)
    assert not mark.exists()
    pickle.loads(malicious)
    assert mark.exists()


# ---------------------------------------------------------------------- a folder that may not be looked into


def test_a_folder_that_may_not_be_searched_is_told() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_steps(folder, 1)
        folder.chmod(0o300)
        with without_privileges():
            with pytest.raises(
                NotReadable, match=rf"^{folder} cannot be searched for checkpoints \(Permission denied\): make it readable\.$"
            ):
                latest(folder)
            with pytest.raises(NotWritten, match=r"\(Permission denied\): make it writable"):
                write_steps(folder, 2)
            with pytest.raises(NotReadable, match="cannot be searched"):
                remove_older(folder, 1)
        folder.chmod(0o755)
        left_as_it_was(folder)
