"""A run in Weights & Biases: offline and in the run directory, unless the environment says more."""

from __future__ import annotations

import importlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.observe.trackers.tracker import Opening, Tracker


class WandbRun(Tracker):
    """Keeps a run; `wandb sync` uploads what was kept offline, each sitting into the same run."""

    def __init__(self, opening: Opening) -> None:
        """Open the run, or make it."""
        self._wandb: Any = importlib.import_module("wandb")
        self.run_id = opening.run_id or secrets.token_hex(4)
        # What is neither printed nor measured here: ranks run in another process.
        settings = self._wandb.Settings(
            silent=True, console="off", x_disable_stats=True, disable_git=True, save_code=False
        )
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or opening.task,
            id=self.run_id,
            name=opening.run_dir.resolve().name,
            dir=os.environ.get("WANDB_DIR") or str(opening.folder),
            mode=os.environ.get("WANDB_MODE") or "offline",
            config=dict(opening.params),
            resume="allow",
            settings=settings,
        )

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step."""
        self._run.log(dict(values), step=step)

    def picture(self, step: int, name: str, path: Path) -> None:
        """Log a picture, beside the values of its step."""
        self._run.log({f"log/{name}": self._wandb.Image(str(path))}, step=step)

    def end(self, status: str) -> None:
        """Complete the run's file."""
        self._run.finish(exit_code=0 if status in ("completed", "stopped") else 1)
