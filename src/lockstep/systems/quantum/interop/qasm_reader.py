"""Circuits from OpenQASM 2 and 3, by Qiskit's parsers.

The parsers were not written for hostile texts: whatever goes wrong in them becomes one error here.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import MAX_QUBITS, Circuit
from lockstep.systems.quantum.interop.qiskit_reader import import_qiskit, read

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
    own = set(_GATE.findall(code))
    custom = [c for c in qasm2.LEGACY_CUSTOM_INSTRUCTIONS if c.name not in own]
    source = qasm2.loads(text, custom_instructions=custom)
    return source, list(source.parameters)


def _version_3(text: str) -> tuple[Any, list[Any]]:
    try:
        import openqasm3

        from lockstep.systems.quantum.interop.qasm_visitor import Visitor
    except ImportError as error:
        raise ConfigError(
            'OpenQASM 3 needs its reader: pip install "lockstep-train[quantum]"'
        ) from error

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
