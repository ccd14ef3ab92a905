"""Typed configuration: the same keys in Python, in YAML and as `key=value` on the command line.

A recipe adds its own keys by subclassing `TrainConfig`. Keys that cannot change the result
(where files go, how often something is logged) are marked `outcome=False`; all others make up
`TrainConfig.hash`, which a checkpoint carries and a run directory is bound to. The text below a
key is its description in `lockstep config` and in docs/configuration.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.config.reading import Config, build, load, override, override_data, with_keys
    from lockstep.config.section import (
        NO_OUTCOME,
        OF_MODEL,
        Beta,
        Count,
        Fraction,
        NonNegativeFloat,
        Positive,
        PositiveFloat,
        Section,
        outcome,
    )
    from lockstep.config.sections import (
        CheckpointConfig,
        CompressionConfig,
        ComputeConfig,
        ConvergenceConfig,
        DataConfig,
        EarlyStoppingConfig,
        LocalConfig,
        MeshConfig,
        OptimizerConfig,
        PrecisionConfig,
        ScheduleConfig,
        WeightsConfig,
    )
    from lockstep.config.train_config import TrainConfig

__all__ = [
    "NO_OUTCOME",
    "OF_MODEL",
    "Beta",
    "CheckpointConfig",
    "CompressionConfig",
    "ComputeConfig",
    "Config",
    "ConvergenceConfig",
    "Count",
    "DataConfig",
    "EarlyStoppingConfig",
    "Fraction",
    "LocalConfig",
    "MeshConfig",
    "NonNegativeFloat",
    "OptimizerConfig",
    "Positive",
    "PositiveFloat",
    "PrecisionConfig",
    "ScheduleConfig",
    "Section",
    "TrainConfig",
    "WeightsConfig",
    "build",
    "load",
    "outcome",
    "override",
    "override_data",
    "with_keys",
]


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


if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
