"""A run in Trackio: in the run directory, or where `TRACKIO_DIR` says."""

from __future__ import annotations

import importlib
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.trackers.tracker import Opening, Tracker


class TrackioRun(Tracker):
    """Keeps a run in an SQLite file; `trackio show` reads it."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        # It is read when the package is imported.
        os.environ.setdefault("TRACKIO_DIR", str(opening.folder.resolve()))
        self._trackio: Any = importlib.import_module("trackio")
        # A run goes on by its name, which must be no other run's in a shared folder.
        name = f"{opening.run_dir.resolve().name}-{secrets.token_hex(4)}"
        self.run_id = opening.run_id or name
        self._run = self._trackio.init(
            project=re.sub(r"[^A-Za-z0-9_-]", "_", opening.task) or "run",
            name=self.run_id,
            resume="allow",
            config=dict(opening.params),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture of a step."""
        self._run.log({f"log/{name}": self._trackio.Image(str(path))}, step=step)

    def end(self, status: str) -> None:
        """Write what is kept in memory."""
        self._run.finish()
