"""Angles from and to Qiskit's parameter expressions."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.angles import (
    FUNCTIONS,
    Angle,
    AnyAngle,
    Formula,
    as_angle,
    function,
    parameter,
)

_OF_SYMPY = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "Abs": "abs"}
"""Functions whose names in SymPy are others than in `FUNCTIONS`."""


def read_angle(value: Any, numbers: Mapping[Any, int], name: str) -> AnyAngle:
    """An angle from a number or a `ParameterExpression` of Qiskit.

    Args:
        value: the number, or the expression.
        numbers: number of each parameter of the circuit.
        name: name of the gate, for errors.

    Raises:
        ConfigError: the value is not real, or holds a function that is not supported.
    """
    if value in numbers:
        return parameter(numbers[value])
    parameters = getattr(value, "parameters", ())
    try:
        if not parameters:
            return Angle(float(value))
        by_name = {p.name: numbers[p] for p in parameters}
        return _from_sympy(value.sympify(), by_name)
    except (TypeError, ValueError, ArithmeticError, RecursionError, ConfigError) as error:
        text = " ".join(str(value).split())[:200]
        raise ConfigError(f"gate {name}: angle {text} is not supported ({error})") from error


def _from_sympy(node: Any, numbers: Mapping[str, int]) -> AnyAngle:
    if getattr(node, "is_Symbol", False):
        return parameter(numbers[node.name])
    if getattr(node, "is_number", False):
        return Angle(float(node))  # a TypeError where it is not real
    kind = type(node).__name__
    operands = [_from_sympy(part, numbers) for part in getattr(node, "args", ())]
    if kind == "conjugate":  # of a real number
        return operands[0]
    known = _OF_SYMPY.get(kind, kind)
    if known in FUNCTIONS:
        return function(known, operands[0])
    combine = {"Add": operator.add, "Mul": operator.mul, "Pow": operator.pow}.get(kind)
    if combine is None:
        raise ConfigError(f"known are sums, products, powers, {', '.join(FUNCTIONS)}")
    combined: Formula = reduce(combine, operands)
    return as_angle(combined)


def written_angle(angle: AnyAngle, vector: Sequence[Any]) -> Any:
    """An angle as a number, or as a `ParameterExpression` of Qiskit.

    Args:
        angle: angle to write.
        vector: Qiskit's parameters, by number.

    Raises:
        ConfigError: it has a power of a negative number, which Qiskit has not.
    """
    if isinstance(angle, Angle):
        if angle.index is None:
            return angle.offset
        return angle.scale * vector[angle.index] + angle.offset
    values = [written_angle(operand, vector) for operand in angle.operands]
    if angle.operation == "add":
        return reduce(operator.add, values)
    if angle.operation == "mul":
        return reduce(operator.mul, values)
    if angle.operation == "pow":
        base, exponent = values
        if not isinstance(base, (int, float)):
            return base**exponent
        if base <= 0:
            raise ConfigError(f"angle {angle}: Qiskit has no powers of {base}")
        return (exponent * math.log(base)).exp()
    return getattr(values[0], angle.operation)()
