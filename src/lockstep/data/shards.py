"""Samples in tar files, as WebDataset has them: `lockstep.Shards`.

The files next to each other in a tar that have the same name up to the first dot are one sample.
Their locations are found once, from the headers. So samples can be read in any order, and those of
other ranks, or of steps before a resume, are not read at all.
"""

from __future__ import annotations

import io
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Subset

from lockstep.config.parsing import parse_int, parse_json, shown
from lockstep.errors import DataError, file_errors
from lockstep.parallel.layout import split

Decoder = Callable[[bytes], Any]

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)")
_PICKLES = frozenset({"pyd", "pkl", "pickle", "pth", "pt", "ckpt", "joblib"})
_END = bytes(512)
_DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError)
"""Exceptions of tarfile for hostile headers."""


def _array(data: bytes) -> Any:
    return np.load(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        return dict(file)


def _integer(data: bytes) -> int:
    return parse_int(data.decode(), least=-(2**63))


DECODERS: Mapping[str, Decoder] = MappingProxyType(
    {
        "json": parse_json,
        "npy": _array,
        "npz": _arrays,
        **dict.fromkeys(("txt", "text", "transcript"), bytes.decode),
        **dict.fromkeys(("cls", "cls2", "class", "count", "index", "inx", "id"), _integer),
    }
)
"""Functions from a file's bytes to a value, by the last part of its extension."""


class _Member(NamedTuple):
    """A file in a tar."""

    key: str
    extension: str
    offset: int
    size: int


class Shards(Dataset[dict[str, Any]]):
    """A map-style dataset of the samples in tar files, in the order of files and members.

    A sample is a dict: `__key__`, the name up to the first dot, and a value for each extension.
    Files of known extensions are decoded (`json`, `txt`, `cls`, `npy`, `npz` and their like), all
    others stay bytes. Nothing is unpickled.

    Attributes:
        paths: the tar files.
        lengths: number of samples in each of them.
    """

    def __init__(
        self,
        paths: str | Path | Iterable[str | Path],
        decoders: Mapping[str, Decoder] | None = None,
        decode: bool = True,
    ) -> None:
        """Find the samples in tar files, which must not be compressed.

        Args:
            paths: one file or several.
            decoders: functions from bytes to a value by extension, such as `png`, in addition to
                the known ones or in their place.
            decode: whether to decode; if not, all values are bytes.

        Raises:
            DataError: a file cannot be read or is damaged, or holds pickles.
        """
        given = [paths] if isinstance(paths, (str, Path)) else paths
        self.paths = tuple(Path(path) for path in given)
        own = dict(decoders or {})
        self._decoders: dict[str, Decoder] = {**DECODERS, **own} if decode else own
        shards = [_Index.of(path, own.keys()) for path in self.paths]
        self._shards = shards
        self.lengths = tuple(len(shard) for shard in shards)
        self._starts = [0, *accumulate(self.lengths)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample.

        Raises:
            IndexError: there is no such sample.
            DataError: the file cannot be read, or a value cannot be decoded.
        """
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        number = bisect_right(self._starts, position) - 1
        path = self.paths[number]
        members = self._shards[number].members(position - self._starts[number])
        sample: dict[str, Any] = {"__key__": members[0].key}
        with file_errors(DataError, path, "read"), path.open("rb", buffering=0) as file:
            for member in members:
                file.seek(member.offset)
                sample[member.extension] = self._value(path, member, file.read(member.size))
        return sample

    def shard(self, index: int, count: int) -> Subset[dict[str, Any]]:
        """One of `count` parts of as many samples in a row, read in order (`data.stream_shards`).

        Raises:
            IndexError: there is no such part.
        """
        return Subset(self, range(*split(len(self), count)[index]))

    def _value(self, path: Path, member: _Member, data: bytes) -> Any:
        where = f"{path}: {member.key}.{member.extension}"
        if len(data) < member.size:
            raise DataError(
                f"{where}: has {len(data)} of {member.size} bytes; the file was cut off"
            )
        decoder = self._decoders.get(member.extension.rpartition(".")[2])
        if decoder is None:
            return data
        try:
            return decoder(data)
        except Exception as error:
            raise DataError(
                f"{where}: cannot be decoded: {shown(str(error) or type(error).__name__)}"
            ) from error


class _Index:
    """The locations of the members of one tar file, in little memory."""

    def __init__(self, members: Iterable[_Member]) -> None:
        extensions: dict[str, int] = {}
        rows: list[tuple[int, int, int]] = []
        keys: list[bytes] = []
        firsts: list[int] = []
        last = None
        for member in members:
            if member.key != last:
                firsts.append(len(rows))
                keys.append(member.key.encode(errors="surrogateescape"))
                last = member.key
            rows.append((extensions.setdefault(member.extension, len(extensions)), *member[2:]))
        self._extensions = list(extensions)
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 3)
        self._firsts = np.array([*firsts, len(rows)], dtype=np.int64)
        self._keys = b"".join(keys)
        self._ends = np.cumsum([0, *map(len, keys)])

    @classmethod
    def of(cls, path: Path, allowed: Iterable[str]) -> _Index:
        """The index of a tar file; extensions that are not `allowed` must not be pickles'."""
        return cls(_checked(path, _files(path), frozenset(allowed)))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def members(self, sample: int) -> list[_Member]:
        """The members of a sample, at least one."""
        start, end = self._ends[sample : sample + 2]
        key = self._keys[start:end].decode(errors="surrogateescape")
        first, last = self._firsts[sample : sample + 2]
        return [
            _Member(key, self._extensions[extension], offset, size)
            for extension, offset, size in self._rows[first:last].tolist()
        ]


def _checked(path: Path, members: Iterable[_Member], allowed: frozenset[str]) -> Iterator[_Member]:
    seen: set[str] = set()
    last = None
    for member in members:
        where = f"{path}: {member.key}.{member.extension}"
        kind = member.extension.rpartition(".")[2]
        if kind in _PICKLES - allowed:
            raise DataError(
                f"{where}: .{kind} files hold pickles, which run code when they are read; store "
                f"npy or json, or give a decoder: Shards(…, decoders={{{kind!r}: …}})"
            )
        seen = seen if member.key == last else set()
        if member.extension in seen:
            raise DataError(f"{where}: comes twice in one sample")
        seen.add(member.extension)
        last = member.key
        yield member


def _files(path: Path) -> Iterator[_Member]:
    """The regular files in a tar that are parts of samples, in order.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    name = ""
    try:
        # Unbuffered: a buffer would read samples too, which other ranks are to read.
        with path.open("rb", buffering=0) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while (member := tar.next()) is not None:
                name = member.name
                tar.members = []  # type: ignore[attr-defined]  # it would keep all of them
                match = _NAME.fullmatch(name)
                is_meta = "/" not in name and name.startswith("__") and name.endswith("__")
                if match is None or not member.isreg() or is_meta:
                    continue
                if member.issparse():
                    raise DataError(f"{path}: {name}: is a sparse file; store it as a plain one")
                key, extension = match.groups()
                yield _Member(key, extension.lower(), member.offset_data, member.size)
            # tarfile stops at a damaged header as at the end mark of the archive.
            file.seek(tar.offset)
            if file.read(len(_END)) != _END:
                raise DataError(f"{path}: {_after(name)} is damaged or cut off; fetch it again")
    except DataError:  # is a ValueError
        raise
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except _DAMAGE as error:
        problem = "is no uncompressed tar file" if not name else f"{_after(name)} is damaged"
        raise DataError(f"{path}: {problem}: {shown(str(error))[1:-1]}") from error


def _after(name: str) -> str:
    return f"what follows member {shown(name)}" if name else "its first header"
