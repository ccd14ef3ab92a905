"""Folders of `torch.distributed.checkpoint` (DCP), written and read in one process.

Their index is a pickle, of which nothing is loaded but the classes that describe tensors; and the
tensors are loaded by `torch.load(weights_only=True)`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from lockstep.config.files import open_to_read, temporary_beside
from lockstep.engine.checkpoint.format import rename_over
from lockstep.engine.checkpoint.listing import INDEX
from lockstep.errors import CheckpointError, ConfigError

ABOUT = "lockstep.json"

_MODULES = (
    "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem",
)  # fmt: skip
_CLASSES = frozenset(
    {
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
        "_StorageInfo", "_StoragePrefix",
    }
)  # fmt: skip
_OTHERS = frozenset(
    {
        ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"), ("pathlib._local", "PosixPath"),
    }
)  # fmt: skip
_PREFIXES = ("", "model.", "app.model.")
"""What the names of a model's tensors may begin with, as programs save them in one with others."""
_SUFFIX = ".distcp"
"""Of the files with tensors; `digest` has no others."""
_CHUNK = 1 << 20


@contextmanager
def _silent() -> Iterator[None]:
    """Suppress warnings that this is a single process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class _Index(pickle._Unpickler):
    """Loads descriptions of tensors, and refuses all else."""

    # That of the class in C, which is faster, cannot be replaced.
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        # Else it could set attributes of a class, such as the methods of `pathlib.PosixPath`.
        stack = self.stack  # type: ignore[attr-defined]
        if not dataclasses.is_dataclass(type(stack[-2])):
            raise pickle.UnpicklingError("sets attributes of other things")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        is_known = module in _MODULES and name in _CLASSES
        if not (is_known or is_dtype or (module, name) in _OTHERS):
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return super().find_class(module, name)


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index


class Folder(Mapping[str, Tensor]):
    """The tensors of a folder by name, each of which is read when it is looked up.

    Attributes:
        likes: tensors of the same dtypes and shapes without content.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index.

        Raises:
            CheckpointError: it is missing or damaged, or names other things than tensors' files.
        """
        self._folder = folder
        path = folder / INDEX
        try:
            with open_to_read(path) as file:
                index = _Index(io.BytesIO(file.read())).load()
            entries = index.state_dict_metadata.items()
            tensors = {n: e for n, e in entries if isinstance(e, TensorStorageMetadata)}
            self.likes = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                for name, entry in tensors.items()
            }
            for place in index.storage_data.values():
                is_here = Path(place.relative_path).name == place.relative_path
                if not (is_here and place.relative_path.endswith(_SUFFIX)):
                    raise ValueError(f"names the file {place.relative_path}")
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
        except Exception as error:  # whatever a damaged pickle makes of itself
            message = f"{path}: is damaged: not the index of torch.distributed.checkpoint: {error}"
            raise CheckpointError(message) from None
        index.storage_meta = index.storage_meta or StorageMeta()
        self._reader, self._prefix = _Reader(folder, index), ""

    def take(self, names: Collection[str]) -> None:
        """Have only what is in the part of the folder that some of these names are found in."""
        for prefix in _PREFIXES:
            part = {
                n.removeprefix(prefix): t for n, t in self.likes.items() if n.startswith(prefix)
            }
            if part.keys() & set(names):
                self.likes, self._prefix = part, prefix
                return

    def __iter__(self) -> Iterator[str]:
        return iter(self.likes)

    def __len__(self) -> int:
        return len(self.likes)

    def __contains__(self, name: object) -> bool:
        return name in self.likes  # by `Mapping`, it would be read

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty_like(self.likes[name], device="cpu")
        try:
            with _silent():
                load({self._prefix + name: tensor}, storage_reader=self._reader, no_dist=True)
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(f"{self._folder}: {name} cannot be read: {reason}") from None
        return tensor


def digest(folder: Path) -> str:
    """SHA-256 of a folder's files.

    Raises:
        CheckpointError: one cannot be read.
    """
    sha = hashlib.sha256()
    try:
        for path in [folder / INDEX, *sorted(folder.glob(f"*{_SUFFIX}"))]:
            sha.update(f"{path.name}\n".encode())
            with open_to_read(path) as file:
                while chunk := file.read(_CHUNK):
                    sha.update(chunk)
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    return sha.hexdigest()


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, str],
    check: Callable[[Folder], None] = lambda made: None,
) -> None:
    """Write tensors as a new folder, or in the place of an older one of this kind.

    Args:
        folder: path of the folder.
        tensors: tensors by name.
        about: metadata, which goes to `lockstep.json` in it.
        check: looks at what was written before it takes its place, and may refuse it.

    Raises:
        ConfigError: there is something else in this place.
        OSError: the disk is full, or read-only.
    """
    if folder.exists() and not (folder / INDEX).exists():
        raise ConfigError(f"{folder}: is no folder of torch.distributed.checkpoint; choose another")
    temporary = temporary_beside(folder)
    try:
        with _silent():
            save(dict(tensors), storage_writer=FileSystemWriter(temporary), no_dist=True)
        (temporary / ABOUT).write_text(json.dumps(dict(about), indent=1) + "\n", encoding="utf-8")
        check(Folder(temporary))
        rename_over(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
