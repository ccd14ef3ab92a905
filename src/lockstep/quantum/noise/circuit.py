"""Circuits with noise, measurements in the middle, reset, and conditions on classical bits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import (
    Circuit,
    Gate,
    as_integer,
    check_num_qubits,
    gate,
    kind_of,
)
from lockstep.quantum.noise.channels import Channel
from lockstep.quantum.noise.readout import Confusion, confusion_matrix

MAX_BITS = 62
"""Most classical bits of a circuit: their values are one integer."""


@dataclass(frozen=True)
class Measure:
    """A measurement of a qubit, whose outcome goes into a classical bit.

    Attributes:
        qubit: qubit that is measured; it is left as it was found.
        bit: classical bit that keeps the outcome.
        confusion: readout error: row v has the probabilities to read 0 and 1 where the qubit is
            found as v. Rows whose sum is 1 as far as float32 can tell are divided by it. None for a
            perfect readout.
    """

    qubit: int
    bit: int
    confusion: Confusion | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: qubit or bit are no such integers, or a row of the confusion matrix is no
                distribution.
        """
        object.__setattr__(self, "qubit", as_integer(self.qubit, "measure: qubit"))
        object.__setattr__(self, "bit", as_integer(self.bit, "measure: bit"))
        if self.confusion is not None:
            object.__setattr__(self, "confusion", confusion_matrix(self.confusion))


@dataclass(frozen=True)
class Reset:
    """A reset of a qubit to |0>, whatever it was.

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
    """Operations that depend on classical bits.

    Attributes:
        bits: classical bits that are looked at; the first is the low bit of `value`.
        value: value that they must have together.
        then: operations where they have it.
        otherwise: operations where they have not.
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

    def check_parameters(self, parameters: Tensor) -> None:
        """Check that a tensor can hold parameters of this circuit.

        Raises:
            ConfigError: it is not a real tensor [..., num_parameters].
        """
        self._gates.check_parameters(parameters)

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
            ConfigError: the parameters are no such tensor.
        """
        return self._gates.angles(parameters)

    def values(self, parameters: Tensor) -> Tensor:
        """The values of all channels, in the order of `every`, [..., V].

        Args:
            parameters: real tensor [..., num_parameters].

        Raises:
            ConfigError: the parameters are no such tensor.
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
