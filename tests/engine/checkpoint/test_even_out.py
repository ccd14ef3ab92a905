"""Run directories of hosts that share no disk; the hosts are threads with folders of their own."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import pytest
import torch
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.config import TrainConfig
from lockstep.config.files import open_to_read
from lockstep.engine.checkpoint import copies as copies_module
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.copies import LOGS, bring, catch_up, even_out, open_directories
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.listing import Owners
from lockstep.engine.checkpoint.owners import find_owners, on_owners, settle
from lockstep.engine.checkpoint.run_directory import Identity, RunDirectory
from lockstep.engine.checkpoint.writer import prune
from lockstep.engine.runtime import ON_DISK, Runtime
from lockstep.errors import CheckpointError, RunDirectoryError

T = TypeVar("T")
IDENTITY = Identity("task", TrainConfig().hash, "task.py:Task")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies_module, "_PART_BYTES", 100)


def on_hosts(num_hosts: int, folder: Path, body: Callable[[Runtime, RunDirectory], T]) -> list[T]:
    """Runs a rank on each host, with the run directory `<folder>/<rank>`, of which two keep all."""

    def rank(transport: ThreadTransport) -> T:
        runtime = Runtime(
            transport, torch.device("cpu"), transport.rank, "local", 0, print, lambda: None
        )
        directory = RunDirectory(folder / str(transport.rank))
        directory.checkpoints.mkdir(parents=True, exist_ok=True)
        directory.owners = find_owners(transport, directory.path, 2, is_apart=True)
        assert directory.owners.ranks == tuple(range(num_hosts))
        return body(runtime, directory)

    return on_ranks(num_hosts, rank)


def write(run_dir: Path, *steps: int, value: float = 0.0) -> None:
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for step in steps:
        model = {"x": torch.full((300,), value + step)}
        checkpoint.write(run_dir / "checkpoints", Snapshot(step, model, {}))


def contents(run_dir: Path) -> dict[str, bytes]:
    root = run_dir / "checkpoints"
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file()}


def test_who_sees_which_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = [tmp_path / name for name in ("a", "a", "b", "file/c", "b", "a")]
    found = on_ranks(6, lambda t: find_owners(t, paths[t.rank], 1, is_apart=True))
    [owners] = set(found)
    assert owners.ranks == (0, 2)
    assert owners.savers == (0,)
    assert owners.of_rank == (0, 0, 2, -1, 2, 0)
    assert len(owners.problems) == 1
    assert "file/c: cannot be made: Not a directory" in owners.problems[0]
    assert "does not see RUN of" in owners.hint("RUN")
    assert not [*(tmp_path / "a").iterdir()]
    together = on_ranks(2, lambda t: find_owners(t, tmp_path / "a", 2, is_apart=True))
    assert {owners.ranks for owners in together} == {(0,)}
    assert "all ranks share RUN" in together[0].hint("RUN")
    assert not Owners().hint("RUN")


def test_all_checkpoints_and_the_best_are_copied(tmp_path: Path) -> None:
    """Also over a damaged one; what is damaged at its source is not kept elsewhere."""
    write(tmp_path / "0", 1, 2, 3)
    write(tmp_path / "1", 2)
    listing.write_hint(tmp_path / "0" / "checkpoints", "best", "step_00000001")
    wanted = contents(tmp_path / "0")
    told = on_hosts(3, tmp_path, lambda runtime, own: bring(runtime, own, 0, 9))
    assert told[0] == told[1] == told[2]
    assert ["step_00000003" in told[0][0], "step_00000001" in told[0][1]] == [True, True]
    assert {n: c for n, c in contents(tmp_path / "1").items() if n != "latest"} == {
        n: c for n, c in wanted.items() if n != "latest"
    } | {n: c for n, c in contents(tmp_path / "1").items() if n.startswith("step_00000002")}
    assert not contents(tmp_path / "2")
    assert on_hosts(3, tmp_path, lambda runtime, own: bring(runtime, own, 0, 9)) == [[]] * 3

    write(tmp_path / "0", 4)
    model = tmp_path / "0" / "checkpoints" / "step_00000004" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    told = on_hosts(3, tmp_path, lambda runtime, own: bring(runtime, own, 0, 9))
    assert "step_00000004 is not kept there" in told[2][1]
    assert not (tmp_path / "1" / "checkpoints" / "step_00000004").exists()
    assert not list((tmp_path / "1" / "checkpoints").glob(".*"))


def test_a_host_that_cannot_write_does_not_keep_others_from_it(tmp_path: Path) -> None:
    write(tmp_path / "1", 1, 2)

    def body(runtime: Runtime, own: RunDirectory) -> list[str]:
        if runtime.transport.rank == 0:
            own.checkpoints.rmdir()
            own.checkpoints.touch()
        return bring(runtime, own, 1, 9)

    [told, same] = on_hosts(2, tmp_path, body)
    assert told == same
    assert len([text for text in told if "cannot be written: File exists" in text]) == 2


def test_the_newest_valid_one_of_all_is_found(tmp_path: Path) -> None:
    write(tmp_path / "0", 1, 3)
    write(tmp_path / "1", 1, 2)
    write(tmp_path / "2", 1)
    root = tmp_path / "2" / "checkpoints"
    listing.write_hint(root, "latest", "step_00000005")
    damaged = tmp_path / "0" / "checkpoints" / "step_00000003" / "model.safetensors"
    damaged.write_bytes(b"")

    def body(runtime: Runtime, own: RunDirectory) -> tuple[int, list[str]]:
        snapshot, _, skipped = checkpoint.newest_valid(own.checkpoints)
        evened = even_out(runtime, own, -1 if snapshot is None else snapshot.step, skipped)
        return evened.step, evened.reasons

    [(step, reasons)] = {(s, tuple(r)) for s, r in on_hosts(3, tmp_path, body)}
    assert step == 2
    assert len(reasons) == 2
    assert str(damaged) in reasons[0]
    assert reasons[1].endswith("names step_00000005, which is missing")
    assert checkpoint.read(tmp_path / "0" / "checkpoints" / "step_00000002").step == 2


def test_rank_0_must_get_it(tmp_path: Path) -> None:
    write(tmp_path / "1", 2)

    def body(runtime: Runtime, own: RunDirectory) -> None:
        if runtime.transport.rank == 0:
            own.checkpoints.rmdir()
            own.checkpoints.touch()
        even_out(runtime, own, [-1, 2][runtime.transport.rank], [])

    with pytest.raises(CheckpointError, match=r"cannot be written: File exists; step_00000002"):
        on_hosts(2, tmp_path, body)


@pytest.mark.parametrize("is_start", [True, False])
def test_a_directory_that_cannot_be_used(tmp_path: Path, is_start: bool) -> None:
    """At the start it is an error; later the others go on without it."""
    write(tmp_path / "0", 1)
    for name in LOGS:
        (tmp_path / "0" / name).write_bytes(name.encode() * 100)

    def body(runtime: Runtime, own: RunDirectory) -> tuple[list[str], bool, tuple[int, ...]]:
        rank = runtime.transport.rank

        def prepare() -> None:
            if rank == 1:
                raise RunDirectoryError("holds another run")

        told = open_directories(runtime, own, 2, True, prepare, lambda: None, is_start)
        return told, own.stores, own.owners.ranks

    if is_start:
        with pytest.raises(RunDirectoryError, match=r"holds another run$"):
            on_hosts(3, tmp_path, body)
        return
    found = on_hosts(3, tmp_path, body)
    assert [stores for _, stores, _ in found] == [True, False, True]
    assert {ranks for *_, ranks in found} == {(0, 2)}
    assert "holds another run; nothing of the run is kept there" in found[2][0][0]
    for name in LOGS:
        assert (tmp_path / "2" / name).read_bytes() == name.encode() * 100
        assert not (tmp_path / "1" / name).exists()


def test_what_one_owner_cannot_do_is_an_error_of_all(tmp_path: Path) -> None:
    def body(runtime: Runtime, own: RunDirectory) -> int:
        def act() -> int:
            if runtime.transport.rank == 1:
                raise CheckpointError("too bad")
            return 7

        assert on_owners(runtime.transport, own.owners, lambda: 7) == 7
        return on_owners(runtime.transport, own.owners, act)

    with pytest.raises(CheckpointError, match=r"^\S+: too bad$"):
        on_hosts(2, tmp_path, body)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_directory_that_is_gone_is_not_made_again(tmp_path: Path, rank: int) -> None:
    def body(runtime: Runtime, own: RunDirectory) -> tuple[tuple[int, ...], list[str]]:
        own.describe(TrainConfig(), IDENTITY)
        if runtime.transport.rank == rank:
            shutil.rmtree(own.path)
        told = open_directories(runtime, own, 1, True, lambda: None, lambda: None)
        return own.owners.ranks, told[:1] if rank else []

    [(ranks, told)] = {(ranks, tuple(told)) for ranks, told in on_hosts(3, tmp_path, body)}
    assert not (tmp_path / str(rank)).exists()
    assert ranks == [(0,), (0, 2)][rank]
    assert rank == 0 or "1: was deleted, moved or replaced; nothing of the run" in told[0]


def unreadable(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Have the disk fail where files of these names are."""

    def opened(path: Path) -> BinaryIO:
        if any(name in str(path) for name in names):
            raise OSError(errno.EIO, "Input/output error")
        return open_to_read(path)

    monkeypatch.setattr(copies_module, "open_to_read", opened)


def test_what_cannot_be_read_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it in vain, and no watchdog takes the others for hanging."""
    write(tmp_path / "0", 1, 2, 3)
    unreadable(monkeypatch, "step_00000002/model")
    states: list[int] = []

    def body(runtime: Runtime, own: RunDirectory) -> list[str]:
        state = runtime.heartbeat._memory
        monkeypatch.setattr(copies_module, "sync", lambda path: states.append(state[1]))
        return bring(runtime, own, 0, 9)

    [told, same] = on_hosts(2, tmp_path, body)
    assert told == same
    assert "model.safetensors: cannot be read: Input/output error" in told[2]
    assert "step_00000002 is not kept there" in told[3]
    folders = [f.name for f in listing.folders(tmp_path / "1" / "checkpoints")]
    assert folders == ["step_00000003", "step_00000001"]
    assert {*states} == {ON_DISK}


def test_a_history_that_cannot_be_read_is_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "0", 1)
    for name in LOGS:
        (tmp_path / "0" / name).write_bytes(name.encode() * 100)
    unreadable(monkeypatch, LOGS[0])

    def body(runtime: Runtime, own: RunDirectory) -> list[str]:
        own.stores = runtime.transport.rank == 0
        return open_directories(runtime, own, 2, True, lambda: None, lambda: None)

    [told, same] = on_hosts(2, tmp_path, body)
    assert told == same
    assert f"{LOGS[0]}: cannot be read: Input/output error; the history of the run" in told[0]
    assert not [path for path in (tmp_path / "1").iterdir() if path.is_file()]


def hints(run_dir: Path) -> list[str | None]:
    found = [listing.hinted(run_dir / "checkpoints", name) for name in ("latest", "best")]
    return [folder and folder.name for folder in found]


@pytest.mark.parametrize("source", [0, 1])
def test_what_an_earlier_run_has_left_gives_way(tmp_path: Path, source: int) -> None:
    """Also that of the same step, and its hints, which would keep the run's from being kept."""
    write(tmp_path / str(source), 1, 2)
    write(tmp_path / str(1 - source), 2, 7, 8, value=0.5)
    write(tmp_path / "2", 7, value=0.5)
    for rank in (1 - source, 2):
        listing.write_hint(tmp_path / str(rank) / "checkpoints", "best", "step_00000002")

    def body(runtime: Runtime, own: RunDirectory) -> list[str]:
        rank = runtime.transport.rank
        step = 5 if rank == 0 else 0  # which a joining rank does not know
        told = catch_up(runtime, own, step, rank != source, rank == source)
        has_some, _ = settle(runtime.transport, own.owners, own.checkpoints, [])
        assert has_some
        return told

    told, *_ = on_hosts(3, tmp_path, body)
    assert "step_00000008, step_00000007: newer than step 5 of the run" in "".join(told)
    for rank in (0, 1):
        folders = [f.name for f in listing.folders(tmp_path / str(rank) / "checkpoints")]
        assert folders == ["step_00000002", "step_00000001"]
        assert hints(tmp_path / str(rank)) == ["step_00000002", None]
    for name, content in contents(tmp_path / str(source)).items():
        assert contents(tmp_path / str(1 - source))[name] == content
    assert hints(tmp_path / "2") == ["step_00000002", None]
    assert {name.partition("/")[0] for name in contents(tmp_path / "2")} == {
        "damaged_step_00000007", "latest",
    }  # fmt: skip


def test_a_new_saver_keeps_the_best_checkpoint(tmp_path: Path) -> None:
    write(tmp_path / "0", 1, 2)
    listing.write_hint(tmp_path / "0" / "checkpoints", "best", "step_00000001")
    on_hosts(
        2, tmp_path, lambda runtime, own: catch_up(runtime, own, 2, False, own.path.name == "0")
    )
    assert hints(tmp_path / "1") == ["step_00000002", "step_00000001"]
    write(tmp_path / "1", 3)
    prune(tmp_path / "1" / "checkpoints", keep=1)
    assert [f.name for f in listing.folders(tmp_path / "1" / "checkpoints")] == [
        "step_00000003", "step_00000001",
    ]  # fmt: skip
