"""Checkpoints on disk: there whole or not at all, and read only if every byte is as it was written.

A checkpoint is a folder of safetensors files and one ``checkpoint.json``, which holds plain data and the size and SHA-256 of
every file, its own content included. Nothing in it is ever unpickled. It is written into a folder beside its place, brought
to the disk (fsync), and takes its name by one rename, so that a process that is killed at any moment leaves the checkpoints
that were there and perhaps a folder that the next writer removes. One process at a time writes into a folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from memtrain.units import format_bytes

FORMAT = 1
# A reader maps one file at a time; a writer copies so much to the host at a time.
SHARD_BYTES = 2**30
_PIECE_BYTES = 2**26
MANIFEST = "checkpoint.json"
_NAME = re.compile(r"step-(\d{9,})(-replaced)?")
_GROUP = re.compile(r"[a-z][a-z0-9_]*")
_REPLACED = "-replaced"
_PARTIAL = ".partial"
# Headers, the manifest and the file system's own blocks, beside the tensors.
_BESIDE_BYTES = 2**20
# https://github.com/huggingface/safetensors, README, "Format".
# fmt: off
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.bool: "BOOL", torch.uint8: "U8",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
}
# fmt: on


class NotWritten(Exception):
    """A checkpoint could not be written; the message is one sentence. What was there before still is."""


class NotReadable(ValueError):
    """A folder is no whole checkpoint; the message says what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all there and unchanged.

    Attributes:
        path: its folder.
        step: optimizer steps taken.
        facts: the plain data that was written with it.
        files: by group of tensors, the names of its files.
    """

    path: Path
    step: int
    facts: Mapping[str, Any]
    files: Mapping[str, tuple[str, ...]]

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a group by name, on the host, one after the other; they are views of the file, to be copied.

        Raises:
            NotReadable: a file holds something other than tensors.
        """
        from safetensors import SafetensorError, safe_open

        for name in self.files.get(group, ()):
            try:
                with safe_open(self.path / name, framework="pt") as file:
                    for key in file.keys():  # noqa: SIM118 - it is no mapping
                        yield key, file.get_tensor(key)
            except (SafetensorError, OSError) as error:
                raise NotReadable(f"{self.path} is no whole checkpoint: {name} holds no tensors ({error}).") from error


# ---------------------------------------------------------------------- writing


def write(folder: Path, step: int, groups: Mapping[str, Mapping[str, Tensor]], facts: Mapping[str, Any]) -> Path:
    """Write a checkpoint into ``folder`` and return its place. One of the same step goes when the new one is complete.

    The host needs room for 64 MiB beside the tensors, or for one that is not contiguous; a card needs none.

    Args:
        step: optimizer steps taken.
        groups: tensors by name, in groups that are read apart; on any device.
        facts: plain data, as JSON takes it.

    Raises:
        NotWritten: the disk is full, the folder cannot be written, or a tensor has a dtype that the format lacks.
    """
    assert all(_GROUP.fullmatch(group) for group in groups), groups
    # As it will be read: a key that is a number becomes text, and the digest is of what is read.
    plain = json.loads(json.dumps(dict(facts)))
    for name, tensor in (item for tensors in groups.values() for item in tensors.items()):
        if tensor.dtype not in _DTYPES:
            raise NotWritten(f"{name} is {tensor.dtype}, which safetensors files cannot hold: keep it in another dtype.")
    place = folder / f"step-{step:09d}"
    partial = folder / (place.name + _PARTIAL)
    try:
        _make(folder)
        remove_unfinished(folder)
        require_space(folder, sum(tensor.nbytes for tensors in groups.values() for tensor in tensors.values()))
        partial.mkdir()
        files = {group: dict(_write_group(partial, group, tensors)) for group, tensors in groups.items()}
        content = {"format": FORMAT, "step": step, "facts": plain, "files": files}
        with _to_disk(partial / MANIFEST) as stream:
            stream.write(json.dumps({**content, "sha256": _digest(content)}, indent=1).encode())
        _sync(partial)
        _take_place(partial, place)
    except OSError as error:
        raise NotWritten(_why(folder, step, error)) from error
    finally:
        _remove(partial)
    return place


def _make(folder: Path) -> None:
    if not folder.is_dir():
        folder.mkdir(parents=True)
        _sync(folder.parent)


def _take_place(partial: Path, place: Path) -> None:
    """Rename; a folder cannot be renamed onto another, so that one steps aside to a name under which it is still found."""
    aside = place.with_name(place.name + _REPLACED)
    if os.path.lexists(place):
        _remove(aside)
        place.rename(aside)
    try:
        partial.rename(place)
    except OSError:
        if os.path.lexists(aside):
            aside.rename(place)
        raise
    _sync(place.parent)
    _remove(aside)


def require_space(folder: Path, needed: int) -> None:
    """Raise OSError where the disk of a folder that is there has no room for a checkpoint of so many bytes."""
    if (free := shutil.disk_usage(folder).free) < needed + _BESIDE_BYTES:
        raise OSError(errno.ENOSPC, f"it takes {format_bytes(needed)} and {format_bytes(free)} are free")


def _why(folder: Path, step: int, error: OSError) -> str:
    remedies = {
        errno.ENOSPC: "free space there",
        errno.EDQUOT: "free space there",
        errno.EFBIG: "raise the limit on the size of a file",
        **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "make it writable"),
    }
    remedy = remedies.get(error.errno or 0, "see to that")
    reason = error.strerror or str(error)
    return f"the checkpoint of step {step} cannot be written to {folder} ({reason}): {remedy}, or name another folder."


def _write_group(folder: Path, group: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, shard in enumerate(_shards(tensors), 1):
        name = _file_name(group, number)
        digest = hashlib.sha256()
        with _to_disk(folder / name) as stream:
            for piece in _pieces(shard):
                stream.write(piece)
                digest.update(piece)
            size = stream.tell()
        yield name, {"bytes": size, "sha256": digest.hexdigest()}


def _file_name(group: str, number: int) -> str:
    return f"{group}-{number:05d}.safetensors"


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, in files of at most ``SHARD_BYTES`` unless one alone is larger."""
    shard: dict[str, Tensor] = {}
    size = 0
    for path, tensor in tensors.items():
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[path] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def _pieces(tensors: Mapping[str, Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, a piece at a time, where the library's own writer holds the file twice over.

    The length of the header as eight bytes, the header, the values. Wide dtypes come first, so that every value is aligned.
    """
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)
    header: dict[str, Any] = {}
    begin = 0
    for name, tensor in ordered:
        end = begin + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        # A card may have no room for the copy that a tensor which is not contiguous takes.
        values = (tensor if tensor.is_contiguous() else tensor.cpu()).detach().reshape(-1)
        for piece in values.split(_PIECE_BYTES // tensor.itemsize):
            # One value may keep the stride of where it came from, and bytes lie side by side.
            yield piece.cpu().contiguous().as_strided(piece.shape, (1,)).view(torch.uint8).numpy().data


@contextlib.contextmanager
def _to_disk(file: Path) -> Iterator[BufferedWriter]:
    with file.open("xb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


def _sync(folder: Path) -> None:
    """Bring a folder's entries to the disk; Windows opens no folders and needs none of this."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(content: Mapping[str, Any]) -> str:
    """Of plain data in one order of its keys, so that the check does not depend on how it is laid out in the file."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------- finding, reading, removing


def places(folder: Path) -> list[Path]:
    """The folders of checkpoints, whole or not, the latest step first.

    Raises:
        NotReadable: the folder cannot be searched.
    """
    try:
        found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise NotReadable(f"{folder} cannot be searched for checkpoints ({error.strerror}): make it readable.") from error
    return sorted(found, key=lambda path: (-_step(path), path.name))


def _step(place: Path) -> int:
    return int(place.name.removesuffix(_REPLACED).removeprefix("step-"))


def latest(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest whole checkpoint, if there is one, and for each newer one a sentence that says why it is not whole.

    Raises:
        NotReadable: the folder cannot be searched.
    """
    troubles: list[str] = []
    for place in places(folder):
        try:
            return read(place), tuple(troubles)
        except NotReadable as error:
            troubles.append(str(error))
    return None, tuple(troubles)


def read(place: Path) -> Checkpoint:
    """The checkpoint of a folder, every file compared with what was written.

    Raises:
        NotReadable: something is missing, cut short or changed, or another version wrote it.
    """
    return _read(place, contents=True)


def _read(place: Path, *, contents: bool) -> Checkpoint:
    try:
        with _regular(place / MANIFEST) as stream:
            written = json.load(stream)
    except OSError as error:
        raise NotReadable(f"{place} is no checkpoint: {MANIFEST} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"{place} is no whole checkpoint: {MANIFEST} is not JSON ({error}).") from error
    if not isinstance(written, dict):
        raise NotReadable(f"{place} is no whole checkpoint: {MANIFEST} is no JSON object.")
    if written.get("format") != FORMAT:
        raise NotReadable(f"{place} has format {written.get('format')!r}, and this version reads {FORMAT}: take that one.")
    content = {name: value for name, value in written.items() if name != "sha256"}
    if written.get("sha256") != _digest(content):
        raise NotReadable(f"{place} is no whole checkpoint: {MANIFEST} is not as it was written.")
    if not _has_form(content):
        raise NotReadable(f"{place} is no checkpoint of memtrain: {MANIFEST} does not have the form of format {FORMAT}.")
    if _NAME.fullmatch(place.name) and _step(place) != content["step"]:
        raise NotReadable(f"{place} holds step {content['step']}: give the folder back the name that it was written under.")
    for name, facts in (item for files in content["files"].values() for item in files.items()):
        _check_file(place / name, facts, contents=contents)
    files = {group: tuple(files) for group, files in content["files"].items()}
    return Checkpoint(path=place, step=content["step"], facts=content["facts"], files=files)


def _has_form(content: Mapping[str, Any]) -> bool:
    """Whether a manifest is what a writer makes; file names follow from the group, so that none leads out of the folder."""
    files = content.get("files")
    if type(content.get("step")) is not int or not isinstance(content.get("facts"), dict) or not isinstance(files, dict):
        return False
    return all(
        _GROUP.fullmatch(group)
        and isinstance(of_group, dict)
        and list(of_group) == [_file_name(group, number) for number in range(1, len(of_group) + 1)]
        and all(
            isinstance(facts, dict) and type(facts.get("bytes")) is int and isinstance(facts.get("sha256"), str)
            for facts in of_group.values()
        )
        for group, of_group in files.items()
    )


def _regular(file: Path) -> BufferedReader:
    """Open a file that is one: a link leads elsewhere, and a pipe never ends."""
    if not stat.S_ISREG(file.lstat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file")
    return file.open("rb")


def _check_file(file: Path, facts: Mapping[str, Any], *, contents: bool) -> None:
    try:
        with _regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != facts["bytes"]:
                raise NotReadable(
                    f"{file.parent} is no whole checkpoint: {file.name} has {size:,} of {facts['bytes']:,} bytes."
                )
            if contents and hashlib.file_digest(stream, "sha256").hexdigest() != facts["sha256"]:
                raise NotReadable(f"{file.parent} is no whole checkpoint: {file.name} is not as it was written.")
    except OSError as error:
        raise NotReadable(f"{file.parent} is no whole checkpoint: {file.name} cannot be read ({error.strerror}).") from error


def remove_unfinished(folder: Path) -> None:
    """Remove what a writer that was killed has left."""
    for path in folder.glob("step-*" + _PARTIAL):
        _remove(path)


def remove_older(folder: Path, keep: int, also: Collection[int] = ()) -> None:
    """Keep the latest ``keep`` checkpoints, and those of the steps ``also``; what cannot be removed stays.

    One that lacks a file, or part of one, is not counted; the files' contents are not read. A folder loses its name before
    its files, so that none that is half gone can be taken for a checkpoint.

    Args:
        also: the step that was just written belongs here, since a damaged checkpoint of a later step may still be counted.

    Raises:
        ValueError: ``keep`` is less than 1, or the folder cannot be searched.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}, and one checkpoint at least has to stay: give 1 or more.")
    whole = 0
    for place in places(folder):
        if whole >= keep and _step(place) not in also:
            doomed = place.with_name(place.name + _PARTIAL)
            with contextlib.suppress(OSError):
                _remove(doomed)
                place.rename(doomed)
                _remove(doomed)
            continue
        with contextlib.suppress(NotReadable):
            _read(place, contents=False)
            whole += 1


def _remove(path: Path) -> None:
    if os.path.isdir(path) and not path.is_symlink():  # Path.is_dir raises where it may not look
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
