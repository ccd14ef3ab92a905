"""Angles as formulas of parameters: their values, derivatives, texts, and what is refused."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.systems.quantum.circuits import random_angle, some_parameters

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import (
    FUNCTIONS,
    Angle,
    Expression,
    Formula,
    parameter,
)
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.simulation.gradients import share, shifted
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities
from lockstep.systems.quantum.simulation.statevector import Simulator

X = [parameter(i) for i in range(4)]
VALUES = some_parameters(4)


def value_of(angle: Any, values: torch.Tensor = VALUES) -> torch.Tensor:
    circuit = Circuit(1, [gate("rx", 0, angle=0.7), gate("rx", 0, angle=angle)], len(values))
    return circuit.angles(values)[1]


def by_text(angle: Any, values: torch.Tensor = VALUES) -> float:
    """The value of the angle's text, as Python reads it."""
    return float(eval(str(angle), {"__builtins__": {}}, {**FUNCTIONS, "θ": values.tolist()}))


@given(st.integers(0, 10**9))
@settings(max_examples=30)
def test_texts_say_what_tensors_compute(seed: int) -> None:
    angle = random_angle(random.Random(seed), 4)
    assert value_of(angle).item() == pytest.approx(by_text(angle), abs=1e-11)


def test_arithmetic_is_that_of_numbers() -> None:
    a, b, c, _ = VALUES.tolist()
    cases = [
        (2 * (math.pi - X[0]) * (math.pi - X[1]), 2 * (math.pi - a) * (math.pi - b)),
        (X[0] - X[1] / X[2] + 1 / X[2], a - b / c + 1 / c),
        (X[0] ** 2 - (-X[1]) ** 3, a * a + b**3),
        (2.5 ** X[0] + abs(X[1]), 2.5**a + abs(b)),
        ((X[0] ** 2 + 1).sqrt().log(), math.log(math.sqrt(a * a + 1))),
        (X[0].sin() * X[1].cos() / X[2].tan(), math.sin(a) * math.cos(b) / math.tan(c)),
        ((a / 9 + 0 * X[0]).arcsin() + (X[1] / 9).arccos(), math.asin(a / 9) + math.acos(b / 9)),
        (X[0].arctan().exp() * X[1].sign(), math.exp(math.atan(a)) * math.copysign(1, b)),
        (1 - X[0] * 1.0, 1 - a),
    ]  # fmt: skip
    for angle, expected in cases:
        assert value_of(angle).item() == pytest.approx(expected, abs=1e-14)


def test_what_is_linear_in_one_parameter_stays_an_angle() -> None:
    assert 2 * X[0] - 1 == Angle(-1.0, 0, 2.0)
    assert (X[1] + 1) * 3 - X[1] == Angle(3.0, 1, 2.0)
    assert X[2] - X[2] == Angle(0.0)
    assert 0 * X[2] == Angle(0.0)
    assert parameter(0) ** 1 == Angle(0.0, 0)
    assert Angle(math.pi).cos() == Angle(-1.0)
    assert isinstance(X[0] + X[1], Expression)
    assert X[0] + X[1] == X[0] + X[1]
    assert hash(X[0] * X[1]) == hash(X[0] * X[1])
    assert (X[3] * X[1] + 2).parameters == (1, 3)


def test_long_sums_are_flat_and_those_of_one_form_share_their_operations() -> None:
    many = [parameter(i) for i in range(300)]
    values = some_parameters(300)
    total: Formula = many[0]
    for each in many[1:]:
        total = total + each
    assert value_of(total, values).item() == pytest.approx(values.sum().item(), abs=1e-12)
    pairs = [gate("rx", 0, angle=a * b) for a, b in itertools.pairwise(many)]
    found = Circuit(1, pairs).angles(values)
    assert torch.equal(found, values[:-1] * values[1:])


def test_batches_and_gradients() -> None:
    angle = 2 * (math.pi - X[0]) * (math.pi - X[1]) + X[2].sin() ** 3
    circuit = Circuit(1, [gate("rx", 0, angle=angle), gate("ry", 0, angle=X[3])])
    rows = some_parameters(2, 3, 4).requires_grad_()
    found = circuit.angles(rows)
    assert found.shape == (2, 3, 2)
    assert torch.equal(found[1, 2], circuit.angles(rows[1, 2]))
    assert torch.autograd.gradcheck(circuit.angles, rows, fast_mode=True)
    assert torch.autograd.gradgradcheck(circuit.angles, rows, fast_mode=True)


def test_the_inverse_circuit_undoes_formulas() -> None:
    gates = [gate("crx", 0, 1, angle=X[0] * X[1]), gate("rzz", 1, 0, angle=X[2].sin() - X[0])]
    circuit = Circuit(2, [gate("h", 0), *gates, gate("p", 1, angle=X[3] ** 2)])
    both = Circuit(2, [*circuit.gates, *circuit.inverse().gates], 4)
    likely = probabilities(Simulator(both).state(VALUES))
    assert likely[0].item() == pytest.approx(1, abs=1e-14)


def test_shifts_follow_the_chain_rule_and_deal_out_its_parts() -> None:
    gates = [gate("h", 0), gate("h", 1), gate("rzz", 0, 1, angle=(1 - X[0]) * (2 - X[1]))]
    gates += [gate("crx", 0, 1, angle=X[2].sin() * X[0]), gate("ry", 0, angle=X[3] ** 2)]
    simulator, terms = Simulator(Circuit(2, gates)), PauliSum({"ZX": 0.7, "IY": 0.3})
    theta = VALUES.clone().requires_grad_()
    (expected,) = torch.autograd.grad(terms.expectation(simulator.state(theta)), theta)
    assert expected.abs().min() > 1e-3

    def by_shift(only: torch.Tensor | None = None) -> torch.Tensor:
        value = shifted(simulator, theta, lambda s: terms.expectation(s)[:, None], only)
        return torch.autograd.grad(value.sum(), theta)[0]

    assert (by_shift() - expected).abs().max() < 1e-12
    parts = [by_shift(share(4, part, 3)) for part in range(3)]
    assert all((part != 0).sum() < 4 for part in parts)
    assert (sum(parts) - expected).abs().max() < 1e-12


def test_undefined_values_are_nan_and_nothing_else() -> None:
    simulator = Simulator(Circuit(1, [gate("rx", 0, angle=X[0].sqrt()), gate("ry", 0, angle=X[1])]))
    likely = probabilities(simulator.state(torch.tensor([[4.0, 1.0], [-1.0, 1.0]])))
    assert likely[0].isfinite().all()
    assert likely[1].isnan().any()


def deep() -> Formula:
    angle: Formula = X[0]
    for _ in range(200):
        angle = angle.sin()
    return angle


def wide() -> Formula:
    angle: Formula = X[0] * X[1]
    for _ in range(60):
        angle = angle * angle
    return angle


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: X[0] / 0, r"0\.0 \*\* -1\.0 is not a finite real number"),
        (lambda: X[0] * float("inf"), "offset must be a finite number, not inf"),
        (lambda: X[0] + float("nan"), "offset must be a finite number, not nan"),
        (lambda: Angle(-1.0).log(), r"log\(-1\.0\) is not a finite real number"),
        (lambda: Angle(2.0).arcsin(), r"arcsin\(2\.0\) is not a finite real number"),
        (lambda: Angle(-2.0) ** 0.5, r"-2\.0 \*\* 0\.5 is not a finite real number"),
        (lambda: Angle(10.0) ** 1000, "is not a finite real number"),
        (lambda: Expression("root", (X[0],)), "there is no operation 'root'"),
        (deep, "at most 10,000 angles and 100 levels"),
        (wide, "at most 10,000 angles and 100 levels"),
        (lambda: gate("h", 0, angle=X[0] * X[1]), "gate h on 0: needs no angle"),
        (lambda: Circuit(1, [gate("rx", 0, angle=X[0] * X[3])], 2), "parameter 3 in a circuit"),
    ],
)  # fmt: skip
def test_wrong_formulas_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("other", ["a", None, torch.ones(1), 1j])
def test_other_things_are_no_numbers(other: Any) -> None:
    for operation in (lambda: X[0] + other, lambda: other * X[0], lambda: X[0] - other,
                      lambda: X[0] / other, lambda: X[0] ** other):  # fmt: skip
        with pytest.raises(TypeError):
            operation()
