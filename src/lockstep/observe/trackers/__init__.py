"""Experiment trackers: MLflow, Weights & Biases, Trackio (`trackers` of the config).

A tracker's library runs in a process of its own (`process.py`), which receives metrics and pictures
as lines of JSON: it may take seconds to import, block, draw from the global random generators or
crash, and none of that may affect a rank. `TrackerSink` starts that process and writes to it.

A run directory then has a folder `trackers/<name>` with the library's files, unless environment
variables name another place, its output (`output.log`) and the newest step (`state.json`).
"""

from __future__ import annotations

from types import MappingProxyType

FOLDER = "trackers"
"""Name of the folder in the run directory."""

PACKAGES = MappingProxyType({"mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"})
"""The package that each tracker imports, by the tracker's name, which is also that of its extra."""
