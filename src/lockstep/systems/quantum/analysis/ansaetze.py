"""Named families of parametrised circuits, and the states of circuits at random angles."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, kind_of, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.systems.quantum.simulation.statevector import Simulator

_AMPLITUDES = 1 << 18
"""About how many amplitudes are simulated at a time."""


def random_angles(circuit: Circuit, samples: int, seed: int) -> Tensor:
    """Angles drawn uniformly from [0, 2π), float64 [samples, num_parameters].

    Args:
        circuit: circuit whose parameters they are for.
        samples: number of draws, at least 2.
        seed: seed of the draws, from 0 to 2^63 - 1.

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


def chunks(angles: Tensor, circuit: Circuit) -> Iterator[Tensor]:
    """The rows of angles [samples, num_parameters], a batch at a time that is quick to simulate."""
    rows = max(1, _AMPLITUDES >> circuit.num_qubits)
    for first in range(0, len(angles), rows):
        yield angles[first : first + rows]


def random_states(
    circuit: Circuit, samples: int, seed: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """States of a circuit at random angles, some at a time: complex128 [some, 2^n].

    Args:
        circuit: circuit to simulate.
        samples: number of states in all, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which they are computed.

    Raises:
        ConfigError: as `random_angles`, or a state does not fit into memory.
    """
    angles = random_angles(circuit, samples, seed).to(device)
    simulator = Simulator(circuit, device=device)
    with torch.no_grad():
        for own in chunks(angles, circuit):
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
    if as_integer(num_layers, "num_layers") < 1:
        raise ConfigError(f"num_layers={num_layers}: must be at least 1")
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
