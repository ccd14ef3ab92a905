"""Who holds a slice of sharded optimizer state, and when it is lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.recovery.leader import Owned, slice_roots
from lockstep.errors import RankFailure
from lockstep.parallel.fold import BLOCK, Segment, slice_up
from lockstep.parallel.layout import stepped_slices


@st.composite
def groups(draw):
    """How many ranks there were, and which are left, joining ranks among them."""
    size = draw(st.integers(1, 6))
    left = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
    return size, left + [-1] * draw(st.integers(0, 2))


@given(groups(), st.booleans())
def test_a_holder_has_stepped_the_slice(group, with_buddy):
    size, members = group
    slices = slice_up([Segment(torch.float32, 7 * BLOCK)], size)[0]
    gone = [r for r in range(size) if r not in members]
    is_lost = any(not with_buddy or (r + 1) % size in gone for r in gone)
    held = held_by(size, members)
    if is_lost:
        with pytest.raises(RankFailure, match=r"last copy .* resume from the newest checkpoint"):
            slice_roots(0, held, with_buddy)
        return
    for part, new_rank in zip(slices, slice_roots(0, held, with_buddy), strict=True):
        assert part in stepped_slices(slices, members[new_rank], with_buddy)


def test_the_owner_is_preferred():
    assert slice_roots(0, held_by(3, [0, 1, 2]), True) == [0, 1, 2]
    assert slice_roots(0, held_by(3, [1, 2]), True) == [0, 0, 1]
    assert slice_roots(0, held_by(1, [0, -1]), True) == [0]


def test_each_column_of_a_mesh_has_slices_of_its_own():
    # Columns 0 and 1 had three ranks and two; rank 1 of the first is lost, and one joins.
    held = [Owned(1, 0, 2), Owned(0, 2, 3), Owned(0, 0, 3), Owned(), Owned(1, 1, 2)]
    assert slice_roots(0, held, True) == [2, 1, 1]
    assert slice_roots(1, held, True) == [0, 4]
    with pytest.raises(RankFailure, match="slice 1 "):
        slice_roots(0, held, False)


def held_by(size: int, members: list[int]) -> list[Owned]:
    """What ranks hold of one column, by their former ranks; -1 for joining ranks."""
    return [Owned(0, member, size) if member >= 0 else Owned() for member in members]
