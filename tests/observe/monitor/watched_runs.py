"""Run directories in all states, and a screen that is driven by a test."""

import asyncio
import json
import os
import time

from tests.observe.reading.test_histories import PLAN, joined, written
from tests.observe.reading.test_runs import run_in
from textual.widgets import DataTable, Static

from lockstep.observe.monitor.terminal.app import MonitorApp
from lockstep.observe.monitor.watch import Monitor, Watch
from lockstep.observe.reading.follow import EVENTS

START = [*map(joined, range(3)), PLAN]
LOST = {"event": "RankLost", "slot": 1, "rank": 1, "reason": "hung at line 7", "step": 2}
RECOVERED = {"event": "Recovered", "world_size": 2, "seconds": 0.1, "copied": False, "step": 2}
HOSTILE = "a\x1b[31mb\x07c\nd[red]e[/]\udcff"


def running(folder, *rows):
    """A run that has written just now."""
    run_in(folder, *rows)
    touched(folder)
    return folder


def touched(folder):
    os.utime(folder / EVENTS, (time.time(), time.time()))


def more(folder, *rows, first=50):
    written(folder, rows, first)
    touched(folder)


def ended(folder, **fields):
    values = {"status": "completed", "step": 9, "params_sha256": "ab" * 32, "metrics": {}}
    (folder / "result.json").write_text(json.dumps(values | {"exit_code": 0} | fields))
    os.utime(folder / EVENTS, (1, 1))


def on_screen(folders, drive, size=(100, 40), **options):
    """Drive a screen by an async function of the app and its pilot."""
    monitor = Monitor(Watch(folders, may_come=True), interval_s=60.0, **options)

    async def body():
        app = MonitorApp(monitor)
        async with app.run_test(size=size) as pilot:
            await looked(app, pilot)
            await drive(app, pilot)
        app.raise_problem()

    asyncio.run(asyncio.wait_for(body(), 25))


async def looked(app, pilot):
    """Have it look, and wait until the screen has been brought up to date."""
    before = app.num_looks
    if before:
        app.monitor.due.set()
    while app.num_looks == before and app.problem is None:
        await asyncio.sleep(0.005)
    await settled(pilot)


async def settled(pilot):
    """Wait until all messages have been handled, but not until the machine has nothing to do."""
    await pilot.pause(0.001)


async def until(app, pilot, holds):
    """Have it look until something holds of the screen."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end, shown(app)
        await looked(app, pilot)


def table(app):
    """The rows of the list as they are shown."""
    rows = app.screen.query_one(DataTable)
    return [[str(cell) for cell in rows.get_row_at(number)] for number in range(rows.row_count)]


def shown(app):
    """All texts of the screen's fields."""
    return "\n".join(str(field.content) for field in app.screen.query(Static) if field.id)


def drawn(app):
    """What is really drawn, line by line."""
    strips = app.screen._compositor.render_strips()
    return ["".join(segment.text for segment in strip) for strip in strips]
