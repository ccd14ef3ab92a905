from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch

from lockstep.config import CheckpointConfig
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint import writer as writer_module
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.listing import folder_name
from lockstep.engine.checkpoint.share import OwnShare
from lockstep.engine.checkpoint.writer import AsyncWriter
from lockstep.engine.events import Checkpointed, Event, Warned
from lockstep.engine.runtime import ON_DISK, Heartbeat
from lockstep.errors import CheckpointError

both = pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])


def snapshot(step: int, value: float = 1.0) -> Callable[[], Snapshot]:
    return lambda: Snapshot(step, {"weight": torch.full((4,), value)}, {})


class Heard(list[Event]):
    """All events, and a writer that emits them."""

    def __init__(self, root: Path, keep: int = 3, background: bool = True) -> None:
        super().__init__()
        self.heartbeat = Heartbeat()
        self.writer = AsyncWriter(
            root,
            CheckpointConfig(keep=keep, background=background),
            self.append,
            self.heartbeat,
        )

    def save(self, step: int, best: bool = False) -> None:
        self.writer.save(snapshot(step), best, perf_counter())


def fail_with(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "write", fail)


@both
def test_a_checkpoint_is_written_and_reported(tmp_path: Path, background: bool) -> None:
    heard = Heard(tmp_path, background=background)
    heard.save(5)
    folder = heard.writer.finish(5)
    assert folder == tmp_path / folder_name(5)
    assert checkpoint.read(folder).model["weight"].tolist() == [1.0] * 4
    [event] = heard
    assert isinstance(event, Checkpointed)
    assert (event.step, event.path) == (5, str(folder))
    assert event.num_bytes == sum(p.stat().st_size for p in folder.iterdir())
    assert event.stall_s >= 0
    assert event.write_s > 0
    heard.writer.poll()
    assert len(heard) == 1


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    heard, gate = Heard(tmp_path), threading.Event()
    writers: list[threading.Thread] = []

    def make() -> Snapshot:
        writers.append(threading.current_thread())
        assert gate.wait(30)
        return snapshot(1)()

    heard.writer.save(make, False, perf_counter())
    heard.writer.poll()
    assert heard == []
    assert listing.folders(tmp_path) == []
    gate.set()
    heard.writer.wait()
    assert [type(e) for e in heard] == [Checkpointed]
    assert writers != [threading.current_thread()]


def test_one_checkpoint_is_written_at_a_time(tmp_path: Path) -> None:
    heard, running = Heard(tmp_path), threading.Semaphore(1)

    def make(step: int) -> Callable[[], Snapshot]:
        def taken() -> Snapshot:
            assert running.acquire(blocking=False)
            threading.Event().wait(0.02)
            running.release()
            return snapshot(step)()

        return taken

    for step in (1, 2, 3):
        heard.writer.save(make(step), False, perf_counter())
    heard.writer.wait()
    assert [(type(e), e.step) for e in heard] == [(Checkpointed, step) for step in (1, 2, 3)]


def test_without_a_background_thread_the_checkpoint_is_there_at_once(tmp_path: Path) -> None:
    heard = Heard(tmp_path, background=False)
    threads = threading.active_count()
    heard.save(1)
    assert threading.active_count() == threads
    assert [p.name for p in listing.folders(tmp_path)] == [folder_name(1)]
    assert [type(e) for e in heard] == [Checkpointed]


def test_seconds_stood_still_count_from_when_training_stopped(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    heard.writer.save(snapshot(1), False, perf_counter() - 7.0)
    heard.writer.wait()
    assert 7.0 <= heard[0].stall_s < 17.0  # type: ignore[attr-defined]


@both
def test_only_the_newest_and_the_best_are_kept(tmp_path: Path, background: bool) -> None:
    heard = Heard(tmp_path, keep=2, background=background)
    for step in (1, 2, 3, 4, 5):
        heard.save(step, best=step == 2)
    heard.writer.wait()
    assert [p.name for p in listing.folders(tmp_path)] == [folder_name(s) for s in (5, 4, 2)]
    assert listing.read_hint(tmp_path, "best") == tmp_path / folder_name(2)
    assert listing.read_hint(tmp_path, "latest") == tmp_path / folder_name(5)


@both
def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    heard = Heard(tmp_path, background=background)
    heard.save(1)
    heard.writer.wait()
    heard.clear()
    with monkeypatch.context() as patch:
        fail_with(patch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
        heard.save(2)
        heard.writer.wait()
    [event] = heard
    assert isinstance(event, Warned)
    assert event.step == 2
    assert f"the checkpoint of step 2 could not be written to {tmp_path}" in event.message
    assert "No space left on device" in event.message
    assert [p.name for p in listing.folders(tmp_path)] == [folder_name(1)]
    heard.save(3)
    heard.writer.wait()
    assert [(type(e), e.step) for e in heard[1:]] == [(Checkpointed, 3)]


def test_a_disk_that_fills_up_while_writing_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = Heard(tmp_path)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    heard.save(1)
    heard.writer.wait()
    assert [type(e) for e in heard] == [Warned]
    assert list(tmp_path.iterdir()) == []


@both
@pytest.mark.parametrize("poll", ["poll", "wait", "save", "finish"])
def test_any_other_error_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool, poll: str
) -> None:
    heard = Heard(tmp_path, background=background)
    with monkeypatch.context() as patch:
        fail_with(patch, ZeroDivisionError("a bug"))
        if not background:
            with pytest.raises(ZeroDivisionError, match="a bug"):
                heard.save(1)
            return
        heard.save(1)
        assert heard.writer._thread is not None
        heard.writer._thread.join()
    calls: dict[str, Callable[[], object]] = {
        "poll": heard.writer.poll,
        "wait": heard.writer.wait,
        "save": lambda: heard.save(2),
        "finish": lambda: heard.writer.finish(1),
    }
    with pytest.raises(ZeroDivisionError, match="a bug"):
        calls[poll]()
    heard.writer.poll()
    assert heard == []


def test_an_error_while_taking_the_snapshot_is_raised_too(tmp_path: Path) -> None:
    def make() -> Snapshot:
        raise RuntimeError("no memory")

    heard = Heard(tmp_path)
    heard.writer.save(make, False, perf_counter())
    with pytest.raises(RuntimeError, match="no memory"):
        heard.writer.wait()


@both
def test_a_run_does_not_end_without_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    heard = Heard(tmp_path, background=background)
    fail_with(monkeypatch, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    heard.save(9)
    with pytest.raises(CheckpointError) as caught:
        heard.writer.finish(9)
    assert str(caught.value).startswith(f"{tmp_path / folder_name(9)}: the last checkpoint")
    assert [type(e) for e in heard] == [Warned]


def test_who_waits_for_a_slow_disk_is_not_taken_for_hung_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "SLOW_S", 0.05)
    heard, gate = Heard(tmp_path), threading.Event()
    waits: list[int] = []

    def at(moment: str, step: int) -> None:
        assert gate.wait(30)

    heard.writer = AsyncWriter(tmp_path, CheckpointConfig(), heard.append, heard.heartbeat, at)
    heard.save(7)
    assert heard.heartbeat._memory[1] == 0
    release = threading.Timer(0.2, lambda: (waits.append(heard.heartbeat._memory[1]), gate.set()))
    release.start()
    heard.writer.wait()
    release.join()
    assert waits == [ON_DISK]
    assert heard.heartbeat._memory[1] == 0
    assert [type(e) for e in heard] == [Warned, Checkpointed]
    assert "training has waited 0.05 s for the checkpoint of step 7" in heard[0].message  # type: ignore[attr-defined]


def test_who_writes_what_it_gathers_is_not_taken_for_hung_either(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    waits: list[int] = []

    def at(moment: str, step: int) -> None:
        heard.heartbeat.wait()  # the tensors of other ranks
        heard.heartbeat.go()
        waits.append(heard.heartbeat._memory[1])

    heard.writer = AsyncWriter(tmp_path, CheckpointConfig(), heard.append, heard.heartbeat, at)
    share = OwnShare(checkpoint.begin(tmp_path, 7), 0, {}, [[]])
    heard.writer.save(snapshot(7), False, perf_counter(), share)
    assert waits == [ON_DISK]
    assert heard.heartbeat._memory[1] == 0


def test_waiting_for_nothing_is_fine(tmp_path: Path) -> None:
    heard = Heard(tmp_path)
    heard.writer.wait()
    heard.writer.poll()
    assert heard == []
