"""The folder of a run: bound to one config, used by one job at a time."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any

from lockstep.config import TrainConfig
from lockstep.errors import RunDirectoryError
from lockstep.train import checkpoint

_IDENTITY = "run.json"


class RunDirectory:
    """Paths of a run, and the claim on them. Used by rank 0.

    Attributes:
        path: of the folder.
        checkpoints: folder of the checkpoints.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self._lock: IO[str] | None = None

    def open(self, config: TrainConfig, task: str, resume: bool) -> None:
        """Claim the folder for this config, creating it if need be.

        Raises:
            RunDirectoryError: it cannot be written, another job uses it, it belongs to another
                config, or it holds checkpoints and `resume` is false.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("w")
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path}: is not writable: {error.strerror}; choose another with --run-dir"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise RunDirectoryError(
                f"{self.path}: another job is training in it; wait for it, or choose another "
                "with --run-dir"
            ) from None
        self._bind(config, task, resume)

    def close(self) -> None:
        """Give up the claim."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _bind(self, config: TrainConfig, task: str, resume: bool) -> None:
        identity = {"task": task, "config_hash": config.hash}
        path = self.path / _IDENTITY
        if path.exists():
            try:
                known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise RunDirectoryError(f"{path}: cannot be read: {error}") from None
            if known != identity:
                raise RunDirectoryError(
                    f"{self.path}: holds a run of {known.get('task')} with config "
                    f"{known.get('config_hash')}, this is {task} with {config.hash}; choose "
                    f"another with --run-dir, or see {self.path / 'config.yaml'}"
                )
        if checkpoint.folders(self.checkpoints) and not resume:
            newest = checkpoint.folders(self.checkpoints)[0].name
            raise RunDirectoryError(
                f"{self.path}: already holds this run up to {newest}; add --resume to go on, or "
                "choose another with --run-dir"
            )
        self._write("config.yaml", config.to_yaml())
        self._write(_IDENTITY, json.dumps(identity) + "\n")

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path / name}: cannot be written: {error.strerror}"
            ) from None
