"""Exact simulation: all 2^n amplitudes, differentiable, on one rank or several."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from lockstep.comm.transport import GroupBroken, Transport
from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, kind_of
from lockstep.systems.quantum.circuits.blocks import BlockMatrices
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, gate
from lockstep.systems.quantum.circuits.fusion import MAX_TARGETS, plan
from lockstep.systems.quantum.simulation.adjoint import (
    KEPT_BYTES,
    AddUp,
    Evolve,
    Program,
    evolve,
    is_transformed,
    num_copies,
    unwrapped,
)
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.parts import (
    StatePart,
    check_fits,
    check_memory,
    checked_amplitudes,
    memory_bytes,
)


class Simulator:
    """Simulates a circuit, any number of times.

    Args:
        circuit: circuit to simulate.
        dtype: dtype of the amplitudes, complex64 or complex128.
        device: device on which the state is computed.
        max_targets: greatest number of target qubits of a fused block; 1 fuses only gates on one
            qubit.
        transport: transport to other ranks, each of which has a part of the state. All ranks must
            make the same calls. Without a transport, this process has the whole state.
        varying: numbers of the parameters that may differ between the states of a batch; all by
            default. Gates that depend on no such parameter have one matrix for all states, which
            is faster. What these gates depend on must be the same in all rows of the parameters;
            the gradient through them, of all states together, is in the first row, and 0 in the
            others.
        parts: number P of parts of the state, a power of two, at least the number of ranks and that
            by default: part p has the amplitudes whose index has p for its high bits, and rank r of
            R the parts from r·P // R on. Results have the same bits on any number of ranks with the
            same number of parts.

    Attributes:
        transport: transport to other ranks; None where the state is whole.
        num_ranks: number of ranks that the state is split over.
        rank: number of this rank.
        num_local: number of qubits of a part.
        part: the parts of the state on this rank, and the memory for them.

    Raises:
        ConfigError: an argument has the wrong type, or the number of ranks or of parts is not a
            power of two or too great for so few qubits.
    """

    def __init__(
        self,
        circuit: Circuit,
        dtype: torch.dtype = torch.complex128,
        device: torch.device | str = "cpu",
        max_targets: int = MAX_TARGETS,
        transport: Transport | None = None,
        varying: Collection[int] | None = None,
        parts: int | None = None,
    ) -> None:
        self.num_ranks = num_ranks = 1 if transport is None else transport.size
        self.transport = transport if num_ranks > 1 else None
        self.rank = 0 if self.transport is None else self.transport.rank
        if not isinstance(circuit, Circuit):
            raise ConfigError(f"a simulator needs a Circuit, not {kind_of(circuit)}")
        if as_integer(max_targets, "max_targets") < 1:
            raise ConfigError(f"max_targets {max_targets}: must be at least 1")
        if parts is None and num_ranks & (num_ranks - 1):
            raise ConfigError(
                f"a state cannot be split over {num_ranks} ranks: their number must be a power of "
                f"two, or parts={1 << num_ranks.bit_length()}, which are distributed over them"
            )
        self.circuit = circuit
        self.dtype, self.device = checked_amplitudes(dtype, device)
        count = num_ranks if parts is None else as_integer(parts, "parts")
        if count < num_ranks or count & (count - 1):
            raise ConfigError(
                f"parts={count}: must be a power of two, and at least {num_ranks}, that of ranks"
            )
        self._num_rank_axes = count.bit_length() - 1
        self._max_targets = max_targets
        self._varying = None if varying is None else _gates_of(circuit, varying)
        self._shared = _shared(circuit, self._varying)
        self.num_local = circuit.num_qubits - self._num_rank_axes
        self.part = StatePart(self.num_local, count, self.transport, KEPT_BYTES)
        self._memory = memory_bytes(self.device)
        self.from_zero = self._program(from_zero=True)

    @cached_property
    def from_any(self) -> Program:
        """The circuit's program for any initial state."""
        return self._program(from_zero=False)

    def _program(self, from_zero: bool) -> Program:
        blocks = plan(
            self.circuit, self._max_targets, self._num_rank_axes, from_zero, self._varying
        )
        return Program(blocks, BlockMatrices(blocks.blocks, self.dtype, self.device))

    def state(self, parameters: Tensor | None = None, initial: Tensor | None = None) -> Tensor:
        """The state after the circuit.

        Args:
            parameters: real tensor [..., num_parameters]; optional if there are none.
            initial: initial state instead of |0…0>, complex, [..., 2^n]; with several ranks, this
                rank's part of it.

        Returns:
            State [..., 2^n], of the simulator's dtype, differentiable in both arguments; with
            several ranks, this rank's part of it. Qubit 0 is the lowest bit of an index.

        Raises:
            ConfigError: the parameters or the initial state are not a tensor of such a shape, what
                gates of one matrix depend on (`varying`) differs between rows, or the state does
                not fit into memory.
        """
        if parameters is None:
            parameters = self.circuit.check_parameters(None).to(self.device)
        parameters = self.circuit.check_parameters(parameters).to(self.dtype.to_real())
        # Parameters, not angles: the last bits of a formula may depend on the row's number.
        _check_shared("parameter", parameters, self._shared[0])
        return self._state(self.circuit.angles(parameters), initial)

    def state_at(self, angles: Tensor, initial: Tensor | None = None) -> Tensor:
        """As `state`, from the angles of all gates.

        Args:
            angles: angles in radians of the G gates that have one, real, [..., G].
            initial: initial state instead of |0…0>, as for `state`.

        Returns:
            State [..., 2^n], as of `state`.

        Raises:
            ConfigError: an argument has another shape, the angle of a gate of one matrix
                (`varying`) differs between rows, or the state does not fit into memory.
        """
        count = len(self.circuit.with_angle)
        if not isinstance(angles, Tensor) or not angles.dim() or angles.shape[-1] != count:
            raise ConfigError(f"angles must be a tensor [..., {count}], not {kind_of(angles)}")
        _check_shared("the angle of gate", angles, self._shared[1])
        return self._state(angles, initial)

    def _state(self, angles: Tensor, initial: Tensor | None) -> Tensor:
        if not torch.is_grad_enabled() and not is_transformed(angles):
            angles = angles.detach()  # so that nothing is kept for a backward pass
        lead = self._lead(angles, initial)
        batch = lead.numel()
        grads = torch.is_grad_enabled() and (
            angles.requires_grad or (initial is not None and initial.requires_grad)
        )
        num_qubits = self.circuit.num_qubits
        shares = self.part.num_parts // max(self.part.counts)
        check_memory(num_qubits, self.dtype, batch, grads, shares, self._memory)
        if not batch:
            empty = (angles.sum(-1, keepdim=True) * 0).to(self.dtype)
            return empty.expand(*lead, self.part.num_here << self.num_local)
        # Without a batch of angles, all states share their matrices.
        rows = angles.reshape(angles.shape[:-1].numel(), angles.shape[-1])
        if len(rows) not in (1, batch):
            rows = angles.expand(*lead, -1).reshape(batch, -1)
        if initial is None:
            here = self.part.num_here
            start = torch.zeros(here * batch, 1, dtype=self.dtype, device=self.device)
            start[:batch] = float(self.rank == 0)
            program = self.from_zero
        else:
            start = self._in_parts(initial.to(self.dtype).expand(*lead, -1).reshape(batch, -1))
            program = self.from_any
        if is_transformed(rows, start):
            return self._transformable(rows, start, program).reshape(*lead, -1)
        states: Tensor = Evolve.apply(rows, start, self.part, program)  # type: ignore[no-untyped-call]
        if self.part.num_here > 1:
            states = states.view(self.part.num_here, batch, -1).transpose(0, 1).reshape(batch, -1)
        return states.view(*lead, -1)

    def _transformable(self, rows: Tensor, start: Tensor, program: Program) -> Tensor:
        """The states by operations that `torch.func` can transform."""
        if self.part.num_parts > 1:
            raise ConfigError(
                "torch.func does not transform a state that is split into parts or over ranks; "
                "simulate it whole on one rank (a Simulator without transport and parts)"
            )
        num_blocks = len(program.plan.blocks)
        num_states = max(num_copies(rows), num_copies(start)) * len(start)
        check_fits(
            f"torch.func through {num_blocks} blocks of gates on {num_states} states",
            (num_blocks + 1) * (num_states << self.circuit.num_qubits) * self.dtype.itemsize,
            self.device,
            "use fewer states at once (chunk_size), or torch.autograd, which needs less",
        )
        return evolve(start, program.plan, program.matrices(rows))

    def _in_parts(self, states: Tensor) -> Tensor:
        """States [B, L·2^m] as those of each part, [L·B, 2^m]."""
        if self.part.num_here == 1:
            return states
        split = states.view(len(states), self.part.num_here, -1)
        return split.transpose(0, 1).reshape(len(states) * self.part.num_here, -1)

    def _lead(self, angles: Tensor, initial: Tensor | None) -> torch.Size:
        """The shape of the batch."""
        if initial is None:
            return angles.shape[:-1]
        size = self.part.num_here << self.num_local
        if not isinstance(initial, Tensor) or not initial.dim() or initial.shape[-1] != size:
            raise ConfigError(
                f"the initial state must be a tensor [..., {size}], not {kind_of(initial)}"
            )
        try:
            batch = torch.broadcast_shapes(angles.shape[:-1], initial.shape[:-1])  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise ConfigError(
                f"parameters {list(angles.shape[:-1])} and initial states "
                f"{list(initial.shape[:-1])} are no batch"
            ) from error
        return torch.Size(batch)

    def add_up(self, local: Tensor) -> Tensor:
        """The sum [M] over all parts of real values [L, M] computed from the L parts here.

        The order of the sum is that of the parts, and the same on all ranks. Differentiable: each
        part gets the gradient of the sum.
        """
        total: Tensor = AddUp.apply(local, self.part)  # type: ignore[no-untyped-call]
        return total


def _gates_of(circuit: Circuit, parameters: Collection[int]) -> frozenset[int]:
    """Numbers, among the gates with angles, of those that depend on any of these parameters."""
    gates = enumerate(circuit.with_angle)
    return frozenset(n for n, g in gates if set(parameters) & set(g.parameters))


def _shared(circuit: Circuit, varying: frozenset[int] | None) -> tuple[list[int], list[int]]:
    """Numbers of the parameters, and of the gates with angles, that are the same in all rows."""
    if varying is None:
        return [], []
    gates = {n: g for n, g in enumerate(circuit.with_angle) if n not in varying}
    return sorted({index for g in gates.values() for index in g.parameters}), [*gates]


def _check_shared(name: str, values: Tensor, shared: Sequence[int]) -> None:
    """Check that some columns of values [..., N] are the same in all rows."""
    rows = values.reshape(values.shape[:-1].numel(), values.shape[-1])
    if not shared or len(rows) < 2:
        return
    with torch.no_grad():
        own = rows.index_select(-1, torch.tensor(shared, device=rows.device))
        differs = ((own > own[:1]) | (own < own[:1])).any(0)
        numbers = torch.arange(len(shared), device=rows.device).where(differs, len(shared))
    first = int(unwrapped(numbers).min())
    if first < len(shared):
        raise ConfigError(
            f"{name} {shared[first]} differs between the states of a batch, for which gates that "
            "depend on no parameter in `varying` have one matrix"
        )


def statevector(
    circuit: Circuit, parameters: Tensor | None = None, dtype: torch.dtype = torch.complex128
) -> Tensor:
    """The state after a circuit; see `Simulator`, which is faster when used many times.

    Args:
        circuit: circuit to simulate.
        parameters: real tensor [..., num_parameters]; optional if there are none.
        dtype: dtype of the amplitudes, complex64 or complex128.

    Returns:
        State [..., 2^n], on the device of the parameters.

    Raises:
        ConfigError: as `Simulator.state`.
    """
    device = "cpu" if parameters is None else parameters.device
    return Simulator(circuit, dtype, device).state(parameters)


T = TypeVar("T")


def expectation(
    simulator: Simulator, state: Tensor, terms: Mapping[str, float] | PauliSum
) -> Tensor:
    """<ψ|H|ψ>, the same on all ranks, which must all call this.

    Strings of I and Z are diagonal and are summed in one pass. For each string with X or Y, gates
    first rotate the state so that the string becomes diagonal, too.

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
    observable = terms if isinstance(terms, PauliSum) else PauliSum(terms)
    observable.check(num_qubits)
    size = simulator.part.num_here << simulator.num_local
    if not isinstance(state, Tensor) or not state.dim() or state.shape[-1] != size:
        raise ConfigError(f"the state must be a tensor [..., {size}], not {kind_of(state)}")
    rows = state.reshape(-1, size)
    diagonal = {s: c for s, c in observable.pairs if not set(s) & set("XY")}
    sums = [_sums_of_parts(simulator, rows, diagonal)] if diagonal else []
    for string, coefficient in observable.pairs:
        if string not in diagonal:
            rotation = Simulator(
                Circuit(num_qubits, _diagonalising(string)),
                simulator.dtype,
                simulator.device,
                transport=simulator.transport,
                parts=simulator.part.num_parts,
            )
            letters = string.replace("X", "Z").replace("Y", "Z")
            rotated = rotation.state(initial=rows)
            sums.append(_sums_of_parts(simulator, rotated, {letters: coefficient}))
    total: Tensor = sum(sums[1:], start=sums[0])
    return simulator.add_up(total).view(state.shape[:-1])


def retried(transport: Transport, work: Callable[[Transport], T]) -> T:
    """The result of `work` on all ranks, computed again by the remaining ranks when one is lost.

    The parts of a state on a lost rank are lost: no other rank has a copy. So the state is computed
    again from its parameters, in as many parts as before on fewer ranks, with the same bits.

    Args:
        transport: transport to the ranks, one that can regroup: under `lockstep`, `mpirun --with-ft
            ulfm` or the launchers of SLURM. All ranks must call this.
        work: function that can be called several times: it makes its own simulators, with a number
            of `parts`, so that any number of ranks is allowed, and has no side effects.

    Raises:
        ConfigError: as `work`; for instance, because the state does not fit into the memory of the
            remaining ranks.
    """
    while True:
        try:
            result = work(transport)
            transport.agree()
            return result
        except GroupBroken:
            transport.regroup()


def _sums_of_parts(simulator: Simulator, rows: Tensor, terms: Mapping[str, float]) -> Tensor:
    """For each of L parts in states [B, L·2^m], its contribution to terms of I and Z, [L, B]."""
    num_far = simulator.circuit.num_qubits - simulator.num_local
    part = simulator.part
    sums = []
    for number, own in enumerate(rows.view(len(rows), part.num_here, -1).unbind(1), part.first):
        near: dict[str, float] = {}
        for string, coefficient in terms.items():
            far = int(string[:num_far].replace("I", "0").replace("Z", "1") or "0", 2)
            sign = -1 if (far & number).bit_count() % 2 else 1
            letters = string[num_far:]
            near[letters] = near.get(letters, 0.0) + sign * coefficient
        sums.append(PauliSum(near).expectation(own.contiguous()))
    return torch.stack(sums)


def _diagonalising(string: str) -> Iterator[Gate]:
    """Gates after which measuring Z measures the string's X and Y."""
    for qubit, letter in enumerate(reversed(string)):
        if letter == "Y":
            yield gate("sdg", qubit)
        if letter in "XY":
            yield gate("h", qubit)
