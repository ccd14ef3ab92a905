"""Checkpoints that several ranks write: each of them some files, in one folder.

Tensors whose elements are on several ranks come together on the rank that writes them. That takes
the memory of what is sent and received in a round: some small tensors, or one large one.

Rank 0 makes the folder. Each rank that sees it makes a note there, empty at first, and says in it
what it has written. When all have, rank 0 adds what is left, and renames the folder. Where some
rank does not see the folder, or little is to be written, rank 0 writes all files. Other ranks that
keep checkpoints (`owners.py`) do the same with the ranks that see theirs.
"""

from __future__ import annotations

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.transport import GroupBroken, Transport, offsets
from lockstep.config.files import read_text
from lockstep.config.parsing import parse_object
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.listing import FIRST, Owners
from lockstep.engine.checkpoint.tensor_files import Kind, Tensors, grouped, index_name, index_of

ROUND_BYTES = 4 << 20
"""About the most bytes that a rank receives in a round, unless a tensor is larger."""
_ALIGNMENT = 8
"""Bytes: what a rank sends of a tensor begins at a multiple of it."""
_POLL_S = 0.02
_PATIENCE_S = 10.0
"""How long a process that is about to end waits for others, if no file grows."""


class Scattered(ABC):
    """A tensor whose elements are on several ranks.

    Attributes:
        kind: dtype and shape of the whole tensor.
        counts: number of elements that each rank sends which sends some.
    """

    def __init__(self, kind: Kind, counts: Mapping[int, int]) -> None:
        self.kind, self.counts = kind, counts

    @abstractmethod
    def own(self) -> Tensor:
        """The elements that this rank sends, [n]."""

    @abstractmethod
    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        """The tensor, of what each rank has sent."""

    def num_bytes(self, rank: int) -> int:
        """Size of what a rank sends, with what fills it up to the next one's place."""
        size = self.counts.get(rank, 0) * self.kind.dtype.itemsize
        return -(-size // _ALIGNMENT) * _ALIGNMENT


class Held(Scattered):
    """A tensor that one rank has."""

    def __init__(self, kind: Kind, rank: int, tensor: Tensor | None) -> None:
        """Note it.

        Args:
            kind: dtype and shape.
            rank: the rank that has it.
            tensor: it, on that rank.
        """
        super().__init__(kind, {rank: kind.shape.numel()})
        self._tensor = tensor

    def own(self) -> Tensor:
        """All of it."""
        assert self._tensor is not None, "only the rank that has it sends it"
        return self._tensor.detach().reshape(-1)

    def whole(self, parts: Mapping[int, Tensor]) -> Tensor:
        """What that rank has sent."""
        return next(iter(parts.values())).view(self.kind.shape)


class GatheringFailed(Exception):
    """This rank cannot take part in a collective that the others are in: the run must end."""


def gathered(
    transport: Transport, wanted: Sequence[Sequence[Scattered]], device: torch.device
) -> Iterator[Tensor]:
    """The tensors that this rank wants, one after another, on the host; a collective.

    All ranks have to exhaust it, also those that want nothing.

    Args:
        transport: the group of ranks.
        wanted: for each rank, the tensors that it wants, in order.
        device: device of the elements.

    Raises:
        GroupBroken: a rank was lost.
        GatheringFailed: this rank could not go on, such as for want of memory.
    """
    rounds = [_rounds(of_rank) for of_rank in wanted]
    for number in range(max(map(len, rounds))):
        now = [of_rank[number] if number < len(of_rank) else [] for of_rank in rounds]
        try:
            yield from _gathered_at_once(transport, now, device)
        except GroupBroken:
            raise
        except Exception as error:
            raise GatheringFailed(f"{type(error).__name__}: {error}") from error


def _rounds(wanted: Sequence[Scattered]) -> list[list[Scattered]]:
    """What a rank receives in each round."""
    rounds: list[list[Scattered]] = []
    size = 0
    for tensor in wanted:
        if not rounds or size + tensor.kind.num_bytes > ROUND_BYTES:
            rounds.append([])
            size = 0
        rounds[-1].append(tensor)
        size += tensor.kind.num_bytes
    return rounds


def _gathered_at_once(
    transport: Transport, now: Sequence[Sequence[Scattered]], device: torch.device
) -> Iterator[Tensor]:
    rank, ranks = transport.rank, range(transport.size)
    sizes = [sum(tensor.num_bytes(rank) for tensor in of_rank) for of_rank in now]
    sent = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    first = 0
    for tensor in (tensor for of_rank in now for tensor in of_rank):
        if tensor.counts.get(rank):
            own = tensor.own().contiguous().view(torch.uint8)
            sent[first : first + len(own)] = own
            first += tensor.num_bytes(rank)
    mine = now[rank]
    counts = [sum(tensor.num_bytes(by) for tensor in mine) for by in ranks]
    received = torch.empty(sum(counts), dtype=torch.uint8, device=device)
    # Transports count elements, of which there may be 2 GiB.
    sizes, words = ([n // _ALIGNMENT for n in of_ranks] for of_ranks in (sizes, counts))
    transport.all_to_all(
        sent.view(torch.int64), sizes, offsets(sizes), received.view(torch.int64), words
    )
    del sent
    received = received.cpu()
    places = offsets(counts)
    for tensor in mine:
        parts = {}
        for by, count in tensor.counts.items():
            last = places[by] + count * tensor.kind.dtype.itemsize
            parts[by] = received[places[by] : last].view(tensor.kind.dtype)
            places[by] += tensor.num_bytes(by)
        yield tensor.whole(parts)


Files = dict[str, Mapping[str, Scattered] | bytes]
"""Files by name: the tensors of each, or its content."""


class GivenUp(Exception):
    """Another rank was lost before it had written its files."""


def files_of(name: str, tensors: Mapping[str, Scattered], most_bytes: int) -> Files:
    """The files of some tensors, and their index if there are several; see `grouped`."""
    groups = grouped(name, {each: tensor.kind for each, tensor in tensors.items()}, most_bytes)
    files: Files = {file: {n: tensors[n] for n in group} for file, group in groups.items()}
    if len(groups) > 1:
        files[index_name(name)] = index_of(groups)
    return files


class OwnShare:
    """The files of a checkpoint that this rank writes.

    Attributes:
        folder: folder of the checkpoint, under its temporary name.
        writers: the ranks that write some into it.
        leads: whether this rank completes the checkpoint there.
        is_shared: whether several ranks write, in this folder or in others.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        files: Files,
        names: Sequence[list[str]],
        leaders: Sequence[int | None] | None = None,
    ) -> None:
        """Begin with nothing written.

        Args:
            folder: folder of the checkpoint, under its temporary name.
            rank: number of this rank.
            files: all files.
            names: those that each rank writes.
            leaders: for each rank the one that made its folder; None for rank 0.
        """
        self.folder, self._rank, self._files, self._names = folder, rank, files, names
        by = [0] * len(names) if leaders is None else leaders
        writers = [rank for rank, of_rank in enumerate(names) if of_rank]
        self.leads, self.is_shared = by[rank] == rank, len(writers) > 1
        self.writers = [writer for writer in writers if by[writer] == by[rank]]
        self._own_note: dict[str, Any] = {}
        self._is_given_up, self._all_have_ended = threading.Event(), threading.Event()

    def gathered(
        self, transport: Transport, device: torch.device
    ) -> tuple[dict[str, Tensors | bytes], Iterator[Tensor]]:
        """The content of this rank's files, gathered while it is read, in order; a collective.

        Returns:
            The content by name; and all tensors in it, which every rank has to exhaust.
        """
        tensors = {n: [*f.values()] for n, f in self._files.items() if not isinstance(f, bytes)}
        wanted = [[t for n in of_rank for t in tensors.get(n, ())] for of_rank in self._names]
        stream = gathered(transport, wanted, device)
        own: dict[str, Tensors | bytes] = {}
        for name in self._names[self._rank]:
            content = self._files[name]
            if not isinstance(content, bytes):
                kinds = {each: tensor.kind for each, tensor in content.items()}
                own[name] = Tensors(kinds, islice(stream, len(kinds)))
            else:
                own[name] = content
        return own, stream

    def write(
        self, files: Mapping[str, Tensors | bytes], halfway: Callable[[], None] = lambda: None
    ) -> None:
        """Write files, and note that they are there, or why they are not.

        Args:
            files: content by name.
            halfway: called before the note is written, except on who leads.

        Raises:
            GroupBroken: a rank was lost whose tensors are gathered.
            GatheringFailed: see `gathered`.
        """
        note: dict[str, Any]
        try:
            note = {"files": checkpoint.write_files(self.folder, files)}
        except (GroupBroken, GatheringFailed):
            raise
        except OSError as error:
            note = {"error": f"{error.strerror or error} (rank {self._rank})"}
        except Exception as error:
            note = {"bug": f"{type(error).__name__}: {error} (rank {self._rank})"}
        self._own_note = note
        if self.leads:
            return
        halfway()
        path = _note(self.folder, self._rank)
        try:
            with path.open("w", encoding="utf-8") as file:
                file.write(json.dumps(note) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            # To remove a file works on a full disk, too.
            with suppress(OSError):
                path.unlink()

    def give_up(self) -> None:
        """Wait no longer for notes of other ranks, some of which may be lost."""
        self._is_given_up.set()

    def all_have_ended(self) -> None:
        """Expect no more of any note: each rank has written its own, or has failed to."""
        self._all_have_ended.set()

    def entries(self) -> dict[str, Any]:
        """The entries of all files in a manifest, when all ranks have written theirs; on who leads.

        Raises:
            OSError: one could not.
            GivenUp: a rank was lost.
        """
        files: dict[str, Any] = {}
        for rank in self.writers:
            note = self._awaited(rank) if rank != self._rank else self._own_note
            if "bug" in note:
                raise RuntimeError(note["bug"])
            if "error" in note:
                raise OSError(note["error"])
            files |= note["files"]
        for note_file in self.folder.glob(_note(self.folder, "*").name):
            note_file.unlink()
        for name, entry in files.items():
            if (self.folder / name).stat().st_size != entry["bytes"]:
                raise OSError(f"{name} is not whole here")
        return files

    def _awaited(self, rank: int) -> dict[str, Any]:
        """What a rank has noted."""
        size, since = -1, 0.0
        while True:
            is_final = self._all_have_ended.is_set()  # before the note is read
            try:
                text = read_text(_note(self.folder, rank))
            except FileNotFoundError:
                return {"error": f"rank {rank} could not write its files"}
            if text.endswith("\n"):
                return parse_object(text)
            if is_final:
                return {"error": f"rank {rank} could not say what it has written"}
            is_over = False
            if not threading.main_thread().is_alive():
                # Nobody will say that a rank was lost; but others may still be writing.
                before, size = size, sum(path.stat().st_size for path in self.folder.iterdir())
                since = since if size == before else time.monotonic()
                is_over = time.monotonic() > since + _PATIENCE_S
            if is_over or self._is_given_up.wait(_POLL_S):
                raise GivenUp


def on_host(files: Mapping[str, Tensors | bytes]) -> dict[str, Tensors | bytes]:
    """The same content in host memory."""
    return {
        name: content
        if isinstance(content, bytes)
        else Tensors(content.kinds, [tensor.cpu() for tensor in content.content])
        for name, content in files.items()
    }


def exhaust(stream: Iterator[Tensor]) -> None:
    """Take part in gathering what is left."""
    for _ in stream:
        pass


def meet(
    transport: Transport,
    make: Callable[[], Path | None],
    files: Files,
    most_bytes: int,
    owners: Owners = FIRST,
) -> OwnShare | None:
    """Agree on folders, and on who writes which files into them; a collective.

    Args:
        transport: the group of ranks.
        make: makes the folder, on ranks that keep checkpoints; returns None if there can be none.
        files: all files.
        most_bytes: size up to which who has made a folder writes all of them.
        owners: who owns which run directory.

    Returns:
        The share of this rank; None if there is no folder.
    """
    rank, ranks = transport.rank, range(transport.size)
    made = make() if rank in owners.savers else None
    where = transport.gather_json(str(made) if made is not None else "")
    if not any(where):
        return None
    leaders = [by if by >= 0 and where[by] else None for by in map(owners.of, ranks)]
    own, sees_it = leaders[rank], False
    sizes = {name: _num_bytes(content) for name, content in files.items()}
    is_small = sum(sizes.values()) <= most_bytes
    folder = Path(where[own]) if own is not None else Path()
    with suppress(OSError):
        if own not in (rank, None) and not is_small:
            _note(folder, rank).touch(exist_ok=False)
        sees_it = True
    seen = [True] * transport.size if is_small else transport.gather_json(sees_it)
    names = list[list[str]]([] for _ in ranks)
    for leader in {by for by in leaders if by is not None}:
        near = [by for by in ranks if leaders[by] == leader]
        _assign(sizes, near if not is_small and all(seen[by] for by in near) else [leader], names)
    return OwnShare(folder, rank, files, names, leaders)


def _assign(sizes: Mapping[str, int], writers: Sequence[int], names: list[list[str]]) -> None:
    """Add each file to the names of one of the writers, the one with the fewest bytes so far."""
    loads = dict.fromkeys(writers, 0)
    for name, num_bytes in sizes.items():
        lightest = min(writers, key=lambda by: (loads[by], by))
        names[lightest].append(name)
        loads[lightest] += num_bytes


def _num_bytes(content: Mapping[str, Scattered] | bytes) -> int:
    if isinstance(content, bytes):
        return len(content)
    return sum(tensor.kind.num_bytes for tensor in content.values())


def _note(folder: Path, rank: int | str) -> Path:
    return folder / f".rank_{rank}.json"
