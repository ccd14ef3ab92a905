"""Carries go from whoever holds them to whom they are wanted by."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thread_transport import on_ranks

from lockstep.engine.carry.carries import Carry
from lockstep.engine.carry.group import moved

CPU = torch.device("cpu")


def carry_of(number):
    """Another one for each microbatch; none for every fifth."""
    if number % 5 == 4:
        return None
    return Carry.of({"h": torch.full((number % 3, 2), float(number)), "n": number}, "test")


numbers = st.sets(st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
def test_everyone_gets_what_anybody_holds(ranks):
    def call(transport):
        held, own = ranks[transport.rank]
        return moved(transport, {n: carry_of(n) for n in held}, own, CPU)

    there = set().union(*(held for held, _ in ranks))
    missing = sorted(set().union(*(own for _, own in ranks)) - there)
    for (_, own), (arrived, lost) in zip(ranks, on_ranks(len(ranks), call), strict=True):
        assert lost == missing
        assert sorted(arrived) == sorted(own & there)
        for number, carry in arrived.items():
            expected = carry_of(number)
            assert (carry and carry.digest) == (expected and expected.digest)
