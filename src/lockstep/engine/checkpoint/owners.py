"""Finding out who writes to which run directory, where hosts share no file system (`Owners`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from lockstep.comm.shared_memory import hosts_of
from lockstep.comm.transport import Transport
from lockstep.config.files import create_beside
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.listing import Owners
from lockstep.engine.runtime import everywhere, on_first
from lockstep.errors import LockstepError, RunDirectoryError, shared

T = TypeVar("T")


def find_owners(
    transport: Transport, path: Path, copies: int, is_apart: bool, is_gone: bool = False
) -> Owners:
    """Find out which ranks see which run directory; a collective.

    Args:
        transport: the group of ranks.
        path: path of the run directory on each host.
        copies: number of hosts that are to keep checkpoints.
        is_apart: whether hosts may have directories of their own.
        is_gone: whether that of this process was deleted, moved or replaced; it stays so.
    """
    if not is_apart or transport.size == 1:
        return Owners(copies=copies)

    def make_mark() -> str:
        if is_gone:
            return ""
        try:
            path.mkdir(parents=True, exist_ok=True)
            mark, descriptor = create_beside(path / "owner")
        except OSError:
            return ""
        os.close(descriptor)
        return mark.name

    mark = on_first(transport, make_mark)
    place, problem = _place(path, mark, is_gone)
    host, hosts = socket.gethostname(), hosts_of(transport)
    told = transport.gather_json([place, problem and f"{host}: {path}: {problem}", host])
    if transport.rank == 0 and mark:
        (path / mark).unlink(missing_ok=True)
    names = tuple(theirs[2] for theirs in told)
    if not mark:  # it is gone, as rank 0 will find
        return Owners(copies=copies, hosts=names)
    # The same folder may have other numbers on other hosts; but only that of rank 0 is shared.
    keys = [
        None if theirs[1] else (hosts[rank], theirs[0]) if rank and theirs[0] else "first"
        for rank, theirs in enumerate(told)
    ]
    of_rank = tuple(-1 if key is None else keys.index(key) for key in keys)
    problems = tuple(dict.fromkeys(theirs[1] for theirs in told if theirs[1]))
    ranks = tuple(sorted({*of_rank} - {-1}))
    return Owners(ranks, copies, of_rank, names, problems)


def _place(path: Path, mark: str, is_gone: bool) -> tuple[str, str]:
    """What tells this folder from others of its host (nothing if it is rank 0's); what is wrong."""
    if mark and os.path.exists(path / mark):
        return "", ""
    if is_gone:
        return "", "was deleted, moved or replaced"
    try:
        path.mkdir(parents=True, exist_ok=True)
        status = os.stat(path)
    except OSError as error:
        return "", f"cannot be made: {error.strerror}"
    return f"{status.st_dev} {status.st_ino}", ""


def on_owners(transport: Transport, owners: Owners, action: Callable[[], T]) -> T:
    """What `action` returns on rank 0; owners run it, without communication; a collective.

    Raises:
        LockstepError: on every rank, if it was raised on any.
    """
    if not owners.are_several:
        result: T = on_first(transport, action)
        return result

    def act() -> T | None:
        if transport.rank not in owners.ranks:
            return None
        try:
            with transport.observer.on_disk():
                return action()
        except LockstepError as error:
            raise type(error)(f"{owners.hosts[transport.rank]}: {error}") from None

    found: T = transport.gather_json(everywhere(transport, act))[0]
    return found


def tried(
    transport: Transport, owners: Owners, action: Callable[[], object], is_start: bool
) -> tuple[Owners, list[str]]:
    """The owners that can do something beside rank 0, and why others cannot; a collective.

    Args:
        transport: the group of ranks.
        owners: all that may be able to.
        action: what they do, without communication; rank 0 has done it.
        is_start: whether all have to be able to.

    Raises:
        RunDirectoryError: one cannot, at the start; on all ranks.
    """
    own = ""
    if transport.rank in owners.ranks[1:]:
        try:
            with transport.observer.on_disk():
                action()
        except (LockstepError, OSError) as error:
            own = f"{socket.gethostname()}: {error}"
    everyone = transport.gather_json(own)
    problems = [text for text in everyone if text]
    if problems and is_start:
        raise shared(RunDirectoryError(problems[0]))
    ranks = tuple(rank for rank in owners.ranks if not everyone[rank])
    of_rank = tuple(by if by in ranks else -1 for by in owners.of_rank)
    return replace(owners, ranks=ranks, of_rank=of_rank), problems


def settle(
    transport: Transport, owners: Owners, root: Path, problems: list[str]
) -> tuple[bool, list[str]]:
    """Note everywhere that there is a checkpoint, and share what went wrong; a collective.

    Args:
        transport: the group of ranks.
        owners: who owns which run directory.
        root: folder of all checkpoints.
        problems: what the user does not know of this rank; is emptied.

    Returns:
        Whether there is one; and the problems of other ranks, with the names of their hosts.
    """
    rank = transport.rank
    saved = listing.read_hint(root, "latest") if rank in owners.savers else None
    told = transport.gather_json([-1 if saved is None else listing.step_of(saved), problems])
    problems.clear()
    step: int = max(newest for newest, _ in told)
    # Or a start without the hosts that keep it would take the run for a new one.
    if rank in owners.ranks and rank not in owners.savers and step >= 0:
        with suppress(OSError):
            listing.mark_latest(root, step)
    others = (by for by in range(transport.size) if by != rank)
    return step >= 0, [f"{owners.hosts[by]}: {text}" for by in others for text in told[by][1]]
