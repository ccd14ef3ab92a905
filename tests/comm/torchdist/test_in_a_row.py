"""What an all-to-all sends: without a copy where it lies in a row already."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.torchdist.process_group_transport import _in_a_row

PARTS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=5)


@given(PARTS)
def test_any_parts_come_one_behind_the_other(parts: list[tuple[int, int]]) -> None:
    memory = torch.arange(10)
    counts, starts = [count for count, _ in parts], [start for _, start in parts]
    wanted = [n for count, start in parts for n in range(start, start + count)]
    assert _in_a_row(memory, counts, starts).tolist() == wanted


def test_what_lies_in_a_row_is_not_copied() -> None:
    memory = torch.arange(10)
    sent = _in_a_row(memory, [0, 3, 0, 2], [9, 4, 0, 7])
    assert sent.tolist() == [4, 5, 6, 7, 8]
    assert sent.data_ptr() == memory[4:].data_ptr()
