"""Properties of ansätze over random angles: reached states, entanglement, and barren plateaus.

Expressibility (Sim et al., Advanced Quantum Technologies 2, 1900070 (2019), equations 8 to 11)
compares the fidelities of pairs of its states at random angles with those of Haar random states.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_count, as_integer, kind_of, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.systems.quantum.simulation.measure import PauliSum, qubits_of
from lockstep.systems.quantum.simulation.statevector import Simulator

_AMPLITUDES = 1 << 18
"""About how many amplitudes are simulated at a time."""
BINS = 75
"""Bins of the histogram of fidelities, as in the paper."""
_LEAST_DIGITS = 1e-300


def meyer_wallach(states: Tensor) -> Tensor:
    """Q = 2 (1 - mean over qubits k of Tr ρ_k²), from 0 (a product) to 1 (Meyer, Wallach 2002).

    In the form of Brennen, Quantum Information and Computation 3, 619 (2003).

    Args:
        states: complex tensor [..., 2^n] of norm 1.

    Returns:
        Values [...], real; differentiable.

    Raises:
        ConfigError: `states` is not such a tensor.
    """
    num_qubits = qubits_of(states)
    purities = []
    for qubit in range(num_qubits):
        split = states.reshape(*states.shape[:-1], -1, 2, 1 << qubit)
        low, high = split.unbind(-2)
        likely = [torch.view_as_real(part).square().sum((-3, -2, -1)) for part in (low, high)]
        coherence = torch.view_as_real((low.conj() * high).sum((-2, -1))).square().sum(-1)
        purities.append(likely[0].square() + likely[1].square() + 2 * coherence)
    total: Tensor = 2 * (1 - torch.stack(purities).mean(0))
    return total


def entangling_capability(
    circuit: Circuit, samples: int = 1000, seed: int = 0, device: torch.device | str = "cpu"
) -> float:
    """The mean of `meyer_wallach` over random angles (Sim et al. 2019, equation 13).

    Args:
        circuit: circuit to evaluate.
        samples: number of states, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    found = [meyer_wallach(states) for states in _random_states(circuit, samples, seed, device)]
    return max(0.0, float(torch.cat(found).mean()))  # rounding may give less than 0


def haar_entanglement(num_qubits: int) -> float:
    """The mean of `meyer_wallach` over all states of n qubits: (2^n - 2) / (2^n + 1)."""
    return ((1 << num_qubits) - 2) / ((1 << num_qubits) + 1)


def fidelities(
    circuit: Circuit, samples: int, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """F = |<ψ(θ)|ψ(φ)>|² of pairs of random angles.

    Args:
        circuit: circuit to evaluate.
        samples: number of pairs, at least 1.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Returns:
        Fidelities [samples], float64, from 0 to 1.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    as_count(samples, "samples")
    found, rest = [], None
    for states in _random_states(circuit, 2 * samples, seed, device):
        both = states if rest is None else torch.cat([rest, states])
        paired = len(both) // 2 * 2
        overlaps = (both[0:paired:2].conj() * both[1:paired:2]).sum(-1)
        found.append(torch.view_as_real(overlaps).square().sum(-1))
        rest = both[paired:]
    return torch.cat(found).clamp(max=1)  # rounding may give more than 1


def expressibility(
    circuit: Circuit,
    samples: int = 5000,
    seed: int = 0,
    bins: int = BINS,
    device: torch.device | str = "cpu",
) -> float:
    """The Kullback-Leibler divergence of the circuit's fidelities from the Haar distribution.

    0 is the most expressive. With a finite number of pairs, it is biased upwards by about
    (occupied bins - 1) / (2 · samples).

    Args:
        circuit: circuit to evaluate.
        samples: number of pairs of states, at least 1.
        seed: seed of the angles, from 0 to 2^63 - 1.
        bins: number of equal bins of the fidelity, at least 2.
        device: device on which states are computed.

    Returns:
        Divergence in nats.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    as_count(bins, "bins", least=2)
    found = fidelities(circuit, samples, seed, device).cpu()
    return divergence(torch.histc(found, bins, 0, 1) / len(found), circuit.num_qubits)


def divergence(frequencies: Tensor, num_qubits: int) -> float:
    """Σ f ln(f / h) with the probabilities h of the same bins for Haar random states.

    Their fidelities F have the density (N - 1) (1 - F)^(N - 2), N = 2^n (Życzkowski, Sommers 2005).

    Args:
        frequencies: relative frequency of each of equal bins, float64 [bins], of sum 1.
        num_qubits: number n of qubits.
    """
    bins = len(frequencies)
    power = (1 << num_qubits) - 1
    lower = torch.arange(bins, dtype=torch.float64) / bins
    # ln((1 - l)^p - (1 - u)^p) directly: the last bins' probabilities underflow in float64.
    ratio = ((1 - lower - 1 / bins) / (1 - lower)).clamp(min=0)
    logarithms = power * torch.log1p(-lower) + torch.log1p(-(ratio**power))
    terms = torch.where(
        frequencies > 0, frequencies * (frequencies.clamp(min=_LEAST_DIGITS).log() - logarithms), 0
    )
    total = float(terms.sum())
    return total if not math.isclose(total, 0, abs_tol=1e-15) else 0.0


def gradient_samples(
    circuit: Circuit,
    observable: PauliSum,
    samples: int = 200,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The gradient of <H> in all parameters, at random angles, by adjoint differentiation.

    Args:
        circuit: circuit to differentiate.
        observable: the sum H.
        samples: number of draws of the angles, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Returns:
        Gradients [samples, num_parameters], float64.

    Raises:
        ConfigError: an argument is out of range, the observable is of another number of qubits,
            the circuit has no parameter, or a state does not fit into memory.
    """
    if isinstance(circuit, Circuit) and not circuit.num_parameters:
        raise ConfigError("the circuit has no parameter, so no gradient")
    angles = _random_angles(circuit, samples, seed).to(device)
    simulator = Simulator(circuit, device=device)
    found = []
    for rows in _chunks(angles, circuit):
        own = rows.clone().requires_grad_()
        total = observable.expectation(simulator.state(own)).sum()
        found.append(torch.autograd.grad(total, own)[0])
    return torch.cat(found)


def gradient_variance(
    ansatz: Ansatz,
    num_qubits: int,
    num_layers: int,
    observable: PauliSum,
    *,
    samples: int = 200,
    circuits: int = 1,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> float:
    """The variance of the derivative in the parameter in the middle of the circuit.

    Args:
        ansatz: family of circuits.
        num_qubits: number of qubits.
        num_layers: number of layers.
        observable: the sum H whose expectation value is differentiated.
        samples: number of draws of the angles for each circuit, at least 2.
        circuits: number of circuits, from as many seeds; more than one for random circuits.
        seed: seed of the circuits and of the angles; the next ones are those after it.
        device: device on which states are computed.

    Raises:
        ConfigError: as `gradient_samples`.
    """
    as_count(circuits, "circuits")
    found = []
    for own in range(seed, seed + circuits):
        circuit = ansatz(num_qubits, num_layers, own)
        gradients = gradient_samples(circuit, observable, samples, own, device)
        found.append(gradients[:, circuit.num_parameters // 2])
    return float(torch.cat(found).var())


def pauli_z(num_qubits: int, kind: Literal["local", "global"]) -> PauliSum:
    """Z on qubits 0 and 1 (`local`, as McClean et al.), or on all (`global`).

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in ("local", "global"):
        raise ConfigError(f"observable {kind!r}: must be local or global")
    count = min(2, num_qubits) if kind == "local" else num_qubits
    return PauliSum({"I" * (num_qubits - count) + "Z" * count: 1.0})


def two_design_variance(num_qubits: int) -> float:
    """The variance if the circuits before and after the gate are 2-designs.

    For a rotation exp(-iθP/2) about a Pauli string P and an observable that is a Pauli string:
    N² / (2 (N² - 1) (N + 1)) with N = 2^n; about 2^-n / 2 (from McClean et al. 2018, equation 7,
    with the integrals of first and second moments done).
    """
    size = 1 << num_qubits
    return size**2 / (2 * (size**2 - 1) * (size + 1))


def decay(num_qubits: Sequence[int], variances: Sequence[float]) -> float:
    """The factor b in variance ∝ exp(-b n), by least squares of the logarithm over n.

    Raises:
        ConfigError: there are fewer than two numbers of qubits, or a variance is not positive.
    """
    if len(set(num_qubits)) < 2 or min(variances) <= 0:
        raise ConfigError("a decay needs positive variances at two numbers of qubits or more")
    x = torch.tensor(num_qubits, dtype=torch.float64)
    y = torch.tensor([math.log(v) for v in variances], dtype=torch.float64)
    x, y = x - x.mean(), y - y.mean()
    return -float(x @ y / (x @ x))


def _random_angles(circuit: Circuit, samples: int, seed: int) -> Tensor:
    """Angles drawn uniformly from [0, 2π), float64 [samples, num_parameters].

    Raises:
        ConfigError: an argument is out of range or of the wrong type.
    """
    if not isinstance(circuit, Circuit):
        raise ConfigError(f"needs a Circuit, not {kind_of(circuit)}")
    if as_integer(samples, "samples") < 2:
        raise ConfigError(f"samples={samples}: a distribution needs at least 2")
    if not 0 <= as_integer(seed, "seed") < 1 << 63:
        raise ConfigError(f"seed={seed}: must be from 0 to 2^63 - 1")
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, circuit.num_parameters)
    return 2 * math.pi * torch.rand(shape, dtype=torch.float64, generator=generator)


def _chunks(angles: Tensor, circuit: Circuit) -> Iterator[Tensor]:
    """The rows of angles [samples, num_parameters], a batch at a time that is quick to simulate."""
    rows = max(1, _AMPLITUDES >> circuit.num_qubits)
    for first in range(0, len(angles), rows):
        yield angles[first : first + rows]


def _random_states(
    circuit: Circuit, samples: int, seed: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """States of a circuit at random angles, some at a time: complex128 [some, 2^n]."""
    angles = _random_angles(circuit, samples, seed).to(device)
    simulator = Simulator(circuit, device=device)
    with torch.no_grad():
        for own in _chunks(angles, circuit):
            yield simulator.state(own)


Ansatz = Callable[[int, int, int], Circuit]
"""A circuit from a number of qubits, a number of layers and a seed, which most do not use."""


def idle(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """No gates: the least expressive circuit (Sim et al. 2019, figure 1)."""
    return _checked(num_qubits, num_layers, iter(()))


def rx_rz(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX and RZ on each qubit; never entangled (Sim et al. 2019, circuit 1)."""
    return _rotations(num_qubits, num_layers, ("rx", "rz"), None)


def rx_rz_cx(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX and RZ on each qubit, then CNOTs from each to the one below (Sim et al., circuit 2)."""
    return _rotations(num_qubits, num_layers, ("rx", "rz"), "line")


def h_cz_rx(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """H on each qubit, CZ between neighbours, RX on each (Sim et al. 2019, circuit 9)."""

    def gates() -> Iterator[Gate]:
        numbers = count()
        for _ in range(num_layers):
            yield from (gate("h", qubit) for qubit in range(num_qubits))
            yield from (gate("cz", q + 1, q) for q in reversed(range(num_qubits - 1)))
            for qubit in range(num_qubits):
                yield gate("rx", qubit, angle=parameter(next(numbers)))

    return _checked(num_qubits, num_layers, gates())


def ring(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX, RY and RZ on each qubit, then CNOTs around the ring."""
    return _rotations(num_qubits, num_layers, ("rx", "ry", "rz"), "ring")


def random_axes(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RY(π/4) on each qubit, then layers of rotations about random axes and CZ between neighbours.

    McClean et al., Nature Communications 9, 4812 (2018), figure 2; axes are drawn from the seed.
    """

    def gates() -> Iterator[Gate]:
        source, numbers = random.Random(seed), count()
        yield from (gate("ry", qubit, angle=math.pi / 4) for qubit in range(num_qubits))
        for _ in range(num_layers):
            for qubit in range(num_qubits):
                name = source.choice(("rx", "ry", "rz"))
                yield gate(name, qubit, angle=parameter(next(numbers)))
            yield from (gate("cz", q, q + 1) for q in range(num_qubits - 1))

    return _checked(num_qubits, num_layers, gates())


ANSAETZE: Mapping[str, Ansatz] = MappingProxyType(
    {
        "idle": idle,
        "rx_rz": rx_rz,
        "rx_rz_cx": rx_rz_cx,
        "h_cz_rx": h_cz_rx,
        "ring": ring,
        "random": random_axes,
    }
)
"""All of them, by the name that commands take."""


def _checked(num_qubits: int, num_layers: int, gates: Iterator[Gate]) -> Circuit:
    as_count(num_layers, "num_layers")
    return Circuit(num_qubits, gates)


def _rotations(
    num_qubits: int, num_layers: int, names: tuple[str, ...], cnots: Literal["line", "ring"] | None
) -> Circuit:
    """Layers of the named rotations of each qubit, with CNOTs along a line or a ring."""

    def gates() -> Iterator[Gate]:
        numbers = count()
        for _ in range(num_layers):
            for name in names:
                for qubit in range(num_qubits):
                    yield gate(name, qubit, angle=parameter(next(numbers)))
            if cnots == "line":
                yield from (gate("cx", q + 1, q) for q in reversed(range(num_qubits - 1)))
            elif cnots == "ring" and num_qubits > 1:
                yield from (gate("cx", q, (q + 1) % num_qubits) for q in range(num_qubits))

    return _checked(num_qubits, num_layers, gates())
