"""Run directories of hosts that share no file system, brought up to date.

What a directory lacks because its host was not there is copied from another one, when ranks begin
and when they regroup. `owners.py` says who writes to which.
"""

from __future__ import annotations

import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.comm.transport import Transport
from lockstep.config.files import open_to_read, sync_folder, temporary_beside
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.listing import Owners
from lockstep.engine.checkpoint.owners import find_owners, tried
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.checkpoint.share import Scattered, exhaust, gathered
from lockstep.engine.checkpoint.tensor_files import Kind, sync, verify
from lockstep.engine.runtime import Runtime, on_first
from lockstep.errors import CheckpointError, LockstepError, RunDirectoryError, shared

LOGS = "events.jsonl", "metrics.csv"
"""Files that all owners write, and whose beginning another one may have."""
_PART_BYTES = 16 << 20


def open_directories(
    runtime: Runtime,
    directory: RunDirectory,
    copies: int,
    is_apart: bool,
    prepare: Callable[[], object],
    store: Callable[[], None],
    is_start: bool = False,
) -> list[str]:
    """Find out who owns which run directory, and open what is this process's; a collective.

    Args:
        runtime: surroundings of this process.
        directory: the run directory; gets its owners.
        copies: number of hosts that are to keep checkpoints.
        is_apart: whether hosts may have directories of their own.
        prepare: locks the directory of this process, and binds it to the run.
        store: begins to store events there; does nothing if it has.
        is_start: whether no rank trains yet. If so, what is wrong on any host is an error.

    Returns:
        What the user should know.

    Raises:
        LockstepError: rank 0, or at the start any host, cannot use its directory; on all ranks.
    """
    transport = runtime.transport
    is_gone = is_apart and directory.is_gone()
    owners = find_owners(transport, directory.path, copies, is_apart, is_gone)
    warnings: list[str] = []
    if owners.are_several or owners.problems:
        on_first(transport, prepare)
        elsewhere = [] if is_start and copies == 1 else [*owners.problems]
        if elsewhere and is_start:
            message = f"{elsewhere[0]}; make it writable, or choose another with --run-dir"
            raise shared(RunDirectoryError(message))
        owners, problems = tried(transport, owners, prepare, is_start)
        warnings = [f"{text}; nothing of the run is kept there" for text in elsewhere + problems]
        with transport.observer.on_disk():
            warnings += _bring_logs(runtime, directory, owners, is_start)
        on_first(transport, store)
        owners, problems = tried(transport, owners, store, is_start)
        warnings += [f"{text}; nothing more of the run is kept there" for text in problems]
    else:

        def begin() -> None:
            prepare()
            store()

        on_first(transport, begin)
    directory.owners, directory.stores = owners, transport.rank in owners.ranks
    hint = owners.hint(directory.name)
    return [*warnings, hint] if hint else warnings


def _bring_logs(
    runtime: Runtime, directory: RunDirectory, owners: Owners, is_start: bool
) -> list[str]:
    """Have owners that begin to store what happens store it from the beginning of the run."""
    transport, path = runtime.transport, directory.path
    is_new = transport.rank in owners.ranks and not directory.stores
    told = transport.gather_json([is_new, _newest(path), _size(path / LOGS[0])])
    source = 0
    if is_start:
        source = max(owners.ranks, key=lambda rank: (*told[rank][1:], -rank))
    targets = [rank for rank in owners.ranks if told[rank][0] and rank != source]
    if not targets or (is_start and told[source][1] < 0):
        return []
    temporary = {name: temporary_beside(path / name) for name in LOGS}
    sizes = transport.gather_json({name: _size(path / name) for name in LOGS})[source]
    problem = _copy(runtime, source, targets, path, sizes, lambda name: temporary[name])
    texts = _texts(runtime, problem)
    for name, copy in temporary.items():
        with suppress(OSError):
            copy.unlink() if problem or texts[source] else copy.replace(path / name)
    what = f"the history of the run is not whole on {owners.names(targets)}"
    return [f"{text}; {what}" for text in texts if text]


def _newest(run_dir: Path) -> int:
    there = listing.folders(run_dir / "checkpoints")
    return next((listing.step_of(f) for f in there if (f / listing.MANIFEST).exists()), -1)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


class Evened(NamedTuple):
    """The outcome of `even_out`."""

    step: int
    """Step of the newest valid checkpoint of all directories; -1 if there is none."""
    name: str
    """What it is called, and whose it is."""
    reasons: list[str]
    """Why newer ones cannot be used."""
    copied: list[str]
    """What was copied, or could not be."""


def even_out(
    runtime: Runtime, directory: RunDirectory, step: int, skipped: Sequence[str]
) -> Evened:
    """Have all savers hold what the directory with the newest valid checkpoint has; a collective.

    Args:
        runtime: surroundings of this process.
        directory: the run directory.
        step: the newest checkpoint that is valid in that of this process; -1 if there is none.
        skipped: why newer ones are not.

    Raises:
        CheckpointError: rank 0 does not get it; on all ranks.
    """
    transport, owners, root = runtime.transport, directory.owners, directory.checkpoints
    missing = [*listing.missing(root, "latest"), *listing.missing(root, "best")]
    hint = listing.hinted(root, "latest")
    last = listing.step_of(hint) if hint is not None else -1
    damaged = [text for text in skipped if text not in missing]
    told = transport.gather_json([step, damaged, last, missing[:1]])
    source = max(owners.ranks, key=lambda rank: (told[rank][0], -rank))
    newest, name = told[source][0], listing.folder_name(max(0, told[source][0]))
    # A host that keeps none has the names of those that others have.
    reasons = [
        f"{owners.hosts[rank]}: {text}"
        for rank in owners.ranks
        for text in [*told[rank][1], *(told[rank][3] if told[rank][2] > newest else ())]
    ]
    copied = bring(runtime, directory, source, step)
    if newest >= 0 and not on_first(transport, (root / name).is_dir):
        raise shared(CheckpointError("; ".join(copied)))
    return Evened(newest, f"{name} of {owners.hosts[source]}", reasons, copied)


def bring(runtime: Runtime, directory: RunDirectory, source: int, valid_to: int) -> list[str]:
    """Have all savers hold the checkpoints that an owner has, newest first; a collective.

    Args:
        runtime: surroundings of this process.
        directory: the run directory.
        source: the owner.
        valid_to: the newest valid checkpoint's step in the directory of this process.

    Returns:
        What was copied, or could not be.
    """
    transport, owners, root = runtime.transport, directory.owners, directory.checkpoints
    there: dict[str, str] = {}
    messages: list[str] = []
    with runtime.heartbeat.on_disk():
        if transport.rank in (source, *owners.savers):
            kept = [f for f in listing.folders(root) if listing.step_of(f) <= valid_to]
            there = {folder.name: _state_of(folder) for folder in kept}
        hint = listing.read_hint(root, "best")
        told = transport.gather_json([there, listing.step_of(hint) if hint is not None else 0])
        for name, state in told[source][0].items():
            # Of another run, or of one that went otherwise, there may be one of the same step.
            targets = [rank for rank in owners.savers if told[rank][0].get(name) != state]
            if targets and state:  # a damaged one stays alone
                where = f"from {owners.hosts[source]} to {owners.names(targets)}"
                messages.append(f"{name} is copied {where}")
                messages += _bring_one(runtime, source, targets, root, name)
        if transport.rank in owners.savers and told[source][1]:  # or it would not be kept
            with suppress(OSError):
                listing.mark_best(root, told[source][1])
    return messages


def _state_of(folder: Path) -> str:
    """What tells the state in a checkpoint from any other; empty if it is damaged."""
    with suppress(CheckpointError):
        return checkpoint.digest_of_state(checkpoint.read_manifest(folder))
    return ""


def catch_up(
    runtime: Runtime, directory: RunDirectory, step: int, is_new: bool, has_saved: bool
) -> list[str]:
    """Have directories keep what the run had kept when they were none of its; a collective.

    Args:
        runtime: surroundings of this process.
        directory: the run directory.
        step: committed steps, on rank 0.
        is_new: whether that of this process becomes one of the run now.
        has_saved: whether this process has kept checkpoints before.

    Returns:
        What users should know.
    """
    transport, owners, root = runtime.transport, directory.owners, directory.checkpoints
    saves = transport.rank in owners.savers
    told = transport.gather_json([step, saves and has_saved])
    source = next((rank for rank in owners.savers if told[rank][1]), 0)
    own, reached = "", told[0][0]
    if is_new:  # it may hold a run of the same config that went further
        try:
            with runtime.heartbeat.on_disk():
                names = listing.set_aside(root, reached)
                (root / "best").unlink(missing_ok=True)
            if names:
                why = f"newer than step {reached} of the run"
                own = f"{root}: {', '.join(names)}: {why}, so renamed to damaged_..."
        except OSError as error:
            own = f"{root}: {_unwritten(error)}"
    messages = [text for text in _texts(runtime, own) if text]
    messages += bring(runtime, directory, source, sys.maxsize)
    newest = _newest(directory.path)
    if saves and not has_saved and newest >= 0:
        with suppress(OSError):
            listing.mark_latest(root, newest)
    return messages


def _bring_one(
    runtime: Runtime, source: int, targets: Sequence[int], root: Path, name: str
) -> list[str]:
    transport, final = runtime.transport, root / name
    sizes: dict[str, int] = {}
    if transport.rank == source:
        with suppress(CheckpointError):  # it was damaged meanwhile
            files = checkpoint.read_manifest(final)["files"]
            sizes = {file: _size(final / file) for file in (*files, listing.MANIFEST)}
    sizes = transport.gather_json(sizes)[source]
    temporary, problem = final, ""
    if transport.rank in targets and sizes:
        try:
            temporary = checkpoint.begin(root, listing.step_of(final))
        except OSError as error:
            problem = _unwritten(error)
    problem = _copy(runtime, source, targets, final, sizes, lambda n: temporary / n, problem)
    if transport.rank in targets and sizes and not problem:
        try:
            for file in sizes:
                sync(temporary / file)
            sync_folder(temporary)
            checkpoint.rename_over(temporary, final)
            sync_folder(root)
            for file, entry in checkpoint.read_manifest(final)["files"].items():
                verify(final / file, entry)
        except (CheckpointError, OSError) as error:
            problem = _unwritten(error) if isinstance(error, OSError) else str(error)
            shutil.rmtree(final, ignore_errors=True)
    if temporary != final:
        shutil.rmtree(temporary, ignore_errors=True)
    told = [(by == source, text) for by, text in enumerate(_texts(runtime, problem)) if text]
    return [text if is_read else f"{text}; {name} is not kept there" for is_read, text in told]


def opened_everywhere(
    transport: Transport, snapshot: checkpoint.Snapshot | None
) -> checkpoint.Snapshot | None:
    """The snapshot that rank 0 has read, on all ranks if all can read it; a collective.

    Args:
        transport: the group of ranks.
        snapshot: what rank 0 has read.
    """
    told: tuple[str, str, list[int]] | None = None
    if snapshot is not None and snapshot.folder is not None:
        folder = snapshot.folder.resolve()
        with suppress(LockstepError, OSError):  # it was removed meanwhile, or has no room
            digest = checkpoint.read_manifest(folder)["sha256"]
            told = (str(folder), digest, listing.stamp_of(folder))
    told = transport.gather_json(told)[0]
    opened = snapshot if transport.rank == 0 else None
    if transport.rank != 0 and told is not None:
        with suppress(LockstepError, OSError), transport.observer.on_disk():
            folder = Path(told[0])
            is_same = listing.stamp_of(folder) == told[2]
            if is_same and checkpoint.read_manifest(folder)["sha256"] == told[1]:
                opened = checkpoint.read(folder, is_mapped=True, is_known=True)
    return opened if all(transport.gather_json(opened is not None)) else None


class _Part(Scattered):
    """Some bytes of a file that one rank has."""

    def __init__(self, rank: int, path: Path, first: int, size: int) -> None:
        super().__init__(Kind(torch.uint8, torch.Size([size])), {rank: size})
        self._path, self._first = path, first
        self.problem = ""

    def own(self) -> Tensor:
        content = bytearray(self.kind.num_bytes)
        try:
            with open_to_read(self._path) as file:
                file.seek(self._first)
                read = file.read(len(content))
            content[: len(read)] = read
            if len(read) < len(content):
                raise OSError("is shorter than it was")
        except OSError as error:  # the others wait for it, and training needs none of it
            self.problem = f"{self._path.name}: cannot be read: {error.strerror or error}"
        return torch.frombuffer(content, dtype=torch.uint8)

    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        return next(iter(parts.values())).cpu()


def _copy(
    runtime: Runtime,
    source: int,
    targets: Sequence[int],
    folder: Path,
    sizes: Mapping[str, int],
    place: Callable[[str], Path],
    problem: str = "",
) -> str:
    """Copy files of one rank to others; a collective.

    Args:
        runtime: surroundings of this process.
        source: the rank that has the files.
        targets: ranks that get them.
        folder: their folder on that rank.
        sizes: their sizes by name.
        place: path of the copy of each.
        problem: why this rank cannot take them; empty if it can.

    Returns:
        Why this rank has not written or read them; empty if it has, or is not to.
    """
    transport = runtime.transport
    named = [
        (name, _Part(source, folder / name, first, min(_PART_BYTES, size - first)))
        for name, size in sizes.items()
        for first in range(0, size, _PART_BYTES)
    ]
    parts = [part for _, part in named]
    wanted = [parts if rank in targets else [] for rank in range(transport.size)]
    stream = gathered(transport, wanted, runtime.device)
    if transport.rank not in targets:
        exhaust(stream)
        return next((part.problem for part in parts if part.problem), "")
    for (name, _), content in zip(named, stream, strict=True):
        if problem:  # the others go on sending
            continue
        try:
            with place(name).open("ab") as file:
                file.write(content.numpy().data)
        except OSError as error:
            problem = _unwritten(error)
    return problem


def _unwritten(error: OSError) -> str:
    return f"cannot be written: {error.strerror or error}"


def _texts(runtime: Runtime, problem: str) -> list[str]:
    """The problems of all ranks, with the names of their hosts, by rank; a collective."""
    own = problem and f"{socket.gethostname()}: {problem}"
    return list(runtime.transport.gather_json(own))
