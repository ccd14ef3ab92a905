"""Named families of parametrised circuits, by number of qubits and of layers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, Gate, as_integer, gate, parameter

Ansatz = Callable[[int, int, int], Circuit]
"""A circuit from a number of qubits, a number of layers and a seed, which most do not need."""


def idle(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """No gate at all: the least expressive circuit (Sim et al. 2019, figure 1)."""
    return _checked(num_qubits, num_layers, iter(()))


def rx_rz(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX and RZ on each qubit; never entangled (Sim et al. 2019, circuit 1)."""
    return _checked(num_qubits, num_layers, _turns(num_qubits, num_layers, ("rx", "rz"), None))


def rx_rz_cx(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX and RZ on each qubit, then CNOTs from each to the one below (Sim et al., circuit 2)."""
    return _checked(num_qubits, num_layers, _turns(num_qubits, num_layers, ("rx", "rz"), "cx"))


def h_cz_rx(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """H on each qubit, CZ between neighbours, RX on each (Sim et al. 2019, circuit 9)."""

    def gates() -> Iterator[Gate]:
        numbers = iter(range(num_layers * num_qubits))
        for _ in range(num_layers):
            yield from (gate("h", qubit) for qubit in range(num_qubits))
            yield from (gate("cz", q + 1, q) for q in reversed(range(num_qubits - 1)))
            for qubit in range(num_qubits):
                yield gate("rx", qubit, angle=parameter(next(numbers)))

    return _checked(num_qubits, num_layers, gates())


def ring(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RX, RY and RZ on each qubit, then CNOTs around the ring."""
    turns = _turns(num_qubits, num_layers, ("rx", "ry", "rz"), "ring")
    return _checked(num_qubits, num_layers, turns)


def random_axes(num_qubits: int, num_layers: int, seed: int = 0) -> Circuit:
    """RY(π/4) on each qubit, then layers of rotations about random axes and CZ between neighbours.

    McClean et al., Nature Communications 9, 4812 (2018), figure 2; axes are drawn from the seed.
    """

    def gates() -> Iterator[Gate]:
        source, numbers = random.Random(seed), iter(range(num_layers * num_qubits))
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


def _turns(
    num_qubits: int, num_layers: int, names: tuple[str, ...], entangled: str | None
) -> Iterator[Gate]:
    """Layers of the named rotations of each qubit, with CNOTs along a line (`cx`) or a `ring`."""
    numbers = iter(range(num_layers * num_qubits * len(names)))
    for _ in range(num_layers):
        for name in names:
            for qubit in range(num_qubits):
                yield gate(name, qubit, angle=parameter(next(numbers)))
        if entangled == "cx":
            yield from (gate("cx", q + 1, q) for q in reversed(range(num_qubits - 1)))
        elif entangled == "ring" and num_qubits > 1:
            yield from (gate("cx", q, (q + 1) % num_qubits) for q in range(num_qubits))
