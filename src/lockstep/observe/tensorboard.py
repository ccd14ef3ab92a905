"""Scalars for TensorBoard (extra `tensorboard`), keyed by step."""

from __future__ import annotations

import importlib
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lockstep.engine.events import Evaluated, Event, Failed, Finished, RunStarted, StepDone
from lockstep.errors import ConfigError
from lockstep.observe.files import opening
from lockstep.observe.sink import Sink


class TensorBoard(Sink):
    """Writes `train/*`, `time/*` and `<split>/*` scalars.

    When a run goes on from step k, as `RunStarted` says, TensorBoard is told to hide what an
    earlier sitting wrote of later steps.

    Args:
        directory: directory of the event files; created if it is not there.

    Raises:
        ConfigError: TensorBoard is not installed.
        RunDirectoryError: the directory is not writable.
    """

    def __init__(self, directory: Path) -> None:
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ConfigError(
                f"tensorboard=true: TensorBoard cannot be imported ({error}); "
                'pip install "lockstep-train[tensorboard]"'
            ) from error
        self._new_writer = module.SummaryWriter
        self._directory = directory
        self._purge_step: int | None = None
        self._writer: Any = None
        with opening(directory):
            directory.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=directory).close()

    def __call__(self, event: Event) -> None:
        """Write the scalars of a `StepDone` or `Evaluated`."""
        if isinstance(event, RunStarted):
            self.close()
            self._purge_step = event.step + 1
        elif isinstance(event, StepDone):
            self._write(event.step, _step_scalars(event))
        elif isinstance(event, Evaluated):
            self._write(event.step, {f"{event.split}/{k}": v for k, v in event.metrics.items()})
        elif isinstance(event, (Finished, Failed)):
            self._write(event.step, {}, flush=True)

    def close(self) -> None:
        """Write what is still in memory and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, step: int, scalars: dict[str, float], flush: bool = False) -> None:
        try:
            if self._writer is None:
                self._writer = self._new_writer(
                    str(self._directory), purge_step=self._purge_step, flush_secs=10
                )
                self._purge_step = None
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)
            if flush:
                self._writer.flush()
        except OSError:
            # A writer that has failed once stays failed: the next event gets a new event file.
            self._writer = None
            raise


def _step_scalars(event: StepDone) -> dict[str, float]:
    return {
        "train/loss": event.loss,
        **{f"train/{name}": value for name, value in event.metrics.items()},
        "train/lr": event.lr,
        "train/grad_norm": event.grad_norm,
        "time/samples_per_s": event.samples_per_s,
        "time/compute_efficiency": event.compute_efficiency,
    }
