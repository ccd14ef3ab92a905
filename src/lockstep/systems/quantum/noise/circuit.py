"""Circuits with noise, measurements in the middle, reset and conditions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, kind_of
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate, check_num_qubits, gate
from lockstep.systems.quantum.noise.channels import Channel
from lockstep.systems.quantum.simulation.measure import check_probabilities


def checked_circuit(circuit: DynamicCircuit) -> DynamicCircuit:
    """The circuit.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(circuit, DynamicCircuit):
        raise ConfigError(f"noise needs a DynamicCircuit, not {kind_of(circuit)}")
    return circuit


def checked_parameters(
    circuit: DynamicCircuit, parameters: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The parameters [..., P] in a dtype and on a device; none where the circuit has none.

    Raises:
        ConfigError: they are not a real tensor of that shape, or there are no rows.
    """
    parameters = circuit.check_parameters(parameters)
    if not parameters.shape[:-1].numel():
        raise ConfigError(f"parameters {list(parameters.shape)}: there are no rows")
    return parameters.to(device, dtype)


Confusion = tuple[tuple[float, float], tuple[float, float]]
"""Row v has the probabilities to read 0 and 1 where the outcome is v."""

_EXACT = 1e-9
"""How far the sum of a row may be from 1 for a row to be used as it is."""
_ROUNDED = 1e-6
"""Greatest distance from 1: the rounding of float32. Such a row is divided by its sum."""


def confusion_matrix(rows: object) -> Confusion:
    """A confusion matrix [2, 2], from a tensor or from rows of numbers.

    Raises:
        ConfigError: a row is not a distribution.
    """
    given = rows.tolist() if isinstance(rows, Tensor) else rows
    try:
        pairs = [list(row) for row in given]  # type: ignore[attr-defined]
        flat = [float(x) for pair in pairs for x in pair if isinstance(x, Real)]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"confusion must be [[P(0|0), P(1|0)], [P(0|1), P(1|1)]], not {given!r}"
        ) from error
    gaps = [abs(math.fsum(row) - 1) for row in (flat[:2], flat[2:])]
    if (
        [len(pair) for pair in pairs] != [2, 2]
        or len(flat) < 4
        or not all(x >= 0 for x in flat)
        or not all(gap < _ROUNDED for gap in gaps)
    ):
        raise ConfigError(f"confusion: both rows of {given!r} must be two probabilities of sum 1")
    return _of_sum_1(flat[0], flat[1]), _of_sum_1(flat[2], flat[3])


def _of_sum_1(zero: float, one: float) -> tuple[float, float]:
    total = math.fsum((zero, one))
    return (zero, one) if abs(total - 1) < _EXACT else (zero / total, one / total)


def misread(likely: Tensor, confusion: Sequence[object]) -> Tensor:
    """The distribution of the values read, from that of a measurement of all qubits.

    Args:
        likely: probabilities of the outcomes, real, [..., 2^n].
        confusion: a confusion matrix as for `Measure`, for each of the n qubits.

    Returns:
        Probabilities [..., 2^n] of the values read; differentiable.

    Raises:
        ConfigError: there are not n confusion matrices, or one is none.
    """
    check_probabilities(likely)
    size = likely.shape[-1]
    if size != 1 << len(confusion):
        raise ConfigError(f"{len(confusion)} confusion matrices for {size} outcomes")
    read = likely
    for qubit, rows in enumerate(confusion):
        matrix = likely.new_tensor(confusion_matrix(rows))
        axes = read.reshape(*likely.shape[:-1], size >> qubit + 1, 2, 1 << qubit)
        read = (matrix.mT @ axes).reshape(likely.shape)
    return read


MAX_BITS = 62
"""Most classical bits of a circuit: their values are one integer."""


@dataclass(frozen=True)
class Measure:
    """A measurement of a qubit, whose outcome goes into a classical bit.

    Attributes:
        qubit: qubit that is measured; its state becomes the outcome's.
        bit: classical bit that is set to the outcome.
        confusion: readout error: row v has the probabilities to read 0 and 1 where the outcome is
            v. Rows whose sum is 1 to the precision of float32 are divided by it. None for a perfect
            readout.
    """

    qubit: int
    bit: int
    confusion: Confusion | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: qubit or bit are not integers, or a row of the confusion matrix is no
                distribution.
        """
        object.__setattr__(self, "qubit", as_integer(self.qubit, "measure: qubit"))
        object.__setattr__(self, "bit", as_integer(self.bit, "measure: bit"))
        if self.confusion is not None:
            object.__setattr__(self, "confusion", confusion_matrix(self.confusion))


@dataclass(frozen=True)
class Reset:
    """A reset of a qubit to |0>.

    Attributes:
        qubit: qubit that is reset.
    """

    qubit: int

    def __post_init__(self) -> None:
        """Check the qubit.

        Raises:
            ConfigError: it is not an integer.
        """
        object.__setattr__(self, "qubit", as_integer(self.qubit, "reset: qubit"))


@dataclass(frozen=True)
class If:
    """Operations that are conditional on classical bits.

    Attributes:
        bits: classical bits of the condition; the first is the low bit of `value`.
        value: value that the bits must have together.
        then: operations if they have this value.
        otherwise: operations if not.
    """

    bits: tuple[int, ...]
    value: int
    then: tuple[Operation, ...]
    otherwise: tuple[Operation, ...] = ()

    def __post_init__(self) -> None:
        """Check the condition.

        Raises:
            ConfigError: there are no bits, or the value does not fit them.
        """
        bits = (self.bits,) if not isinstance(self.bits, Iterable) else tuple(self.bits)
        object.__setattr__(self, "bits", tuple(as_integer(b, "if: bit") for b in bits))
        value = as_integer(self.value, "if: value")
        if not self.bits or len(set(self.bits)) < len(self.bits):
            raise ConfigError(f"if: bits {list(self.bits)} must be different, and at least one")
        if not 0 <= value < 1 << len(self.bits):
            raise ConfigError(f"if: value {value} is no value of {len(self.bits)} bits")
        for name in ("then", "otherwise"):
            given = getattr(self, name)
            object.__setattr__(
                self, name, tuple(given) if isinstance(given, Iterable) else (given,)
            )

    def holds(self, values: Tensor) -> Tensor:
        """Whether the condition holds, for values of all classical bits, int64 of any shape."""
        holds = torch.ones_like(values, dtype=torch.bool)
        for position, bit in enumerate(self.bits):
            holds &= (values >> bit & 1) == (self.value >> position & 1)
        return holds


Operation = Gate | Channel | Measure | Reset | If
"""What a `DynamicCircuit` is made of."""


@dataclass(frozen=True, eq=False)
class DynamicCircuit:
    """Operations on qubits, which start as |0…0>, and on classical bits, which start as 0.

    Attributes:
        num_qubits: number of qubits.
        operations: gates, channels, measurements, resets and conditions, in the order in which they
            act.
        num_bits: number of classical bits; by default, the highest that is used plus one.
        num_parameters: number of parameters; by default, the highest that is used plus one.
    """

    num_qubits: int
    operations: tuple[Operation, ...]
    num_bits: int = -1
    num_parameters: int = -1

    def __init__(
        self,
        num_qubits: int,
        operations: Iterable[Operation],
        num_bits: int | None = None,
        num_parameters: int | None = None,
    ) -> None:
        """Check and keep the operations.

        Raises:
            ConfigError: an operation is of another type, or uses a qubit, bit or parameter that the
                circuit does not have.
        """
        num_qubits = check_num_qubits(num_qubits)
        given = tuple(operations) if isinstance(operations, Iterable) else (operations,)
        every = list(_walk(given))
        bits = [b for each in every for b in _bits(each)]
        least = max(bits, default=-1) + 1
        count = least if num_bits is None else as_integer(num_bits, "num_bits")
        if min(bits, default=0) < 0 or not least <= count <= MAX_BITS:
            raise ConfigError(
                f"{count} classical bits: there can be {MAX_BITS}; the highest used is {least - 1}"
            )
        for each in every:
            wrong = [q for q in _qubits(each) if not 0 <= q < num_qubits]
            if wrong:
                raise ConfigError(
                    f"{kind_of(each)}: qubit {wrong[0]} in a circuit of {num_qubits} qubits"
                )
        object.__setattr__(self, "num_qubits", num_qubits)
        object.__setattr__(self, "operations", given)
        object.__setattr__(self, "num_bits", count)
        used = Circuit(num_qubits, [*_gates(every), *_carriers(every)], num_parameters)
        object.__setattr__(self, "num_parameters", used.num_parameters)

    def check_parameters(self, parameters: Tensor | None) -> Tensor:
        """The parameters [..., num_parameters]; None stands for those of a circuit that has none.

        Raises:
            ConfigError: they are not such a real tensor.
        """
        return self._gates.check_parameters(parameters)

    @cached_property
    def every(self) -> tuple[Operation, ...]:
        """All operations, those of conditions behind them."""
        return tuple(_walk(self.operations))

    @cached_property
    def _gates(self) -> Circuit:
        return Circuit(self.num_qubits, _gates(self.every), self.num_parameters)

    @cached_property
    def _carriers(self) -> Circuit:
        return Circuit(self.num_qubits, _carriers(self.every), self.num_parameters)

    def angles(self, parameters: Tensor) -> Tensor:
        """The angles of all gates that have one, in the order of `every`, [..., G].

        Args:
            parameters: real tensor [..., num_parameters].

        Raises:
            ConfigError: the parameters are not such a tensor.
        """
        return self._gates.angles(parameters)

    def values(self, parameters: Tensor) -> Tensor:
        """The values of all channels, in the order of `every`, [..., V].

        Args:
            parameters: real tensor [..., num_parameters].

        Raises:
            ConfigError: the parameters are not such a tensor.
        """
        return self._carriers.angles(parameters)


def _walk(operations: Sequence[Operation]) -> Iterator[Operation]:
    for number, each in enumerate(operations):
        if not isinstance(each, (Gate, Channel, Measure, Reset, If)):
            raise ConfigError(
                f"operation {number}: must be a Gate, Channel, Measure, Reset or If, not "
                f"{kind_of(each)}"
            )
        yield each
        if isinstance(each, If):
            yield from _walk(each.then)
            yield from _walk(each.otherwise)


def _gates(operations: Iterable[Operation]) -> list[Gate]:
    return [each for each in operations if isinstance(each, Gate)]


def _carriers(operations: Iterable[Operation]) -> list[Gate]:
    """Gates with the channels' values as angles: both are the same functions of parameters."""
    channels = [each for each in operations if isinstance(each, Channel)]
    return [gate("rx", 0, angle=value) for each in channels for value in each.values]


def _qubits(operation: Operation) -> tuple[int, ...]:
    if isinstance(operation, Gate):
        return operation.every_qubit
    if isinstance(operation, Channel):
        return operation.qubits
    return () if isinstance(operation, If) else (operation.qubit,)


def _bits(operation: Operation) -> tuple[int, ...]:
    if isinstance(operation, Measure):
        return (operation.bit,)
    return operation.bits if isinstance(operation, If) else ()
