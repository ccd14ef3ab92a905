"""Calls in the format of PyTorch's Flight Recorder, judged by PyTorch's own analyser."""

from __future__ import annotations

import gc
import pickle
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lockstep.comm.call_records import CallLog, parse_calls
from lockstep.comm.calls import KINDS, CallGroup, CallRing
from lockstep.errors import ConfigError, DataError
from lockstep.observe.reading.flight_recorder import NAMES, write_flight

Act = Callable[..., None]


class Rank:
    """A rank that makes calls without moving anything."""

    def __init__(self, rank: int, size: int = 3) -> None:
        self.ring, self.rank = CallRing(), rank
        self.group = self.ring.start(rank, size)

    def call(
        self, kind: str, given: int = 0, taken: int = 0, peer: int = -1,
        group: CallGroup | None = None, is_done: bool = True,
    ) -> None:  # fmt: skip
        place = self.ring.begin(group or self.group, KINDS.index(kind), (given, taken, peer))
        if is_done:
            self.ring.end(place, is_done=True)

    @property
    def log(self) -> CallLog:
        return parse_calls(self.ring.copy())


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    yield
    gc.enable()  # the analyser turns it off


def analysed(folder: Path, *options: str) -> Any:
    """The analyser's database of the collectives it has found."""
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig
    from torch.distributed.flight_recorder.components.loader import read_dir

    arguments: Any = JobConfig().parse_args([str(folder), *options])
    details, version = read_dir(arguments)
    return build_db(details, arguments, version)


def loaded(folder: Path, rank: int) -> Any:
    """What the file of a rank holds."""
    return pickle.loads((folder / f"rank_{rank}").read_bytes())


def trained(rank: Rank, steps: int, uneven: bool = True) -> None:
    """What engines call in some steps."""
    for step in range(steps):
        rank.call("all_gather", 8 * (rank.rank + 1) if uneven else 8, 48)
        parts = [[3, 1, 2], [0, 4, 1], [5, 2, 2]]
        rank.call("all_to_all", sum(parts[rank.rank]), sum(part[rank.rank] for part in parts))
        rank.call("broadcast", 16, 16)
        rank.call("barrier" if step % 2 else "agree")


def test_every_kind_that_ranks_share_has_a_name_of_the_analyser() -> None:
    from torch.distributed.flight_recorder.components.types import COLLECTIVES, P2P

    assert set(NAMES.values()) <= COLLECTIVES | P2P
    assert set(KINDS) - set(NAMES) == {"finish_sending"}


@pytest.mark.parametrize("steps", [3, 700])
def test_calls_that_all_ranks_have_made_match(tmp_path: Path, steps: int) -> None:
    ranks = [Rank(number) for number in range(3)]
    for rank in ranks:
        trained(rank, steps)
    assert write_flight({5 + r.rank: r.log for r in ranks}, tmp_path / "out") == []
    found = analysed(tmp_path / "out")
    assert len(found.collectives) == min(4 * steps, 1024)
    assert all(one.pass_check and not one.missing_ranks for one in found.collectives)


def test_the_rank_that_is_missing_is_named(tmp_path: Path) -> None:
    ranks = [Rank(number) for number in range(3)]
    for rank in ranks:
        trained(rank, 2)
        if rank.rank != 1:
            rank.call("all_gather", 8, 48, is_done=False)
            rank.call("barrier", is_done=False)  # tried after the failure
    write_flight({r.rank: r.log for r in ranks}, tmp_path / "out")
    *good, last = analysed(tmp_path / "out").collectives
    assert len(good) == 8
    assert all(not one.missing_ranks for one in good)
    assert (last.collective_seq_id, last.missing_ranks) == (9, {1})
    assert last.collective_name.endswith(":_all_gather_base")
    assert [loaded(tmp_path / "out", rank)["pg_status"]["0"] for rank in (0, 1)] == [
        {"last_enqueued_collective": begun, "last_started_collective": begun,
         "last_completed_collective": 8} for begun in (9, 8)
    ]  # fmt: skip


def test_the_first_call_that_differs_is_named(tmp_path: Path) -> None:
    ranks = [Rank(number) for number in range(3)]
    for rank in ranks:
        trained(rank, 2)
        rank.call("broadcast" if rank.rank == 2 else "all_gather", 8, 48, is_done=False)
    write_flight({r.rank: r.log for r in ranks}, tmp_path / "out")
    bad = [one for one in analysed(tmp_path / "out").collectives if not one.pass_check]
    assert bad[0].collective_seq_id == 9
    # It takes the first file that it meets for what should have been.
    assert set(bad[0].mismatch_collectives) in ({2}, {0, 1})


def test_subgroups_and_messages_match_whatever_their_order(tmp_path: Path) -> None:
    ranks = [Rank(number, 4) for number in range(4)]
    pairs = {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3]}
    dice = random.Random(2)
    for rank in ranks:
        rank.call("subgroup")
        inner = rank.ring.subgroup(pairs[rank.rank])
        other = 1 - pairs[rank.rank].index(rank.rank)
        for _ in range(6):
            acts: list[tuple[Any, ...]] = [("send", 8, 0, other), ("receive", 0, 8, other)]
            for act in dice.sample(acts, 2):
                rank.call(*act, group=inner)
            rank.call("finish_sending", group=inner)
            rank.call("all_gather", 8, 16, group=inner)
            rank.call("all_gather", 8, 32)
    write_flight({r.rank: r.log for r in ranks}, tmp_path / "out")
    found = analysed(tmp_path / "out")
    assert all(one.pass_check and not one.missing_ranks for one in found.collectives)
    # A split, and in six rounds one of all, two of pairs, and four messages.
    assert len(found.collectives) == 1 + 6 * (1 + 2 + 4)


def test_ranks_of_which_nothing_is_known_are_told_and_the_analyser_goes_without(
    tmp_path: Path,
) -> None:
    ranks = [Rank(0), Rank(2)]
    for rank in ranks:
        trained(rank, 1)
    assert write_flight({r.rank: r.log for r in ranks}, tmp_path / "out") == [1]
    assert analysed(tmp_path / "out", "--allow-incomplete-ranks").collectives


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    rank = Rank(0, 1)
    with pytest.raises(ConfigError, match="is not empty"):
        write_flight({0: rank.log}, tmp_path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_flight({0: rank.log}, tmp_path / "notes")


@pytest.mark.slow
def test_memory_does_not_grow_with_the_square_of_the_ranks(tmp_path: Path) -> None:
    ranks = [Rank(number, 1024) for number in range(16)]
    for rank in ranks:
        for _ in range(200):
            rank.call("barrier")
    logs = {r.rank: r.log for r in ranks}
    tracemalloc.start()
    try:
        assert write_flight(logs, tmp_path / "out") == list(range(16, 1024))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A list of the ranks takes 8 KiB, and for each call it would be 25 MiB.
    assert peak < 8 << 20
    assert loaded(tmp_path / "out", 3)["pg_config"]["0"]["ranks"] == str(list(range(1024)))


def test_more_ranks_than_there_are_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"out: the calls are of 1,048,576 ranks, .* at most 1,024"):
        write_flight({0: Rank(0, 1 << 20).log}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_rank_of_a_group_of_another_size_has_called_does_not_count(tmp_path: Path) -> None:
    ranks = [Rank(0), Rank(1)]
    for rank, later in zip(ranks, (3, 1100), strict=True):
        rank.call("subgroup")
        rank.call("barrier", group=rank.ring.subgroup([0, 1]))
        for _ in range(later):
            rank.call("barrier")
    smaller = Rank(1, 2)
    logs = {0: ranks[0].log, 1: ranks[1].log, 9: smaller.log}
    assert write_flight(logs, tmp_path / "out") == [2]
    # Rank 1 has made the call of the subgroup too: it is only no longer known.
    names = {entry["process_group"][0] for entry in loaded(tmp_path / "out", 0)["entries"]}
    assert "1" not in names
