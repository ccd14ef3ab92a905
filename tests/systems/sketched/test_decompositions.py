"""Randomised factorisations against those of LAPACK."""

import sys

import pytest
import torch
from scipy.linalg import qr

from lockstep.errors import ConfigError, TaskError
from lockstep.sketch import cqrrpt, rsvd


def with_spectrum(values, rows, dtype=torch.float64):
    torch.manual_seed(0)
    n = len(values)
    left, right = torch.linalg.qr(torch.randn(rows, n)).Q, torch.linalg.qr(torch.randn(n, n)).Q
    return ((left.double() * values) @ right.double().t()).to(dtype)


def eye_error(Q):
    return float((Q.t() @ Q - torch.eye(Q.shape[1], dtype=Q.dtype)).norm())


@pytest.mark.parametrize("block", [1, 7, 64])
@pytest.mark.parametrize("transposed", [False, True])
def test_rsvd_is_near_the_truncated_svd(block, transposed):
    matrix = with_spectrum(1 / torch.arange(1, 81, dtype=torch.float64), 120)
    matrix = matrix.t() if transposed else matrix
    found = rsvd(matrix, 20, block=block)
    exact = torch.linalg.svdvals(matrix)
    optimum = exact[20:].norm()
    error = (matrix - found.U * found.S @ found.V.t()).norm()
    assert optimum <= error * (1 + 1e-9) < 1.02 * optimum
    torch.testing.assert_close(found.S[:10], exact[:10], rtol=1e-3, atol=0)
    assert max(eye_error(found.U), eye_error(found.V)) < 1e-12
    assert (found.S.diff() <= 0).all()


def test_rsvd_of_a_matrix_of_low_rank_is_exact():
    matrix = with_spectrum(torch.tensor([3.0, 2.0, 1.0, *[0.0] * 20]), 50)
    found = rsvd(matrix, 8, block=4)
    torch.testing.assert_close(found.U * found.S @ found.V.t(), matrix)
    assert eye_error(found.U) < 1e-12


def test_rsvd_keeps_orthogonality_where_singular_values_fall_fast():
    matrix = with_spectrum(10.0 ** -torch.arange(30.0), 40, torch.float32)
    assert eye_error(rsvd(matrix, 25, block=5).U) < 1e-5


def test_rsvd_is_a_function_of_its_seed():
    matrix = with_spectrum(torch.ones(30), 30)
    one, same, other = (rsvd(matrix, 5, seed=seed, power_iterations=0) for seed in (1, 1, 2))
    assert torch.equal(one.U, same.U)
    assert not torch.allclose(one.U, other.U)


def test_power_iterations_help():
    matrix = with_spectrum(1 / torch.arange(1, 101).double().sqrt(), 100)

    def error(iterations):
        found = rsvd(matrix, 10, 2, iterations)
        return (matrix - found.U * found.S @ found.V.t()).norm()

    assert error(3) < error(1) < error(0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_cqrrpt_is_a_qr_with_pivoting(dtype):
    matrix = with_spectrum(10.0 ** -torch.linspace(0, 4, 60), 2000, dtype)
    found = cqrrpt(matrix)
    scale = 10 * 60 * torch.finfo(dtype).eps
    assert found.Q.shape == (2000, 60)
    assert eye_error(found.Q) < scale
    assert torch.equal(found.R, found.R.triu())
    assert found.pivots.sort().values.tolist() == list(range(60))
    error = (matrix[:, found.pivots] - found.Q @ found.R).norm() / matrix.norm()
    assert error < scale
    # As good pivots as those of the classical algorithm, on the whole matrix.
    R, _ = qr(matrix.double().numpy(), mode="r", pivoting=True)
    for k in (10, 30, 50):
        tails = [float(torch.as_tensor(r[k:60]).norm()) for r in (found.R, R)]
        assert tails[0] < 1.5 * tails[1]


def test_cqrrpt_finds_the_rank():
    matrix = torch.randn(500, 12, dtype=torch.float64) @ torch.randn(12, 40, dtype=torch.float64)
    found = cqrrpt(matrix)
    assert found.Q.shape == (500, 12)
    torch.testing.assert_close(found.Q @ found.R, matrix[:, found.pivots])
    assert eye_error(found.Q) < 1e-12
    assert cqrrpt(torch.zeros(9, 4)).Q.shape == (9, 0)


def test_cqrrpt_is_not_misled_by_rows_in_a_pattern():
    # All but every hundredth row are zero: buckets in the order of rows would collide.
    matrix = torch.zeros(4000, 20, dtype=torch.float64)
    matrix[::100] = torch.randn(40, 20, dtype=torch.float64)
    found = cqrrpt(matrix)
    assert found.Q.shape == (4000, 20)
    torch.testing.assert_close(found.Q @ found.R, matrix[:, found.pivots])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: rsvd(m, 0), "rank=0: must be at least 1"),
        (
            lambda m: rsvd(m, 5),
            r"rank=5: a matrix of shape \(9, 4\) has no such rank; take at most 4",
        ),
        (lambda m: rsvd(m, 2, block=0), "block=0: must be at least 1"),
        (lambda m: rsvd(m, 2, oversampling=-1), "oversampling=-1: must not be negative"),
        (lambda m: cqrrpt(m.t()), r"a matrix of shape \(4, 9\): must have at least as many rows"),
        (lambda m: cqrrpt(m, 0.5), "oversampling=0.5: must be at least 1"),
        (lambda m: cqrrpt(m, nonzeros=0), "nonzeros=0: must be at least 1"),
    ],
)
def test_what_cannot_be_factorised(call, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        call(torch.randn(9, 4))


@pytest.mark.parametrize("call", [lambda m: rsvd(m, 1), cqrrpt])
def test_matrices_of_integers_are_refused(call):
    with pytest.raises(TaskError, match=r"the matrix is torch.int64"):
        call(torch.ones(4, 2, dtype=torch.int64))


def test_without_scipy_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.linalg", None)
    with pytest.raises(ConfigError, match=r'pip install "lockstep-train\[sketch\]"'):
        cqrrpt(torch.randn(5, 2))
