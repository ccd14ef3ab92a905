"""Factors of low rank: PowerSGD's arithmetic beside plain definitions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_compressed_sums import CPU, RANK, States, buffers, reduction
from torch import Tensor

from lockstep.comm.transport import LocalTransport
from lockstep.errors import ConfigError
from lockstep.parallel.compression.low_rank import matrices, orthonormal, right_start
from lockstep.parallel.compression.sums import first_agreed
from lockstep.parallel.layout import Range

from sums import NUM_SCALARS, PLACES, SEGMENTS  # isort: skip

NUM = 3
SCALARS = torch.zeros(NUM_SCALARS, dtype=torch.float64)


def states() -> States:
    return States(first_agreed("lowrank", RANK, SEGMENTS, PLACES, list, CPU))


def step(kept: States, leaves: list[list[Tensor | None]], feeds_back: bool = True) -> list[Tensor]:
    """The sums of the tensors of `PLACES`."""
    made = reduction(LocalTransport(), [Range(0, NUM)], kept, "lowrank", feeds_back)
    made.restart()
    for m, leaf in enumerate(leaves):
        made.leaf_sums.add([*leaf, buffers(0, m)], SCALARS)
    made.reduce()
    kept.commit()
    return [
        segment[offset : offset + shape.numel()].view(shape).clone()
        for segment, of in zip(made.total.segments, PLACES, strict=False)
        for offset, shape in of
    ]


def random_leaf(seed: int) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(s.dtype, shape) for s, of in zip(SEGMENTS, PLACES, strict=True) for _, shape in of]
    return [torch.randn(shape, dtype=dtype, generator=generator) for dtype, shape in shapes]


def test_what_is_a_matrix_and_gains_becomes_factors() -> None:
    found = matrices(PLACES, 2)
    # A scalar, a vector and [2, 4] stay whole; [7, 3, 5] is 7 by 15.
    assert [(m.segment, m.tensor, m.rows, m.columns) for m in found] == [
        (0, 0, 40, 50),
        (0, 2, 7, 15),
    ]
    # 4 (7 + 15) < 105 ≤ 5 (7 + 15), and 22 (40 + 50) < 2000 ≤ 23 (40 + 50).
    assert [len(matrices(PLACES, rank)) for rank in (1, 4, 5, 22, 23)] == [3, 2, 1, 1, 0]
    empty = torch.Size([0, 30])
    assert matrices([[(0, empty), (0, torch.Size([30, 0]))]], 1) == []
    with pytest.raises(ConfigError, match=r"compression\.rank=23: no parameter is a matrix"):
        first_agreed("lowrank", 23, SEGMENTS, PLACES, list, CPU)


def test_sums_are_those_of_the_paper() -> None:
    """Algorithm 1 of Vogels et al. (2019) with error feedback (2), in float64, step by step."""
    kept = states()
    tensors, matrix = [0, 2], [(40, 50), (7, 15)]
    errors = [[torch.zeros(shape, dtype=torch.float64) for shape in matrix] for _ in range(NUM)]
    rights = [right_start(t.double(), kept.key + (n << 64)) for n, t in enumerate(kept.agreed)]
    for number in range(4):
        leaves = [random_leaf(10 * number + m) for m in range(NUM)]
        found = step(kept, leaves)
        for k, (tensor, shape) in enumerate(zip(tensors, matrix, strict=True)):
            whole = [
                leaf[tensor].double().view(shape) + errors[m][k] for m, leaf in enumerate(leaves)
            ]
            left, _ = torch.linalg.qr(sum(w @ rights[k] for w in whole))
            own = [w.T @ left for w in whole]
            rights[k] = sum(own)
            for m in range(NUM):
                errors[m][k] = whole[m] - left @ own[m].T
            expected = (left @ rights[k].T).view(PLACES[0][tensor][1])
            assert found[tensor].double().sub(expected).abs().max() < 1e-3
        for plain in (1, 3, 4):  # sent whole
            expected = (leaves[0][plain] + leaves[1][plain]) + leaves[2][plain]
            assert found[plain].equal(expected)


def test_a_sum_of_low_rank_is_found_whole() -> None:
    kept, generator = states(), torch.Generator().manual_seed(3)
    left, right = (torch.randn(n, RANK, generator=generator) for n in (40, 50))
    leaves = [random_leaf(m) for m in range(NUM)]
    for m, leaf in enumerate(leaves):
        leaf[0] = (m + 1) * (left @ right.T)
    found = step(kept, leaves)[0]
    assert found.sub(6 * (left @ right.T)).abs().max() < 1e-3
    assert max(error[0][:2000].abs().max() for error in kept.kept.values()) < 1e-3


@pytest.mark.parametrize("feeds_back", [True, False])
def test_gradients_of_zero_do_not_end_learning(feeds_back: bool) -> None:
    """Factors of zeros would stay zeros; also where only some rows ever have gradients."""
    kept = states()
    for _ in range(2):
        leaves: list[list[Tensor | None]] = [[None] * 5 for _ in range(NUM)]
        assert not any(tensor.any() for tensor in step(kept, leaves, feeds_back))
    for number in range(3):
        leaf = random_leaf(number)
        leaf[0] = torch.zeros(40, 50)
        leaf[0][30:, 20:] = 1.0  # not the first rows, which orthonormal columns of zeros would find
        found = step(kept, [list(leaf) for _ in range(NUM)], feeds_back)[0]
        assert found[30:, 20:].sub(3.0).abs().max() < 1e-4


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(1, 5),
    st.integers(0, 30),
    st.integers(0, 2**32),
    st.floats(-30, 30),
)
def test_columns_are_orthonormal_whatever_they_were(
    dtype: torch.dtype, rank: int, more: int, seed: int, exponent: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(rank + more, rank, dtype=dtype, generator=generator) * 10.0**exponent
    columns[:, seed % rank] = columns[:, 0] * (seed % 2)  # zeros, or the same once more
    made = orthonormal(columns)
    assert made.is_contiguous()
    assert made.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    assert (made.T @ made - torch.eye(rank, dtype=dtype)).abs().max() < tolerance
    # They span the given ones.
    rest = columns - made @ (made.T @ columns)
    assert rest.abs().max() <= 1e2 * tolerance * columns.abs().max()


def test_random_starts_depend_on_the_key_and_keep_what_is_there() -> None:
    factor = torch.zeros(50, 2)
    assert right_start(factor, 5).equal(right_start(factor, 5))
    assert not right_start(factor, 5).equal(right_start(factor, 6))
    assert not right_start(factor, 5).equal(right_start(factor, 5 + (1 << 64)))
    factor[:, 0] = torch.arange(50.0)
    made = right_start(factor, 5)
    assert (made[:, 0] * made[1, 0].sign()).allclose(factor[:, 0] / factor[:, 0].norm())
    assert made[:, 1].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_columns_that_are_not_finite_become_nan(bad: float) -> None:
    columns = torch.ones(7, 2)
    columns[3, 1] = bad
    assert orthonormal(columns).isnan().all()
