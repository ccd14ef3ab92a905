"""Carries of microbatches: as trees, packed, saved by name, committed, and sent between ranks."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thread_transport import on_ranks

from lockstep.comm.transport import LocalTransport
from lockstep.engine.carry import (
    Carries,
    Carry,
    check_carry,
    check_named,
    exchanged,
    from_named,
    pack,
    unpack,
)
from lockstep.engine.carry.distributed_carries import scattered_carries
from lockstep.engine.checkpoint.share import gathered
from lockstep.errors import TaskError

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(len(shape)))
    return numbers.to(draw(st.sampled_from(DTYPES)))


keys = st.text(st.characters(exclude_characters="/", codec="utf-8"), max_size=4)
values = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
values |= st.floats(allow_nan=False, allow_infinity=False)
trees = st.recursive(
    tensors() | values,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


def same(one, two):
    """Whether two trees are equal to the bit, types included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and torch.equal(one, two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(v, two[k]) for k, v in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    return one == two


@given(trees)
def test_a_tree_comes_back_whole(tree):
    carry = Carry.of(tree, "here")
    check_carry(carry.structure, carry.tensors)
    assert same(carry.tree, tree)


@given(st.dictionaries(st.integers(0, 40), st.none() | trees, max_size=4))
def test_carries_come_back_from_a_message_and_from_a_checkpoint(given_trees):
    carries = {n: Carry.of(t, "here") if t is not None else None for n, t in given_trees.items()}
    scattered, structures = scattered_carries(LocalTransport(), carries)
    [*content] = gathered(LocalTransport(), [[*scattered.values()]], CPU)
    saved = dict(zip(scattered, content, strict=True))
    check_named(saved, {str(n): structures.get(str(n)) for n in range(41)}, 41)
    for again in (unpack(pack(carries, CPU)), from_named(saved, structures, [*carries], CPU)):
        assert sorted(again) == sorted(carries)
        for number, carry in carries.items():
            assert (again[number] is None) == (carry is None)
            if carry is not None:
                assert same(again[number].tree, carry.tree)
                assert again[number].digest == carry.digest


def test_who_reads_a_carry_must_not_change_it():
    carry = Carry.of({"h": torch.ones(3), "n": 2}, "here")
    assert carry.read(lambda tree: tree["h"].sum() * tree["n"], "there") == 6
    with pytest.raises(TaskError, match="there: changes the carry, which it may only read"):
        carry.read(lambda tree: tree["h"].add_(1), "there")


def test_neither_who_gave_a_tree_nor_who_gets_it_can_change_what_is_kept():
    hidden = torch.ones(3, requires_grad=True) * 2
    carry = Carry.of({"h": hidden}, "here")
    assert not carry.tensors["h"].requires_grad
    with torch.no_grad():
        hidden.zero_()
    carry.tree["h"].fill_(7)
    assert carry.tree["h"].tolist() == [2, 2, 2]


def test_tensors_are_kept_as_a_checkpoint_would_give_them_back():
    wide = torch.arange(12.0).view(3, 4)
    for tensor in (wide.T, wide[:, ::2], wide[0].expand(5, 4)):
        carry = Carry.of(tensor, "here")
        assert carry.tree.is_contiguous()
        assert torch.equal(carry.tree, tensor)


def test_a_digest_tells_tensors_and_structures_apart():
    zeros = torch.zeros(2)
    others = [{"h": zeros}, {"g": zeros}, [zeros], (zeros,), {"h": zeros + 1}, {"h": zeros, "n": 1}]
    assert len({Carry.of(tree, "here").digest for tree in others}) == len(others)


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"a": object()}, "here: a: a object cannot be kept"),
        ({"a": {1: torch.ones(1)}}, "here: a: the key 1 must be text"),
        ({"a/b": torch.ones(1)}, "here: the key 'a/b' must be text without '/'"),
        ([math.nan], "here: 0: nan is not finite"),
        ({"a": "\ud800"}, "here: a: .* is no text that UTF-8 can hold"),
        ({"\ud800": 1}, "here: .* is no text that UTF-8 can hold"),
        ({"a": torch.ones(1).to_sparse()}, "here: a: a tensor of dtype .* layout torch.sparse"),
        (torch.ones(1, dtype=torch.complex64), "here: a tensor of dtype torch.complex64"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_place(tree, said):
    with pytest.raises(TaskError, match=said):
        Carry.of(tree, "here")


def test_a_tree_without_end_is_refused():
    tree = []
    tree.append(tree)
    with pytest.raises(TaskError, match="more than 32 levels"):
        Carry.of(tree, "here")


@pytest.mark.parametrize(
    ("structures", "named", "said"),
    [
        (None, {}, "keys 0 to 1"),
        ({"0": None}, {}, "keys 0 to 1"),
        ({"0": None, "1": None, "2": None}, {}, "keys 0 to 1"),
        ({"0": {"tensor": "h"}, "1": None}, {}, "microbatch 0: tensor 'h' is not there"),
        ({"0": None, "1": None}, {"1/h": torch.ones(1)}, "microbatch 1: tensor 'h'"),
        ({"0": None, "1": None}, {"7/h": torch.ones(1)}, "tensor '7/h' is of no microbatch"),
        ({"0": {"set": []}, "1": None}, {}, "microbatch 0: .* is no part of a carry"),
        ({"0": {"tensor": "h", "x": 1}, "1": None}, {"0/h": torch.ones(1)}, "no part of a carry"),
        ({"0": {"list": [{"tensor": "h"}] * 2}, "1": None}, {"0/h": torch.ones(1)}, "exactly once"),
    ],
)
def test_a_checkpoint_with_another_carry_is_refused(structures, named, said):
    with pytest.raises(ValueError, match=said):
        check_named(named, structures, 2)


def test_a_structure_of_many_levels_is_refused():
    deep = None
    for _ in range(500):
        deep = {"list": [deep]}
    with pytest.raises(ValueError, match="too many levels"):
        check_named({}, {"0": deep}, 1)


def test_a_step_counts_from_its_commit_on():
    carries = Carries()
    one, two = Carry.of(torch.ones(1), "here"), Carry.of(torch.ones(1) * 2, "here")
    carries.make(3, one)
    assert carries.of(3) is None
    carries.begin()  # given up
    carries.commit()
    assert carries.of(3) is None
    carries.make(3, one)
    carries.commit()
    carries.begin()
    carries.make(3, two)
    carries.make(4, two)
    carries.skip()  # fp16
    assert carries.of(3) is one
    assert carries.committed == {3: one, 4: None}


def carry_of(number):
    """A different one for each microbatch; none for every fifth."""
    if number % 5 == 4:
        return None
    return Carry.of({"h": torch.full((number % 3, 2), float(number)), "n": number}, "test")


numbers = st.sets(st.integers(0, 9))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
def test_carries_reach_all_ranks_that_need_them(ranks):
    def call(transport):
        own, wanted = ranks[transport.rank]
        return exchanged(transport, {n: carry_of(n) for n in own}, wanted, CPU)

    there = set().union(*(own for own, _ in ranks))
    missing = sorted(set().union(*(wanted for _, wanted in ranks)) - there)
    for (_, wanted), (arrived, lost) in zip(ranks, on_ranks(len(ranks), call), strict=True):
        assert lost == missing
        assert sorted(arrived) == sorted(wanted & there)
        for number, carry in arrived.items():
            expected = carry_of(number)
            assert (carry and carry.digest) == (expected and expected.digest)
