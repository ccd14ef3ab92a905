"""What a tracker's library is asked to do, in the tracker's process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Opening:
    """What a tracker is told of a run when it is opened.

    Attributes:
        task: name of the task, which names the project or experiment.
        run_dir: path of the run directory.
        folder: folder for what the library keeps.
        params: keys of the config with their values.
        run_id: the tracker's name for the run, if an earlier sitting has opened it; else empty.
    """

    task: str
    run_dir: Path
    folder: Path
    params: Mapping[str, str | int | float | bool | None]
    run_id: str


class Tracker(ABC):
    """A run in a tracker. Its methods may raise anything, and may block.

    Attributes:
        run_id: the tracker's name for the run, by which it is opened again.
    """

    run_id: str

    @abstractmethod
    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Take values of a step; called for ascending steps, for one more than once with others."""

    @abstractmethod
    def picture(self, step: int, name: str, path: Path) -> None:
        """Take a PNG file of the run directory."""

    @abstractmethod
    def end(self, status: str) -> None:
        """Complete what was taken, and let go.

        Args:
            status: `completed`, `stopped`, `failed`, or empty where the run was killed.
        """
