"""Typed configuration: the same keys in Python, in YAML and as `key=value` on the command line.

A recipe adds its own keys by subclassing `TrainConfig`. Keys that cannot change the result
(where files go, how often something is logged) are marked `outcome=False`; all others make up
`TrainConfig.hash`, which a checkpoint carries and a run directory is bound to. The text below a
key is its description in `lockstep config` and in docs/configuration.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.lazy import lazy_names

if TYPE_CHECKING:
    from lockstep.config.reading import (
        Config,
        build,
        load,
        override,
        override_data,
        with_keys,
    )
    from lockstep.config.section import (
        NO_OUTCOME,
        OF_MODEL,
        Beta,
        Count,
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

if not TYPE_CHECKING:  # else type checkers would take any name for one of this package
    __getattr__, __dir__ = lazy_names(__name__)
