"""Sums of rows: the same bits whoever adds up which microbatches."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.tables.table import RowFold, RowSum, added, nothing, plan, total
from lockstep.parallel.layout import ROWS, Range, RowLayout, Strided, split

DIM = 3


@st.composite
def leaves(draw):
    """The sums of some microbatches, a few rows each; values that round when they are added."""
    found = []
    for _ in range(draw(st.integers(1, 9))):
        ids = sorted(draw(st.sets(st.integers(0, 7), max_size=5)))
        seed = draw(st.integers(0, 2**31))
        rows = torch.randn(len(ids), DIM, generator=torch.Generator().manual_seed(seed))
        found.append(RowSum(torch.tensor(ids, dtype=torch.int64), rows))
    return found


def along_the_tree(values):
    """The sum of one row over all microbatches, those without it left out: the plain recursion."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    left, right = along_the_tree(values[:half]), along_the_tree(values[half:])
    if left is None or right is None:
        return right if left is None else left
    return left + right


def summed(sums, distributed):
    nodes, parts = [], []
    for microbatches in distributed:
        fold = RowFold(microbatches, len(sums))
        for number in range(*microbatches):
            if number < len(sums):
                fold.add(sums[number])
        nodes += fold.nodes
        parts += fold.sums
    ordered = sorted(zip(nodes, parts, strict=True), key=lambda pair: pair[0].first)
    return total([p for _, p in ordered], [n for n, _ in ordered], len(sums))


@given(leaves(), st.integers(1, 11))
def test_any_number_of_ranks_makes_the_sums_of_the_tree(sums, size):
    found = summed(sums, split(len(sums), size))
    for row in range(8):
        there = [s.rows[s.ids == row] for s in sums]
        wanted = along_the_tree([rows[0] if len(rows) else None for rows in there])
        mine = found.rows[found.ids == row]
        assert (wanted is None) == (len(mine) == 0)
        assert wanted is None or torch.equal(mine[0], wanted)
    assert found.ids.tolist() == sorted(set(found.ids.tolist()))


@given(leaves(), st.integers(1, 4))
def test_microbatches_in_rounds_make_the_same_sums(sums, size):
    rounds = [Strided(rank, len(sums) + size, size) for rank in range(size)]
    one, other = summed(sums, split(len(sums), 1)), summed(sums, rounds)
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.rows, other.rows)


def test_a_row_that_one_lacks_keeps_its_bits():
    left = RowSum(torch.tensor([1, 4]), torch.tensor([[-0.0], [1.0]]))
    right = RowSum(torch.tensor([4, 6]), torch.tensor([[2.0], [-0.0]]))
    both = added(left, right)
    assert both.ids.tolist() == [1, 4, 6]
    assert torch.signbit(both.rows[:, 0]).tolist() == [True, False, True]
    assert both.rows[1] == 3.0
    empty = nothing(1, left.rows)
    assert added(empty, left) is left
    assert added(left, empty) is left


def test_a_rank_without_microbatches_has_no_nodes():
    assert plan(Range(3, 3), 5) == ([], [])
    assert plan(Strided(5, 9, 4), 5) == ([], [])


@pytest.mark.parametrize(("num_rows", "size"), [(1, 1), (5, 3), (160, 2), (1000, 7), (33, 4)])
def test_every_row_has_one_place_with_one_owner(num_rows, size):
    layout = RowLayout(num_rows, size)
    ids = torch.arange(num_rows)
    owners, places = layout.owner(ids), layout.local(ids)
    assert len(set(zip(owners.tolist(), places.tolist(), strict=True))) == num_rows
    for owner in range(size):
        own = places[owners == owner]
        assert own.tolist() == sorted(own.tolist())
        assert layout.num_local(owner) % ROWS == 0
        assert not len(own) or int(own.max()) < layout.num_local(owner)
    counts = [layout.num_local(owner) for owner in range(size)]
    assert max(counts) - min(counts) <= ROWS
