from __future__ import annotations

import pytest
import torch
from sums import NUM_SCALARS, PLACES, SEGMENTS, Leaf, row_bits, tree_sum, wild_leaves

from lockstep.parallel.fold import ArenaLayout, Fold, rows_needed
from lockstep.parallel.layout import Node, Range

CPU = torch.device("cpu")


def folded(own: Range, leaves: list[Leaf], num_rows: int) -> list[list[bytes]]:
    _, [arena] = ArenaLayout(SEGMENTS, NUM_SCALARS, 0).allocate([num_rows], CPU)
    fold = Fold(arena.rows, PLACES, own, len(leaves))
    for i in range(*own):
        fold.add(leaves[i].tensors, leaves[i].scalars)
    return [row_bits(row) for row in arena.rows[: len(fold.nodes)]]


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 11, 16])
@pytest.mark.parametrize("missing", [0.0, 0.4])
def test_all_leaves_fold_into_the_tree_sum(num: int, missing: float) -> None:
    leaves = wild_leaves(num, seed=num, missing=missing)
    own = Range(0, num)
    assert folded(own, leaves, rows_needed(own, num)) == [tree_sum(leaves)]


def test_part_of_the_leaves_folds_into_one_row_for_each_node() -> None:
    leaves = wild_leaves(8, seed=3)
    nodes = folded(Range(1, 8), leaves, rows_needed(Range(1, 8), 8))
    assert nodes == [tree_sum(leaves[1:2]), tree_sum(leaves[2:4]), tree_sum(leaves[4:8])]


def test_nodes_are_those_of_the_range() -> None:
    _, [arena] = ArenaLayout(SEGMENTS, NUM_SCALARS, 0).allocate([3], CPU)
    assert Fold(arena.rows, PLACES, Range(1, 8), 8).nodes == [Node(1, 1), Node(2, 2), Node(4, 4)]


@pytest.mark.parametrize("own", [Range(0, 16), Range(3, 16), Range(1, 8), Range(5, 7), Range(0, 1)])
def test_rows_needed_are_enough_and_none_too_many(own: Range) -> None:
    leaves = wild_leaves(16)
    num_rows = rows_needed(own, 16)
    folded(own, leaves, num_rows)
    with pytest.raises(IndexError):
        folded(own, leaves, num_rows - 1)


def test_a_rank_without_leaves_has_a_row_for_the_total() -> None:
    assert rows_needed(Range(4, 4), 4) == 1


def test_restart_forgets_the_leaves_of_the_step_before() -> None:
    _, [arena] = ArenaLayout(SEGMENTS, NUM_SCALARS, 0).allocate([4], CPU)
    fold = Fold(arena.rows, PLACES, Range(0, 6), 6)
    for leaf in wild_leaves(4, seed=1):
        fold.add(leaf.tensors, leaf.scalars)
    fold.restart()
    leaves = wild_leaves(6, seed=2, missing=0.3)
    for leaf in leaves:
        fold.add(leaf.tensors, leaf.scalars)
    assert row_bits(arena.rows[0]) == tree_sum(leaves)


def test_leaves_are_left_as_they_are() -> None:
    leaves = wild_leaves(5)
    before = [tree_sum([leaf]) for leaf in leaves]
    folded(Range(0, 5), leaves, 4)
    assert [tree_sum([leaf]) for leaf in leaves] == before


def test_strides_of_a_gradient_do_not_matter() -> None:
    plain = wild_leaves(4)
    strided = [
        Leaf([t if t is None or t.dim() != 2 else t.t().contiguous().t() for t in leaf.tensors],
             leaf.scalars)
        for leaf in plain
    ]  # fmt: skip
    assert not all(t is None or t.is_contiguous() for t in strided[0].tensors)
    assert folded(Range(0, 4), strided, 3) == [tree_sum(plain)]


def test_a_missing_gradient_is_a_positive_zero() -> None:
    zero = torch.full((), -0.0)
    for tensors in ([None, zero], [zero, None], [None, None]):
        leaves = wild_leaves(2)
        for leaf, tensor in zip(leaves, tensors, strict=True):
            leaf.tensors[1] = tensor
        [row] = folded(Range(0, 2), leaves, 2)
        assert row[1] == torch.zeros(()).numpy().tobytes()


def test_a_lone_negative_zero_keeps_its_sign() -> None:
    [leaf] = wild_leaves(1)
    leaf.tensors[1] = torch.full((), -0.0)
    [row] = folded(Range(0, 1), [leaf], 1)
    assert row[1] == torch.full((), -0.0).numpy().tobytes()
