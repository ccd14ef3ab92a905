"""Checkpoints on disk: tensors as safetensors, everything else as JSON; verified, never pickled.

The format (github.com/huggingface/safetensors): the length of the header as 8 bytes, the header in
JSON with dtype, shape and place of each tensor, then the tensors without gaps. What reads it may
want tensors at multiples of their element size, so those with the largest elements come first.

    checkpoints/step_00000100/model.safetensors        parameters and persistent buffers by name
                              buffers.safetensors      other buffers, if any may change
                              optimizer.safetensors    state by "key/parameter"
                              task.safetensors         tensors of Task.state_dict, if any
                              carry.safetensors        what microbatches carry, by "number/name"
                              table_0.00000.safetensors  rows of a table, if there is one
                              manifest.json            SHA-256 of these, and all the rest
    checkpoints/latest, checkpoints/best               names of folders; only hints

A folder is written under a temporary name, flushed to disk, and renamed: it is complete or does not
exist. A valid one of the same state is left alone. Nothing in it depends on the number of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lockstep.config.files import open_to_read, read_bytes, sync_folder, temporary_beside
from lockstep.config.parsing import as_type, parse_object
from lockstep.engine.checkpoint.listing import (
    MANIFEST,
    folder_name,
    folders,
    missing,
    write_hint,
)
from lockstep.engine.digests import memory_of
from lockstep.errors import CheckpointError

FORMAT = 1
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"

_BUFFERS, _TASK, _CARRY = "buffers.safetensors", "task.safetensors", "carry.safetensors"
"""There only if there are such tensors."""

TABLE = "table_"
"""What the names of files with rows of tables begin with; these are read one by one."""

_CIRCUMSTANCES = ("sha256", "layout", "versions", "saved_at")
"""Keys of a manifest that may differ between two checkpoints of the same state."""

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ", torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}  # fmt: skip

_ALIGNMENT = 8
"""Bytes: the header ends at a multiple of it."""


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
    """

    step: int
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    meta: dict[str, Any] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    task: dict[str, Tensor] = field(default_factory=dict)
    carry: dict[str, Tensor] = field(default_factory=dict)
    folder: Path | None = None


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


def in_memory(tensors: Mapping[str, Tensor]) -> Tensors:
    """Tensors by name as the content of a file."""
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    kinds = {name: Kind(tensors[name].dtype, tensors[name].shape) for name in names}
    return Tensors(kinds, (tensors[name] for name in names))


def write(
    root: Path,
    snapshot: Snapshot,
    halfway: Callable[[], None] = lambda: None,
    streamed: Mapping[str, Tensors] | None = None,
) -> tuple[Path, int]:
    """Write a checkpoint below `root`.

    Args:
        root: folder of all checkpoints; made if need be.
        snapshot: training state to write.
        halfway: function that is called when all tensors are on disk under a temporary name.
        streamed: files whose tensors are gathered while they are written, by name, in order.

    Returns:
        Its folder and its size in bytes.

    Raises:
        OSError: the disk is full, read-only, or gone; nothing half-written stays behind.
    """
    final = root / folder_name(snapshot.step)
    # Beside the final folder: a rename is atomic within one file system only.
    temporary = temporary_beside(final)
    try:
        root.mkdir(exist_ok=True)  # and not its parent: a run directory that is gone stays so
        temporary.mkdir()
        contents = {MODEL: in_memory(snapshot.model), OPTIMIZER: in_memory(snapshot.optimizer)}
        optional = {_BUFFERS: snapshot.buffers, _TASK: snapshot.task, _CARRY: snapshot.carry}
        contents |= {name: in_memory(tensors) for name, tensors in optional.items() if tensors}
        contents |= streamed or {}
        files = {
            name: write_tensors(temporary / name, tensors) for name, tensors in contents.items()
        }
        halfway()
        body = {"format": FORMAT, "step": snapshot.step, "files": files, **snapshot.meta}
        body = json.loads(json.dumps(body))  # as it will be read: keys that are numbers are text
        manifest = {"sha256": _json_digest(body), **body}
        text = json.dumps(manifest, indent=1, ensure_ascii=False).encode()
        size = len(text) + sum(f["bytes"] for f in files.values())
        _write_file(temporary / MANIFEST, [text])
        sync_folder(temporary)
        if _holds(final, body):
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            _rename_over(temporary, final)
            sync_folder(root)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    # Last: a hint must not name a folder that does not exist.
    write_hint(root, "latest", final.name)
    return final, size


def read(folder: Path) -> Snapshot:
    """Read and verify a checkpoint.

    Raises:
        CheckpointError: something is missing, damaged, or newer than this library.
    """
    manifest = read_manifest(folder)
    optional = [name for name in (_BUFFERS, _TASK, _CARRY) if name in manifest["files"]]
    names = [MODEL, OPTIMIZER, *optional]
    files = {name: _read_verified(folder / name, manifest) for name in names}
    for name in manifest["files"]:
        if name.startswith(TABLE):  # rows are verified now, and read once their ranks are known
            _read_verified(folder / name, manifest)
    meta = {k: v for k, v in manifest.items() if k not in ("sha256", "format", "step", "files")}
    return Snapshot(
        manifest["step"],
        files[MODEL],
        files[OPTIMIZER],
        meta,
        files.get(_BUFFERS, {}),
        files.get(_TASK, {}),
        files.get(_CARRY, {}),
        folder,
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read and verify one file of a checkpoint.

    Raises:
        CheckpointError: it, or the manifest, is missing or damaged.
    """
    return _read_verified(path, read_manifest(path.parent))


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
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
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


def newest_valid(root: Path) -> tuple[Snapshot | None, Path | None, list[str]]:
    """The newest checkpoint that verifies, its folder, and why newer ones were passed over."""
    skipped = missing(root, "latest")
    for folder in folders(root):
        try:
            return read(folder), folder, skipped
        except CheckpointError as error:
            skipped.append(str(error))
    return None, None, skipped + missing(root, "best")


def write_tensors(path: Path, tensors: Tensors) -> dict[str, Any]:
    """Write a file, and return when it is on disk.

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
            yield memory_of(plain)

    return _write_file(path, chunks())


def _write_file(path: Path, chunks: Iterable[Any]) -> dict[str, Any]:
    sha, num_bytes = hashlib.sha256(), 0
    with path.open("wb") as file:
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            file.write(view)
            sha.update(view)
            num_bytes += len(view)
        file.flush()
        # Before the folder is renamed: a machine that stops in between must not leave a folder
        # under its final name whose files have no content yet.
        os.fsync(file.fileno())
    return {"sha256": sha.hexdigest(), "bytes": num_bytes}


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
        for name in there["files"]:
            _read_verified(final / name, there)
    except CheckpointError:
        return False
    mine, theirs = (
        _json_digest({k: v for k, v in manifest.items() if k not in _CIRCUMSTANCES})
        for manifest in (body, there)
    )
    return mine == theirs


def _rename_over(temporary: Path, final: Path) -> None:
    """Rename, over another checkpoint of the same step if there is one.

    In between the step has no folder; if the process is killed then, `bring_back` restores it.
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


def _read_verified(path: Path, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
    expected = manifest["files"].get(path.name)
    if expected is None:
        raise CheckpointError(f"{path.with_name(MANIFEST)}: is damaged: names no {path.name}")
    try:
        with open_to_read(path) as file:
            # Before reading it: a file of the wrong size may not fit into memory.
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise CheckpointError(
                    f"{path}: is damaged: holds {size} bytes, must hold {expected['bytes']}"
                )
            data = file.read()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except MemoryError:
        raise CheckpointError(f"{path}: its {size:,} bytes do not fit into memory") from None
    if hashlib.sha256(data).hexdigest() != expected["sha256"]:
        raise CheckpointError(f"{path}: is damaged: its SHA-256 does not match the manifest")
    try:
        # From the bytes that were verified: the file may have been replaced since.
        return safetensors.torch.load(data)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        # The format's own checks are SafetensorErrors; a dtype that torch lacks is a KeyError.
        raise CheckpointError(f"{path}: is damaged: {error}") from None


def _json_digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
