"""The network, its Jacobians and the balance operator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from lockstep.systems.ufs.fields import DEFAULT_INPUTS
from lockstep.systems.ufs.fields.rows import Scale
from lockstep.systems.ufs.model import SeaIceNet
from lockstep.systems.ufs.report.scores import (
    BalanceOperator,
    describe,
    jacobians,
    normalised,
    physical,
    sensitivity,
)

INPUTS = ("sst", "sss", "tair", "qref")
OUTPUTS = ("aice", "hi", "tsfc")


def net(squash: bool = True, inputs: tuple[str, ...] = INPUTS) -> SeaIceNet:
    torch.manual_seed(0)
    count = len(inputs) + len(OUTPUTS)
    generator = np.random.default_rng(0)
    scale = Scale(generator.normal(size=count), generator.uniform(1e-3, 10, count))
    return SeaIceNet(inputs, OUTPUTS, (16, 8), scale, squash).double()


def rows(count: int = 50) -> Tensor:
    """Physical inputs near the mean."""
    model = net()
    noise = torch.randn(count, len(INPUTS), generator=torch.Generator().manual_seed(1)).double()
    return noise * model.input_deviation + model.input_mean


def test_the_default_network_has_9345_parameters() -> None:
    scale = Scale(np.zeros(15), np.ones(15))
    model = SeaIceNet(DEFAULT_INPUTS, ("aice",), (64, 64, 64), scale, squash=True)
    assert sum(p.numel() for p in model.parameters()) == 9345
    weights = model.layers[2].weight
    assert weights.std().item() == pytest.approx((2 / 128) ** 0.5, rel=0.05)


@pytest.mark.parametrize("squash", [True, False])
def test_physical_and_normalised_values_agree(squash: bool) -> None:
    model, x = net(squash), rows()
    y = model(model.normalise(x)) * model.output_deviation + model.output_mean
    assert torch.allclose(model.predict(x), y, rtol=1e-12)


def test_bounds_are_kept_and_other_outputs_are_left_alone() -> None:
    far = 1e3 * rows()
    free, kept = net(squash=False).predict(far), net(squash=True).predict(far)
    assert ((free[:, 0] < 0) | (free[:, 0] > 1)).any()
    assert ((kept[:, 0] >= 0) & (kept[:, 0] <= 1)).all()
    assert torch.equal(free[:, 1:], kept[:, 1:])


def test_squashing_has_slope_1_in_the_middle() -> None:
    inside = torch.tensor([0.499, 0.5, 0.501]).double()
    model = net()
    raw = (inside[:, None] - model.output_mean) / model.output_deviation
    model.layers = torch.nn.Identity()
    found = model(raw)[:, 0] * model.output_deviation[0] + model.output_mean[0]
    assert torch.allclose(found, inside, atol=1e-6)


@pytest.mark.parametrize("squash", [True, False])
def test_jacobians_are_those_of_single_rows(squash: bool) -> None:
    model, x = net(squash), rows()
    singly = torch.stack([torch.autograd.functional.jacobian(model.predict, row) for row in x])
    found = physical(model, x)
    assert found.shape == (50, 3, 4)
    assert not found.requires_grad
    scaled = normalised(model, model.normalise(x)) * model.output_deviation[:, None]
    assert torch.allclose(found, scaled / model.input_deviation, rtol=1e-5)
    assert torch.allclose(found, singly, rtol=1e-10, atol=0)
    assert torch.autograd.gradcheck(model.predict, x[:5].requires_grad_())


@pytest.mark.parametrize("count", [0, 1, 4096, 5000])
def test_chunks_do_not_matter(count: int) -> None:
    x = torch.randn(count, 2)
    found = jacobians(lambda v: torch.stack([v[:, 0] * v[:, 1], v[:, 0] ** 2], dim=1), x, 2)
    zero = torch.zeros(count)
    expected = torch.stack([x.flip(1), torch.stack([2 * x[:, 0], zero], 1)], 1)
    assert torch.equal(found, expected)


def test_jacobians_need_no_gradients_and_leave_none() -> None:
    model, x = net(), rows()
    with torch.no_grad():
        inside = normalised(model, x)
    assert torch.equal(inside, normalised(model, x))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("squash", [True, False])
def test_the_balance_operator_is_the_jacobian(squash: bool) -> None:
    model, x = net(squash), rows()
    operator, jacobian = BalanceOperator(model, x), physical(model, x)
    dx, dy = torch.randn_like(x), torch.randn(50, 3).double()
    assert torch.allclose(operator.apply(dx), torch.einsum("noi,ni->no", jacobian, dx))
    assert torch.allclose(operator.apply_adjoint(dy), torch.einsum("noi,no->ni", jacobian, dy))


@pytest.mark.parametrize("seed", range(5))
def test_the_adjoint_passes_the_dot_product_test(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    model = net()
    x = rows() + torch.randn(50, 4, generator=generator).double() * model.input_deviation
    dx = torch.randn(50, 4, generator=generator).double() * model.input_deviation
    dy = torch.randn(50, 3, generator=generator).double()
    operator = BalanceOperator(model, x)
    forward = (operator.apply(dx) * dy).sum()
    backward = (dx * operator.apply_adjoint(dy)).sum()
    assert abs(forward - backward) <= 1e-12 * abs(forward)


def test_figures_of_a_known_jacobian() -> None:
    found = torch.tensor([[[3.0, 0.0]], [[0.0, -4.0]]])
    assert describe(found) == pytest.approx(
        {
            "jacobian_norm": 3.5,
            "jacobian_mean": 1.75,
            "jacobian_std": (6.25 - 1.75**2) ** 0.5,
            "jacobian_max": 4.0,
            "jacobian_condition": 4 / 3,
        }
    )
    assert sensitivity(found).tolist() == [1.5, 2.0]
    assert describe(torch.zeros(2, 1, 2))["jacobian_condition"] == 1e12
