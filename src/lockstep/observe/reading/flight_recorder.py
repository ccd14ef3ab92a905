"""Calls of ranks in the format of PyTorch's Flight Recorder, for its analyser.

The format is that of `torch.distributed.flight_recorder` (torch 2.13): a file for each rank with a
pickled dict of plain values. The analyser finds the first collective that the ranks of a group have
not all made alike. Lockstep itself never reads such a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.comm.call_records import Call, CallLog
from lockstep.comm.calls import NUM_RECORDS
from lockstep.config.files import replacing_binary
from lockstep.engine.call_history import MOST_FILES, listed
from lockstep.errors import ConfigError, DataError, file_errors

VERSION = "2.10"
"""Version of the format, by which the analyser chooses how to read it."""

PREFIX = "rank_"
"""Prefix of the names of files; the rank follows."""

NAMES = {
    "all_gather": "_all_gather_base", "all_to_all": "all_to_all", "broadcast": "broadcast",
    "barrier": "barrier", "agree": "barrier", "regroup": "barrier", "subgroup": "split",
    "send": "send", "receive": "recv",
}  # fmt: skip
"""The analyser's names of calls, by Lockstep's."""

_BACKEND = "gloo"
"""The analyser knows only PyTorch's backends, so calls over MPI get this name too."""


@dataclass(frozen=True, eq=False)
class _Group:
    """A process group of the analyser, whose calls are numbered.

    Messages are numbered for each sender and receiver, so each such pair is a group of two. All
    ranks share one object of each group, since comparing its ranks for each call would be slow.
    """

    name: str
    ranks: tuple[int, ...]
    description: str


_Groups = dict[tuple[str, int], _Group]
"""Groups by name and first rank: subgroups that are made at the same time have one number."""


def write_flight(logs: Mapping[int, CallLog], folder: Path) -> list[int]:
    """Write a file for each rank.

    Args:
        logs: the newest calls, by slot; only those of the largest group are written.
        folder: folder of the files, which is created.

    Returns:
        The ranks of which nothing is known.

    Raises:
        DataError: the group has too many ranks.
        ConfigError: the folder is not empty, or cannot be written.
    """
    size = max(log.size for log in logs.values())
    if size > MOST_FILES:
        raise DataError(
            f"--flight {folder}: the calls are of {size:,} ranks, and those of at most "
            f"{MOST_FILES:,} can be written; leave out --flight"
        )
    by_rank = {log.rank: log for log in logs.values() if log.size == size}
    world = _Group("0", tuple(range(size)), "all ranks")
    groups: _Groups = {("0", 0): world}
    calls = {rank: _grouped(log, groups) for rank, log in by_rank.items()}
    # Of these ranks all calls are known.
    whole = {rank for rank, log in by_rank.items() if len(log.calls) < NUM_RECORDS}
    firsts = _firsts(calls, whole)
    with file_errors(ConfigError, f"--flight {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"--flight {folder}: is not empty; choose a new folder")
        for rank, own in calls.items():
            kept = [(g, call) for g, call in own if g in firsts and call.number >= firsts[g]]
            with replacing_binary(folder / f"{PREFIX}{rank}") as file:
                pickle.dump(_dump(rank, world, kept), file, protocol=2)
    return [rank for rank in range(size) if rank not in by_rank]


def _grouped(log: CallLog, groups: _Groups) -> list[tuple[_Group, Call]]:
    """The calls of a rank that the analyser knows, each with its group.

    Args:
        log: the calls of the rank.
        groups: all groups; new ones are added.
    """
    found = []
    for call in log.until_stuck:
        ranks = log.ranks(call.group)
        if call.kind not in NAMES or ranks is None or log.rank not in ranks:
            continue
        if not call.is_message:
            group = _Group(str(call.group), tuple(ranks), f"subgroup {call.group}")
        elif 0 <= call.peer < len(ranks):
            ends = (log.rank, ranks[call.peer])
            source, to = ends if call.kind == "send" else ends[::-1]
            description = f"messages from rank {source} to rank {to}"
            group = _Group(f"{call.group}:{source}:{to}", tuple(sorted(ends)), description)
        else:
            continue
        found.append((groups.setdefault((group.name, group.ranks[0]), group), call))
    return found


def _firsts(
    calls: Mapping[int, Sequence[tuple[_Group, Call]]], whole: set[int]
) -> dict[_Group, int]:
    """The number in each group from which the calls of all its ranks are known.

    Args:
        calls: calls of each rank.
        whole: ranks of which all calls are known.
    """
    least: dict[_Group, dict[int, int]] = {}
    for rank, own in calls.items():
        for group, call in own:
            numbers = least.setdefault(group, {})
            numbers[rank] = min(call.number, numbers.get(rank, call.number))
    return {
        group: max(numbers.values())
        for group, numbers in least.items()
        if all(rank in numbers or rank in whole or rank not in calls for rank in group.ranks)
    }


def _dump(rank: int, world: _Group, calls: Sequence[tuple[_Group, Call]]) -> dict[str, Any]:
    """The content of a rank's file."""
    by_group: dict[_Group, list[Call]] = {world: []}
    for group, call in calls:
        by_group.setdefault(group, []).append(call)
    return {
        "version": VERSION,
        "pg_config": {
            group.name: {
                "name": group.name,
                "desc": group.description,
                "ranks": str(list(group.ranks)),
            }
            for group in by_group
        },
        "pg_status": {group.name: _status(own) for group, own in by_group.items()},
        "entries": [_entry(index, rank, group, call) for index, (group, call) in enumerate(calls)],
    }


def _status(calls: Sequence[Call]) -> dict[str, int]:
    begun = max((call.number for call in calls), default=0)
    done = max((call.number for call in calls if call.is_done), default=0)
    return {
        "last_enqueued_collective": begun,
        "last_started_collective": begun,
        "last_completed_collective": done,
    }


def _entry(index: int, rank: int, group: _Group, call: Call) -> dict[str, Any]:
    """A call in the analyser's format, with sizes in bytes."""
    given, taken = _sizes(call)
    return {
        "record_id": index,
        "pg_id": 0,
        "process_group": (group.name, group.description),
        "collective_seq_id": call.number,
        "p2p_seq_id": call.number if call.is_message else 0,
        "op_id": index + 1,
        "profiling_name": f"{_BACKEND}:{NAMES[call.kind]}{_ends(rank, group, call)}",
        "time_created_ns": call.begun_ns,
        "input_sizes": [given],
        "input_dtypes": ["Byte"],
        "output_sizes": [taken],
        "output_dtypes": ["Byte"],
        "state": "completed" if call.is_done else "started",
        "time_discovered_started_ns": call.begun_ns,
        "time_discovered_completed_ns": call.ended_ns if call.is_done else None,
        "retired": call.is_done,
        "timeout_ms": 0,
        "is_p2p": call.is_message,
        "frames": [],
    }


def _sizes(call: Call) -> tuple[list[int], list[int]]:
    """Shapes of input and output; empty where ranks may differ."""
    if call.kind == "all_gather":
        return [], [call.taken]
    if call.kind in ("all_to_all", "broadcast"):
        return [call.given], [call.taken]
    return ([call.given], []) if call.kind == "send" else ([], [call.taken])


def _ends(rank: int, group: _Group, call: Call) -> str:
    """The sender and the receiver of a message, as indices in the group."""
    if not call.is_message:
        return ""
    own = group.ranks.index(rank)
    return f" {own}->{1 - own}" if call.kind == "send" else f" {own}<-{1 - own}"


def missing(ranks: Sequence[int]) -> Iterator[str]:
    """The message about ranks of which nothing is known."""
    if ranks:
        yield f"of {listed(ranks)} nothing is known; add --allow-incomplete-ranks"
