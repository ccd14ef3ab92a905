"""Expectation values of states that are split over ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from lockstep.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.quantum.simulation.measure import PauliSum
from lockstep.quantum.simulation.statevector import Simulator


def expectation(simulator: Simulator, state: Tensor, terms: Mapping[str, float]) -> Tensor:
    """<ψ|H|ψ>, the same on all ranks, which must all call this.

    Strings of I and Z are diagonal and are summed in one pass. For one with X or Y, gates first
    turn the state so that it becomes such a string.

    Args:
        simulator: simulator that computed the state.
        state: this rank's part of the state, [2^n / ranks], complex.
        terms: coefficient of each Pauli string, as for `PauliSum`.

    Returns:
        A real scalar, differentiable in the state. After `backward` on all ranks, each has the
        whole gradient of the circuit's parameters.

    Raises:
        ConfigError: there are no terms, or a string has other letters or another length.
    """
    num_qubits = simulator.circuit.num_qubits
    PauliSum(terms).check(num_qubits)
    plain = {s: c for s, c in terms.items() if not set(s) & set("XY")}
    sums = [_local_sum(simulator, state, plain)] if plain else []
    for string, coefficient in terms.items():
        if string not in plain:
            turned = Simulator(
                Circuit(num_qubits, _turning(string)),
                simulator.dtype,
                simulator.device,
                transport=simulator.transport,
            )
            letters = string.replace("X", "Z").replace("Y", "Z")
            own = turned.state(initial=state)
            sums.append(_local_sum(simulator, own, {letters: coefficient}))
    total: Tensor = sum(sums[1:], start=sums[0])
    return simulator.add_up(total.view(1))[0]


def _local_sum(simulator: Simulator, state: Tensor, terms: Mapping[str, float]) -> Tensor:
    """The contribution of this rank's amplitudes to terms of I and Z, a real scalar."""
    num_far = simulator.circuit.num_qubits - simulator.num_local
    near: dict[str, float] = {}
    for string, coefficient in terms.items():
        far = int(string[:num_far].replace("I", "0").replace("Z", "1") or "0", 2)
        sign = -1 if (far & simulator.rank).bit_count() % 2 else 1
        own = string[num_far:]
        near[own] = near.get(own, 0.0) + sign * coefficient
    return PauliSum(near).expectation(state)


def _turning(string: str) -> Iterator[Gate]:
    """Gates after which Z measures X, or Y."""
    for qubit, letter in enumerate(reversed(string)):
        if letter == "Y":
            yield gate("sdg", qubit)
        if letter in "XY":
            yield gate("h", qubit)
