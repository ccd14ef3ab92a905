"""SPSA and Rotosolve: their steps by the papers' formulas, what they find, what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.optim import SPSA, Perturbation, Rotosolve, Sweep
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.layer import Layer
from lockstep.systems.quantum.simulation.gradients import frequencies
from lockstep.systems.quantum.simulation.measure import PauliSum


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.perturbation = Perturbation(0.2, decay=0.5)
        self.x = nn.Parameter(torch.tensor([1.0, -2.0], dtype=torch.float64))
        self.y = nn.Parameter(torch.tensor([[0.5]], dtype=torch.float64))


def bowl(model: Any) -> Tensor:
    return (model.x**2).sum() + 3 * (model.y - 1).square().sum() + model.x[0] * model.y[0, 0]


def test_spsa_estimates_gradients_and_steps_by_spalls_formulas() -> None:
    model = Two()
    optimizer = SPSA(model.parameters(), model.perturbation, lr=0.1, stability=3, decay=0.6)
    for step in range(3):
        torch.manual_seed(step)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        optimizer.zero_grad()
        value = model.perturbation(model, bowl)
        value.backward()
        radius = 0.2 / (step + 1) ** 0.5
        signs = {n: (p.grad / p.grad.abs().max()).sign() for n, p in model.named_parameters()
                 if n in ("x", "y")}  # fmt: skip
        moved = []
        for sign in (1, -1):
            other = Two()
            other.load_state_dict(
                {**before, **{n: before[n] + sign * radius * s for n, s in signs.items()}}
            )
            moved.append(bowl(other).detach())
        slope = (moved[0] - moved[1]) / (2 * radius)
        assert (value - sum(moved) / 2).abs() < 1e-13
        assert torch.allclose(model.x.grad.abs(), slope.abs().expand(2), atol=1e-12)
        optimizer.step()
        gain = 0.1 / (step + 1 + 3) ** 0.6
        assert torch.allclose(model.x.detach(), before["x"] - gain * slope * signs["x"], atol=1e-13)
        assert model.perturbation.steps.item() == step + 1


def test_estimates_are_the_gradient_on_average() -> None:
    model, total = Two(), torch.zeros(2, dtype=torch.float64)
    torch.manual_seed(1)
    for _ in range(400):
        total += torch.autograd.grad(model.perturbation(model, bowl), model.x)[0]
    (expected,) = torch.autograd.grad(bowl(model), model.x)
    assert (total / 400 - expected).abs().max() < 0.6


def ansatz(scale: float = 1.0) -> Circuit:
    gates = []
    for number in range(0, 8, 2):
        gates += [gate("ry", q, angle=parameter(number + q, scale)) for q in range(2)]
        gates.append(gate("cx", 0, 1))
    return Circuit(2, gates)


HAMILTONIAN = PauliSum({"ZZ": -1.0, "XI": -0.7, "IX": -0.7})
GROUND = -math.sqrt(1 + 4 * 0.7**2)
"""The lowest energy of two spins with coupling 1 in a field of 0.7 (2x2 block of even parity)."""


class Energy(nn.Module):
    def __init__(self, circuit: Circuit) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = Layer(circuit, HAMILTONIAN, dtype=torch.float64)
        self.sweep = Sweep("layer.weights", self.layer.frequencies())


def energy(model: Any) -> Tensor:
    return model.layer().sum()


@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_rotosolve_takes_each_angle_to_its_minimum(scale: float) -> None:
    model = Energy(ansatz(scale))
    optimizer = Rotosolve(model.layer.weights, model.sweep)
    last = math.inf
    for step in range(8 * 7):
        optimizer.zero_grad()
        value = model.sweep(model, energy)
        value.backward()
        assert value.item() < last + 1e-12
        last = value.item()
        assert not model.layer.weights.grad.any()
        optimizer.step()
        (slope,) = torch.autograd.grad(energy(model), model.layer.weights)
        assert slope[step % 8].abs() < 1e-10
        assert model.sweep.found.tolist() == [step + 1, 0, 0]
    assert energy(model).item() == pytest.approx(GROUND, abs=1e-3)


def test_parts_of_the_loss_add_up_to_the_same_step() -> None:
    whole, parts = Energy(ansatz()), Energy(ansatz())
    for model, factors in ((whole, [1.0]), (parts, [0.25, 0.75])):
        for factor in factors:
            model.sweep(model, lambda m, factor=factor: factor * energy(m)).backward()
        Rotosolve(model.layer.weights, model.sweep).step()
    assert torch.allclose(whole.layer.weights, parts.layer.weights, atol=1e-12)


def test_an_angle_without_effect_stays() -> None:
    model = Energy(Circuit(2, [gate("rz", 0, angle=parameter(0))]))
    before = model.layer.weights.clone()
    model.sweep(model, lambda m: m.layer().sum() * 0).backward()
    Rotosolve(model.layer.weights, model.sweep).step()
    assert torch.equal(model.layer.weights, before)


@pytest.mark.parametrize("scale", [2.0, 3.0, 5.0, 0.5])
def test_a_wrong_frequency_is_found(scale: float) -> None:
    model = Energy(ansatz(scale))
    model.sweep = Sweep("layer.weights", 1.0)
    with pytest.raises(ConfigError, match=r"no sinusoid of angle 0 .* and the frequency right"):
        model.sweep(model, energy)


def test_frequencies_are_those_of_the_shift_rule() -> None:
    gates = [gate("rx", 0, angle=parameter(0, -2.0)), gate("cp", 0, 1, angle=parameter(1, 0.5))]
    circuit = Circuit(2, [*gates, gate("rzz", 0, 1, angle=parameter(3))])
    assert frequencies(circuit).tolist() == [2.0, 0.5, 1.0, 1.0]
    assert frequencies(circuit, [3, 0]).tolist() == [1.0, 2.0]


def nothing_to_move() -> Tensor:
    alone = Perturbation()
    return alone(alone, lambda model: model.steps.sum())


def several(angle: Any, name: str = "rx", *qubits: int) -> Callable[[], Tensor]:
    gates = [gate(name, *(qubits or (0,)), angle=angle), gate("ry", 1, angle=parameter(1))]
    return lambda: frequencies(Circuit(2, gates))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (several(parameter(1)), "parameter 1 is used by 2 gates"),
        (several(parameter(0), "crx", 0, 1), "parameter 0 is used by a controlled rx"),
        (several(parameter(0) ** 2), r"parameter 0 is part of the formula θ\[0\]\*\*2\.0"),
        (lambda: Perturbation(0.0), "radius=0.0, decay=0.101: must be above 0"),
        (lambda: Perturbation(math.nan), "radius=nan"),
        (lambda: Sweep("x", 0.0), "frequencies: must be above 0"),
        (nothing_to_move, "the model has no parameters that require gradients"),
        (lambda: Two().perturbation(Two(), lambda m: m.x), r"must be a real scalar .* not \[2\]"),
        (lambda: Sweep("z")(Two(), bowl), "the model has no angles 'z'"),
        (lambda: Sweep("x", torch.ones(3))(Two(), bowl), "3 frequencies for 2 angles"),
        (lambda: Sweep("x")(Two(), bowl), r"no sinusoid of angle 0 \(off by"),
        (lambda: Sweep("x")(Two(), lambda m: 1.0), "must be a real scalar tensor, not float"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
