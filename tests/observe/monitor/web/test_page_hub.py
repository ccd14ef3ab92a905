"""The loop that looks for all who watch: nobody waits for it, and no change is missed."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from run_files import begin

from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web import hub as hubs
from lockstep.observe.monitor.web.hub import Hub
from lockstep.observe.monitor.web.views import run_id
from lockstep.observe.reading.large.run import LargeRun


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    begin(tmp_path / "one", 3)
    return Hub(Watch([tmp_path]), orjson.loads, 1.0, print)


def test_nobody_waits_while_a_run_is_read(hub, tmp_path, monkeypatch):
    hub.open(tmp_path / "one")
    is_reading, is_answered = threading.Event(), threading.Event()

    def advance(run, budget_s):
        is_reading.set()
        return is_answered.wait(10.0)

    monkeypatch.setattr(LargeRun, "advance", advance)
    with ThreadPoolExecutor(2) as pool:
        pool.submit(hub._look)
        assert is_reading.wait(10.0)
        try:
            assert len(pool.submit(hub.runs).result(5.0)) == 1
        finally:
            is_answered.set()


def test_what_ends_the_looking_is_told_and_ends_the_streams(hub, monkeypatch):
    error = RuntimeError("the disk is on fire")

    def poll(watch):
        raise error

    async def changes():
        hub.start()
        return [change async for change in hub.changes()]

    failures = []
    monkeypatch.setattr(hub, "_failed", failures.append)
    monkeypatch.setattr(Watch, "poll", poll)
    assert len(asyncio.run(asyncio.wait_for(changes(), 8.0))) == 1
    assert failures == [error]


def test_what_changes_while_a_change_is_sent_is_told_at_once(hub, tmp_path, monkeypatch):
    monkeypatch.setattr(Hub, "_look", lambda hub: None)

    async def second():
        hub.start()
        changes = hub.changes()
        await changes.__anext__()
        hub._notify({tmp_path / "one"}, is_list=False)
        await asyncio.sleep(0.1)  # as long as a browser takes it
        change = await asyncio.wait_for(changes.__anext__(), 5.0)
        hub.stop()
        return change

    assert asyncio.run(second())["runs"] == [run_id(tmp_path / "one")]


def test_looks_are_as_far_apart_as_was_asked_but_what_is_opened_is_read_at_once(
    tmp_path, monkeypatch
):
    begin(tmp_path / "one", 300)
    looks = []
    monkeypatch.setattr(Hub, "_look", lambda hub: looks.append(time.monotonic()))
    monkeypatch.setattr(hubs, "_FIRST_S", 0.0)

    async def watched(interval_s):
        hub = Hub(Watch([tmp_path]), orjson.loads, interval_s, print)
        hub.start()
        changes = hub.changes()
        await changes.__anext__()
        await asyncio.sleep(0.5)
        looks_before = len(looks)
        run = await asyncio.to_thread(hub.open, tmp_path / "one")
        for _ in range(200):
            await asyncio.sleep(0.02)
            if run.is_whole:
                break
        hub.stop()
        return looks_before, run.is_whole

    assert asyncio.run(watched(3600.0)) == (1, True)
    looks.clear()
    assert asyncio.run(watched(0.05))[0] > 4
