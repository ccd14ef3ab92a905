"""The parts of Qiskit's OpenQASM 3 importer that are replaced here.

They read functions and powers in angles, and keep the order of parameters. This module imports
Qiskit and its importer, so it is itself imported only when a program is read.
"""

from __future__ import annotations

import math
from typing import Any

from openqasm3 import ast
from openqasm3.ast import GateModifierName
from qiskit.circuit import ParameterExpression
from qiskit_qasm3_import import types
from qiskit_qasm3_import.converter import ConvertVisitor, GateBuilder
from qiskit_qasm3_import.expression import ValueResolver

from lockstep.errors import ConfigError

_NUMERIC = (types.Int, types.Uint, types.Float, types.Angle)
_FUNCTIONS = ("sin", "cos", "tan", "arcsin", "arccos", "arctan", "exp", "log", "sqrt")
_OF_MATH = {"arcsin": "asin", "arccos": "acos", "arctan": "atan"}


class Values(ValueResolver):
    """Resolves expressions of numbers, and of parameters, which Qiskit keeps symbolic."""

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


_MAX_GATE_SIZE = 6_000
"""Most instructions of a gate's definition, with all definitions in it expanded: each use is a
copy."""


class Visitor(ConvertVisitor):
    """Reads one program.

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
        if self._sizes[name] > _MAX_GATE_SIZE:
            raise ConfigError(
                f"gate {name}: its definition has more than {_MAX_GATE_SIZE:,} instructions when "
                "all definitions in it are expanded"
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
