from __future__ import annotations

import pytest
import torch

from lockstep.parallel.fold import ALIGNMENT, ArenaLayout, Segment

LAYOUT = ArenaLayout([Segment(torch.float32, 1024), Segment(torch.float64, 2048)], 3, 5)
CPU = torch.device("cpu")


def test_header_and_rows_do_not_overlap_and_start_on_cache_lines() -> None:
    _, [first, second] = LAYOUT.allocate([2, 3], CPU)
    views = [
        view
        for arena in (first, second)
        for view in (arena.header, *(v for r in arena.rows for v in (*r.segments, r.scalars)))
    ]
    for value, view in enumerate(views):
        assert view.data_ptr() % ALIGNMENT == 0
        view.fill_(value + 1)
    for value, view in enumerate(views):
        assert torch.equal(view, torch.full_like(view, value + 1))
    assert [len(a.rows) for a in (first, second)] == [2, 3]
    assert [len(s) for s in first.rows[0].segments] == [1024, 2048]
    assert [len(v) for v in (first.header, first.rows[0].scalars)] == [5, 3]


@pytest.mark.parametrize("num_rows", [0, 1, 2])
def test_message_carries_the_header_and_the_first_rows(num_rows: int) -> None:
    _, [sender] = LAYOUT.allocate([2], CPU)
    sender.header.fill_(7)
    for index, row in enumerate(sender.rows):
        row.segments[0].fill_(index + 1)
        row.segments[1].fill_(index + 11)
        row.scalars.fill_(index + 21)
    memory, [receiver] = LAYOUT.allocate([num_rows], CPU)
    message = sender.message(num_rows)
    assert len(message) == LAYOUT.num_bytes(num_rows)
    memory.copy_(message)
    assert receiver.header.tolist() == [7] * 5
    for mine, theirs in zip(receiver.rows, sender.rows, strict=False):
        for a, b in zip(mine.segments, theirs.segments, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(mine.scalars, theirs.scalars)


def test_fresh_memory_is_zero() -> None:
    memory, _ = LAYOUT.allocate([1, 2], CPU)
    assert not memory.any()
    assert len(memory) == LAYOUT.num_bytes(1) + LAYOUT.num_bytes(2)


def test_rows_add_up_element_by_element() -> None:
    _, [arena] = LAYOUT.allocate([2], CPU)
    for row, value in zip(arena.rows, (1.0, 2.0), strict=True):
        for tensor in (*row.segments, row.scalars):
            tensor.fill_(value)
    arena.rows[0].add_(arena.rows[1])
    for row, value in zip(arena.rows, (3.0, 2.0), strict=True):
        for tensor in (*row.segments, row.scalars):
            assert tensor.tolist() == [value] * len(tensor)
