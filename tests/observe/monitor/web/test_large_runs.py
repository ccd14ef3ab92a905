"""A run of any size is told as one that is kept whole, and nothing in its file is an error."""

from __future__ import annotations

import json
import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_files import PLAN, append, begin, done, is_free, joined

from lockstep.config.parsing import parse_object
from lockstep.observe.monitor.web.views import curves_of
from lockstep.observe.reading import follow
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.large import envelopes
from lockstep.observe.reading.large import rows as row_files
from lockstep.observe.reading.large import run as large
from lockstep.observe.reading.large.envelopes import Envelope
from lockstep.observe.reading.large.run import LargeRun

ALL = (0, 1 << 40)


def read(run: LargeRun) -> LargeRun:
    while run.advance(1.0) or not run.is_whole:
        pass
    return run


def curve(run: LargeRun, name: str, first: int, last: int, most: int) -> Envelope:
    return run.curves([name], first, last, most)[0]


def points(run: LargeRun, name: str, first: int = 0, last: int = 1 << 40) -> dict[int, float]:
    envelope = curve(run, name, first, last, 4096)
    return dict(zip(envelope.step.tolist(), envelope.value.tolist(), strict=True))


SESSIONS = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=5)


@settings(max_examples=30)
@given(SESSIONS, st.sampled_from([4, 2048]), st.sampled_from([parse_object, orjson.loads]))
def test_curves_are_those_of_a_history_that_keeps_all(sessions, most, parse):
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        patch.setattr(envelopes, "MOST_BUCKETS", most)
        folder = Path(name)
        step = 0
        for back, steps in sessions:
            start = max(0, step - back)
            append(folder, [*map(joined, range(3)), {**PLAN, "step": start}])
            step = start + steps
            append(folder, [done(s, s * 0.5, a=-s) for s in range(start + 1, step + 1)])
            val = {"event": "Evaluated", "split": "val", "metrics": {"loss": step}, "seconds": 1.0}
            append(folder, [{**val, "step": step}])
            logged = {"event": "Logged", "name": "a/b", "kind": "scalar", "value": step / 4}
            append(folder, [{**logged, "step": step}, {**logged, "name": "words", "kind": "text"}])
        run, history = read(LargeRun(folder, parse)), read_run(folder)
        assert set(run.names) == set(history.curves)
        for name, curve in history.curves.items():
            # Ranges of a step each are read again from the file, whatever the envelopes hold.
            truth = dict(zip(curve.steps, curve.values, strict=True))
            found = {s: v for t in truth for s, v in points(run, name, t, t).items() if s == t}
            assert found == truth
        assert (run.history.step, run.history.num_steps) == (history.step, history.num_steps)


def test_a_spike_is_never_lost_and_zoom_is_exact(tmp_path):
    rows = [done(s, 1.0 if s != 5003 else 77.0) for s in range(1, 10_001)]
    append(tmp_path, [PLAN, *rows])
    run = read(LargeRun(tmp_path, orjson.loads))
    coarse = curve(run, "train/loss", *ALL, 500)
    assert len(coarse.step) <= 500
    assert coarse.high.max() == 77.0
    fine = points(run, "train/loss", 5000, 5006)
    assert {s: v for s, v in fine.items() if 5000 <= s <= 5006} == dict.fromkeys(
        range(5000, 5007), 1.0
    ) | {5003: 77.0}


def logged(step: int, name: str, value: float) -> dict[str, Any]:
    return {"event": "Logged", "step": step, "name": name, "kind": "scalar", "value": value}


def test_a_zoom_reads_each_byte_once_while_others_use_the_run(tmp_path, monkeypatch):
    steps = range(1, 401)
    append(tmp_path, [PLAN, *(logged(s, n, s / 4) for s in steps for n in ("a", "b", "c"))])
    num_read, real = [], row_files.lines

    def lines(file, start, end):
        with ThreadPoolExecutor() as pool:
            assert pool.submit(is_free, run.lock).result()
        num_read.append(end - start)
        return real(file, start, end)

    monkeypatch.setattr(envelopes, "MOST_BUCKETS", 4)
    run = read(LargeRun(tmp_path, orjson.loads))
    monkeypatch.setattr(row_files, "lines", lines)
    (one,) = run.curves(["log/a"], 0, 100, 4096)
    three = run.curves(["log/a", "log/b", "log/c"], 0, 100, 4096)
    assert [list(envelope.value) for envelope in three] == [list(one.value)] * 3
    assert list(one.value[:100]) == [s / 4 for s in range(1, 101)]
    assert num_read[1] < 1.1 * num_read[0]
    # What would take too long stays as coarse as it is; the rest is as fine as can be.
    monkeypatch.setattr(large, "_MOST_READ_AGAIN", num_read[0] - 1)
    (coarse,) = run.curves(["log/a"], 0, 100, 4096)
    assert len(num_read) == 2
    assert len(coarse.step) < 4


def test_a_curve_that_is_not_in_a_range_has_nothing_read_for_it(tmp_path, monkeypatch):
    first = [logged(s, "a", s / 4) for s in range(1, 201)]
    append(tmp_path, [PLAN, *first, *(logged(s, "b", s / 4) for s in range(201, 401))])
    monkeypatch.setattr(envelopes, "MOST_BUCKETS", 16)
    run = read(LargeRun(tmp_path))
    monkeypatch.setattr(large, "_MOST_READ_AGAIN", run.size // 4)
    nothing, fine = run.curves(["log/a", "log/b"], 300, 310, 4096)
    assert not len(nothing.step)
    assert {s: s / 4 for s in range(300, 311)}.items() <= dict(
        zip(fine.step.tolist(), fine.value.tolist(), strict=True)
    ).items()


def test_the_smallest_parts_are_read_again_first():
    ranges = {"a": (100, 300), "b": (90, 110), "c": (0, 1000), "d": (280, 320)}
    assert row_files.closest(ranges, 230) == {"b": (90, 110), "d": (280, 320), "a": (100, 300)}
    assert row_files.closest(ranges, 20) == {"b": (90, 110)}
    assert row_files.closest(ranges, 0) == {}


def test_a_file_that_is_replaced_while_it_is_read_again_is_not_mixed(tmp_path, monkeypatch):
    append(tmp_path, [PLAN, *(done(s, 1.0) for s in range(1, 101))])
    monkeypatch.setattr(envelopes, "MOST_BUCKETS", 4)
    run = read(LargeRun(tmp_path))
    real = row_files.lines

    def lines(file, start, end):
        monkeypatch.setattr(row_files, "lines", real)
        (tmp_path / "events.jsonl").unlink()
        append(tmp_path, [PLAN, done(1, 9.0)])
        read(run)
        return real(file, start, end)

    monkeypatch.setattr(row_files, "lines", lines)
    assert curves_of(run, [run.names.index("train/loss")], 0, 9, 4096) == {
        "generation": run.generation, "curves": {}
    }  # fmt: skip
    assert points(run, "train/loss") == {1: 9.0}


def test_a_sample_of_rows_is_there_at_once_and_gives_way_to_all(tmp_path, monkeypatch):
    monkeypatch.setattr(large, "_SMALL", 1000)
    append(tmp_path, [PLAN, *(done(s, float(s)) for s in range(1, 3001))])
    run = LargeRun(tmp_path, orjson.loads)
    run.advance(0.0)
    envelope = curve(run, "train/loss", *ALL, 4096)
    assert not run.is_whole
    assert 200 < len(envelope.step) <= 256
    assert envelope.step[-1] > 2900
    assert list(envelope.step) == list(envelope.value)
    run.advance(0.02)
    assert not run.is_whole
    assert 5 < run.sampled_of < 20
    partial = curve(run, "train/loss", *ALL, 4096)
    assert list(partial.step) == list(partial.value)
    assert partial.step[-1] > 2900
    read(run)
    assert run.sampled_of == 1
    assert points(run, "train/loss") == {s: float(s) for s in range(1, 3001)}


def test_damaged_rows_are_said_and_passed_over(tmp_path):
    append(tmp_path, [PLAN, done(1, 1.0)])
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "StepDone", "step": 2\n\x00\xff\xfe\n[1, 2]\n"text"\n\n')
        file.write(b'{"event": "Unheard", "step": 3, "time": 1}\n' + b"[" * 100_000 + b"\n")
        for wrong in ({"metrics": {"a": [1]}}, {"metrics": 3}, {"step": 1 << 70}, {"step": -1}):
            row = {"time": 5.0, **done(4, 1.0), **wrong}
            file.write(json.dumps(row).encode() + b"\n")
        row = {"time": "x", **done(4, 1.0), "loss": "much"}
        file.write(json.dumps(row).encode() + b"\n")
    nobody = {"event": "Recovered", "step": 4, "world_size": 0, "seconds": 0.5, "copied": False}
    append(tmp_path, [joined(0), {**PLAN, "step": 1}, nobody])
    append(tmp_path, [done(5, "NaN", a="Infinity"), done(6, 0.5, a=1)])
    run = read(LargeRun(tmp_path, orjson.loads))
    assert run.history.num_problems == 13
    found = points(run, "train/loss")
    assert {step: v for step, v in found.items() if v == v} == {1: 1.0, 6: 0.5}
    assert math.isnan(found[5])
    assert points(run, "train/a") == {5: math.inf, 6: 1.0}


def test_many_logged_scalars_leave_room_for_splits(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_MOST_SHEETS", 3)
    append(tmp_path, [PLAN, *(logged(1, f"n{n}", 1.0) for n in range(9)), done(1, 0.5)])
    append(tmp_path, [logged(2, f"n{n}", 1.0) for n in range(9)])
    val = {"event": "Evaluated", "step": 1, "split": "val", "metrics": {"a": 4}, "seconds": 1.0}
    append(tmp_path, [val])
    run = read(LargeRun(tmp_path))
    assert points(run, "val/a") == {1: 4.0}
    assert points(run, "train/loss") == {1: 0.5}
    assert [name for name in run.names if name.startswith("log/")] == ["log/n0", "log/n1", "log/n2"]
    found = run.history.problems
    assert [one.partition(": more than ")[2] for one in found] == [
        f"3 splits or scalars: 'of log/n{n}' is left out" for n in range(3, 9)
    ]
    assert run.history.num_problems == len(found)


def test_names_without_end_are_told_up_to_a_number(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_MOST_SHEETS", 3)
    monkeypatch.setattr(row_files, "_MOST_LEFT_OUT", 5)
    append(tmp_path, [PLAN, *(logged(s, f"n{n}", 1.0) for s in (1, 2) for n in range(20))])
    run = read(LargeRun(tmp_path))
    assert run.history.num_problems == 5
    assert points(run, "log/n2") == {1: 1.0, 2: 1.0}


def test_names_beyond_the_most_are_said_once(tmp_path, monkeypatch):
    monkeypatch.setattr(envelopes, "MOST_CURVES", 8)
    append(tmp_path, [PLAN, *(done(s, 0.5, **{f"m{s}": 1.0}) for s in range(1, 9))])
    run = read(LargeRun(tmp_path))
    assert len(run.names) == 8
    (problem,) = run.history.problems
    assert "metrics: the further ones are left out" in problem


def test_a_line_without_end_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "MAX_TEXT_BYTES", 5000)
    append(tmp_path, [PLAN, done(1, 1.0)])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("x" * 17_000 + "\n")
    append(tmp_path, [done(2, 2.0)])
    run = read(LargeRun(tmp_path))
    assert points(run, "train/loss") == {1: 1.0, 2: 2.0}
    assert "more than 5,000 bytes" in run.history.problems[0]


def test_a_last_row_that_is_too_long_is_read_once(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "MAX_TEXT_BYTES", 5000)
    append(tmp_path, [PLAN, done(1, 1.0)])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("x" * 17_000)
    run = read(LargeRun(tmp_path))
    generation = run.generation
    assert [run.advance(1.0) for _ in range(3)] == [False] * 3
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write("x" * 8_000 + "\n")
    append(tmp_path, [done(2, 2.0)])
    assert points(read(run), "train/loss") == {1: 1.0, 2: 2.0}
    assert (run.generation, run.history.num_problems) == (generation, 1)


def test_a_file_that_is_written_again_in_its_place_is_told(tmp_path):
    append(tmp_path, [PLAN, *(done(s, 1.5) for s in range(1, 6))])
    run = read(LargeRun(tmp_path))
    generation, number = run.generation, (tmp_path / "events.jsonl").stat().st_ino
    with (tmp_path / "events.jsonl").open("w") as file:
        file.write("")
    append(tmp_path, [PLAN, *(done(s, 2.5) for s in range(1, 7))])
    assert (tmp_path / "events.jsonl").stat().st_ino == number
    assert points(read(run), "train/loss") == dict.fromkeys(range(1, 7), 2.5)
    assert run.generation == generation + 1


def test_a_file_that_is_replaced_cut_off_or_gone_is_told(tmp_path):
    events = tmp_path / "events.jsonl"
    begin(tmp_path, 5)
    run = read(LargeRun(tmp_path))
    generation = run.generation
    other = tmp_path / "other"
    append(other, [PLAN, done(1, 9.0)])
    (other / "events.jsonl").replace(events)
    assert points(read(run), "train/loss") == {1: 9.0}
    assert run.generation > generation
    text = events.read_text()
    events.write_text(text[: len(text) // 2])
    assert points(read(run), "train/loss") == {}
    events.write_text(text)
    assert points(read(run), "train/loss") == {1: 9.0}
    events.unlink()
    assert run.advance(1.0)
    assert run.problem == "events.jsonl: is gone"
    assert points(run, "train/loss") == {1: 9.0}
    events.mkdir()
    run.advance(1.0)
    assert "cannot be read" in run.problem


def test_the_newest_row_is_waited_for_until_it_is_whole(tmp_path):
    begin(tmp_path, 3)
    run = read(LargeRun(tmp_path))
    line = json.dumps({"time": 1.0, **done(4, 4.0)})
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[:50])
    read(run)
    assert 4 not in points(run, "train/loss")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[50:] + "\n")
    read(run)
    assert points(run, "train/loss")[4] == 4.0
    assert run.history.num_problems == 0
