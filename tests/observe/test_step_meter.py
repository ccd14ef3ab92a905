"""What steps cost, learnt from events, and what is said of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_events import Recorder, evaluated, finished, joined, run_started, step_done

from lockstep.engine.events import Event, Failed, RankTimes, Recovered
from lockstep.observe import EventHub, Measured, Predicted, Sinks, StepCost, text
from lockstep.observe.step_costs import SampledMedian, StepMeter, each_step, peak_memory, step_time

START = [joined(0), joined(1), run_started(world_size=2)]
PLAN = Predicted(step=0, by="plan.json", cost=StepCost(0.25, 1000))


def report(step: int, step_s: float, peak_bytes: int = 0, ranks: int = 2, **fields: Any) -> Event:
    """A report of ten steps."""
    times = [RankTimes(r, 1.0, 0.0, 0.0, 0.0, peak_bytes=peak_bytes - r) for r in range(ranks)]
    fields = {"num_steps": 10, "seconds": 10 * step_s, "ranks": tuple(times)} | fields
    return step_done(step, **fields)


def values(cost: StepCost | None) -> tuple[float, int]:
    """Time and memory, which must be there."""
    assert cost is not None
    return cost.step_s, cost.peak_bytes


def metered(events: Iterable[Event]) -> Measured:
    meter = StepMeter()
    for event in events:
        meter.take(event)
    return meter.measured(99)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200), st.sampled_from([2, 4, 16]))
def test_the_median_is_that_of_values_at_even_distances(values: list[float], most: int) -> None:
    median = SampledMedian(most)
    for value in values:
        median.add(value)
    every = 1
    while len(values[::every]) > most:
        every *= 2
    assert len(median) == len(values[::every]) <= most
    assert median.value == statistics.median_low(values[::every])


@pytest.mark.parametrize("most", [0, -2, 3])
def test_an_odd_number_of_values_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match=f"most={most}: must be an even number above 0"):
        SampledMedian(most)


def test_a_run_of_a_million_reports_keeps_a_few_thousand_values() -> None:
    median = SampledMedian()
    for number in range(1_000_000):
        median.add(number / 1e6)
    assert 2048 <= len(median) <= 4096
    assert median.value == pytest.approx(0.5, abs=1e-3)


def test_without_a_plan_the_second_report_predicts_the_median_of_those_that_follow() -> None:
    times = [9.0, 0.5, 0.2, 0.4, 0.3]
    reports = [report(10 * n, time, 100 * n) for n, time in enumerate(times, 1)]
    found = metered([*START, *reports])
    assert values(found.predicted) == (pytest.approx(0.5), 200)
    assert values(found.measured) == (pytest.approx(0.3), 500)
    assert (found.by, found.reason) == ("the first reports", "")


@pytest.mark.parametrize("num_reports", range(3))
def test_fewer_than_three_reports_say_nothing(num_reports: int) -> None:
    found = metered([*START, *(report(10 * n, 0.1) for n in range(num_reports))])
    assert (found.measured, found.predicted, found.by) == (None, None, "")
    assert found.reason == "too few steps on 2 ranks"
    assert metered([]).reason == "no report"


def test_a_plan_predicts_all_reports_but_the_first() -> None:
    reports = [report(10 * n, time) for n, time in enumerate([9.0, 0.5, 0.3, 0.1], 1)]
    found = metered([PLAN, *START, *reports])
    assert found.predicted == PLAN.cost
    assert values(found.measured) == (pytest.approx(0.3), 0)
    assert found.by == "plan.json"
    assert metered([PLAN, *START, reports[0]]).predicted == PLAN.cost


def test_a_plan_without_the_layout_leaves_no_prediction() -> None:
    nothing = Predicted(step=0, by="plan.json", cost=None, reason="no row")
    found = metered([nothing, *START, *(report(10 * n, 0.1) for n in range(5))])
    assert (found.predicted, found.by, found.reason) == (None, "", "no row")
    assert found.measured is not None


def test_a_plan_of_another_run_is_replaced_by_the_first_reports() -> None:
    other = Predicted(step=0, by="", cost=None, reason="of config X")
    found = metered([other, *START, *(report(10 * n, 0.1) for n in range(5))])
    assert (found.by, found.reason) == ("the first reports", "of config X")
    assert metered([other, *START]).reason == "of config X; too few steps on 2 ranks"


@pytest.mark.parametrize("by", ["plan", "reports"])
def test_a_prediction_stands_beside_no_fewer_than_ten_steps(by: str) -> None:
    """A slow second step predicts nothing, and a few steps measure nothing."""
    plan = [PLAN] if by == "plan" else []
    times = [9.0, 4.0, *[0.1] * (9 if plan else 19)]
    reports = [report(n, time, num_steps=1, seconds=time) for n, time in enumerate(times, 1)]
    few = metered([*plan, *START, *reports[:-2]])
    assert few.measured is None
    assert step_time(few) == ""
    enough = metered([*plan, *START, *reports])
    assert values(enough.measured) == (pytest.approx(0.1), 0)
    expected = 0.25 if plan else 0.1
    assert enough.predicted is not None
    assert enough.predicted.step_s == pytest.approx(expected)


def test_evaluations_and_checkpoints_are_no_steps() -> None:
    saving = [RankTimes(0, 1.0, 0.0, 0.0, 2.0), RankTimes(1, 1.0, 0.0, 0.0, 1.0)]
    last = step_done(30, num_steps=10, seconds=3.5, ranks=tuple(saving))
    events = [report(10, 9.0), evaluated(10), report(20, 0.15), evaluated(20), last]
    found = metered([*START, *events])
    assert values(found.predicted) == (pytest.approx(0.1), 0)
    assert values(found.measured) == (pytest.approx(0.1), 0)


def test_reports_of_another_number_of_ranks_do_not_count() -> None:
    events = [report(10, 9.0), report(20, 0.1, ranks=1), report(30, 0.2), report(40, 0.3)]
    events += [report(50, 7.0, 10**9, ranks=1), report(60, 7.0, 10**9, ranks=3)]
    found = metered([*START, *events])
    assert values(found.predicted) == (pytest.approx(0.2), 0)
    assert values(found.measured) == (pytest.approx(0.3), 0)


def test_a_session_counts_by_itself_and_its_plan_too() -> None:
    reports = [report(10 * n, 0.1 * n) for n in range(1, 5)]
    first = [PLAN, *START, *reports]
    assert metered([*first, *START]).reason == "too few steps on 2 ranks"
    assert metered([*first, *START, *reports]).by == "the first reports"
    said = Measured(step=40, measured=None, predicted=None, reason="so it said")
    assert metered([*first, said]) is said
    assert metered([*first, said, *START]).reason == "too few steps on 2 ranks"


def test_a_run_that_goes_back_to_a_checkpoint_goes_on_being_measured() -> None:
    reports = [report(10 * n, 0.1) for n in range(1, 5)]
    again = [joined(1, slot=2), Recovered(step=20, world_size=2, seconds=0.1, copied=True)]
    back = run_started(world_size=2, step=20)
    found = metered([PLAN, *START, *reports, *again, back])
    assert found.measured is not None
    assert found.by == "plan.json"


@pytest.mark.parametrize("seconds_of_it", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_cannot_be_does_not_count(seconds_of_it: float) -> None:
    bad = report(20, 0.1, seconds=seconds_of_it)
    none = report(20, 0.1, num_steps=0)
    found = metered([*START, report(10, 1.0), bad, none, report(30, 0.2), report(40, 0.3)])
    assert values(found.predicted) == (pytest.approx(0.2), 0)
    assert values(found.measured) == (pytest.approx(0.3), 0)


def test_times_that_add_up_to_more_than_a_number_holds_have_a_median() -> None:
    longest = [report(10 * n, 0.1, seconds=1.7e308, num_steps=1) for n in range(2, 5)]
    found = metered([*START, report(10, 1.0), *longest])
    assert values(found.predicted) == values(found.measured) == (1.7e308, 0)


@pytest.mark.parametrize("cost", [(0.0, 1), (-1.0, 1), (math.nan, 1), (math.inf, 1), (1.0, -1)])
def test_no_step_costs_that(cost: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="must be a finite time above 0"):
        StepCost(*cost)


def hub() -> tuple[EventHub, Recorder]:
    recorder = Recorder()
    return EventHub(lambda _: Sinks([recorder])), recorder


@pytest.mark.parametrize("plan", [[], [PLAN]])
def test_the_rank_that_takes_over_knows_what_came_before(plan: list[Event]) -> None:
    before = [*plan, *START, *(report(10 * n, 0.1 * n, n) for n in range(1, 5))]
    (first, whole), (second, rest) = hub(), hub()
    first.open()
    for event in [*before, finished(40)]:
        first(event)
    for event in before:
        second(event)
    second.open()
    for event in [run_started(world_size=1, step=40, continued=True), finished(40)]:
        second(event)
    said = [[e for e in r.events if isinstance(e, Measured)] for r in (whole, rest)]
    assert said[0] == said[1]
    assert len(said[0]) == 1
    assert not any(isinstance(event, Predicted) for event in rest.events)


def test_a_process_that_came_later_does_not_take_its_second_report_for_the_runs() -> None:
    late, recorder = hub()
    for step in range(10, 60, 10):
        late(report(step, 0.1))
    late.open()
    late(run_started(world_size=2, step=50, continued=True))
    late(Failed(step=0, error="E", message="m"))
    *_, said, failed = recorder.events
    assert isinstance(failed, Failed)
    assert isinstance(said, Measured)
    assert values(said.measured) == (pytest.approx(0.1), 0)
    assert said.predicted is None
    assert "joined after the first reports" in said.reason


def test_in_words() -> None:
    both = Measured(
        step=1, measured=StepCost(0.0059, 3 << 20), predicted=StepCost(0.0061, 4 << 20), by="p.json"
    )
    assert step_time(both) == "5.9 ms; 6.1 ms predicted by p.json"
    assert each_step(both) == "5.9 ms a step, 6.1 ms predicted by p.json"
    assert peak_memory(both) == "3.0 MiB; 4.0 MiB predicted by p.json"
    alone = Measured(step=1, measured=StepCost(2.5, 3 << 20), predicted=None, reason="no row")
    assert step_time(alone) == "2.50 s; no prediction: no row"
    assert each_step(alone) == "2.50 s a step"
    assert peak_memory(alone) == "3.0 MiB"
    nothing = Measured(step=1, measured=None, predicted=StepCost(1.0, 1), by="p.json")
    assert step_time(nothing) == peak_memory(nothing) == step_time(None) == peak_memory(None) == ""


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (1e-9, "0.001 µs"), (85.34e-6, "85.3 µs"), (0.9996e-3, "1 ms"), (0.0059, "5.9 ms"),
        (0.9996, "1.00 s"), (3.25, "3.25 s"), (65.0, "0:01:05"), (1e300, None),
    ],
)  # fmt: skip
def test_times_in_words(value: float, words: str | None) -> None:
    assert words in (None, text.brief(value))
