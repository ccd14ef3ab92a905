"""Sums in rounds: the bits of the canonical tree, whoever computes which leaf."""

from __future__ import annotations

import pytest
import torch
from sums import NUM_SCALARS, PLACES, SEGMENTS, row_bits, tree_sum, wild_leaves
from tests.thread_transport import ThreadTransport, on_ranks

from lockstep.parallel import rounds as rounds_module
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.fold import Row
from lockstep.parallel.rounds import LateGradientError, Rounds

CPU = torch.device("cpu")
NUM_TENSORS = [len(places) for places in PLACES]


def rounds(
    transport: ThreadTransport, num: int, num_replicas: int, bucket: int = 1 << 20
) -> Rounds:
    return Rounds(
        transport,
        Leaves(SEGMENTS, PLACES, NUM_SCALARS, num, CPU),
        num_replicas=num_replicas,
        bucket_bytes=bucket,
        order=[1, 0],
    )


@pytest.mark.parametrize("num", [1, 2, 3, 5, 8, 11])
@pytest.mark.parametrize(("size", "num_replicas"), [(1, 1), (2, 2), (3, 3), (3, 2), (5, 5)])
@pytest.mark.parametrize(("early", "bucket", "few"), [(False, 1 << 20, 64), (True, 1, 2)])
def test_owners_get_the_slices_of_the_tree_sum(
    num, size, num_replicas, early, bucket, few, monkeypatch
) -> None:
    monkeypatch.setattr(rounds_module, "FEW_NODES", few)
    leaves = wild_leaves(num, seed=num, missing=0.3)

    def body(transport: ThreadTransport) -> tuple[list[torch.Tensor], torch.Tensor]:
        made = rounds(transport, num, num_replicas, bucket)
        for _ in range(2):  # a second step overwrites the first
            made.restart()
            for first in range(0, num, num_replicas):
                number = first + transport.rank
                has_leaf = transport.rank < num_replicas and number < num
                tensors = list(leaves[number].tensors) if has_leaf else None
                if early:
                    last = NUM_TENSORS[-1]
                    made.take(len(SEGMENTS) - 1, tensors and tensors[-last:])
                    if tensors:
                        tensors[-last:] = [None] * last
                scalars = leaves[number].scalars if has_leaf else torch.zeros(NUM_SCALARS).double()
                made.add(tensors, scalars)
        return [part.clone() for part in made.total.segments], made.total.scalars.clone()

    ranks = on_ranks(size, body)
    whole = [torch.cat(parts) for parts in zip(*(segments for segments, _ in ranks), strict=True)]
    for _, scalars in ranks:
        assert row_bits(Row(whole, scalars)) == tree_sum(leaves)


def test_a_gradient_that_comes_after_its_segment_was_summed_is_refused() -> None:
    [leaf] = wild_leaves(1, missing=0.0)

    def body(transport: ThreadTransport) -> int:
        made = rounds(transport, 1, 1)
        made.take(1, leaf.tensors[NUM_TENSORS[0] :])
        with pytest.raises(LateGradientError) as caught:
            made.add(leaf.tensors, leaf.scalars)
        return caught.value.index

    assert on_ranks(1, body) == [NUM_TENSORS[0]]
