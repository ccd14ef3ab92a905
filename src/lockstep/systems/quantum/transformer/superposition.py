"""The quantum transformer as one circuit, its transitions in superposition.

The control qubits are the transition's number. Controlled on each value c, the context ψ of
transition c + 1 is prepared on both registers; V and W act once, for all transitions; controlled
again, the preparation of the target is undone on the first register, and that of the current word
on the second. The amplitude of |0…0> is A.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate, unitary
from lockstep.systems.quantum.simulation.parts import check_fits
from lockstep.systems.quantum.transformer.ansatz import angle_shape, pairs

_COPIES = 4
"""Matrices in memory while the preparation of a transition is made and checked."""
_NORM_TOLERANCE = 1e-4
"""States may have been normalised in single precision."""


def superposition(states: Tensor, num_layers: int) -> Circuit:
    """The circuit of a sentence.

    Args:
        states: states of the sentence's words, real and of norm 1, [T + 1, d] with d = 2^n.
        num_layers: number of layers of the ansatz.

    Returns:
        A circuit on 2n qubits (first register, then second) and as many controls as T needs. Its
        parameters are the angles of V, then those of W, flat.

    Raises:
        ConfigError: there are fewer than two states, their dimension is not a power of two or their
            norm not 1, or the circuit does not fit into memory.
    """
    states = _checked(states)
    as_integer(num_layers, "num_layers")
    transitions, dim = len(states) - 1, states.shape[1]
    check_fits(
        f"the circuit of {transitions} transitions of dimension {dim}",
        (transitions + _COPIES) * dim**4 * torch.complex128.itemsize,
        advice="take a smaller dimension, or the closed form, which needs no circuit",
    )
    num_qubits = dim.bit_length() - 1
    first, second = tuple(range(num_qubits)), tuple(range(num_qubits, 2 * num_qubits))
    controls = tuple(range(2 * num_qubits, 2 * num_qubits + (transitions - 1).bit_length()))
    spread = list(_spread(controls, transitions))
    gates = list(spread)
    context = torch.zeros(dim, dim, dtype=states.dtype)
    for number in range(transitions):
        context = context + torch.outer(states[number], states[number])
        psi = (context / context.norm()).flatten()
        gates.append(_selected(preparation(psi), (*first, *second), controls, number))
    size = torch.Size(angle_shape(num_qubits, num_layers)).numel()
    gates += _ansatz(first, num_layers, 0)
    gates += _ansatz(second, num_layers, size)
    for number in range(transitions):  # preparations are their own inverses
        gates.append(_selected(preparation(states[number + 1]), first, controls, number))
        gates.append(_selected(preparation(states[number]), second, controls, number))
    return Circuit(2 * num_qubits + len(controls), [*gates, *reversed(spread)], 2 * size)


def _checked(states: Tensor) -> Tensor:
    """The states in double precision.

    Raises:
        ConfigError: as `superposition`.
    """
    if not isinstance(states, Tensor) or states.dim() != 2 or states.is_complex():
        raise ConfigError("the states of a sentence must be a real tensor [words, dimension]")
    count, dim = states.shape
    if count < 2 or dim < 2 or dim & (dim - 1):
        raise ConfigError(
            f"states [{count}, {dim}]: must be at least two, of a dimension that is a power of two"
        )
    states = states.detach().cpu().double()
    if not bool(((states.norm(dim=1) - 1).abs() < _NORM_TOLERANCE).all()):
        raise ConfigError("the states of a sentence must have norm 1")
    return states


def preparation(state: Tensor) -> Tensor:
    """The reflection that exchanges |0…0> and a real state [N] of norm 1: [N, N]."""
    normal = -state
    normal[0] += 1
    square = normal @ normal
    identity = torch.eye(len(state), dtype=state.dtype)
    if square < torch.finfo(state.dtype).tiny:
        return identity
    return identity - torch.outer(normal, normal) * (2 / square)


def _spread(controls: tuple[int, ...], transitions: int) -> Iterator[Gate]:
    """Gates, their own inverses, that make all values below `transitions` equally likely."""
    if transitions == 1 << len(controls):
        yield from (gate("h", qubit) for qubit in controls)
        return
    uniform = torch.zeros(1 << len(controls), dtype=torch.float64)
    uniform[:transitions] = transitions**-0.5
    yield unitary(preparation(uniform), *controls)


def _selected(
    matrix: Tensor, qubits: tuple[int, ...], controls: tuple[int, ...], number: int
) -> Gate:
    made = unitary(matrix, *qubits)
    bits = [number >> i & 1 for i in range(len(controls))]
    return made.controlled(*controls, state=bits) if controls else made


def _ansatz(qubits: tuple[int, ...], num_layers: int, first: int) -> Iterator[Gate]:
    """The gates of `ansatz.unitaries` on these qubits, with parameters from `first` on."""
    number = first
    for _ in range(num_layers):
        for control, target in pairs(len(qubits)) or [(0, 0)]:
            for rotation in range(angle_shape(len(qubits), 1)[2]):
                qubit = qubits[(control, target)[rotation % 2]]
                for name in ("rx", "ry", "rz"):
                    yield gate(name, qubit, angle=parameter(number))
                    number += 1
                if rotation % 2:
                    yield gate("cx", qubits[control], qubits[target])
