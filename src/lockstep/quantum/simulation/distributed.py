"""Expectation values of states that are split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.comm.transport import GroupBroken, Transport
from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, Gate, gate, kind_of
from lockstep.quantum.simulation.measure import PauliSum
from lockstep.quantum.simulation.statevector import Simulator

T = TypeVar("T")


def expectation(
    simulator: Simulator, state: Tensor, terms: Mapping[str, float] | PauliSum
) -> Tensor:
    """<ψ|H|ψ>, the same on all ranks, which must all call this.

    Strings of I and Z are diagonal and are summed in one pass. For one with X or Y, gates first
    turn the state so that it becomes such a string.

    Args:
        simulator: simulator that computed the state.
        state: this rank's parts of the state, [..., amplitudes], complex.
        terms: a Pauli sum, or the coefficient of each Pauli string, as for `PauliSum`.

    Returns:
        Real values [...], differentiable in the state. After `backward` on all ranks, each has the
        whole gradient of the circuit's parameters. They have the same bits on any number of ranks
        with the same number of parts.

    Raises:
        ConfigError: there are no terms, a string has other letters or another length, or the state
            is not of such a shape.
    """
    num_qubits = simulator.circuit.num_qubits
    whole = terms if isinstance(terms, PauliSum) else PauliSum(terms)
    whole.check(num_qubits)
    size = simulator.part.num_here << simulator.num_local
    if not isinstance(state, Tensor) or not state.dim() or state.shape[-1] != size:
        raise ConfigError(f"the state must be a tensor [..., {size}], not {kind_of(state)}")
    rows = state.reshape(-1, size)
    pairs = dict(zip(whole.strings, whole.coefficients, strict=True))
    plain = {s: c for s, c in pairs.items() if not set(s) & set("XY")}
    sums = [_sums_of_parts(simulator, rows, plain)] if plain else []
    for string, coefficient in pairs.items():
        if string not in plain:
            turned = Simulator(
                Circuit(num_qubits, _turning(string)),
                simulator.dtype,
                simulator.device,
                transport=simulator.transport,
                parts=simulator.part.num_parts,
            )
            letters = string.replace("X", "Z").replace("Y", "Z")
            own = turned.state(initial=rows)
            sums.append(_sums_of_parts(simulator, own, {letters: coefficient}))
    total: Tensor = sum(sums[1:], start=sums[0])
    return simulator.add_up(total).view(state.shape[:-1])


def retried(transport: Transport, work: Callable[[Transport], T]) -> T:
    """What `work` finds over all ranks, done anew by those that are left when one is lost.

    A state is lost with the parts of a lost rank: no other rank has a copy, so there is no block
    of gates to go back to. It is made anew from its parameters, in as many parts as before on
    fewer ranks, and has the same bits.

    Args:
        transport: transport to the ranks, one that can regroup: under `lockstep`, `mpirun --with-ft
            ulfm` or the launchers of SLURM. All ranks must call this.
        work: function that begins anew at each call: it makes its simulators (with the number of
            `parts` given, for the number of ranks may then be any), and adds to nothing outside.

    Raises:
        ConfigError: as `work`; for instance, because the state does not fit into the memory of the
            ranks that are left.
    """
    while True:
        try:
            found = work(transport)
            transport.agree()
            return found
        except GroupBroken:
            transport.regroup()


def _sums_of_parts(simulator: Simulator, rows: Tensor, terms: Mapping[str, float]) -> Tensor:
    """For each of L parts in states [B, L·2^m], its contribution to terms of I and Z, [L, B]."""
    num_far = simulator.circuit.num_qubits - simulator.num_local
    part = simulator.part
    sums = []
    for place, own in enumerate(rows.view(len(rows), part.num_here, -1).unbind(1)):
        near: dict[str, float] = {}
        for string, coefficient in terms.items():
            far = int(string[:num_far].replace("I", "0").replace("Z", "1") or "0", 2)
            sign = -1 if (far & part.first + place).bit_count() % 2 else 1
            letters = string[num_far:]
            near[letters] = near.get(letters, 0.0) + sign * coefficient
        sums.append(PauliSum(near).expectation(own.contiguous()))
    return torch.stack(sums)


def _turning(string: str) -> Iterator[Gate]:
    """Gates after which Z measures X, or Y."""
    for qubit, letter in enumerate(reversed(string)):
        if letter == "Y":
            yield gate("sdg", qubit)
        if letter in "XY":
            yield gate("h", qubit)
