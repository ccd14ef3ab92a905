"""Circuits from OpenQASM 2 and 3, by Qiskit's parsers.

It also reads functions and powers in angles.

These were not written for hostile texts: whatever goes wrong in them becomes one error here.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from openqasm3 import ast
from openqasm3.ast import GateModifierName
from qiskit.circuit import ParameterExpression
from qiskit_qasm3_import import types
from qiskit_qasm3_import.converter import ConvertVisitor, GateBuilder
from qiskit_qasm3_import.expression import ValueResolver

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.circuit import MAX_QUBITS, Circuit
from lockstep.systems.quantum.interop.qiskit_reader import import_qiskit, read

_NUMERIC = (types.Int, types.Uint, types.Float, types.Angle)
_FUNCTIONS = ("sin", "cos", "tan", "arcsin", "arccos", "arctan", "exp", "log", "sqrt")
_OF_MATH = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}


class Values(ValueResolver):
    """Resolves expressions; of numbers, and of parameters, whose values Qiskit keeps as text."""

    def visit_FunctionCall(self, node: ast.FunctionCall) -> Any:  # noqa: D102
        name = node.name.name
        arguments = [self.visit(argument) for argument in node.arguments]
        if name not in _FUNCTIONS or len(arguments) != 1:
            raise ConfigError(
                f"OpenQASM: {name} of {len(arguments)}: known functions of angles are "
                f"{', '.join(_FUNCTIONS)}"
            )
        if not isinstance(arguments[0][1], _NUMERIC):
            raise ConfigError(f"OpenQASM: {name}: its argument must be a number")
        value = arguments[0][0]
        is_constant = types.Float(not isinstance(value, ParameterExpression))
        if name == "sqrt":
            return _power(value, 0.5), is_constant
        if isinstance(value, ParameterExpression):
            return getattr(value, name)(), is_constant
        return getattr(math, _OF_MATH.get(name, name))(value), is_constant

    def visit_BinaryExpression(self, node: ast.BinaryExpression) -> Any:  # noqa: D102
        if node.op.name != "**":
            return super().visit_BinaryExpression(node)
        (base, one), (exponent, two) = self.visit(node.lhs), self.visit(node.rhs)
        if not (isinstance(one, _NUMERIC) and isinstance(two, _NUMERIC)):
            raise ConfigError("OpenQASM: ** is for numbers only")
        constant = not any(isinstance(value, ParameterExpression) for value in (base, exponent))
        return _power(base, exponent), types.Float(constant)


def _power(base: Any, exponent: Any) -> Any:
    if isinstance(base, ParameterExpression) or not isinstance(exponent, ParameterExpression):
        return base**exponent
    if base <= 0:
        raise ConfigError(f"OpenQASM: a power of {base} with a parameter in its exponent")
    return (exponent * math.log(base)).exp()


_MOST_OF_A_GATE = 6_000
"""Most instructions of a gate's definition, with all definitions in it expanded: each use is a
copy."""


class Visitor(ConvertVisitor):
    """Reads a program once.

    Attributes:
        inputs: names of the program's parameters, in the order of their declarations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[str] = []
        self._sizes: dict[str, int] = {}

    def visit_IODeclaration(self, node: Any, context: Any) -> Any:  # noqa: D102
        self.inputs.append(node.identifier.name)
        return super().visit_IODeclaration(node, context)

    def _define_gate(
        self, name: str, definition: Any, n_parameters: int, n_qubits: int, definer: Any,
        context: Any,
    ) -> Any:  # fmt: skip
        """Keep a gate's parameters in the order of its definition, not in that of their names."""
        if isinstance(definition, GateBuilder):
            body = definition._definition
            self._check_size(name, body)
            by_name = {parameter.name: parameter for parameter in body.parameters}
            order = [by_name[argument.name] for argument in definer.arguments]
            definition = GateBuilder(name, body, order)
        return super()._define_gate(name, definition, n_parameters, n_qubits, definer, context)

    def _check_size(self, name: str, body: Any) -> None:
        inner = (getattr(i.operation, "base_op", i.operation).name for i in body.data)
        self._sizes[name] = 1 + sum(self._sizes.get(each, 1) for each in inner)
        if self._sizes[name] > _MOST_OF_A_GATE:
            raise ConfigError(
                f"gate {name}: its definition has more than {_MOST_OF_A_GATE:,} instructions when "
                "all definitions in it are taken apart"
            )

    def _resolve_generic(self, node: Any, context: Any, strict: bool) -> Any:
        return Values(context, strict).resolve(node)

    def _apply_gate_modifier(self, modifier: Any, gate: Any, context: Any) -> Any:
        """Keep modifiers as annotations: applied at once, controls take exponential time."""
        if modifier.modifier in (GateModifierName.inv, GateModifierName.pow):
            if not gate.num_qubits:
                return super()._apply_gate_modifier(modifier, gate, context)
            if modifier.modifier is GateModifierName.inv:
                return gate.inverse(annotated=True)
            power = self._resolve_constant_float(modifier.argument, context)
            return gate.power(power, annotated=True)
        count = 1
        if modifier.argument is not None:
            count = self._resolve_constant_int(modifier.argument, context)
        state = 0 if modifier.modifier is GateModifierName.negctrl else (1 << count) - 1
        return gate.control(count, ctrl_state=state, annotated=True)


T = TypeVar("T")

_COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_VERSION = re.compile(r"\s*OPENQASM\s+(\d+)")
_GATE = re.compile(r"\bgate\s+(\w+)")
_QUBITS = re.compile(r"\b(?:qreg\s+\w+|qubit)\s*\[\s*(\d+)\s*\]")
_SIZE = re.compile(r"\[\s*(\d+)\s*\]")
_BRACKETS = re.compile(r"[(\[{]|[)\]}]")
_DEEPEST = 50
"""Most levels of nested brackets: with many, parsers take long or overflow their stack."""
_MOST_BITS = 10_000
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
    """What is made of a program's `qiskit.QuantumCircuit` and its parameters, in their order.

    Raises:
        ConfigError: the text cannot be read, whatever goes wrong.
    """
    import_qiskit()
    if not isinstance(text, str):
        raise ConfigError(f"OpenQASM: must be a string, not {type(text).__name__}")
    code = _COMMENTS.sub(" ", text)
    _check_sizes(code)
    version = _VERSION.match(code)
    with _one_error():
        return make(
            *(_version_3(text) if version and version[1] == "3" else _version_2(text, code))
        )


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

    except ImportError as error:
        raise ConfigError(
            'OpenQASM 3 needs its reader: pip install "lockstep-train[quantum]"'
        ) from error

    complaints = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaints):  # the parser prints what is wrong
            program = openqasm3.parse(text)
    except openqasm3.parser.QASM3ParsingError as error:
        raise ConfigError(f"OpenQASM: {complaints.getvalue().strip() or error}") from error
    visitor = Visitor()
    source = visitor.convert(program).circuit
    by_name = {parameter.name: parameter for parameter in source.parameters}
    return source, [by_name[name] for name in visitor.inputs]


def _check_sizes(code: str) -> None:
    """Refuse sizes that a parser would allocate memory for, or panic at, before it checks them."""
    for size in _SIZE.findall(code):
        if len(size) > len(str(_MOST_BITS)) or int(size) > _MOST_BITS:
            raise ConfigError(f"OpenQASM: [{size[:30]}] is more than {_MOST_BITS:,} bits")
    depth = 0
    for bracket in _BRACKETS.findall(code):
        depth += 1 if bracket in "([{" else -1
        if depth > _DEEPEST:
            raise ConfigError(f"OpenQASM: more than {_DEEPEST} brackets in one another")
    num_qubits = sum(int(size) for size in _QUBITS.findall(code))
    if num_qubits > MAX_QUBITS:
        raise ConfigError(f"OpenQASM: {num_qubits} qubits; at most {MAX_QUBITS} are supported")


@contextlib.contextmanager
def _one_error() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _unreadable(error) from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of Qiskit's Rust, and no Exception
            raise
        raise _unreadable(error) from error


def _unreadable(error: Any) -> ConfigError:
    said = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(f"OpenQASM: {said[:500]}")
