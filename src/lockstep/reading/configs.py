"""Where the configs of runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def config_differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The dotted keys whose values are not the same in all configs, with these values."""
    keys = dict.fromkeys(key for config in configs for key in config)
    found = {key: [config.get(key) for config in configs] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}
