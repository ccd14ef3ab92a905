"""Circuits whose angles are numbers as files: OpenQASM 2 and 3, Qiskit's QPY, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import Angle
from lockstep.systems.quantum.circuits.circuit import Circuit, Gate
from lockstep.systems.quantum.interop.qasm import expanded, from_qasm, to_qasm, to_qiskit
from lockstep.systems.quantum.interop.qiskit_reader import from_qiskit, import_qiskit

_COLUMNS = ("gate", "qubits", "controls", "control_state", "angle")


class Format(NamedTuple):
    """A kind of file.

    Attributes:
        suffix: ending of the file's name.
        write: the content for a circuit.
        read: the circuit of a content that `write` has made.
    """

    suffix: str
    write: Callable[[Circuit], bytes]
    read: Callable[[bytes], Circuit]


def to_csv(circuit: Circuit) -> str:
    """A row for each gate: its name, qubits, controls, their states, and angle.

    Numbers of one cell are separated by spaces; matrices are written as gates.

    Raises:
        ConfigError: an angle depends on parameters, or Qiskit is needed and not installed.
    """
    if circuit.num_parameters:
        raise ConfigError(
            f"CSV has no parameters, the circuit has {circuit.num_parameters}; bind them"
        )
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(_COLUMNS)
    if any(gate.matrix is not None for gate in circuit.gates):
        circuit = expanded(circuit)
    angles = iter(circuit.angles(torch.zeros(0, dtype=torch.float64)).tolist())
    for gate in circuit.gates:
        lists = (gate.qubits, gate.controls, gate.control_state)
        angle = "" if gate.angle is None else repr(next(angles))
        rows.writerow([gate.name, *(" ".join(map(str, numbers)) for numbers in lists), angle])
    return f"# {circuit.num_qubits} qubits; qubit 0 is the low bit\n{text.getvalue()}"


def from_csv(text: str) -> Circuit:
    """The circuit that `to_csv` has written.

    Raises:
        ConfigError: it is no such text.
    """
    head, _, rest = text.partition("\n")
    try:
        num_qubits = int(head.removeprefix("# ").split()[0])
        gates = []
        for row in csv.DictReader(io.StringIO(rest)):
            qubits, controls, states = (tuple(map(int, row[c].split())) for c in _COLUMNS[1:-1])
            angle = Angle(float(row["angle"])) if row["angle"] else None
            gates.append(Gate(row["gate"], qubits, angle, controls, states))
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"not a circuit as CSV: {type(error).__name__}: {error}") from None
    return Circuit(num_qubits, gates)


def _to_qpy(circuit: Circuit) -> bytes:
    import_qiskit()
    from qiskit import qpy

    file = io.BytesIO()
    qpy.dump(to_qiskit(expanded(circuit)), file)
    return file.getvalue()


def _from_qpy(content: bytes) -> Circuit:
    import_qiskit()
    from qiskit import qpy

    return from_qiskit(qpy.load(io.BytesIO(content))[0])


def _qasm(version: int) -> tuple[Callable[[Circuit], bytes], Callable[[bytes], Circuit]]:
    return (
        lambda circuit: to_qasm(circuit, version).encode(),
        lambda content: from_qasm(content.decode()),
    )


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "qasm2": Format(".qasm", *_qasm(2)),
        "qasm3": Format(".qasm3", *_qasm(3)),
        "qiskit": Format(".qpy", _to_qpy, _from_qpy),
        "csv": Format(
            ".csv", lambda circuit: to_csv(circuit).encode(), lambda data: from_csv(data.decode())
        ),
    }
)
