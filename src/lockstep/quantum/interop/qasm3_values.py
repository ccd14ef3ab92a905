"""What angles of OpenQASM 3 may hold beside sums and products: powers and functions."""

from __future__ import annotations

import math
from typing import Any

from openqasm3 import ast
from qiskit.circuit import ParameterExpression
from qiskit_qasm3_import import types
from qiskit_qasm3_import.expression import ValueResolver

from lockstep.errors import ConfigError

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
