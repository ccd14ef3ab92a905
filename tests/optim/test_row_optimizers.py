"""Optimizers of rows, beside torch's and formulas in float64."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError
from lockstep.optim import RowAdagrad, RowAdam, RowSGD, RowSignSGD
from lockstep.optim.rows import row_norms

KINDS = (
    RowSignSGD(0.1, 0.2), RowSGD(0.1, 0.2), RowSGD(0.1, 0.2, 0.9), RowAdagrad(0.1, 0.2),
    RowAdam(0.1, 0.2),
)  # fmt: skip


def state_of(optimizer, num_rows, dim):
    return {n: torch.zeros(num_rows, width) for n, width in optimizer.widths(dim).items()}


@pytest.mark.parametrize(
    ("optimizer", "peer"),
    [
        (RowSGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
        (RowSGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
        (RowAdagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1)),
        (RowAdagrad(0.1, start=0.5), lambda p: torch.optim.Adagrad(
            p, lr=0.1, initial_accumulator_value=0.5)),
    ],
)  # fmt: skip
def test_steps_of_torch(optimizer, peer):
    torch.manual_seed(0)
    rows = torch.randn(5, 7)
    parameter = torch.nn.Parameter(rows.clone())
    other, state = peer([parameter]), state_of(optimizer, 5, 7)
    for _ in range(4):
        gradients = torch.randn(5, 7)
        parameter.grad = gradients.clone()
        other.step()
        optimizer.step(rows, state, gradients, optimizer.lr)
    torch.testing.assert_close(rows, parameter.data, rtol=1e-5, atol=1e-6)


def test_a_subclass_has_any_fields_of_its_own():
    @dataclass(frozen=True)
    class Scaled(RowSGD):
        factor: float = 20.0
        how: str = "much"

    assert Scaled(how="more").factor == 20.0
    with pytest.raises(ConfigError, match=r"Scaled: momentum=1\.5"):
        Scaled(momentum=1.5)


def test_sign_steps_after_the_sum():
    rows, gradients = torch.tensor([[1.0, -2.0, 0.5]]), torch.tensor([[3.0, -1e-9, 0.0]])
    RowSignSGD(weight_decay=0.5).step(rows, {}, gradients, 0.1)
    torch.testing.assert_close(rows, torch.tensor([[0.85, -1.8, 0.475]]))


def test_adam_of_rows_by_its_formula():
    torch.manual_seed(1)
    optimizer, rows = RowAdam(betas=(0.8, 0.95), weight_decay=0.3), torch.randn(3, 4)
    state, expected = state_of(optimizer, 3, 4), rows.double()
    mean, square = torch.zeros(3, 4).double(), torch.zeros(3).double()
    for step in range(1, 5):
        gradients = torch.randn(3, 4)
        optimizer.step(rows, state, gradients, 0.01)
        g = gradients.double()
        mean = 0.8 * mean + 0.2 * g
        square = 0.95 * square + 0.05 * (g**2).mean(1)
        corrected = (square / (1 - 0.95**step)).sqrt() + 1e-8
        expected = expected * (1 - 0.01 * 0.3)
        expected = expected - 0.01 * mean / (1 - 0.8**step) / corrected[:, None]
    torch.testing.assert_close(rows.double(), expected, rtol=1e-5, atol=1e-6)


def test_rows_count_their_own_steps():
    optimizer, rows = RowAdam(), torch.zeros(2, 4)
    state = state_of(optimizer, 2, 4)
    for chosen in ([0, 1], [0], [0]):
        part, own = rows[chosen], {n: s[chosen] for n, s in state.items()}
        optimizer.step(part, own, torch.ones(len(chosen), 4), 0.1)
        rows[chosen] = part
        for name, values in own.items():
            state[name][chosen] = values
    assert state["steps"].flatten().tolist() == [3.0, 1.0]
    # Corrected as a new one is: the first step of each row is the learning rate.
    torch.testing.assert_close(rows[1], torch.full((4,), -0.1))


@given(st.integers(0, len(KINDS) - 1), st.integers(1, 70), st.sets(st.integers(0, 29), min_size=1))
def test_bits_of_a_row_do_not_depend_on_others(kind, dim, chosen):
    torch.manual_seed(dim)
    optimizer, rows = KINDS[kind], torch.randn(30, dim)
    state, gradients = state_of(optimizer, 30, dim), torch.randn(2, 30, dim)
    few = sorted(chosen)
    part, own = rows[few], {n: s[few] for n, s in state.items()}
    for step in gradients:
        optimizer.step(rows, state, step, 0.1)
        optimizer.step(part, own, step[few], 0.1)
    assert torch.equal(rows[few], part)
    assert all(torch.equal(state[name][few], own[name]) for name in own)


@given(st.integers(1, 40), st.integers(1, 40))
def test_norms_of_rows_do_not_depend_on_others(num_rows, dim):
    rows = torch.randn(40, dim)
    assert torch.equal(row_norms(rows)[:num_rows], row_norms(rows[:num_rows]))
    assert row_norms(rows[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RowSGD(lr=-1.0), "RowSGD: lr=-1.0: must be a number of at least 0"),
        (lambda: RowSGD(momentum=1.0), "RowSGD: momentum=1.0: must be a number of at least 0 and"),
        (lambda: RowAdam(betas=(0.9, 1.5)), r"RowAdam: betas=\(0.9, 1.5\): must be"),
        (lambda: RowAdagrad(eps=float("nan")), "RowAdagrad: eps=nan: must be"),
        (lambda: RowSignSGD(weight_decay="1"), "RowSignSGD: weight_decay='1': must be"),
    ],
)
def test_a_number_out_of_range_is_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
