"""Checkpoints on disk: tensors as safetensors, everything else as JSON; verified, never pickled.

    checkpoints/step_00000100/model.safetensors        parameters and persistent buffers by name
                              buffers.safetensors      other buffers, if any may change
                              optimizer.safetensors    state by "key/parameter"
                              task.safetensors         tensors of Task.state_dict, if any
                              carry.safetensors        what microbatches carry, by "number/name"
                              table_0.00000.safetensors  rows of a table, if there is one
                              manifest.json            SHA-256 of these, and all the rest
    checkpoints/latest, checkpoints/best               names of folders; only hints

A large model, and its optimizer's state, are in several files, `model-00001-of-00002.safetensors`
and so on, with an index, `model.safetensors.index.json`.

A folder is written under a temporary name, flushed to disk, and renamed: it is complete or does not
exist. A valid one of the same state is left alone. Nothing in it depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lockstep.config.files import read_bytes, sync_folder, temporary_beside
from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.checkpoint.listing import (
    MANIFEST,
    files_with,
    folder_name,
    folders,
    missing,
    write_hint,
)
from lockstep.engine.checkpoint.tensor_files import (
    FILE_BYTES,
    MappedFile,
    Tensors,
    in_files,
    in_memory,
    read_verified,
    sync,
    unreadable,
    verify,
    write_file,
    write_tensors,
)
from lockstep.errors import CheckpointError

if TYPE_CHECKING:
    from lockstep.engine.checkpoint.share import OwnShare

_MOST_LOOKED_AT = 16 << 20
"""Bytes of tensors of files that stay in memory, besides the newest one."""
FORMAT = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

CARRY, _BUFFERS, _TASK = "carry.safetensors", "buffers.safetensors", "task.safetensors"
"""There only if there are such tensors."""

TABLE = "table_"
"""What the names of files with rows of tables begin with; these are read one by one."""

_CIRCUMSTANCES = ("sha256", "layout", "versions", "saved_at")
"""Keys of a manifest that may differ between two checkpoints of the same state."""


@dataclass
class Snapshot:
    """A training state in memory.

    Attributes:
        step: number of committed optimizer steps.
        model: `state_dict` of the model: parameters and persistent buffers by name.
        optimizer: tensors of the optimizer's state by "key/parameter".
        meta: JSON-able values: config, progress, versions, layout, other state of the task.
        buffers: buffers that are not persistent and that a step may change, by name.
        task: tensors of the task's own state by name.
        carry: tensors that microbatches carry, by "number/name"; `meta` has the rest.
        folder: where it was read from, and rows of tables are.
        mapped: the files that tensors are read from when they are looked at.
    """

    step: int
    model: Mapping[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    task: dict[str, Tensor] = field(default_factory=dict)
    carry: dict[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None
    mapped: list[MappedFile] = field(default_factory=list)
    _bytes_looked_at: int = 0

    def look(self, tensor: Tensor | None) -> Tensor | None:
        """A tensor of a file that is about to be looked at; frees the memory of earlier ones."""
        # Not for each tensor, since it takes some microseconds for each file.
        if self._bytes_looked_at > _MOST_LOOKED_AT:
            self.drop()
        self._bytes_looked_at += 0 if tensor is None else tensor.nbytes
        return tensor

    def drop(self) -> None:
        """Free the memory of what was looked at in files."""
        self._bytes_looked_at = 0
        for file in self.mapped:
            file.drop()


def begin(root: Path, step: int) -> Path:
    """Make the folder for a checkpoint that is being written.

    Raises:
        OSError: the disk is full, read-only, or gone.
    """
    # Beside the final folder: a rename is atomic within one file system only.
    temporary = temporary_beside(root / folder_name(step))
    root.mkdir(exist_ok=True)  # and not its parent: a run directory that is gone stays so
    temporary.mkdir()
    return temporary


def write_files(folder: Path, files: Mapping[str, Tensors | bytes]) -> dict[str, Any]:
    """Write files, and return their entries in a manifest when they are on disk.

    Raises:
        OSError: the disk is full, read-only, or gone.
    """
    entries = {
        name: write_file(folder / name, [content])
        if isinstance(content, bytes)
        else write_tensors(folder / name, content)
        for name, content in files.items()
    }
    # At the end, since other ranks may wait for this one while it writes.
    for name in files:
        sync(folder / name)
    return entries


def write(
    root: Path,
    snapshot: Snapshot,
    halfway: Callable[[], None] = lambda: None,
    share: OwnShare | None = None,
    most_bytes: int = FILE_BYTES,
    tables: Mapping[str, Tensors] | None = None,
) -> tuple[Path, int]:
    """Write a checkpoint below `root`.

    Args:
        root: folder of all checkpoints; made if need be.
        snapshot: training state to write.
        halfway: function that is called when all tensors are on disk under a temporary name.
        share: files beside the snapshot's, which has no tensors of model and optimizer if these
            are among them.
        most_bytes: greatest size of the tensors in a file.
        tables: files with rows of tables by name, where no ranks have them (`share`).

    Returns:
        Its folder and its size in bytes.

    Raises:
        OSError: the disk is full, read-only, or gone; nothing half-written stays behind.
    """
    final = root / folder_name(snapshot.step)
    temporary = share.folder if share is not None else begin(root, snapshot.step)
    try:
        files = share.entries() if share is not None else {}
        contents: dict[str, Tensors | bytes] = {**(tables or {})}
        for name, tensors in ((MODEL, snapshot.model), (OPTIMIZER, snapshot.optimizer)):
            if not files_with(name, files):
                contents |= in_files(name, tensors, most_bytes)
        optional = {_BUFFERS: snapshot.buffers, _TASK: snapshot.task, CARRY: snapshot.carry}
        contents |= {name: in_memory(tensors) for name, tensors in optional.items() if tensors}
        files = write_files(temporary, contents) | files
        halfway()
        body = {"format": FORMAT, "step": snapshot.step, "files": files, **snapshot.meta}
        body = json.loads(json.dumps(body))  # as it will be read: keys that are numbers are text
        manifest = {"sha256": _json_digest(body), **body}
        text = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
        size = len(text) + sum(f["bytes"] for f in files.values())
        write_file(temporary / MANIFEST, [text])
        sync(temporary / MANIFEST)
        sync_folder(temporary)
        if _holds(final, body):
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            rename_over(temporary, final)
            sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Last: a hint must not name a folder that does not exist.
    write_hint(root, "latest", final.name)
    return final, size


def read(folder: Path, is_mapped: bool = False, is_known: bool = False) -> Snapshot:
    """Read and verify a checkpoint.

    Args:
        folder: its folder.
        is_mapped: whether the tensors of model, optimizer and carries are to be read when they are
            looked at.
        is_known: whether another rank has verified the files, which then are opened only.

    Raises:
        CheckpointError: something is missing, damaged, or newer than this library.
    """
    manifest = read_manifest(folder)
    known = manifest["files"]
    left, mapped = set(known), list[MappedFile]()

    def tensors(file: str, is_mapped: bool = False) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name in _named(folder, manifest, file):
            left.discard(name)
            if is_mapped:
                mapped.append(MappedFile(folder / name, known[name], not is_known))
                found |= mapped[-1].tensors
            else:
                found |= read_verified(folder / name, known[name])
        return found

    model, optimizer = tensors(MODEL, is_mapped), tensors(OPTIMIZER, is_mapped)
    # What a task and its hooks are given is theirs.
    buffers, task = tensors(_BUFFERS), tensors(_TASK)
    carry = tensors(CARRY, is_mapped)
    for name in () if is_known else sorted(left):
        # Rows are verified now, and read once their ranks are known.
        verify(folder / name, known[name])
    meta = {k: v for k, v in manifest.items() if k not in ("sha256", "format", "step", "files")}
    step = manifest["step"]
    return Snapshot(step, model, optimizer, meta, buffers, task, carry, folder, mapped)


def read_model(folder: Path, is_known: bool = False) -> Snapshot:
    """The parameters and persistent buffers alone, as `read` maps them."""
    manifest = read_manifest(folder)
    mapped = [
        MappedFile(folder / name, manifest["files"][name], not is_known)
        for name in _named(folder, manifest, MODEL)
    ]
    tensors = {name: tensor for file in mapped for name, tensor in file.tensors.items()}
    return Snapshot(manifest["step"], tensors, {}, folder=folder, mapped=mapped)


def _named(folder: Path, manifest: Mapping[str, Any], file: str) -> list[str]:
    names = files_with(file, manifest["files"])
    if not names and file in (MODEL, OPTIMIZER):
        raise CheckpointError(f"{folder / MANIFEST}: is damaged: names no {file}")
    return names


def model_files(names: Mapping[str, Any]) -> list[str]:
    """Those files of a manifest that hold the weights of the model, those of tables included."""
    return sorted([*files_with(MODEL, names), *(n for n in names if n.startswith(TABLE))])


def read_tensors(
    path: Path, files: Mapping[str, Any], is_mapped: bool = False
) -> dict[str, Tensor]:
    """Read and verify one file of a checkpoint.

    Args:
        path: path of the file.
        files: what the manifest says of files.
        is_mapped: whether it was verified before, and tensors are to be read when looked at.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    if path.name not in files:
        raise CheckpointError(f"{path.with_name(MANIFEST)}: is damaged: names no {path.name}")
    if is_mapped:
        return MappedFile(path, files[path.name], is_hashed=False).tensors
    return read_verified(path, files[path.name])


def read_manifest(folder: Path) -> dict[str, Any]:
    """The verified manifest of a checkpoint.

    Raises:
        CheckpointError: it is missing, damaged, or newer than this library.
    """
    path = folder / MANIFEST
    try:
        manifest = parse_object(read_bytes(path))
        digest = manifest.pop("sha256")
    except OSError as error:
        raise unreadable(path, error) from None
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: not a checkpoint's manifest: {error}") from None
    except KeyError:
        message = f"{path}: is damaged: not a checkpoint's manifest: has no sha256"
        raise CheckpointError(message) from None
    # Before the digest, which a newer format may compute differently.
    if isinstance(manifest.get("format"), int) and manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path}: format={manifest['format']} is newer than this library reads ({FORMAT}); "
            "update lockstep-train"
        )
    if digest != _json_digest(manifest):
        raise CheckpointError(f"{path}: is damaged: its SHA-256 does not match its content")
    try:
        as_type(_Body, {k: manifest[k] for k in _Body.__dataclass_fields__ if k in manifest})
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None
    if folder.name != folder_name(manifest["step"]):
        raise CheckpointError(
            f"{path}: is damaged: step={manifest['step']}: the folder is called {folder.name}"
        )
    return {"sha256": digest, **manifest}


def newest_valid(
    root: Path, is_mapped: bool = False
) -> tuple[Snapshot | None, Path | None, list[str]]:
    """The newest checkpoint that verifies, its folder, and why newer ones were passed over.

    Args:
        root: folder of all checkpoints.
        is_mapped: see `read`.
    """
    skipped = missing(root, "latest")
    for folder in folders(root):
        try:
            return read(folder, is_mapped), folder, skipped
        except CheckpointError as error:
            skipped.append(str(error))
    return None, None, skipped + missing(root, "best")


@dataclass
class _Size:
    """The entry of a file in a manifest."""

    sha256: str
    bytes: int


@dataclass
class _Body:
    """The fields that every manifest has."""

    format: int
    step: int
    files: dict[str, _Size]


def _holds(final: Path, body: Mapping[str, Any]) -> bool:
    """Whether a valid checkpoint of the same state exists.

    It does after the loss of a rank that had just written it. Replacing it would only be a risk: a
    folder cannot be replaced by another one in one system call.
    """
    if not final.exists():
        return False
    try:
        there = read_manifest(final)
        for name, expected in there["files"].items():
            verify(final / name, expected)
    except CheckpointError:
        return False
    return digest_of_state(body) == digest_of_state(there)


def digest_of_state(manifest: Mapping[str, Any]) -> str:
    """The SHA-256 of what a manifest says of the state, which tells it from any other."""
    return _json_digest({k: v for k, v in manifest.items() if k not in _CIRCUMSTANCES})


def rename_over(temporary: Path, final: Path) -> None:
    """Rename a folder, over another one if there is one.

    In between there is none; if the process is killed then, `bring_back` restores a checkpoint.
    """
    if not final.exists():
        temporary.rename(final)
        return
    aside = temporary.with_suffix(".old")
    final.rename(aside)
    try:
        temporary.rename(final)
    except BaseException:
        aside.rename(final)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _json_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
