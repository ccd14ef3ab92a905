"""Angles of gates: numbers, linear functions of one parameter, or formulas of several.

    x = [parameter(0), parameter(1)]
    gate("p", 1, angle=2 * (math.pi - x[0]) * (math.pi - x[1]))

Arithmetic that stays linear in one parameter gives an `Angle`, any other an `Expression`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from types import MappingProxyType

from torch import Tensor

from lockstep.errors import ConfigError


def as_integer(value: object, name: str) -> int:
    """An integer of any type but bool, as an int.

    Raises:
        ConfigError: the value is not one.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or isinstance(value, Tensor):
        raise ConfigError(f"{name}: must be an integer, not {value!r}")
    return int(value.__index__())


def as_count(value: object, name: str, least: int = 1) -> int:
    """An integer that is not below `least`.

    Raises:
        ConfigError: the value is not one.
    """
    count = as_integer(value, name)
    if count < least:
        raise ConfigError(f"{name}={value}: must be at least {least}")
    return count


def as_number(value: object, name: str) -> float:
    """A finite real number, as a float.

    Raises:
        ConfigError: the value is not one.
    """
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ConfigError(f"{name} must be a finite number, not {value!r}")
    return float(value)


def kind_of(value: object) -> str:
    """The type of a value, with the dtype and shape of a tensor, for error messages."""
    if isinstance(value, Tensor):
        return f"one of {value.dtype} {list(value.shape)}"
    return type(value).__name__


FUNCTIONS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "sin": math.sin,
        "cos": math.cos,
        "tan": math.tan,
        "arcsin": math.asin,
        "arccos": math.acos,
        "arctan": math.atan,
        "exp": math.exp,
        "log": math.log,
        "abs": abs,
        "sign": lambda value: float((value > 0) - (value < 0)),
    }
)
"""The functions that an expression may contain: name in torch to function of a number."""

_MAX_TERMS = 10_000
"""Most angles in one expression."""
_MAX_DEPTH = 100
"""Most levels of an expression: evaluating it is one recursive call for each."""


class Formula:
    """Base of angles and expressions: arithmetic, functions, and the formula as text."""

    def __add__(self, other: Formula | float) -> Formula:
        """The sum with a number or another angle."""
        return _sum(self, other) if _is_term(other) else NotImplemented

    __radd__ = __add__

    def __mul__(self, other: Formula | float) -> Formula:
        """The product with a number or another angle."""
        return _product(self, other) if _is_term(other) else NotImplemented

    __rmul__ = __mul__

    def __neg__(self) -> Formula:
        """The negative."""
        return _product(self, -1.0)

    def __sub__(self, other: Formula | float) -> Formula:
        """The difference to a number or another angle."""
        return _sum(self, -other) if _is_term(other) else NotImplemented

    def __rsub__(self, other: Formula | float) -> Formula:
        """The difference of a number and this."""
        return _sum(-self, other) if _is_term(other) else NotImplemented

    def __truediv__(self, other: Formula | float) -> Formula:
        """The quotient by a number or another angle.

        Raises:
            ConfigError: the number is 0.
        """
        return _product(self, _power(other, -1.0)) if _is_term(other) else NotImplemented

    def __rtruediv__(self, other: float) -> Formula:
        """A number divided by this."""
        return _product(_power(self, -1.0), other) if _is_term(other) else NotImplemented

    def __pow__(self, other: Formula | float) -> Formula:
        """A power, with a number or another angle as exponent; NaN where it is not real."""
        return _power(self, other) if _is_term(other) else NotImplemented

    def __rpow__(self, other: float) -> Formula:
        """A power of a number."""
        return _power(other, self) if _is_term(other) else NotImplemented

    def __abs__(self) -> Formula:
        """The absolute value; its derivative at 0 is 0."""
        return function("abs", self)

    def sin(self) -> Formula:
        """The sine."""
        return function("sin", self)

    def cos(self) -> Formula:
        """The cosine."""
        return function("cos", self)

    def tan(self) -> Formula:
        """The tangent."""
        return function("tan", self)

    def arcsin(self) -> Formula:
        """The inverse sine, from -π/2 to π/2; NaN outside of [-1, 1]."""
        return function("arcsin", self)

    def arccos(self) -> Formula:
        """The inverse cosine, from 0 to π; NaN outside of [-1, 1]."""
        return function("arccos", self)

    def arctan(self) -> Formula:
        """The inverse tangent, from -π/2 to π/2."""
        return function("arctan", self)

    def exp(self) -> Formula:
        """The exponential function."""
        return function("exp", self)

    def log(self) -> Formula:
        """The natural logarithm; NaN below 0."""
        return function("log", self)

    def sqrt(self) -> Formula:
        """The square root; NaN below 0."""
        return _power(self, 0.5)

    def sign(self) -> Formula:
        """-1, 0 or 1; its derivative is 0."""
        return function("sign", self)

    def __str__(self) -> str:
        """The formula, such as `(2.0*θ[0] + 3.0)*sin(θ[1])`."""
        return written(self, "θ[{}]".format)


@dataclass(frozen=True)
class Angle(Formula):
    """An angle in radians: scale · θ[index] + offset, or only the offset.

    Attributes:
        offset: constant part, in radians.
        index: number of the parameter, from 0; None for an angle that depends on none.
        scale: factor of the parameter.
    """

    offset: float = 0.0
    index: int | None = None
    scale: float = 1.0

    __str__ = Formula.__str__

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: a number is not finite, or the index is not an integer from 0 on.
        """
        as_number(self.offset, "angle: offset")
        as_number(self.scale, "angle: scale")
        if self.index is not None and as_integer(self.index, "parameter") < 0:
            raise ConfigError(f"parameter {self.index}: must not be negative")

    @property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the parameters that it depends on, ascending."""
        return () if self.index is None else (self.index,)


@dataclass(frozen=True)
class Expression(Formula):
    """A sum, a product, a power or a function of angles; made by arithmetic with these.

    Attributes:
        operation: `add`, `mul`, `pow` or a key of `FUNCTIONS`.
        operands: what it is applied to.
    """

    operation: str
    operands: tuple[Angle | Expression, ...]

    __str__ = Formula.__str__

    def __post_init__(self) -> None:
        """Check the size.

        Raises:
            ConfigError: there is no such operation, or the expression is too large.
        """
        if self.operation not in ("add", "mul", "pow", *FUNCTIONS):
            raise ConfigError(f"expression: there is no operation {self.operation!r}")
        if self.num_terms > _MAX_TERMS or self.depth > _MAX_DEPTH:
            raise ConfigError(
                f"expression: at most {_MAX_TERMS:,} angles and {_MAX_DEPTH} levels are supported"
            )

    @cached_property
    def num_terms(self) -> int:
        """Number of angles in it."""
        return sum(o.num_terms if isinstance(o, Expression) else 1 for o in self.operands)

    @cached_property
    def depth(self) -> int:
        """Levels of nested expressions."""
        return 1 + max(o.depth if isinstance(o, Expression) else 0 for o in self.operands)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Numbers of the parameters that it depends on, ascending."""
        return tuple(sorted({i for o in self.operands for i in o.parameters}))


AnyAngle = Angle | Expression


def parameter(index: int, scale: float = 1.0, offset: float = 0.0) -> Angle:
    """The angle scale · θ[index] + offset, which supports arithmetic and functions.

    Args:
        index: number of the parameter, from 0.
        scale: factor of the parameter.
        offset: constant part, in radians.

    Raises:
        ConfigError: a number is not finite, or the index is not an integer from 0 on.
    """
    return Angle(offset, index, scale)


def as_angle(value: Formula | float) -> AnyAngle:
    """A number as an angle; angles as they are.

    Raises:
        ConfigError: the number is not finite.
    """
    if isinstance(value, (Angle, Expression)):
        return value
    if not isinstance(value, Real):
        raise ConfigError(f"an angle must be a number or a `parameter`, not {value!r}")
    return Angle(float(value))


def function(name: str, of: Formula | float) -> AnyAngle:
    """A function of `FUNCTIONS` of an angle.

    Raises:
        ConfigError: there is no such function, or it has no finite real value at a number.
    """
    angle = as_angle(of)
    if name in FUNCTIONS and not angle.parameters and isinstance(angle, Angle):
        return _number(lambda: FUNCTIONS[name](angle.offset), f"{name}({angle.offset})")
    return Expression(name, (angle,))


def written(angle: Formula, name: Callable[[int], str]) -> str:
    """An angle as text that Python, and OpenQASM 3, can read.

    Args:
        angle: angle to write.
        name: function from the number of a parameter to its name.
    """
    return _written(as_angle(angle), name)[0]


_SUM, _PRODUCT, _ATOM = range(3)


def _written(angle: AnyAngle, name: Callable[[int], str]) -> tuple[str, int]:
    """The text of an angle, and its precedence: whether it needs brackets in a larger formula."""
    if isinstance(angle, Angle):
        return _written_angle(angle, name)
    texts = [_written(operand, name) for operand in angle.operands]
    if angle.operation == "add":
        return " + ".join(text for text, _ in texts), _SUM
    if angle.operation == "mul":
        return "*".join(text if level > _SUM else f"({text})" for text, level in texts), _PRODUCT
    if angle.operation == "pow":
        return "**".join(text if level == _ATOM else f"({text})" for text, level in texts), _PRODUCT
    return f"{angle.operation}({texts[0][0]})", _ATOM


def _written_angle(angle: Angle, name: Callable[[int], str]) -> tuple[str, int]:
    offset, scale = float(angle.offset), float(angle.scale)
    if angle.index is None:
        return repr(offset), _ATOM if offset >= 0 else _SUM
    own = name(angle.index)
    text = own if scale == 1 else f"{scale!r}*{own}"
    if offset:
        return f"{text} {'+' if offset > 0 else '-'} {abs(offset)!r}", _SUM
    return text, _ATOM if scale == 1 else _PRODUCT if scale >= 0 else _SUM


def _is_term(value: object) -> bool:
    return isinstance(value, (Angle, Expression, Real))


def _sum(left: Formula | float, right: Formula | float) -> AnyAngle:
    one, two = as_angle(left), as_angle(right)
    if isinstance(one, Angle) and isinstance(two, Angle):
        indices = {*one.parameters, *two.parameters}
        if len(indices) < 2:
            scale = sum(a.scale for a in (one, two) if a.parameters)
            index = indices.pop() if scale else None
            return Angle(one.offset + two.offset, index, scale or 1.0)
    return Expression("add", (*_operands("add", one), *_operands("add", two)))


def _product(left: Formula | float, right: Formula | float) -> AnyAngle:
    one, two = as_angle(left), as_angle(right)
    if isinstance(one, Angle) and isinstance(two, Angle):
        if one.index is None:
            one, two = two, one
        if two.index is None:
            scale = one.scale * two.offset
            return Angle(one.offset * two.offset, one.index if scale else None, scale or 1.0)
    factors = [a for a in (one, two) if a != Angle(1.0)]
    if len(factors) < 2:
        return factors[0]
    return Expression("mul", (*_operands("mul", one), *_operands("mul", two)))


def _power(base: Formula | float, exponent: Formula | float) -> AnyAngle:
    one, two = as_angle(base), as_angle(exponent)
    if isinstance(two, Angle) and two.index is None:
        if two.offset == 1:
            return one
        if isinstance(one, Angle) and one.index is None:
            number, by = one.offset, two.offset
            return _number(lambda: number**by, f"{number} ** {by}")
    return Expression("pow", (one, two))


def _operands(operation: str, angle: AnyAngle) -> tuple[AnyAngle, ...]:
    """The operands of one sum or product, so that long ones are flat."""
    if isinstance(angle, Expression) and angle.operation == operation:
        return angle.operands
    return (angle,)


def _number(value: Callable[[], float], text: str) -> Angle:
    try:
        return Angle(float(value()))
    except (ArithmeticError, ValueError, TypeError, ConfigError) as error:
        raise ConfigError(f"angle: {text} is not a finite real number") from error
