"""What each kind of compression keeps of a leaf, and what is left of it."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sums import PLACES, SEGMENTS
from torch import Tensor

from lockstep.parallel.compression.codes import (
    drawn,
    greatest,
    magnitudes,
    num_kept,
    pack,
    signed,
    unpack,
)
from lockstep.parallel.compression.integers import (
    KINDS,
    dequantise,
    expected_next,
    exponents,
    quantise,
    scales,
    total_scales,
    width,
)
from lockstep.parallel.compression.reduction import BLOCK, LeafMemory, in_blocks

DTYPES = (torch.float32, torch.float64)
FEW = settings(max_examples=40, deadline=None)


@st.composite
def leaves(draw: st.DrawFn, num: int = 1, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Leaves of two blocks of one dtype, of any finite magnitudes."""
    dtype = dtype or draw(st.sampled_from(DTYPES))
    bits = 8 * dtype.itemsize
    # Far enough below the greatest number that leaves can be added up.
    most = float(np.finfo(f"float{bits}").max) / 2**12
    small = hnp.arrays(
        f"float{bits}", 24, elements=st.floats(-most, most, width=bits, allow_subnormal=True)
    )
    found = []
    for _ in range(num):
        values = np.zeros(2 * BLOCK, f"float{bits}")
        values[BLOCK - 12 : BLOCK + 12] = draw(small)
        found.append(torch.from_numpy(values))
    return found


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in values.tolist()]


@FEW
@given(leaves(), st.integers(1, 15))
def test_what_is_sent_and_what_is_cut_off_add_up_to_the_leaf_exactly(
    found: list[Tensor], bits: int
) -> None:
    (leaf,) = found
    scale = scales(exponents(leaf), bits, leaf.dtype)
    sent = dequantise(quantise(leaf, scale, bits), scale)
    error = leaf - sent
    assert [a + b for a, b in zip(exact(sent), exact(error), strict=True)] == exact(leaf)


@FEW
@given(leaves(), st.integers(1, 15))
def test_nothing_is_off_by_more_than_a_half_but_the_greatest_by_one(
    found: list[Tensor], bits: int
) -> None:
    (leaf,) = found
    scale = scales(exponents(leaf), bits, leaf.dtype)
    whole = quantise(leaf, scale, bits)
    assert whole.abs().max() <= 2**bits - 1
    off = (leaf.view(2, -1) / scale[:, None] - whole.view(2, -1)).abs()
    assert off[whole.view(2, -1).abs() < 2**bits - 1].le(0.5).all()
    assert off.max() <= 1


@FEW
@given(st.data(), st.integers(1, 12), st.sampled_from([torch.int8, torch.int16]))
def test_the_sum_of_integers_is_that_of_what_they_mean(
    data: st.DataObject, num: int, wire: torch.dtype
) -> None:
    found = data.draw(leaves(num=num))
    bits = width(wire, num)
    scale = scales(exponents(torch.stack(found).abs().amax(dim=0)), bits, found[0].dtype)
    whole = [quantise(leaf, scale, bits) for leaf in found]
    total = torch.zeros(len(found[0]), dtype=wire)
    for numbers in whole:
        total += numbers.to(wire)
    each = [exact(dequantise(numbers, scale)) for numbers in whole]
    assert exact(dequantise(total, scale)) == [sum(column) for column in zip(*each, strict=True)]


@pytest.mark.parametrize(("wire", "most"), [(torch.int8, 127), (torch.int16, 32767)])
def test_the_sum_of_the_greatest_leaves_fits_and_no_wider_ones_would(
    wire: torch.dtype, most: int
) -> None:
    for num in (1, 2, 3, 4, 7, 8, 9, 100, 127, 128, 5000, most, most + 1):
        bits = width(wire, num)
        assert num * (2**bits - 1) <= most < num * (2 ** (bits + 1) - 1)
        assert (bits > 0) == (num <= most)


def test_halves_are_rounded_to_even() -> None:
    leaf = torch.zeros(BLOCK)
    leaf[:6] = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 3.0])
    assert quantise(leaf, torch.ones(1), 2)[:6].tolist() == [0, 2, 2, 0, -2, 3]


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_are_normal_powers_of_two_for_any_magnitude(dtype: torch.dtype) -> None:
    every = torch.arange(KINDS[dtype].all_ones + 1).to(torch.int16)
    for bits in (1, 7, 15):
        found = scales(every, bits, dtype)
        assert torch.frexp(found).mantissa.eq(0.5).all()
        tiny = torch.finfo(dtype).tiny
        assert found.ge(tiny).all()
        assert found.reciprocal().ge(tiny).all()


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_that_is_not_finite_makes_its_sum_nan(bad: float, dtype: torch.dtype) -> None:
    leaf = torch.ones(3 * BLOCK, dtype=dtype)
    leaf[BLOCK + 5] = bad
    seen = exponents(leaf)
    scale = scales(torch.full([3], KINDS[dtype].all_ones // 2, dtype=torch.int16), 7, dtype)
    total = dequantise(quantise(leaf, scale, 7).to(torch.int16), total_scales(scale, seen))
    assert [block.isfinite().all().item() for block in total.view(3, -1)] == [True, False, True]
    assert total.view(3, -1)[1].isnan().all()


def test_what_is_expected_next_falls_by_halves() -> None:
    seen, expected = (torch.tensor(e, dtype=torch.int16) for e in ([5, 9, 0, 0], [7, 7, 1, 0]))
    assert expected_next(seen, expected).tolist() == [6, 9, 0, 0]


@FEW
@given(
    hnp.arrays("float32", st.integers(1, 60), elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2])),
    st.data(),
)
def test_of_equal_magnitudes_the_first_are_taken(values: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(values)))
    order = sorted(range(len(values)), key=lambda i: (-abs(values[i]), i))
    assert greatest(torch.from_numpy(values), count).tolist() == sorted(order[:count])


@pytest.mark.parametrize("count", [1, 7, 700, 7_000, 69_999, 70_000])
@pytest.mark.parametrize("seed", range(5))
def test_the_greatest_of_many_are_found_whatever_a_sample_says(seed: int, count: int) -> None:
    """Few distinct values; all equal; great where the sample is, and where it is not; any."""
    source, numel = np.random.default_rng(seed), 70_000
    values = source.standard_normal(numel).astype(np.float32)
    match seed:
        case 0:
            values = np.round(values)
        case 1:
            values = np.ones_like(values)
        case 2:
            values[::64] *= 1e6
        case 3:
            values[::64] = 0
    order = np.lexsort([np.arange(numel), -np.abs(values)])
    found = greatest(torch.from_numpy(values), count)
    assert found.numpy().tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_among_the_greatest(bad: float) -> None:
    values = torch.arange(50.0)
    values[3] = bad
    assert greatest(values, 1).tolist() == [3]
    assert greatest(values, 2).tolist() == [3, 49]
    assert greatest(torch.full([50], bad), 2).tolist() == [0, 1]


@FEW
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    st.floats(0.001, 1.0),
    st.integers(0, 2**63 - 1),
)
def test_drawn_indices_are_of_each_tensor_and_come_once(
    sizes: list[list[int]], ratio: float, key: int
) -> None:
    shapes = [torch.Size(size) for size in sizes]
    found = drawn(shapes, ratio, key)
    assert [len(indices) for indices in found] == [num_kept(shape, ratio) for shape in shapes]
    for shape, indices in zip(shapes, found, strict=True):
        there = indices.tolist()
        assert there == sorted(set(there))
        assert all(0 <= index < shape.numel() for index in there)
        assert bool(there) == (shape.numel() > 0)
    again = drawn(shapes, ratio, key)
    assert all(a.equal(b) for a, b in zip(found, again, strict=True))


def test_drawn_indices_are_all_as_likely() -> None:
    counts = torch.zeros(20)
    for key in range(4000):
        counts[drawn([torch.Size([20])], 0.25, key)[0]] += 1
    # Of 4,000 draws of 5 in 20, each has 1,000 in the mean, with a deviation of 27.
    assert counts.sub(1000).abs().max() < 5 * 27.4


@FEW
@given(leaves())
def test_signs_are_one_bit_each(found: list[Tensor]) -> None:
    (leaf,) = found
    packed = pack(leaf)
    assert len(packed) == len(leaf) // 8
    assert unpack(packed, leaf.dtype).equal(torch.where(leaf >= 0, 1.0, -1.0).to(leaf.dtype))


def test_signs_have_the_mean_magnitude_of_their_block() -> None:
    leaf = torch.zeros(2 * BLOCK)
    leaf[:BLOCK] = torch.tensor([3.0, -1.0]).repeat(BLOCK // 2)
    leaf[BLOCK : BLOCK + 2] = torch.tensor([-5.0, 7.0])  # a tensor of two elements
    counts = torch.tensor([BLOCK, 2.0])
    assert magnitudes(leaf, counts).tolist() == [2.0, 6.0]
    meant = signed(pack(leaf), magnitudes(leaf, counts))
    assert meant[:2].tolist() == [2.0, -2.0]
    assert meant[BLOCK : BLOCK + 2].tolist() == [-6.0, 6.0]


def test_no_block_has_parts_of_two_tensors() -> None:
    segments, places = in_blocks(SEGMENTS, PLACES)
    for segment, of in zip(segments, places, strict=True):
        taken = [set(range(o // BLOCK, -(-(o + s.numel()) // BLOCK))) for o, s in of]
        assert sum(map(len, taken)) == len(set().union(*taken))
        assert max(set().union(*taken)) < segment.numel // BLOCK
    here = LeafMemory(SEGMENTS, PLACES, torch.device("cpu"))
    there = LeafMemory(segments, places, torch.device("cpu"))
    shapes = [(s.dtype, shape) for s, of in zip(SEGMENTS, PLACES, strict=True) for _, shape in of]
    tensors = [torch.randn(shape, dtype=dtype) for dtype, shape in shapes]
    there.take(tensors)
    there.give(here)
    expected = LeafMemory(SEGMENTS, PLACES, torch.device("cpu"))
    expected.take(tensors)
    assert all(a.equal(b) for a, b in zip(here.segments, expected.segments, strict=True))
