"""Which attributes the code of a method reads, found without running it."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType


def attributes_read(kind: type, method: str) -> set[str]:
    """Names of the attributes that a method reads, itself or in methods of its class it refers to.

    Args:
        kind: class that has the method.
        method: name of the method.
    """
    names: set[str] = set()
    waiting = [method]
    while waiting:
        function = getattr(kind, waiting.pop(), None)
        if isinstance(function, FunctionType):
            new = set(_reads(function.__code__)) - names
            names |= new
            waiting += new
    return names


def _reads(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _reads(constant)
