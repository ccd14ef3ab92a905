from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_events import evaluated, run_started, step_done

from lockstep.engine.events import Event, RankTimes
from lockstep.observe.showing.live import Pace


def after(*events: Event, waited_s: float = 0.0) -> float | None:
    pace = Pace()
    for event in events:
        pace.take(event)
    return pace.left_s(waited_s)


def reports(
    seconds_a_step: float, first: int, last: int, num_steps: int = 10, **fields: object
) -> list[Event]:
    """Reports of `num_steps` steps each, after steps from `first` to `last`."""
    return [
        step_done(step, num_steps=num_steps, seconds=num_steps * seconds_a_step, **fields)
        for step in range(first, last + 1, num_steps)
    ]


def test_nothing_is_said_before_there_is_enough_to_go_by() -> None:
    assert after() is None
    assert after(run_started()) is None
    assert after(run_started(), step_done(1)) is None
    assert after(run_started(), step_done(1), step_done(2)) == 498 * 0.5


def test_nothing_is_said_of_a_run_without_a_known_end() -> None:
    assert after(run_started(total_steps=0), *reports(1, 10, 100)) is None


def test_a_steady_run_takes_its_steps_times_their_number() -> None:
    assert after(run_started(), *reports(2, 10, 100)) == pytest.approx(800)
    assert after(run_started(), *reports(2, 10, 500)) == 0


def test_the_first_report_counts_until_there_is_another_one() -> None:
    start = [run_started(), step_done(10, num_steps=10, seconds=100.0)]
    assert after(*start) == pytest.approx(4900)
    assert after(*start, *reports(1, 20, 20)) == pytest.approx(480)


def test_steps_before_a_resume_do_not_count() -> None:
    assert after(run_started(step=400), *reports(3, 410, 450)) == pytest.approx(150)
    again = [run_started(), *reports(100, 10, 400), run_started(step=400)]
    assert after(*again) is None
    assert after(*again, *reports(3, 410, 450)) == pytest.approx(150)


def test_another_first_rank_is_no_new_session() -> None:
    before = [run_started(), *reports(2, 10, 100)]
    assert after(*before, run_started(step=100, continued=True)) == after(*before)


def test_evaluations_count_with_what_they_cost_for_each_step() -> None:
    events: list[Event] = [run_started(total_steps=1000)]
    for step in range(10, 501, 10):
        # An evaluation of 60 s after every hundredth step is within the next report.
        seconds = 10.0 + (60.0 if step > 100 and step % 100 == 10 else 0.0)
        events.append(step_done(step, num_steps=10, seconds=seconds))
        if step % 100 == 0:
            events.append(replace(evaluated(step), seconds=60.0))
    left_s = after(*events)
    assert left_s is not None
    assert 500 * (1 + 0.8 * 0.6) <= left_s + 1e-9 <= 500 * 1.6


def test_checkpoints_count_in_full_however_long_they_take() -> None:
    saved = (RankTimes(0, 5.0, 0.0, 0.0, 95.0), RankTimes(1, 5.0, 95.0, 0.0, 0.0))
    events = [run_started(), *reports(0.5, 10, 90), *reports(10, 100, 100, ranks=saved)]
    assert after(*events) == pytest.approx(400 * (0.5 + 95 / 100))


def test_one_long_interruption_counts_for_little() -> None:
    slept = step_done(110, num_steps=10, seconds=8 * 3600.0)
    left_s = after(run_started(), *reports(1, 10, 100), slept, *reports(1, 120, 200))
    assert left_s is not None
    assert 300 <= left_s <= 1.3 * 300


def test_a_run_that_becomes_faster_is_believed() -> None:
    left_s = after(run_started(total_steps=2000), *reports(5, 10, 500), *reports(1, 510, 1000))
    assert left_s == pytest.approx(1000)


def test_between_two_reports_the_time_goes_down_to_where_the_next_one_is_due() -> None:
    events = [run_started(), *reports(1, 10, 100)]
    assert after(*events, waited_s=4) == pytest.approx(396)
    assert after(*events, waited_s=4000) == pytest.approx(390)
    assert after(*events, waited_s=-1) == pytest.approx(400)
    assert after(run_started(), *reports(1, 10, 500), waited_s=5) == 0


sizes = st.floats(0, 1e7, allow_nan=False)


@given(
    total=st.integers(0, 10**6),
    spent=st.lists(st.tuples(st.integers(0, 500), sizes, sizes, sizes), max_size=50),
    waited_s=st.floats(-10, 1e9),
)
def test_it_is_never_negative_nor_infinite(
    total: int, spent: list[tuple[int, float, float, float]], waited_s: float
) -> None:
    events: list[Event] = [run_started(total_steps=total)]
    step = 0
    for num_steps, seconds, evaluating_s, saving_s in spent:
        step += num_steps
        saved = (RankTimes(0, 0.0, 0.0, 0.0, saving_s),)
        events.append(step_done(step, num_steps=num_steps, seconds=seconds, ranks=saved))
        events.append(replace(evaluated(step), seconds=evaluating_s))
    left_s = after(*events, waited_s=waited_s)
    assert left_s is None or (math.isfinite(left_s) and left_s >= 0)
