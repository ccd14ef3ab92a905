"""What is read from events, however they come."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import RunDirectoryError
from lockstep.observe.reading.follow import EVENTS, RunReader, read_run
from lockstep.observe.reading.history import Curve

PLAN = {
    "event": "RunStarted", "task": "t", "run_dir": "r", "config_hash": "c", "total_steps": 9,
    "steps_per_epoch": 3, "num_samples": 30, "num_parameters": 5, "world_size": 3,
    "transport": "gloo", "launcher": "local", "device": "cpu", "threads": 1, "num_microbatches": 6,
    "batch_size": 10,
}  # fmt: skip


def joined(rank, slot=None, step=0):
    return {
        "event": "Joined", "step": step, "slot": rank if slot is None else slot, "rank": rank,
        "host": "h", "pid": 7, "local_rank": rank, "device": "cpu", "threads": 1,
        "microbatches": [2 * rank, 2 * rank + 2],
    }  # fmt: skip


def done(step, loss, ranks=3, **metrics):
    times = [
        {
            "rank": r,
            "compute_s": 1.0 + r,
            "communication_s": 0.5,
            "data_s": 0.0,
            "checkpoint_s": 0.0,
        }
        for r in range(ranks)
    ]
    return {
        "event": "StepDone", "step": step, "num_steps": 1, "epoch": 0, "loss": loss, "lr": 0.1,
        "metrics": metrics, "grad_norm": 1.0, "loss_scale": 1.0, "samples": 10, "seconds": 0.5,
        "ranks": times,
    }  # fmt: skip


EVALUATED = {
    "event": "Evaluated",
    "step": 2,
    "split": "val",
    "metrics": {"loss": 1.0},
    "seconds": 1.0,
}


def written(folder, rows, first=0):
    with (folder / EVENTS).open("a") as file:
        for number, row in enumerate(rows, first):
            file.write(json.dumps({"time": 100.0 + number, "step": 0, **row}) + "\n")


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(allow_nan=False)), max_size=40))
def test_a_curve_has_the_newest_value_of_each_step(points):
    curve, expected = Curve(), {}
    for step, value in points:
        curve.add(step, value)
        expected = {s: v for s, v in expected.items() if s < step} | {step: value}
    assert dict(zip(curve.steps, curve.values, strict=True)) == expected
    assert all(curve.at(step) == expected.get(step) for step in range(31))


def test_steps_that_are_done_again_after_a_resume_replace_those_before(tmp_path):
    written(tmp_path, [*map(joined, range(3)), PLAN, done(1, 3.0), done(2, 2.0), done(3, 1.0)])
    evaluated = {"event": "Evaluated", "split": "val", "metrics": {"loss": 4.0}, "seconds": 1.0}
    written(tmp_path, [{**evaluated, "step": 3}], 10)
    again = [*map(joined, range(3)), {**PLAN, "step": 2}, done(3, 0.5)]
    written(tmp_path, again, 20)
    history = read_run(tmp_path)
    assert list(history.curves["train/loss"].values) == [3.0, 2.0, 0.5]
    assert not history.curves["val/loss"].steps
    assert (history.step, history.started, history.newest) == (3, 100.0, 124.0)
    assert len(history.processes) == 3
    assert history.plan.step == 2


def test_survivors_and_joiners_have_their_new_numbers(tmp_path):
    lost = {"event": "RankLost", "slot": 1, "rank": 1, "reason": "hung", "step": 1}
    recovered = {"event": "Recovered", "world_size": 2, "seconds": 0.1, "copied": False, "step": 1}
    written(
        tmp_path, [*map(joined, range(3)), PLAN, done(1, 3.0), lost, recovered, done(2, 2.0, 2)]
    )
    history = read_run(tmp_path)
    assert [(p.joined.slot, p.rank, p.until is None) for p in history.processes] == [
        (0, 0, True), (1, 1, False), (2, 1, True),
    ]  # fmt: skip
    assert history.processes[1].reason == "hung"
    assert [p.seconds["compute_s"] for p in history.processes] == [2.0, 2.0, 5.0]
    # a joining rank takes number 0, and the survivors the others.
    more = [joined(0, slot=3, step=2), {**recovered, "world_size": 3, "step": 2}, done(3, 1.0)]
    written(tmp_path, more, 30)
    history = read_run(tmp_path)
    assert [(p.joined.slot, p.rank) for p in history.processes if p.until is None] == [
        (0, 1), (2, 2), (3, 0),
    ]  # fmt: skip


def test_a_loss_and_a_joiner_at_once_leave_each_number_to_one(tmp_path):
    lost = {"event": "RankLost", "slot": 0, "rank": 0, "step": 1}
    recovered = {"event": "Recovered", "world_size": 3, "seconds": 0.1, "copied": False, "step": 1}
    both = [lost, joined(2, slot=3, step=1), recovered]
    again = [{**lost, "slot": 1}, joined(2, slot=4, step=2), {**recovered, "step": 2}]
    written(tmp_path, [*map(joined, range(3)), PLAN, done(1, 3.0), *both, done(2, 2.0), *again])
    living = [(p.joined.slot, p.rank) for p in read_run(tmp_path).processes if p.until is None]
    assert living == [(2, 0), (3, 1), (4, 2)]


def test_a_run_that_goes_back_in_a_session_keeps_its_processes(tmp_path):
    """As one does whose microbatches carry what was lost with its rank."""
    lost = {"event": "RankLost", "slot": 1, "rank": 1, "step": 3}
    recovered = {"event": "Recovered", "world_size": 2, "seconds": 0.1, "copied": False, "step": 1}
    back = [lost, {"event": "Warned", "message": "back", "step": 3}, {**PLAN, "step": 1}, recovered]
    steps = [done(n, float(n)) for n in (1, 2, 3)]
    written(tmp_path, [*map(joined, range(3)), PLAN, *steps, *back, done(2, 7.0, ranks=2)])
    history = read_run(tmp_path)
    assert [(p.joined.slot, p.rank, p.until is None) for p in history.processes] == [
        (0, 0, True), (1, 1, False), (2, 1, True),
    ]  # fmt: skip
    assert [p.seconds["compute_s"] for p in history.processes] == [4.0, 6.0, 11.0]
    assert (history.step, history.num_steps, history.first_of_session) == (2, 4, 0)
    assert list(history.curves["train/loss"].values) == [1.0, 7.0]


def test_work_is_counted_in_microbatches_of_the_steps_that_a_process_took_part_in(tmp_path):
    balanced = {"event": "Rebalanced", "step": 1, "microbatches": [1, 2, 3], "slowest": 0,
                "slowdown": 2.0}  # fmt: skip
    rows = [*map(joined, range(3)), PLAN, {**done(1, 3.0), "num_steps": 5}, balanced, done(2, 2.0)]
    written(tmp_path, rows)
    assert [p.num_computed for p in read_run(tmp_path).processes] == [11, 12, 13]


def test_who_computes_which_microbatches_after_a_loss(tmp_path):
    lost = {"event": "RankLost", "slot": 1, "rank": 1, "step": 1}
    recovered = {"event": "Recovered", "world_size": 2, "seconds": 0.1, "copied": False, "step": 1,
                 "microbatches": [5, 3]}  # fmt: skip
    written(tmp_path, [*map(joined, range(3)), PLAN, done(1, 3.0), lost, recovered])
    living = [(p.joined.slot, p.num_microbatches) for p in read_run(tmp_path).living]
    assert living == [(0, 5), (2, 3)]


def test_a_row_that_is_too_long_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.setattr("lockstep.observe.reading.follow.MAX_TEXT_BYTES", 2000)
    reader = RunReader(tmp_path)
    written(tmp_path, [PLAN, done(1, 3.0)])
    with (tmp_path / EVENTS).open("a") as file:
        file.write("[" + "1," * 3000)
    assert reader.poll()
    with (tmp_path / EVENTS).open("a") as file:
        file.write("1," * 500 + "1]\n")
    written(tmp_path, [done(2, 2.0)])
    assert reader.poll()
    assert list(reader.history.curves["train/loss"].steps) == [1, 2]
    (problem,) = reader.history.problems
    assert "a row of more than 2,000 bytes is left out" in problem


@pytest.mark.parametrize(
    "row",
    [
        {**PLAN, "time": "NaN"}, {**PLAN, "time": 1e300}, {**PLAN, "time": -1.0},
        {**joined(0), "microbatches": []}, {**joined(0), "microbatches": [0, 4, 0]},
        {**done(10**25, 1.0)}, {**done(2, 1.0), "num_steps": 10**30},
        {**done(2, 1.0), "num_steps": 0}, {**EVALUATED, "model_step": -(10**19)},
        {**EVALUATED, "metrics": {"loss": 10**400}},
    ],
)  # fmt: skip
def test_what_cannot_be_is_a_problem(tmp_path, row):
    written(tmp_path, [PLAN, row, done(5, 1.0)])
    history = read_run(tmp_path)
    assert (history.num_problems, history.step) == (1, 5)
    curves = history.curves.values()
    assert all(len(c.steps) == len(c.values) == len(c.origins) for c in curves)


def test_what_ranks_have_spent_adds_up_also_in_old_files(tmp_path):
    rows = [done(1, 3.0, 2), done(2, 2.0, 2)]
    for row, peak in zip(rows, (500, 400), strict=True):
        row["ranks"][0] |= {"faults": 3, "peak_bytes": peak, "num_calls": 2, "sent_bytes": 10,
                            "received_bytes": 30, "cpu_s": 0.5}  # fmt: skip
    written(tmp_path, [*map(joined, range(2)), {**PLAN, "world_size": 2}, *rows])
    talks, silent = (process.times for process in read_run(tmp_path).processes)
    assert (talks.num_calls, talks.sent_bytes, talks.received_bytes) == (4, 20, 60)
    assert (talks.faults, talks.peak_bytes, talks.cpu_s) == (6, 500, 1.0)
    assert (silent.compute_s, silent.num_calls, silent.sent_bytes) == (4.0, 0, 0)


def test_a_reader_goes_on_where_it_was(tmp_path):
    reader = RunReader(tmp_path)
    assert not reader.poll()
    written(tmp_path, [PLAN, done(1, 3.0)])
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"event": "StepD')
    assert reader.poll()
    assert not reader.poll()
    with (tmp_path / EVENTS).open("a") as file:
        file.write(json.dumps({"time": 101, **done(2, math.pi)})[len('{"event": "StepD') + 0 :])
        file.write("\n")
    assert reader.poll()
    assert reader.history.num_problems == 1  # the torn line has become another one
    written(tmp_path, [done(3, 2.5)])
    assert reader.poll()
    assert list(reader.history.curves["train/loss"].steps) == [1, 3]
    (tmp_path / EVENTS).unlink()
    written(tmp_path, [PLAN, done(1, 7.0)])
    assert reader.poll()
    assert list(reader.history.curves["train/loss"].values) == [7.0]


def test_what_cannot_be_read_is_named_and_passed_over(tmp_path):
    bad = [{"event": "Unheard"}, {"event": "StepDone"}, {"event": "Evaluated", "split": 3}, {}]
    written(tmp_path, [PLAN, *bad, {**done(1, "NaN"), "metrics": {"x": "Infinity"}}])
    with (tmp_path / EVENTS).open("ab") as file:
        file.write(b"\xff\x00 no JSON\n[1]\n" + b'{"time": "x", "event": "Warned"}\n')
    history = read_run(tmp_path)
    assert history.num_problems == len(bad) + 3
    assert any("Unheard" in problem for problem in history.problems)
    assert math.isnan(history.curves["train/loss"].at(1))
    assert history.curves["train/x"].at(1) == math.inf
    with pytest.raises(RunDirectoryError, match="is no run directory"):
        read_run(tmp_path / "none")
