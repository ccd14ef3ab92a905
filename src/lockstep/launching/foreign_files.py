"""Files of other programs, read without running anything in them.

Archives of NumPy are read without their pickled objects. Files of `torch.save` are pickles, which
`torch.load(weights_only=True)` reads in a process of its own, with a limit of time and memory, that
hands on tensors and plain values only: `python -m lockstep.launching.foreign_files`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.files import open_to_read, read_bytes
from lockstep.config.parsing import parse_object, parse_yaml, shown
from lockstep.errors import DataError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

_MOST_ARRAY_BYTES = 4 << 30
"""Bytes of all arrays of a file together, whatever their archive compresses them to."""
_TIME_S, _BYTES_A_SECOND = 60.0, 20e6
_MORE_BYTES = 512 << 20
"""Memory that reading may take beside `_COPIES` of the file."""
_COPIES = 4
_REFUSED, _DAMAGED = 3, 4
_SMALL = 64 << 20
"""Bytes of a file that is read whole at once."""
_NAMES = "names"
"""Argument of the reading process: no tensors are wanted."""
_READER = """
import sys
if not sys.path[0]:  # the working directory, whose modules would be run in place of torch
    del sys.path[0]
from lockstep.launching.foreign_files import _hand_on
sys.exit(_hand_on())
"""
_ZIP, _PICKLES = b"PK", (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
_MOST_NAMED = 8


class ForeignFile:
    """A file or folder of another program; each form of its content is read when it is asked for.

    Attributes:
        path: its path.
    """

    def __init__(self, path: Path) -> None:
        """Look whether it is there.

        Raises:
            DataError: there is no such file or folder, it cannot be read, or it is empty.
        """
        self.path = path
        try:
            self.is_folder = path.is_dir()
            if self.is_folder:
                self._start = b"" if any(path.iterdir()) else None
            else:
                with open_to_read(path, follow_links=True) as file:
                    self._start = file.read(4) or None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{shown(str(path))[1:-1]}: cannot be read: {reason}") from None
        if self._start is None:
            raise DataError(f"{path}: is empty")

    @cached_property
    def arrays(self) -> Mapping[str, npt.NDArray[np.generic]]:
        """The arrays of an `.npz` file by name, without those of objects; else empty.

        Raises:
            DataError: it is damaged, or the arrays take too much memory.
        """
        import numpy as np

        is_npz = self.path.suffix == ".npz"
        if self.is_folder or not (self._is_zip or is_npz):
            return {}
        names = self._members()
        if not is_npz and not all(name.endswith(".npy") for name in names):
            return {}  # a file of `torch.save`
        found = {}
        with self._reading(), np.load(BytesIO(self._content), allow_pickle=False) as archive:
            for name in archive.files:
                try:
                    array = archive[name]
                except ValueError as error:
                    if "allow_pickle" not in str(error):
                        raise
                    continue
                if not isinstance(array, np.ndarray):
                    raise ValueError(f"{name} is no array")
                found[name] = array
        return found

    @cached_property
    def _torch(self) -> _Saved:
        """What a file of `torch.save` holds."""
        return _Saved(self.path, self._is_zip)

    @property
    def is_torch(self) -> bool:
        """Whether it is, or was, a file of `torch.save`."""
        if self.is_folder or self.path.suffix == ".npz":
            return False
        is_torch = self._is_zip or (self._start or b"")[:2] in _PICKLES
        return is_torch or self.path.suffix in (".pt", ".pth", ".ckpt", ".bin")

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of a file of `torch.save`, in nested dicts by "key/key"; empty if it is none.

        Raises:
            DataError: it is damaged, names code to run, or takes too much time or memory.
        """
        return {} if not self.is_torch or self.arrays else self._torch

    @property
    def values(self) -> Mapping[str, Any]:
        """Numbers, texts and lists of a file of `torch.save`, without its tensors."""
        found = self._torch.values_beside if self.tensors else {}
        return found if isinstance(found, dict) else {}

    @cached_property
    def keys(self) -> Mapping[str, Any]:
        """The keys and values of a YAML file; empty if it is something else.

        Raises:
            DataError: it is no YAML, or holds something else than keys.
        """
        if self.is_folder or self.path.suffix not in (".yaml", ".yml"):
            return {}
        try:
            found = parse_yaml(self._content.decode())
        except ValueError as error:
            raise DataError(f"{self.path}: is not valid YAML: {error}") from None
        if not isinstance(found, dict):
            raise DataError(f"{self.path}: must hold keys and values, holds {shown(found)}")
        return found

    def newest(self, pattern: str) -> ForeignFile | None:
        """The file of a folder whose name has the highest number; None if none matches.

        Args:
            pattern: regular expression of whole names, with the number as its only group.
        """
        if not self.is_folder:
            return None
        found = [
            (int(m[1]), p) for p in self.path.iterdir() if (m := re.fullmatch(pattern, p.name))
        ]
        return ForeignFile(max(found)[1]) if found else None

    def beside(self, name: str) -> ForeignFile | None:
        """Another file of its folder; None if there is none of that name."""
        folder = self.path if self.is_folder else self.path.parent
        return ForeignFile(folder / name) if (folder / name).is_file() else None

    def described(self) -> str:
        """What it holds, for the message that nobody knows it."""
        if self.is_folder:
            return f"a folder with {_listed(sorted(path.name for path in self.path.iterdir()))}"
        for kind, found in (("arrays", self.arrays), ("keys", self.keys), ("", self.tensors)):
            if found:
                return f"{kind or 'tensors'} {_listed([*found])}"
        return f"{self.path.suffix or 'no'} suffix, begins with {self._start!r}"

    @property
    def _is_zip(self) -> bool:
        return (self._start or b"").startswith(_ZIP)

    @cached_property
    def _content(self) -> bytes:
        try:
            return read_bytes(self.path, _MOST_ARRAY_BYTES, follow_links=True)
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _members(self) -> list[str]:
        with (
            self._reading(),
            open_to_read(self.path, follow_links=True) as file,
            zipfile.ZipFile(file) as archive,
        ):
            size = sum(info.file_size for info in archive.infolist())
            if size > _MOST_ARRAY_BYTES:
                raise DataError(
                    f"{self.path}: unpacks to {size:,} bytes; at most {_MOST_ARRAY_BYTES:,} can be"
                )
            return archive.namelist()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise what a library says of a damaged archive as a `DataError`."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.path}: is damaged or cut off ({type(error).__name__}); copy it again"
            ) from None


class _Saved(Mapping[str, "Tensor"]):
    """The tensors of a file of `torch.save`; of a large one, their names are read first, alone.

    Args:
        path: path of the file.
        is_zip: whether it is in today's form, whose tensors can stay on the disk.
    """

    def __init__(self, path: Path, is_zip: bool) -> None:
        self._path = path
        self._names_first = is_zip and path.stat().st_size > _SMALL

    def __getitem__(self, name: str) -> Tensor:
        return self._whole[0][name]

    def __contains__(self, name: object) -> bool:
        return name in self._named[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named[0])

    def __len__(self) -> int:
        return len(self._named[0])

    @property
    def values_beside(self) -> Any:
        """The tree of its other values."""
        return self._named[1]

    @cached_property
    def _named(self) -> tuple[Sequence[str], Any]:
        if self._names_first:
            found = json.loads(_read_apart(self._path, _NAMES))
            return found["names"], found["values"]
        return [*self._whole[0]], self._whole[1]

    @cached_property
    def _whole(self) -> tuple[dict[str, Tensor], Any]:
        from safetensors.torch import load

        content = _read_apart(self._path)
        header = parse_object(content[8 : 8 + int.from_bytes(content[:8], "little")])
        return load(content), json.loads(header["__metadata__"]["values"])


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more if names else "nothing"


def _read_apart(path: Path, *what: str) -> bytes:
    """What another process hands on of a file of `torch.save`.

    Raises:
        DataError: it is damaged, names code to run, or takes too much time or memory.
    """
    with open_to_read(path, follow_links=True) as file:
        time_s = _TIME_S + os.fstat(file.fileno()).st_size / _BYTES_A_SECOND
        argv = [sys.executable, "-c", _READER, *what]
        try:
            done = subprocess.run(
                argv, stdin=file, capture_output=True, timeout=time_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(
                f"{path}: could not be read within {time_s:.0f} s; is it a file of torch.save?"
            ) from None
    reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if done.returncode == _REFUSED:
        raise DataError(
            f"{path}: is a pickle that names {reason}, which could run code and is not loaded; "
            "where it was made, save its state_dict() alone, with torch.save"
        )
    if done.returncode == _DAMAGED:
        raise DataError(f"{path}: is damaged, cut off or no file of torch.save: {reason}")
    if done.returncode:
        raise DataError(
            f"{path}: could not be read in {_COPIES} times its size of memory "
            f"(code {done.returncode}: {reason}); is it a file of torch.save?"
        )
    return done.stdout


def _hand_on() -> int:
    """Read a file of `torch.save` from standard input; write its tensors to standard output.

    They are written as safetensors, whose metadata has the other values as JSON; or, if that is all
    that is asked for, their names and these values are.
    """
    import pickle
    import resource

    import torch
    from safetensors.torch import save

    with suppress(FileNotFoundError), open("/proc/self/statm", encoding="ascii") as statm:
        now = int(statm.read().split()[0]) * resource.getpagesize()
        limit = now + _COPIES * os.fstat(0).st_size + _MORE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        if _NAMES in sys.argv:
            content = torch.load("/dev/stdin", map_location="cpu", weights_only=True, mmap=True)
            names = [name for name, _ in _tensors_in(content, "")]
            data = json.dumps({"names": names, "values": _plain(content)}).encode()
        else:
            with open(0, "rb", closefd=False) as file:
                content = torch.load(file, map_location="cpu", weights_only=True)
            tensors = {n: t.detach().clone().contiguous() for n, t in _tensors_in(content, "")}
            data = save(tensors, {"values": json.dumps(_plain(content))})
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        print(named[1] if named else "more than tensors and plain values", file=sys.stderr)
        return _REFUSED
    except MemoryError:
        return 1
    except Exception as error:
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
        return 1 if "allocate" in str(error) else _DAMAGED
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
    return 0


def _tensors_in(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of nested dicts and lists."""
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            yield from _tensors_in(part, f"{name}/{key}" if name else str(key))


def _plain(value: Any) -> Any:
    """A tree without what JSON does not know."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    return value if isinstance(value, (str, int, float, bool)) else None
