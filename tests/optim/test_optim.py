from __future__ import annotations

import pytest
import torch
from tests.slices import slices_of
from torch import Tensor, nn

from lockstep.config import TrainConfig
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.optimizer.choice import check_optimizer
from lockstep.engine.optimizer.flat_optimizer import FlatOptimizer
from lockstep.optim.gradient_based import LBFGS, NaturalGradient
from lockstep.parallel.layout import Range


def rosenbrock(x: Tensor, y: Tensor) -> Tensor:
    return ((1 - x) ** 2 + 100 * (y - x**2) ** 2).sum()


def minimise(steps: int, **keys: float) -> float:
    x = nn.Parameter(torch.tensor([-1.2, 0.5], dtype=torch.float64))
    y = nn.Parameter(torch.tensor([1.0, 0.1], dtype=torch.float64))
    optimizer = LBFGS([x, y], **keys)
    for _ in range(steps):
        optimizer.zero_grad()
        rosenbrock(x, y).backward()
        optimizer.step()
    return rosenbrock(x, y).item()


def test_lbfgs_finds_the_bottom_of_a_curved_valley() -> None:
    assert minimise(150, max_step=0.3) < 1e-15


def test_lbfgs_solves_a_quadratic_in_few_steps() -> None:
    matrix = torch.diag(torch.tensor([1.0, 3.0, 10.0, 40.0], dtype=torch.float64))
    x = nn.Parameter(torch.ones(4, dtype=torch.float64))
    optimizer = LBFGS([x], max_step=10)
    for _ in range(25):
        x.grad = matrix @ x.detach()
        optimizer.step()
    assert x.abs().max() < 1e-8


def test_lbfgs_turns_back_where_its_memory_points_uphill() -> None:
    x = nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    optimizer = LBFGS([x])
    for _ in range(60):
        x.grad = x.detach().cos()  # of sin: curves down as often as up
        optimizer.step()
    assert x.detach().sin().item() == pytest.approx(-1)


def stepper(x: nn.Parameter) -> tuple[FlatOptimizer, list[Tensor]]:
    optimizer = LBFGS([x], history=3)
    check_optimizer(optimizer, nn.ParameterList([x]), TrainConfig())
    flat = FlatTensors([[("x", x)]], "parameter")
    gradients = [torch.zeros_like(f) for f in flat.flats]
    slices = slices_of(flat, gradients, [[Range(0, len(gradients[0]))]])
    return FlatOptimizer(optimizer, flat, slices), gradients


def test_lbfgs_goes_on_from_saved_state() -> None:
    def steps(pair: tuple[FlatOptimizer, list[Tensor]], x: nn.Parameter, count: int) -> None:
        for _ in range(count):
            pair[1][0][:3] = (x.detach() - 2) ** 3
            pair[0].step()

    straight = nn.Parameter(torch.tensor([0.5, 1.0, 5.0], dtype=torch.float64))
    stopped = nn.Parameter(straight.detach().clone())
    one, two = stepper(straight), stepper(stopped)
    steps(one, straight, 12)
    steps(two, stopped, 7)
    resumed = nn.Parameter(stopped.detach().clone())
    three = stepper(resumed)
    three[0].load_state(two[0].state())
    steps(three, resumed, 5)
    assert torch.equal(resumed, straight)


def test_natural_gradient_divides_by_the_metric() -> None:
    x = nn.Parameter(torch.zeros(2, 1, dtype=torch.float64))
    metric = torch.tensor([[2.0, 1.0], [1.0, 3.0]], dtype=torch.float64)
    optimizer = NaturalGradient(x, lambda: metric, lr=0.5, damping=0.25)
    x.grad = torch.tensor([[1.0], [-2.0]], dtype=torch.float64)
    optimizer.step()
    assert metric.tolist() == [[2.0, 1.0], [1.0, 3.0]]
    expected = -0.5 * torch.linalg.solve(metric + 0.25 * torch.eye(2), x.grad)
    assert torch.allclose(x.detach(), expected)
