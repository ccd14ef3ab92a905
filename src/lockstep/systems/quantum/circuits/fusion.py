"""Gate fusion: gates are combined into blocks, each of which passes over the state once.

A block acts on a few target qubits, with one matrix for each value of its control qubits. Applying
it is a product of a small matrix with the state as a tall one, which BLAS does at full speed, and
reads and writes memory once for many gates.

The state's axes are in the order that the next block needs: its controls first, its targets last.
Applying a block moves its targets to the front at no cost, since the product can be written
transposed. In circuits whose gates go around a ring no other permutation is needed.

A state that starts as |0…0> has no axes at first: each qubit's is added before the first block that
touches it. So the first layer of a circuit costs next to nothing.

Over several ranks, the first axes are the bits of the rank's number. A control there costs nothing:
it selects the rank's matrix. When a target is there, the ranks' axes are swapped with the local
ones that are used as targets last: each rank sends every other one an equal part of its state.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate

MAX_TARGETS = 4
"""Most target qubits of a fused block. A pass over the state costs 2^targets products for each
amplitude, and one trip to memory."""
MAX_VARYING_TARGETS = 2
"""As `MAX_TARGETS`, where each state of a batch has its own matrix, which takes time to compute."""
MAX_CONTROLS = 1
"""Most control qubits of a fused block, unless a single gate has more."""

Move = list[int] | int | None
"""A permutation of the local axes; or the number of qubits in |0> whose axes are added behind them;
or None: the ranks' axes are swapped with the first local ones."""


@dataclass
class Block:
    """Gates that are applied together.

    Attributes:
        gates: each gate with its number among the gates that have an angle, or -1 without one.
        targets: target qubits, high bit first; their axes are the last of the state.
        controls: control qubits, high bit first; their axes are the first of the state.
        after: the targets in the order of their axes after the block, which are the first.
        moves: moves of the state's axes before the block is applied.
        rank_controls: bits of the rank's number, counted from the high one, that are the first
            controls.
        varies: whether its matrix may differ between the states of a batch.
    """

    gates: list[tuple[Gate, int]] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    controls: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    rank_controls: list[int] = field(default_factory=list)
    varies: bool = False

    def touches(self, qubits: Sequence[int]) -> bool:
        """Whether the block acts on any of the qubits."""
        return any(q in self.targets or q in self.controls for q in qubits)

    def take(self, gates: list[tuple[Gate, int]], targets: list[int], controls: list[int]) -> None:
        """Add gates, once it is known that they fit."""
        self.gates += gates
        self.targets, self.controls = targets, controls


@dataclass
class Plan:
    """A circuit as blocks.

    Attributes:
        blocks: the blocks in the order in which they act.
        moves: moves of the axes after the last block, which restore the usual order.
    """

    blocks: list[Block]
    moves: list[Move]


def plan(
    circuit: Circuit,
    max_targets: int = MAX_TARGETS,
    num_rank_axes: int = 0,
    from_zero: bool = True,
    varying: Container[int] | None = None,
) -> Plan:
    """Fuse a circuit's gates into blocks, and choose the order of axes for each block.

    Args:
        circuit: circuit whose gates are fused.
        max_targets: greatest number of target qubits of a fused block.
        num_rank_axes: base-2 logarithm of the number of ranks that the state is split over.
        from_zero: whether the state begins as |0…0>, without local axes; else it has all of them.
        varying: numbers, among the gates that have an angle, of those whose angle differs between
            the states of a batch; None if there is no batch, or all may.

    Raises:
        ConfigError: there are too many ranks for so few qubits.
    """
    blocks = _Fusion(max_targets, varying).run(circuit)
    usual = list(range(circuit.num_qubits - 1, -1, -1))
    ranks, local = usual[:num_rank_axes], usual[num_rank_axes:]
    return _lay_out(blocks, _Axes(ranks, [], local) if from_zero else _Axes(ranks, local, []))


class _Fusion:
    """Adds each gate to a block, as early as its qubits and the blocks' sizes allow.

    Gates on one qubit wait for the next gate that acts on it and others, and join its block.
    """

    def __init__(self, max_targets: int, varying: Container[int] | None) -> None:
        self._max_targets = max_targets
        self._varying = varying
        self._blocks: list[Block] = []
        self._waiting: dict[int, list[tuple[Gate, int]]] = {}

    def run(self, circuit: Circuit) -> list[Block]:
        number = 0
        for gate in circuit.gates:
            own = (gate, -1 if gate.angle is None else number)
            number += gate.angle is not None
            if len(gate.every_qubit) == 1:
                self._waiting.setdefault(gate.qubits[0], []).append(own)
            else:
                self._place(own)
        for qubit in sorted(self._waiting):
            self._put(self._waiting[qubit], [qubit], [])
        for block in self._blocks:
            block.gates = _angles_first(block.gates)
        return self._blocks

    def _place(self, own: tuple[Gate, int]) -> None:
        gate = own[0]
        changed = [c for c in gate.controls if self._waiting.get(c)]
        wide = [*gate.qubits, *changed]
        if len(wide) > max(self._max_targets, len(gate.qubits)):
            for qubit in changed:
                self._put(self._waiting.pop(qubit), [qubit], [])
            wide = list(gate.qubits)
        before = [each for qubit in wide for each in self._waiting.pop(qubit, [])]
        controls = [c for c in gate.controls if c not in wide]
        self._put([*before, own], wide, controls)

    def _put(self, gates: list[tuple[Gate, int]], targets: list[int], controls: list[int]) -> None:
        qubits = [*targets, *controls]
        varying = self._varying
        varies = varying is None or any(number in varying for _, number in gates)
        touching = [i for i, block in enumerate(self._blocks) if block.touches(qubits)]
        for block in self._blocks[max(touching, default=0) :]:
            every = list(dict.fromkeys([*block.targets, *targets]))
            others = dict.fromkeys([*block.controls, *controls])
            outside = [c for c in others if c not in every]
            most = max(MAX_CONTROLS, len(block.controls))
            room = self._max_targets
            if varying is not None and (varies or block.varies):
                room = min(room, MAX_VARYING_TARGETS)
            if all(number < 0 for _, number in gates):  # its matrix is computed only once
                room = max(room, len(block.targets))
            if len(every) <= room and len(outside) <= most:
                block.take(gates, every, outside)
                block.varies |= varies
                return
        self._blocks.append(Block(gates, targets, controls, varies=varies))


def _angles_first(gates: list[tuple[Gate, int]]) -> list[tuple[Gate, int]]:
    """Move gates with angles before those without angles that they share no qubit with.

    Successive gates without angles are then multiplied together once, when the plan is made.
    """
    ordered: list[tuple[Gate, int]] = []
    for own in gates:
        position = len(ordered)
        if own[1] >= 0:
            qubits = {*own[0].every_qubit}
            while position and ordered[position - 1][1] < 0:
                if qubits & {*ordered[position - 1][0].every_qubit}:
                    break
                position -= 1
        ordered.insert(position, own)
    return ordered


def _lay_out(blocks: list[Block], axes: _Axes) -> Plan:
    home, usual = axes.ranks, [*axes.local, *axes.absent]
    for number, block in enumerate(blocks):
        following = blocks[number + 1 :]
        if set(block.targets) & set(axes.ranks):
            axes.add(axes.absent)
            axes.exchange(_leaving(axes, blocks[number:]))
        size = len(block.targets)
        axes.order(_wanted(axes.local, block))
        axes.add([q for q in axes.absent if block.touches([q])])
        axes.order(_wanted(axes.local, block))
        block.moves = axes.take_moves()
        block.targets = axes.local[-size:]
        outside = [q for q in axes.ranks if q in block.controls]
        block.rank_controls = [axes.ranks.index(q) for q in outside]
        block.controls = [*outside, *(q for q in axes.local if q in block.controls)]
        block.after = _order_after(block, following)
        axes.local = [*block.after, *axes.local[:-size]]
    axes.add(axes.absent)
    if axes.ranks != home:
        if set(axes.ranks) & set(home):
            axes.exchange([q for q in axes.local if q not in home][: len(home)])
        axes.exchange(home)
    axes.order(usual)
    return Plan(blocks, axes.take_moves())


class _Axes:
    """The order of the qubits' axes, and the moves that led to it.

    Attributes:
        ranks: qubits whose bits make up the rank's number, high bit first.
        local: qubits whose axes each rank's part of the state has, in the order of these axes.
        absent: local qubits that no block has touched, and that have no axis yet.
    """

    def __init__(self, ranks: list[int], local: list[int], absent: list[int]) -> None:
        self.ranks = ranks
        self.local = local
        self.absent = absent
        self._moves: list[Move] = []

    def order(self, wanted: list[int]) -> None:
        """Bring the local axes into this order."""
        if wanted != self.local:
            self._moves.append([self.local.index(q) for q in wanted])
            self.local = wanted

    def add(self, qubits: list[int]) -> None:
        """Add axes for these absent qubits, after the others."""
        if qubits:
            self._moves.append(len(qubits))
            self.local = [*self.local, *qubits]
            self.absent = [q for q in self.absent if q not in qubits]

    def exchange(self, leaving: list[int]) -> None:
        """Swap these local qubits with those of the ranks."""
        self.order([*leaving, *(q for q in self.local if q not in leaving)])
        self._moves.append(None)
        self.local = [*self.ranks, *self.local[len(leaving) :]]
        self.ranks = leaving

    def take_moves(self) -> list[Move]:
        """The moves since the last call."""
        moves, self._moves = self._moves, []
        return moves


def _leaving(axes: _Axes, following: Sequence[Block]) -> list[int]:
    """The local qubits whose next use as a target is last, in the order of their axes."""
    count = len(axes.ranks)
    free = [q for q in axes.local if q not in following[0].targets]
    if len(free) < count:
        raise ConfigError(
            f"{1 << count} ranks are too many for {count + len(axes.local)} qubits: each needs "
            f"{count} local ones to exchange, beside {len(following[0].targets)} of a block"
        )

    def next_use(qubit: int) -> int:
        uses = (i for i, later in enumerate(following) if qubit in later.targets)
        return next(uses, len(following))

    chosen = sorted(free, key=lambda q: -next_use(q))[:count]
    return [q for q in axes.local if q in chosen]


def _wanted(order: list[int], block: Block) -> list[int]:
    """The axes with the block's controls first and its targets last."""
    controls = [q for q in order if q in block.controls]
    targets = [q for q in order if q in block.targets]
    rest = [q for q in order if q not in block.controls and q not in block.targets]
    return [*controls, *rest, *targets]


def _order_after(block: Block, following: Sequence[Block]) -> list[int]:
    """The block's targets: the next block's controls first, then those that are used last."""
    first = following[0].controls if following else []

    def next_use(qubit: int) -> int:
        uses = (i for i, later in enumerate(following) if later.touches([qubit]))
        return next(uses, len(following))

    ahead = [q for q in block.targets if q in first]
    others = [q for q in block.targets if q not in first]
    return [*ahead, *sorted(others, key=lambda q: (-next_use(q), -q))]
