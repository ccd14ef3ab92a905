"""Signs: a function of place, without bias or correlation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.sketch import SignKey, packed_signs, sign_matrix
from lockstep.systems.sketched.products import normals, unpacked

KEY = SignKey(7, 3, "U1")
KEYS = st.builds(
    SignKey, st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1), st.sampled_from(["U1", "U2"])
)
SIGMAS = 4.5
"""Standard deviations beyond which a statistic of fixed keys would not be by chance."""


@settings(max_examples=60, deadline=None)
@given(KEYS, st.integers(1, 5), st.integers(0, 300), st.integers(0, 200))
def test_any_range_is_a_part_of_the_whole(key, num_rows, first, length):
    whole = sign_matrix(key, num_rows + 2, range(first + length + 70))
    part = sign_matrix(key, num_rows, range(first, first + length))
    assert torch.equal(part, whole[:num_rows, first : first + length])


@settings(max_examples=40, deadline=None)
@given(KEYS, st.integers(0, 100), st.integers(1, 100))
def test_bits_unpack_to_the_signs(key, first, length):
    columns = range(first, first + length)
    packed = packed_signs(key, 3, columns)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, math.ceil(length / 8))
    assert torch.equal(unpacked(packed, length, torch.float32), sign_matrix(key, 3, columns))


def test_the_bits_are_these_for_ever():
    # A checkpoint keeps the key alone: another hash would be another model.
    assert packed_signs(SignKey(0, 0, "U1"), 2, range(64)).tolist() == FIRST_BITS
    assert packed_signs(KEY, 1, range(5, 69)).tolist() == [OTHER_BITS]


FIRST_BITS = [[242, 28, 97, 14, 104, 5, 118, 81], [81, 34, 205, 247, 21, 193, 187, 150]]
OTHER_BITS = [105, 27, 157, 214, 92, 61, 72, 146]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_signs_are_exact_in_every_dtype(dtype):
    made = sign_matrix(KEY, 4, range(100), dtype)
    assert made.dtype == dtype
    assert torch.equal(made.float(), sign_matrix(KEY, 4, range(100)))


def test_signs_are_unbiased_in_all_and_in_each_row_and_column():
    made = sign_matrix(KEY, 512, range(4096)).double()
    assert abs(made.mean()) * math.sqrt(made.numel()) < SIGMAS
    rows, columns = made.mean(1) * math.sqrt(4096), made.mean(0) * math.sqrt(512)
    for means in (rows, columns):
        assert means.abs().max() < 5.5
        assert abs(means.var() - 1) < SIGMAS * math.sqrt(2 / len(means))


def test_rows_and_columns_are_uncorrelated():
    made = sign_matrix(KEY, 256, range(4096)).double()
    for rows in (made, made.t()[:1024]):
        products = rows @ rows.t() / math.sqrt(rows.shape[1])
        apart = products[~torch.eye(len(rows), dtype=torch.bool)]
        pairs = len(apart) / 2
        assert abs(apart.var() - 1) < SIGMAS * math.sqrt(2 / pairs)
        assert apart.abs().max() < 6.5


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (0, 8), (0, 64), (7, 64)])
def test_neighbours_are_uncorrelated(shift):
    made = sign_matrix(KEY, 300, range(3000)).double()
    down, right = shift
    product = made[down:, right:] * made[: 300 - down, : 3000 - right]
    assert abs(product.mean()) * math.sqrt(product.numel()) < SIGMAS


@pytest.mark.parametrize(
    "other", [KEY._replace(seed=8), KEY._replace(layer=4), SignKey(7, 3, "U2")]
)
def test_other_keys_give_unrelated_signs(other):
    product = (sign_matrix(KEY, 100, range(1000)) * sign_matrix(other, 100, range(1000))).double()
    assert abs(product.mean()) * math.sqrt(product.numel()) < SIGMAS


def test_every_pattern_of_a_byte_is_as_frequent():
    counts = packed_signs(KEY, 256, range(8192)).flatten().bincount(minlength=256).double()
    expected = counts.sum() / 256
    chi_square = ((counts - expected).square() / expected).sum()
    assert abs(chi_square - 255) < SIGMAS * math.sqrt(2 * 255)


def test_normals_have_the_moments_of_a_normal_distribution():
    drawn = normals(KEY, 500, 400)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        error = (drawn**power).mean() - moment
        assert abs(error) < SIGMAS * math.sqrt(variance / drawn.numel())


def test_no_random_state_is_touched():
    before = torch.get_rng_state()
    sign_matrix(KEY, 3, range(3))
    normals(KEY, 3, 3)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("columns", [range(0, 8, 2), range(-1, 8)])
def test_ranges_that_are_none(columns):
    with pytest.raises(ConfigError, match=r"columns=range\(.*: must be a range from 0"):
        sign_matrix(KEY, 2, columns)


@pytest.mark.parametrize(("name", "value"), [("seed", -1), ("seed", 2**63), ("layer", -5)])
def test_keys_that_are_none(name, value):
    with pytest.raises(ConfigError, match=rf"^{name}={value}: must be in 0"):
        sign_matrix(KEY._replace(**{name: value}), 2, range(2))
