"""Trajectories: their mean, their gradients, and what they depend on."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import some_parameters
from tests.systems.quantum.noise.reference import NUM_PARAMETERS, random_dynamic

from lockstep.errors import ConfigError
from lockstep.quantum import (
    DensitySimulator,
    DynamicCircuit,
    If,
    Measure,
    PauliSum,
    Reset,
    TrajectorySimulator,
    channel,
    gate,
    parameter,
)
from lockstep.systems.quantum.noise.trajectories import uniform

TASK = f"{Path(__file__).parent / 'task.py'}:Noisy"
THETA = some_parameters(NUM_PARAMETERS).sigmoid()
ENERGY = PauliSum({"XIY": 0.5, "ZZI": -0.3, "IIX": 0.8, "IYZ": 0.4})


def random_case(seed: int) -> DynamicCircuit:
    return random_dynamic(random.Random(seed), 3, 9, classical=True, trained=True)


def check_mean(seed: int, shots: int) -> None:
    """Values, bits and gradients within 5 sigma of the density matrix."""
    circuit = random_case(seed)
    at = THETA.clone().requires_grad_()
    exact = DensitySimulator(circuit).run(at)
    found = TrajectorySimulator(circuit).run(at, shots, key=seed)
    assert (found.weights - 1).abs().max() < 1e-12
    hits = torch.nn.functional.one_hot(found.bits, exact.bits.shape[-1])
    columns = torch.cat([found.expectation(ENERGY)[:, None], found.weights[:, None] * hits], 1)
    expected = torch.cat([exact.expectation(ENERGY)[None], exact.bits])
    sigma = columns.detach().std(0) / shots**0.5
    assert ((columns.mean(0) - expected).abs() <= 5 * sigma + 1e-9).all(), f"seed {seed}"
    (wanted,) = torch.autograd.grad(expected[0] + expected[1], at)
    blocks = (columns[:, 0] + columns[:, 1]).view(20, -1).mean(1)
    slopes = torch.stack([torch.autograd.grad(b, at, retain_graph=True)[0] for b in blocks])
    sigma = slopes.std(0) / 20**0.5
    # Of 20 blocks: Student's t is wider than a normal distribution.
    assert ((slopes.mean(0) - wanted).abs() <= 7 * sigma + 1e-9).all(), f"seed {seed}"


def test_the_mean_is_the_density_matrix() -> None:
    for seed in range(3):
        check_mean(seed, 1000)


@pytest.mark.slow
def test_the_mean_is_the_density_matrix_for_many() -> None:
    for seed in range(100, 150):
        print("seed", seed)
        check_mean(seed, 10_000)


def test_a_shot_depends_on_key_row_and_its_number_only() -> None:
    measures = [gate("h", 0), gate("h", 1), Measure(0, 0), Measure(1, 1)]
    circuit = DynamicCircuit(3, [*random_case(1).operations, *measures], 2, NUM_PARAMETERS)
    simulator = TrajectorySimulator(circuit)
    thetas = torch.stack([THETA, THETA / 2])
    whole = simulator.run(thetas, 50, key=3)
    parts = [simulator.run(thetas, n, key=3, first=f) for f, n in ((0, 7), (7, 1), (8, 42))]
    assert torch.equal(torch.cat([p.bits for p in parts], -1), whole.bits)
    states = torch.cat([p.states for p in parts], -2)
    assert (states - whole.states).abs().max() < 1e-13
    alone = simulator.run(thetas[0], 50, key=3)
    assert torch.equal(alone.bits, whole.bits[0])
    other = simulator.run(thetas, 50, key=4)
    assert not torch.equal(other.bits, whole.bits)
    assert not torch.equal(whole.bits[0], simulator.run(thetas[[0, 0]], 50, key=3).bits[1])


@pytest.mark.parametrize("key", [5, (1 << 63) + 5, (1 << 64) - 1])
def test_all_bits_of_a_key_count(key: int) -> None:
    bits = np.random.Philox(key=key | 3 << 64)
    expected = np.random.Generator(bits).random(6)
    assert uniform(key, 3, 0, 2, 3).flatten().tolist() == expected.tolist()


def test_without_a_key_torchs_generator_gives_one() -> None:
    simulator = TrajectorySimulator(random_case(1))
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(simulator.run(THETA, 40))
    assert torch.equal(runs[0].states, runs[1].states)
    assert torch.equal(runs[0].bits, runs[1].bits)
    assert not torch.equal(runs[0].states, runs[2].states)


def test_teleportation() -> None:
    """A state goes from qubit 0 to 2, by two bits."""
    operations = [
        gate("ry", 0, angle=parameter(0)), gate("p", 0, angle=parameter(1)),
        gate("h", 1), gate("cx", 1, 2), gate("cx", 0, 1), gate("h", 0),
        Measure(0, 0), Measure(1, 1), If((1,), 1, (gate("x", 2),)), If((0,), 1, (gate("z", 2),)),
        Reset(0), Reset(1),
    ]  # fmt: skip
    circuit = DynamicCircuit(3, operations)
    theta = torch.tensor([0.7, 1.1], dtype=torch.float64)
    found = TrajectorySimulator(circuit).run(theta, 40, key=0)
    assert set(found.bits.tolist()) == {0, 1, 2, 3}
    expected = torch.tensor([0.35]).cos().double(), torch.tensor([0.35]).sin().double()
    for index, size in ((0, expected[0]), (4, expected[1])):
        assert (found.states[:, index].abs() - size).abs().max() < 1e-7
    angle = (found.states[:, 4] / found.states[:, 0]).angle()
    assert (angle - 1.1).abs().max() < 1e-12
    density = DensitySimulator(circuit).run(theta)
    assert (density.bits - 0.25).abs().max() < 1e-14


def test_float32() -> None:
    simulator = TrajectorySimulator(random_case(2), torch.complex64)
    found = simulator.run(THETA.float().requires_grad_(), 30, key=1)
    assert found.states.dtype == torch.complex64
    exact = TrajectorySimulator(random_case(2)).run(THETA, 30, key=1)
    assert (found.states - exact.states).abs().max() < 1e-4
    found.expectation(ENERGY).mean().backward()


def test_second_derivatives_are_refused() -> None:
    at = THETA.clone().requires_grad_()
    value = TrajectorySimulator(random_case(1)).run(at, 5, key=1).expectation(ENERGY).mean()
    (slope,) = torch.autograd.grad(value, at, create_graph=True)
    with pytest.raises(ConfigError, match="second derivatives of trajectories are not supported"):
        slope.sum().backward()


@pytest.mark.parametrize("name", ["BitFlip", "DepolarizingChannel", "PhaseFlip"])
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_a_biased_gradient_is_refused(name: str, end: float) -> None:
    operations = [gate("h", 0), channel(name, 0, p=parameter(0))]
    simulator = TrajectorySimulator(DynamicCircuit(1, operations))
    at = torch.tensor([end], dtype=torch.float64)
    assert len(simulator.run(at, 3).bits) == 3
    with pytest.raises(ConfigError, match=f"{name}: a trained value makes an operator's weight 0"):
        simulator.run(at.requires_grad_(), 3)


def test_an_operator_that_is_never_there_leaves_gradients_alone() -> None:
    """At temperature 0 nothing goes up, whatever gamma is."""
    operations = [
        gate("ry", 0, angle=1.1),
        channel("GeneralizedAmplitudeDamping", 0, gamma=parameter(0), p=0.0),
    ]
    circuit = DynamicCircuit(1, operations)
    energy = PauliSum({"Z": 1.0, "X": 0.5})
    at = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    exact = DensitySimulator(circuit).run(at).expectation(energy)
    (slope,) = torch.autograd.grad(exact, at)
    simulator = TrajectorySimulator(circuit)
    found = simulator.run(at, 4000, key=1).expectation(energy)
    (mean,) = torch.autograd.grad(found.mean(), at)
    assert mean.item() == pytest.approx(slope.item(), abs=0.05)
    trained = channel("GeneralizedAmplitudeDamping", 0, gamma=0.4, p=parameter(0))
    simulator = TrajectorySimulator(DynamicCircuit(1, [gate("ry", 0, angle=1.1), trained]))
    with pytest.raises(ConfigError, match="a trained value makes an operator's weight 0"):
        simulator.run(torch.zeros(1, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("name", ["BitFlip", "AmplitudeDamping", "PhaseDamping"])
@pytest.mark.parametrize("end", [0.0, 1.0])
def test_numbers_at_the_ends_of_a_range_leave_gradients_alone(name: str, end: float) -> None:
    key = "p" if name == "BitFlip" else "gamma"
    noise = channel(name, 0, **{key: end})
    gates = gate("ry", 0, angle=parameter(0)), gate("ry", 0, angle=parameter(0))
    circuit = DynamicCircuit(1, [gates[0], noise, gates[1]])
    energy = PauliSum({"Z": 1.0, "X": 0.5})
    at = torch.tensor([0.6], dtype=torch.float64, requires_grad=True)

    def exact(angle: torch.Tensor) -> torch.Tensor:
        return DensitySimulator(circuit).run(angle).expectation(energy)

    (slope,) = torch.autograd.grad(exact(at), at)
    with torch.no_grad():
        finite = (exact(at + 1e-5) - exact(at - 1e-5)) / 2e-5
    assert slope.item() == pytest.approx(finite.item(), abs=1e-8)
    found = TrajectorySimulator(circuit).run(at, 4000, key=1).expectation(energy)
    (mean,) = torch.autograd.grad(found.mean(), at)
    assert mean.item() == pytest.approx(slope.item(), abs=0.15)


@pytest.mark.slow
def test_a_task_of_trajectories_has_one_result(lockstep) -> None:
    done = lockstep("verify", TASK, "--ranks", "1,2,3,4", "--launchers", "python,mpi")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout


@pytest.mark.slow
def test_a_task_of_trajectories_has_one_result_on_two_ranks(lockstep) -> None:
    done = lockstep("verify", TASK, "--ranks", "1,2", "--launchers", "python", "steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "one SHA-256" in done.stdout
