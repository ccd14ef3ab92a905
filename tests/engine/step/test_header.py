"""What ranks tell one another in each step arrives as it was said."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.calls import Traffic
from lockstep.engine.step.sums import STOP_REASONS, Headers, header, num_values
from lockstep.engine.timing import Stopwatch, Times

seconds = st.floats(0, 1e9)
counters = st.lists(st.one_of(st.just(-math.inf), st.integers(0, 2**53).map(float)), max_size=4)


@given(
    st.booleans(),
    st.sampled_from(STOP_REASONS),
    st.booleans(),
    st.tuples(seconds, seconds, seconds, seconds),
    counters,
    st.integers(0, 15),
)
def test_a_header_survives_the_journey(
    has_failed: bool,
    stop_reason: str,
    grows: bool,
    times: tuple[float, float, float, float],
    counted: list[float],
    asked: int,
) -> None:
    own = has_failed, stop_reason, grows, Times(*times), tuple(counted)
    values = header(*own, 0, asked, settings=2**31, order=7, loss=2**32 - 1, stored=9)
    assert len(values) == num_values(len(counted))
    quiet = header(False, "", False, Times(1), (-math.inf,) * len(counted), 3, settings=2**31)
    few = [values], [values, quiet], [quiet, values, quiet]
    for rows in (*few, [*[quiet] * 20, values]):
        table = np.array(rows)
        found = Headers(table)
        table.fill(0)  # the next step's headers come into the same memory
        assert (found.has_failed, found.stop_reason) == (has_failed, stop_reason)
        assert (found.grows, found.asked) == (grows, asked)
        place = rows.index(values)
        assert [*found.times[place]] == [*Times(*times)]
        assert found.carry_lengths == [0 if row is values else 3 for row in rows]
        if -math.inf not in counted:
            assert found.counters == counted
        assert found.stored == (9 if rows[0] is values else -1)  # rank 0's
        assert found.have_same_settings
        assert found.have_same_order  # of those that give it
        assert found.have_same_loss


def test_differences_between_headers_are_seen() -> None:
    def headers(**fields: list[int]) -> Headers:
        rows = [
            header(False, "", False, Times(), (), **dict(zip(fields, of_rank, strict=True)))
            for of_rank in zip(*fields.values(), strict=True)
        ]
        return Headers(np.array(rows))

    assert not headers(settings=[1, 1, 0]).have_same_settings
    assert not headers(order=[0, 2, 3]).have_same_order
    assert not headers(loss=[5, 4]).have_same_loss
    assert headers(asked=[1, 4, 0, 1]).asked == 5
    assert headers(is_suspicious=[0, 1]).is_suspicious
    for field in ("settings", "order", "loss"):
        for values in ([1], [1, 1], [1] * 20):
            assert headers(**{field: values}).are_alike
            assert not headers(**{field: [*values, 0]}).are_alike


def test_times_since() -> None:
    assert Times(5, 4, 3, 2).since(Times(1, 1, 1, 2)) == Times(4, 3, 2, 0)
    assert Times(1, 0, 0, 0, 9, 5, 8, 7, 6).since(Times(0, 0, 0, 0, 1, 1, 2, 3, 4)) == Times(
        1, 0, 0, 0, 8, 4, 6, 4, 6
    )


@given(st.lists(st.tuples(*[st.integers(0, 1 << 40)] * len(Times._fields)), max_size=5))
def test_times_add_up_and_of_memory_the_most_stays(rows: list[tuple[int, ...]]) -> None:
    total = Times()
    for row in rows:
        total = total.plus(Times(*row))
    for number, name in enumerate(Times._fields):
        column = [row[number] for row in rows]
        if name == "grad_norm":
            assert total.grad_norm == [0, *column][-1]
            continue
        assert getattr(total, name) == (
            max if name in ("peak_bytes", "swapped_bytes", "device_bytes", "device_busy") else sum
        )([0, *column])


def test_a_stopwatch_knows_what_was_said() -> None:
    traffic = Traffic()
    traffic.add(5, 6)
    watch = Stopwatch(traffic)
    traffic.add(10, 20)
    times = watch.times()
    assert (times.num_calls, times.sent_bytes, times.received_bytes) == (1, 10, 20)
    assert Stopwatch(traffic).times().num_calls == 0


def test_a_stopwatch_knows_what_the_process_has_used() -> None:
    watch = Stopwatch()
    block = bytearray(1 << 26)
    while watch.times().cpu_s < 0.01:
        sum(range(10_000))
    times = watch.times()
    assert 0.01 <= times.cpu_s < 10
    assert times.cores_s >= 0
    assert times.peak_bytes > len(block)
    assert Stopwatch().times().cpu_s < times.cpu_s
