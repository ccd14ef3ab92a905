"""The screens of `lockstep monitor`, driven by keys."""

import json
import math
import shutil
from collections import deque

import pytest
from tests.observe.monitor.watched_runs import (
    HOSTILE,
    LOST,
    RECOVERED,
    START,
    drawn,
    ended,
    looked,
    more,
    on_screen,
    running,
    shown,
    table,
    until,
)  # fmt: skip
from tests.observe.reading.test_histories import PLAN, done, joined
from tests.observe.reading.test_runs import run_in

from lockstep.observe.monitor.watch import Alert, Monitor, Watch
from lockstep.observe.reading.follow import EVENTS


def test_a_folder_is_empty_before_the_first_run_which_then_comes_by_itself(tmp_path):
    async def drive(app, pilot):
        assert table(app) == []
        assert "no runs in" in shown(app)
        running(tmp_path / "runs" / "first", *START, done(1, 3.0))
        await until(app, pilot, lambda: table(app))
        assert table(app)[0][:3] == ["first", "running", "1/9"]
        ended(tmp_path / "runs" / "first")
        await until(app, pilot, lambda: table(app)[0][1] == "completed")

    on_screen([tmp_path / "runs"], drive)


def test_a_run_is_followed_from_its_start_to_its_end(tmp_path):
    folder = running(tmp_path / "run")

    async def drive(app, pilot):
        assert "no report yet" in shown(app)
        more(folder, *START, done(1, 3.0, accuracy=0.5), done(2, 2.0, accuracy=0.75))
        await until(app, pilot, lambda: "step 2/9" in shown(app))
        assert "3 of 3 ranks" in shown(app)
        assert "train/loss  newest 2  least 2  most 3" in shown(app)
        assert "a step " not in shown(app)  # two reports say too little
        await pilot.press("right")
        assert "train/accuracy  newest 0.75" in shown(app)
        await pilot.press("left", "l")
        assert "logarithmic" in shown(app)
        more(folder, LOST, RECOVERED, done(3, 1.5, ranks=2), first=60)
        await until(app, pilot, lambda: "2 of 3 ranks" in shown(app))
        assert "rank 1 (slot 1) is lost: it hung at line 7" in shown(app)
        assert "lost" in shown(app)
        ended(folder)
        await until(app, pilot, lambda: "SHA-256 " + "ab" * 32 in shown(app))
        assert "completed" in shown(app)
        await pilot.press("escape")
        assert table(app)[0][1] == "completed"

    on_screen([folder], drive)


def test_what_a_step_takes_is_beside_what_was_predicted_while_a_run_goes_on(tmp_path):
    plan = {"event": "Predicted", "by": "plan.json", "cost": {"step_s": 0.25, "peak_bytes": 1}}
    folder = running(tmp_path / "run", plan, *START, *(done(n, 3.0) for n in range(1, 12)))

    async def drive(app, pilot):
        await until(
            app, pilot, lambda: "a step 500 ms; 250 ms predicted by plan.json" in shown(app)
        )

    on_screen([folder], drive)


def test_ranks_say_what_they_have_done_since_the_last_report_and_in_all(tmp_path):
    folder = running(tmp_path / "run", *START, done(1, 3.0))

    async def drive(app, pilot):
        await until(app, pilot, lambda: "67% (67%)" in shown(app))  # 1.0 of 1.5 s
        row = done(2, 2.0)
        row["ranks"][0] |= {"compute_s": 0.0, "data_s": 1.5, "communication_s": 0.0}
        row["ranks"][0]["peak_bytes"] = 3 << 20
        more(folder, row)
        await until(app, pilot, lambda: "100% (50%)" in shown(app))
        line = next(line for line in shown(app).splitlines() if "3.0 MiB" in line)
        assert line.split()[:4] == ["0", "living", "h", "7"]

    on_screen([folder], drive, size=(140, 40))


def test_a_killed_run_a_failed_one_and_damaged_files_are_shown_as_what_they_are(tmp_path):
    run_in(tmp_path / "killed", *START, done(3, 2.0))
    failed = run_in(tmp_path / "failed", *START, done(3, 2.0))
    ended(failed, status="failed", step=3)
    damaged = run_in(tmp_path / "damaged", *START, done(2, math.nan))
    with (damaged / EVENTS).open("ab") as file:
        file.write(b'\x00\xff{"event": "StepDone"}\n{"event": "Unheard", "time": 1}\n[1]\n')
    (damaged / "run.json").write_text("{")
    (damaged / "result.json").write_text("[]")

    async def drive(app, pilot):
        states = {row[0]: row[1] for row in table(app)}
        assert states["killed"] == "killed"
        assert states["failed"] == "failed"
        names = [row[0] for row in table(app)]
        await pilot.press(*["down"] * names.index("damaged"), "enter")
        await until(app, pilot, lambda: "3 rows cannot be read" in shown(app))
        assert "run.json" in shown(app)
        assert "no values that can be drawn" in shown(app)
        await pilot.press("escape")

    on_screen([tmp_path], drive)


def test_the_cursor_stays_on_its_run_when_others_come_and_go(tmp_path):
    for name in "bcd":
        run_in(tmp_path / name, *START, done(3, 2.0))

    async def drive(app, pilot):
        await pilot.press("s", "s")  # by name
        assert [row[0] for row in table(app)] == ["b", "c", "d"]
        await pilot.press("down")
        run_in(tmp_path / "a", *START, done(3, 2.0))
        await until(app, pilot, lambda: len(table(app)) == 4)
        shutil.rmtree(tmp_path / "b")
        await until(app, pilot, lambda: len(table(app)) == 3)
        await pilot.press("enter")
        await looked(app, pilot)
        assert str(tmp_path / "c") in shown(app)

    on_screen([tmp_path], drive)


def test_runs_are_filtered_by_the_conditions_of_the_command_and_sorted(tmp_path):
    for number in range(5):
        run_in(tmp_path / f"run{number}", *START, done(number + 1, 2.0 - number / 4))

    async def drive(app, pilot):
        async def ask(conditions):
            await pilot.press("slash")
            app.screen.query_one("#filter").value = conditions
            await pilot.press("enter")

        await ask("train/loss<1.6")
        assert sorted(row[0] for row in table(app)) == ["run2", "run3", "run4"]
        await ask("step>=3 step<5")
        assert sorted(row[0] for row in table(app)) == ["run2", "run3"]
        await ask("nonsense")
        assert "must be a key" in shown(app)
        assert len(table(app)) == 5
        await ask("")
        await pilot.press("s", "s", "s", "s")
        assert next(row[0] for row in table(app)) == "run4"
        assert "by -step" in shown(app)

    on_screen([tmp_path], drive)


def test_a_hundred_runs_are_listed_and_opened(tmp_path):
    for number in range(100):
        run_in(tmp_path / f"run{number:03}", *START, done(3, float(number)))

    async def drive(app, pilot):
        assert len(table(app)) == 100
        assert "100 runs, 0 running" in shown(app)
        await pilot.press("s", "s", "o")
        await until(app, pilot, lambda: "newest 0" in shown(app))
        assert sum(run.is_open for run in app.monitor.watch.runs.values()) == 1
        await pilot.press("escape")
        await until(app, pilot, lambda: not any(r.is_open for r in app.monitor.watch.runs.values()))
        await pilot.press("o")
        await until(app, pilot, lambda: "newest 0" in shown(app))

    on_screen([tmp_path], drive)


@pytest.mark.parametrize("listeners", [[], [lambda watch, changed: None]])
def test_events_are_forgotten_once_nobody_reads_them(tmp_path, listeners):
    """A listener, such as the exporter, may count on what it has read of a run."""
    folder = run_in(tmp_path / "run", *START, done(3, 2.0))
    monitor = Monitor(Watch([tmp_path]), listeners)
    run = monitor.watch.runs[folder]
    monitor.want(folder)
    monitor.want(folder)
    monitor.leave(folder)
    monitor.look()
    assert run.is_open, "another screen of it is there still"
    monitor.leave(folder)
    monitor.look()
    assert run.is_open == bool(listeners)
    assert list(run.history.curves["train/loss"].values) == [2.0]


def test_control_signs_and_markup_in_names_never_reach_the_terminal(tmp_path):
    plan = PLAN | {"task": HOSTILE}
    warned = {"event": "Warned", "message": HOSTILE, "step": 1}
    ranks = [joined(rank) | {"host": HOSTILE} for rank in range(3)]
    folder = running(tmp_path / HOSTILE, *ranks, plan, done(1, 3.0, **{HOSTILE: 1.0}), warned)
    (folder / "run.json").write_text(json.dumps({"task": HOSTILE, "config_hash": "c"}))
    (folder / "tags.json").write_text(json.dumps([HOSTILE]))

    async def drive(app, pilot):
        seen = drawn(app)
        await pilot.press("enter")
        await until(app, pilot, lambda: "warning" in shown(app))
        await pilot.press("left")
        await looked(app, pilot)
        seen += drawn(app)
        assert all(line.isprintable() for line in seen), seen
        assert any(r"a\x1b[31mb\x07c" in line for line in seen)
        assert any("[red]e[/]" in line for line in seen)
        "".join(seen).encode()

    on_screen([tmp_path], drive, size=(200, 50))


@pytest.mark.parametrize("size", [(60, 20), (20, 6), (8, 3)])
def test_a_narrow_terminal_shows_what_fits(tmp_path, size):
    folder = running(tmp_path / "run", *START, *(done(n, 3.0 / n) for n in range(1, 9)))

    async def drive(app, pilot):
        await pilot.press("enter")
        await until(app, pilot, lambda: "newest 0.375" in shown(app) or size[0] < 60)
        if size == (60, 20):
            lines = drawn(app)
            assert any("running" in line and "step 8/9" in line for line in lines)
            assert any(chr(0x2800) <= sign <= chr(0x28FF) for sign in "".join(lines))
            assert "exchange" in shown(app)
        await pilot.resize_terminal(120, 40)
        await looked(app, pilot)
        await until(app, pilot, lambda: "step 8/9" in shown(app))
        await pilot.resize_terminal(*size)
        await looked(app, pilot)
        await pilot.press("down", "down", "up")

    on_screen([folder.parent], drive, size=size)


def test_a_run_that_vanishes_and_comes_back_and_a_replaced_file_are_survived(tmp_path):
    folder = running(tmp_path / "run", *START, done(5, 3.0))

    async def drive(app, pilot):
        await until(app, pilot, lambda: "step 5/9" in shown(app))
        (folder / EVENTS).unlink()
        more(folder, *START, done(2, 7.0), first=0)
        await until(app, pilot, lambda: "newest 7" in shown(app))
        assert "step 2/9" in shown(app)
        shutil.rmtree(folder)
        await until(app, pilot, lambda: "is gone" in shown(app))
        running(folder, *START, done(3, 4.0))
        await until(app, pilot, lambda: "newest 4" in shown(app))

    on_screen([folder], drive)


def test_the_diagnosis_and_the_alerts_of_a_run_are_shown(tmp_path):
    folder = run_in(tmp_path / "run", *START, done(3, 2.0))
    alert = Alert("slow\x1b", "on", str(folder), "t", 3, "it is slow", 1.0, 2.0)
    notes = deque(["prometheus http://127.0.0.1:1/metrics"])

    async def drive(app, pilot):
        assert "killed" in shown(app).lower()
        assert r"alert slow\x1b: it is slow" in shown(app)
        assert "->" in shown(app), "what to do"
        await pilot.press("escape")
        await looked(app, pilot)
        assert "alert slow" in shown(app)
        assert "prometheus http" in shown(app)

    on_screen([folder], drive, alerts=lambda: [alert], notes=notes)


def test_a_hundred_alerts_leave_room_for_the_list(tmp_path):
    folder = run_in(tmp_path / "run", *START, done(3, 2.0))
    on = [Alert(f"rule{n}", "on", str(folder), "t", 3, "slow", 1.0, 2.0) for n in range(100)]

    async def drive(app, pilot):
        assert "rule99" in shown(app)
        assert "and 95 older alerts" in shown(app)
        assert any("killed" in line for line in drawn(app))

    on_screen([tmp_path], drive, size=(80, 24), alerts=lambda: on)


def test_what_ends_the_looking_ends_the_screen_and_is_told(tmp_path):
    def broken(watch, changed):
        raise RuntimeError("a listener's own fault")

    with pytest.raises(RuntimeError, match="own fault"):
        on_screen([tmp_path], lambda app, pilot: looked(app, pilot), listeners=[broken])
