"""Files of tensors: safetensors, written as tensors arrive, verified, and read whole or by ranges.

The format (github.com/huggingface/safetensors): the length of the header as 8 bytes, the header in
JSON with dtype, shape and place of each tensor, then the tensors without gaps. What reads it may
want tensors at multiples of their element size, so those with the largest elements come first.

Many tensors go to several files, with an index that says which file has which, as Hugging Face's
libraries write and read them. Where the files are cut depends on the tensors alone.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.config.files import open_to_read
from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.checkpoint.listing import SUFFIX
from lockstep.engine.digests import bytes_of
from lockstep.errors import CheckpointError, EnvironError

FILE_BYTES = 256 << 20
"""Greatest size of the tensors in a file, unless a single one is larger."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

_ALIGNMENT = 8
"""Bytes: the header ends at a multiple of it."""
_CHUNK = 1 << 20
_LIBC = ctypes.CDLL(None)
_MOST_HEADER_BYTES = 100_000_000
"""As in the format's own library."""


class Kind(NamedTuple):
    """Dtype and shape of a tensor, as in a header."""

    dtype: torch.dtype
    shape: torch.Size

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.shape.numel() * self.dtype.itemsize


class Tensors(NamedTuple):
    """The tensors of a file, each of which is made when it is read."""

    kinds: Mapping[str, Kind]
    """Kind of each tensor by name, those of the largest elements first."""
    content: Iterable[Tensor]
    """The tensors in that order, on any device."""


def in_order(kinds: Mapping[str, Kind]) -> dict[str, Kind]:
    """The same kinds in the order of a file."""
    names = sorted(kinds, key=lambda name: (-kinds[name].dtype.itemsize, name))
    return {name: kinds[name] for name in names}


def grouped(file: str, kinds: Mapping[str, Kind], most_bytes: int) -> dict[str, dict[str, Kind]]:
    """The files that tensors go to, each with its own.

    Args:
        file: name of the file, if one holds them all.
        kinds: all tensors.
        most_bytes: greatest size of the tensors in a file.
    """
    groups: list[dict[str, Kind]] = [{}]
    size = 0
    for name, kind in in_order(kinds).items():
        if groups[-1] and size + kind.num_bytes > most_bytes:
            groups.append({})
            size = 0
        groups[-1][name] = kind
        size += kind.num_bytes
    if len(groups) == 1:
        return {file: groups[0]}
    stem, count = file.removesuffix(SUFFIX), len(groups)
    return {
        f"{stem}-{number:05}-of-{count:05}{SUFFIX}": group for number, group in enumerate(groups, 1)
    }


def in_memory(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors by name as the content of a file."""
    kinds = in_order({name: Kind(t.dtype, t.shape) for name, t in tensors.items()})
    return Tensors(kinds, (tensors[name] for name in kinds))


def in_files(
    file: str, tensors: Mapping[str, Tensor], most_bytes: int
) -> dict[str, Tensors | bytes]:
    """Tensors by name as the content of the files of `grouped`, and their index."""
    kinds = {name: Kind(t.dtype, t.shape) for name, t in tensors.items()}
    groups = grouped(file, kinds, most_bytes)
    files: dict[str, Tensors | bytes] = {
        each: in_memory({name: tensors[name] for name in group}) for each, group in groups.items()
    }
    if len(groups) > 1:
        files[index_name(file)] = index_of(groups)
    return files


def index_name(file: str) -> str:
    """The name of the index of files that hold what one file could."""
    return f"{file}.index.json"


def index_of(groups: Mapping[str, Mapping[str, Kind]]) -> bytes:
    """The index of the files of `grouped`."""
    size = sum(kind.num_bytes for group in groups.values() for kind in group.values())
    places = {name: file for file, group in groups.items() for name in group}
    index = {"metadata": {"total_size": size}, "weight_map": places}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write a file; `sync` must follow.

    Returns:
        Its entry in a manifest: SHA-256 in hexadecimal, and size in bytes.

    Raises:
        KeyError: a dtype that the format lacks.
        OSError: the disk is full, read-only, or gone.
    """

    def chunks() -> Iterator[Any]:
        yield _header(tensors.kinds)
        for tensor in tensors.content:
            plain = tensor.detach().cpu().contiguous()
            yield bytes_of(plain)

    return write_file(path, chunks())


def write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    """As `write_tensors`, of bytes."""
    sha, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            file.write(view)
            sha.update(view)
            num_bytes += len(view)
    return {"sha256": sha.hexdigest(), "bytes": num_bytes}


def sync(path: Path) -> None:
    """Wait until a file is on disk.

    Before its folder is renamed: a machine that stops in between must not leave a folder under its
    final name whose files have no content yet.

    Raises:
        OSError: the disk is full, or gone.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _header(kinds: Mapping[str, Kind]) -> bytes:
    header, first = {}, 0
    for name, kind in kinds.items():
        last = first + kind.num_bytes
        place = {"shape": list(kind.shape), "data_offsets": [first, last]}
        header[name] = {"dtype": _NAMES[kind.dtype], **place}
        first = last
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def verify(path: Path, expected: Mapping[str, Any]) -> None:
    """Make sure of a file's size and SHA-256, without the memory for its content.

    Args:
        path: path of the file.
        expected: its entry in a manifest.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    with _opened(path, expected, is_hashed=True):
        pass


def read_verified(path: Path, expected: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a file, in memory.

    Raises:
        CheckpointError: it is missing or damaged, or does not fit into memory.
    """
    with _opened(path, expected) as file:
        try:
            data = file.read()
        except OSError as error:
            raise unreadable(path, error) from None
        except MemoryError:
            size = expected["bytes"]
            raise CheckpointError(f"{path}: its {size:,} bytes do not fit into memory") from None
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise _damaged(path)
    try:
        # From the bytes that were verified: the file may have been replaced since.
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        # The format's own checks are SafetensorErrors; a dtype that torch lacks is a KeyError.
        raise CheckpointError(f"{path}: is damaged: {error}") from None


class MappedFile:
    """A file whose tensors are read from the disk where they are looked at.

    Attributes:
        tensors: them, by name; what is written to them stays in this process.
    """

    def __init__(self, path: Path, expected: Mapping[str, Any], is_hashed: bool = True) -> None:
        """Open it.

        Args:
            path: path of the file.
            expected: its entry in a manifest.
            is_hashed: whether its SHA-256 is verified, for which all of it is read once.

        Raises:
            CheckpointError: it is missing or damaged.
            OSError: this process has no room for it.
        """
        with _opened(path, expected, is_hashed) as file:
            # Unlike `mmap.mmap`, this keeps no descriptor, of which a process may have few. By
            # the open file, since there may be another by this path now.
            place = f"/dev/fd/{file.fileno()}"
            try:
                self._storage = torch.UntypedStorage.from_file(place, False, expected["bytes"])
            except RuntimeError as error:
                raise _no_room(path, str(error)) from None
        self._bytes = torch.empty(0, dtype=torch.uint8).set_(self._storage)  # type: ignore[arg-type]
        try:
            self.tensors = dict(self._found())
        except (KeyError, ValueError, TypeError, RuntimeError) as error:
            raise CheckpointError(f"{path}: is damaged: {error}") from None

    def _found(self) -> Iterator[tuple[str, Tensor]]:
        size = len(self._bytes)
        start = 8 + int.from_bytes(self._bytes[:8].numpy().tobytes(), "little")
        if not 8 < start <= min(size, _MOST_HEADER_BYTES):
            raise ValueError("its header is longer than the file")
        header = parse_object(self._bytes[8:start].numpy().tobytes())
        for name, about in header.items():
            if name == "__metadata__":
                continue
            entry = as_type(_Entry, about)
            kind = Kind(_DTYPES[entry.dtype], torch.Size(entry.shape))
            first, last = entry.data_offsets
            is_inside = 0 <= start + first <= start + last <= size
            if last - first != kind.num_bytes or not is_inside:
                raise ValueError(f"{name} has another size than its place")
            tensor = torch.empty(0, dtype=kind.dtype)
            if kind.num_bytes:
                tensor = self._bytes[start + first : start + last].view(kind.dtype)
            yield name, tensor.view(kind.shape)

    def drop(self) -> None:
        """Free the memory of what was looked at; it is read again if need be."""
        if size := len(self._bytes):
            start = ctypes.c_void_p(self._storage.data_ptr())
            _LIBC.madvise(start, ctypes.c_size_t(size), mmap.MADV_DONTNEED)


@dataclass
class _Entry:
    dtype: str
    shape: list[int]
    data_offsets: list[int]


def _opened(path: Path, expected: Mapping[str, Any], is_hashed: bool = False) -> BinaryIO:
    """A file of the size that a manifest says, open at its start."""
    try:
        file = open_to_read(path)
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        # Before reading it: a file of the wrong size may not fit into memory.
        size = os.fstat(file.fileno()).st_size
        if size != expected["bytes"]:
            raise CheckpointError(
                f"{path}: is damaged: holds {size} bytes, must hold {expected['bytes']}"
            )
        if is_hashed:
            sha = hashlib.sha256()
            while chunk := file.read(_CHUNK):
                sha.update(chunk)
            if sha.hexdigest() != expected["sha256"]:
                raise _damaged(path)
            file.seek(0)
    except OSError as error:
        file.close()
        raise unreadable(path, error) from None
    except BaseException:
        file.close()
        raise
    return file


def _no_room(path: Path, reason: str | None) -> EnvironError:
    return EnvironError(
        f"{path}: cannot be read: {reason}; allow more open files (ulimit -n), memory (ulimit -v) "
        "or mappings (vm.max_map_count), then start again"
    )


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file that cannot be read.

    Raises:
        EnvironError: this process has no room for it, which says nothing about the file.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        raise _no_room(path, error.strerror) from None
    return CheckpointError(f"{path}: cannot be read: {error.strerror}")


def _damaged(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: is damaged: its SHA-256 does not match the manifest")
