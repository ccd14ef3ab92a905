"""Circuits as files: OpenQASM 2 and 3 by Qiskit's parsers, Qiskit's QPY, and CSV.

The parsers were not written for hostile texts: whatever goes wrong in them becomes one error here.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from lockstep.errors import ConfigError, needing
from lockstep.systems.quantum.circuits.angles import Angle, AnyAngle, Expression, written
from lockstep.systems.quantum.circuits.circuit import MAX_QUBITS, Circuit, Gate
from lockstep.systems.quantum.interop.qiskit_reader import (
    from_qiskit,
    gate_classes,
    import_qiskit,
    read,
    written_angle,
)

T = TypeVar("T")

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_VERSION = re.compile(r"\s*OPENQASM\s+(\d+)")
_GATE = re.compile(r"\bgate\s+(\w+)")
_QUBITS = re.compile(r"\b(?:qreg\s+\w+|qubit)\s*\[\s*(\d+)\s*\]")
_SIZE = re.compile(r"\[\s*(\d+)\s*\]")
_BRACKETS = re.compile(r"[(\[{]|[)\]}]")
_MAX_DEPTH = 50
"""Most levels of nested brackets: with many, parsers take long or overflow their stack."""
_MAX_BITS = 10_000
"""The greatest number in brackets: the size of a register of classical bits, or an index."""


def from_qasm(text: str) -> Circuit:
    """A circuit from OpenQASM 2 or 3.

    The parameters of version 3 are numbered in the order in which the text declares them.

    Args:
        text: program in OpenQASM.

    Raises:
        ConfigError: the text cannot be read, or as `from_qiskit`.
    """
    return reading(text, read)


def reading(text: str, make: Callable[[Any, Sequence[Any]], T]) -> T:
    """Read a program, and convert its `qiskit.QuantumCircuit` and parameters, in order, by `make`.

    Raises:
        ConfigError: the text cannot be read, or `make` fails, for whatever reason.
    """
    import_qiskit()
    if not isinstance(text, str):
        raise ConfigError(f"OpenQASM: must be a string, not {type(text).__name__}")
    code = _COMMENTS.sub(" ", text)
    _check_sizes(code)
    version = _VERSION.match(code)
    with _one_error():
        is_3 = version is not None and version[1] == "3"
        return make(*(_version_3(text) if is_3 else _version_2(text, code)))


def _version_2(text: str, code: str) -> tuple[Any, list[Any]]:
    from qiskit import qasm2

    # Qiskit would take these in place of definitions of the same names in the text.
    defined = set(_GATE.findall(code))
    custom = [c for c in qasm2.LEGACY_CUSTOM_INSTRUCTIONS if c.name not in defined]
    source = qasm2.loads(text, custom_instructions=custom)
    return source, list(source.parameters)


def _version_3(text: str) -> tuple[Any, list[Any]]:
    with needing("quantum", "OpenQASM 3 needs its reader"):
        import openqasm3

        from lockstep.systems.quantum.interop.qasm_visitor import Visitor

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):  # the parser prints what is wrong
            program = openqasm3.parse(text)
    except openqasm3.parser.QASM3ParsingError as error:
        raise ConfigError(f"OpenQASM: {printed.getvalue().strip() or error}") from error
    visitor = Visitor()
    source = visitor.convert(program).circuit
    by_name = {parameter.name: parameter for parameter in source.parameters}
    return source, [by_name[name] for name in visitor.inputs]


def _check_sizes(code: str) -> None:
    """Refuse sizes that a parser would allocate memory for, or panic at, before it checks them."""
    for size in _SIZE.findall(code):
        if len(size) > len(str(_MAX_BITS)) or int(size) > _MAX_BITS:
            raise ConfigError(f"OpenQASM: [{size[:30]}] is more than {_MAX_BITS:,} bits")
    depth = 0
    for bracket in _BRACKETS.findall(code):
        depth += 1 if bracket in "([{" else -1
        if depth > _MAX_DEPTH:
            raise ConfigError(f"OpenQASM: more than {_MAX_DEPTH} brackets in one another")
    num_qubits = sum(int(size) for size in _QUBITS.findall(code))
    if num_qubits > MAX_QUBITS:
        raise ConfigError(f"OpenQASM: {num_qubits} qubits; at most {MAX_QUBITS} are supported")


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        # A panic of Qiskit's Rust code is a BaseException.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        message = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"OpenQASM: {message[:500]}") from error


def to_qiskit(circuit: Circuit) -> Any:
    """The circuit as `qiskit.QuantumCircuit`, its parameters a ParameterVector θ.

    Controlled unitaries become `AnnotatedOperation`s, which Qiskit decomposes when it transpiles.

    Raises:
        ConfigError: Qiskit is not installed, or has no expression for an angle.
    """
    qiskit = import_qiskit()
    vector = qiskit.circuit.ParameterVector("θ", circuit.num_parameters)
    made = qiskit.QuantumCircuit(circuit.num_qubits)
    for gate in circuit.gates:
        made.append(qiskit_gate(gate, vector), gate.every_qubit)
    return made


def qiskit_gate(gate: Gate, vector: Sequence[Any]) -> Any:
    """A gate as a Qiskit operation; `vector` has Qiskit's parameters by number."""
    if gate.matrix is not None:
        from qiskit.circuit.library import UnitaryGate

        # `Gate` has found it to be unitary; Qiskit's check costs more than everything else.
        operation = UnitaryGate(gate.matrix.numpy(), check_input=False)
    else:
        values = () if gate.angle is None else (written_angle(gate.angle, vector),)
        operation = gate_classes()[gate.name](*values)
    if gate.controls:
        # Qiskit has the first control as the low bit of the state.
        state = sum(bit << i for i, bit in enumerate(gate.control_state))
        # A unitary with controls would be decomposed at once, which takes seconds.
        annotated = True if gate.matrix is not None else None
        operation = operation.control(len(gate.controls), ctrl_state=state, annotated=annotated)
    return operation


def bound(circuit: Circuit, parameters: torch.Tensor) -> Circuit:
    """The circuit with numbers in place of its parameters.

    Args:
        circuit: circuit to bind.
        parameters: value of each parameter, real, [num_parameters].

    Raises:
        ConfigError: the values are not such a tensor.
    """
    circuit.check_parameters(parameters)
    values = iter(circuit.angles(parameters.double()).tolist())
    gates = []
    for g in circuit.gates:
        number = None if g.angle is None else Angle(next(values))
        gates.append(Gate(g.name, g.qubits, number, g.controls, g.control_state, g.matrix))
    return Circuit(circuit.num_qubits, gates)


def drawing(circuit: Circuit, **options: Any) -> str:
    """The circuit in text, as Qiskit draws it; `options` are those of `QuantumCircuit.draw`."""
    return str(to_qiskit(circuit).draw("text", **options))


_NO_STANDARD = {
    "rxx": "gate rxx(t) a, b { h a; h b; cx a, b; rz(t) b; cx a, b; h a; h b; }",
    "ryy": "gate ryy(t) a, b { rx(pi/2) a; rx(pi/2) b; cx a, b; rz(t) b; cx a, b; "
    "rx(-pi/2) a; rx(-pi/2) b; }",
    "rzz": "gate rzz(t) a, b { cx a, b; rz(t) b; cx a, b; }",
    "sxdg": "gate sxdg a { inv @ sx a; }",
}
"""Definitions of gates in `gates.KINDS` that stdgates.inc does not have."""
_STANDARD = frozenset(["cx", "cy", "cz", "ch", "cp", "crx", "cry", "crz", "ccx", "cswap"])
"""Controlled gates that stdgates.inc has."""


def to_qasm(circuit: Circuit, version: int = 2) -> str:
    """The circuit as a program in OpenQASM; in version 2, all angles must be numbers.

    Args:
        circuit: circuit to write.
        version: version of OpenQASM, 2 or 3. In version 3, parameter i is the i-th input,
            `theta_i`.

    Raises:
        ConfigError: version 2 and there are parameters, another version, an angle that OpenQASM
            has no function for, or Qiskit is not installed.
    """
    import_qiskit()
    if version not in (2, 3):
        raise ConfigError(f"OpenQASM {version}: must be 2 or 3")
    if version == 3:
        made = expanded(circuit)
        return "\n".join([*header(made), *map(line, made.gates)]) + "\n"
    if circuit.num_parameters:
        raise ConfigError(
            f"OpenQASM 2 has no parameters, the circuit has {circuit.num_parameters}; bind them "
            "with `bound`, or take version 3"
        )
    from qiskit import qasm2

    return str(qasm2.dumps(to_qiskit(expanded(circuit))))


def expanded(circuit: Circuit) -> Circuit:
    """The circuit with gates in place of matrices: the same to rounding, its phase included."""
    gates = [part for gate in circuit.gates for part in expanded_gate(gate)]
    return Circuit(circuit.num_qubits, gates, circuit.num_parameters)


def expanded_gate(gate: Gate) -> Iterator[Gate]:
    """A gate as it is, or the gates that its matrix is a product of."""
    if gate.matrix is None:
        yield gate
        return
    from qiskit.circuit.library import UnitaryGate

    definition = UnitaryGate(gate.matrix.numpy(), check_input=False).definition
    for part in from_qiskit(definition).gates:
        qubits = tuple(gate.qubits[q] for q in part.qubits)
        inner = tuple(gate.qubits[c] for c in part.controls)
        controls, bits = (*gate.controls, *inner), (*gate.control_state, *part.control_state)
        yield from expanded_gate(Gate(part.name, qubits, part.angle, controls, bits, part.matrix))


def header(circuit: Circuit) -> list[str]:
    """The first lines of a program in version 3: definitions of gates, inputs, and qubits `q`."""
    used = {gate.name for gate in circuit.gates}
    lines = ["OPENQASM 3.0;", 'include "stdgates.inc";']
    lines += [text for name, text in _NO_STANDARD.items() if name in used]
    lines += [f"input float[64] theta_{i};" for i in range(circuit.num_parameters)]
    return [*lines, f"qubit[{circuit.num_qubits}] q;"]


def line(gate: Gate) -> str:
    """A gate in version 3."""
    name, modifiers = gate.name, ""
    plain = "c" * len(gate.controls) + gate.name
    if all(gate.control_state) and plain in _STANDARD:
        name = plain
    else:
        for bit, run in groupby(gate.control_state):
            modifiers += f"{'ctrl' if bit else 'negctrl'}({len(list(run))}) @ "
    angle = "" if gate.angle is None else f"({_angle(gate.angle)})"
    qubits = ", ".join(f"q[{qubit}]" for qubit in gate.every_qubit)
    return f"{modifiers}{name}{angle} {qubits};"


def _angle(angle: AnyAngle) -> str:
    missing = {"abs", "sign"} & _operations(angle)
    if missing:
        raise ConfigError(f"angle {angle}: OpenQASM 3 has no {', '.join(sorted(missing))}")
    return written(angle, "theta_{}".format)


def _operations(angle: AnyAngle) -> set[str]:
    if not isinstance(angle, Expression):
        return set()
    return {angle.operation}.union(*map(_operations, angle.operands))


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
