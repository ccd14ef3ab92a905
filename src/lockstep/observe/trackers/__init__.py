"""Experiment trackers of others: MLflow, Weights & Biases, Trackio (`trackers` of the config).

A tracker's library runs in a process of its own (`process.py`), which gets what a run is made of as
lines of JSON: it may take seconds to import, block, draw from the global random generators or
crash, and none of that is to reach a rank. `TrackerSink` starts that process and feeds it. What a
library does is behind `Tracker`; each is one module here.

In a run directory there is then a folder `trackers/<name>`, with what the library keeps, what it
printed (`output.log`) and how far it has come (`state.json`), unless variables of the environment
name another place.
"""

from __future__ import annotations

from types import MappingProxyType

FOLDER = "trackers"
"""Folder in the run directory."""

PACKAGES = MappingProxyType({"mlflow": "mlflow", "wandb": "wandb", "trackio": "trackio"})
"""The package that each tracker imports, by the tracker's name, which is also its extra's."""
