"""Packages whose names are imported when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The functions `__getattr__` and `__dir__` of a package that imports nothing by itself.

    Its names come from where its own `if TYPE_CHECKING:` block imports them, so type checkers and
    the interpreter read the same lines.

    Args:
        package: dotted name of the package.
    """
    module = sys.modules[package]

    @cache
    def homes() -> dict[str, str]:
        import ast  # takes a few milliseconds, which `import lockstep` need not spend

        assert module.__loader__ is not None
        source = module.__loader__.get_source(package)  # type: ignore[attr-defined]
        return {
            alias.name: str(statement.module)
            for block in ast.parse(source).body
            if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
            for statement in block.body
            if isinstance(statement, ast.ImportFrom)
            for alias in statement.names
        }

    def find(name: str) -> Any:
        # Python also looks up names such as __path__ here: no reason to read the source.
        home = None if name.startswith("__") else homes().get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if home == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(home), name)
        setattr(module, name, value)  # from now on it is found without this function
        return value

    return find, lambda: sorted({*vars(module), *homes()})
