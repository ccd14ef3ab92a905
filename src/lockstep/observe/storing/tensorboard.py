"""Scalars for TensorBoard (extra `tensorboard`), keyed by step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lockstep.engine.events import Evaluated, Event, Failed, Finished, Logged, RunStarted, StepDone
from lockstep.errors import ConfigError
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import opening
from lockstep.observe.storing.jsonl import scalars_of


class TensorBoard(Sink):
    """Writes `train/*`, `time/*`, `<split>/*` and `log/*`.

    When a run resumes from step k, as `RunStarted` says, TensorBoard is made to hide what an
    earlier session wrote of later steps.

    Args:
        directory: directory of the event files; created if it does not exist.

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
        """Write the scalars of a `StepDone` or `Evaluated`, and what was logged."""
        if isinstance(event, RunStarted):
            self.close()
            self._purge_step = event.step + 1
        elif isinstance(event, (StepDone, Evaluated)):
            self._write(lambda writer: _add_scalars(writer, event))
        elif isinstance(event, Logged):
            self._write(lambda writer: _add_logged(writer, event))
        elif isinstance(event, (Finished, Failed)):
            self._write(lambda writer: writer.flush())

    def close(self) -> None:
        """Write what is still in memory and close the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _write(self, write: Callable[[Any], None]) -> None:
        try:
            if self._writer is None:
                self._writer = self._new_writer(
                    str(self._directory), purge_step=self._purge_step, flush_secs=10
                )
                self._purge_step = None
            write(self._writer)
        except OSError:
            # A writer that has failed once stays failed: the next event gets a new event file.
            self._writer = None
            raise


def _add_scalars(writer: Any, event: Event) -> None:
    for name, value in scalars_of(event).items():
        writer.add_scalar(name, value, event.step)


def _add_logged(writer: Any, event: Logged) -> None:
    tag = f"log/{event.name}"
    if event.kind == "scalar":
        _add_scalars(writer, event)
    elif event.kind == "text":
        writer.add_text(tag, event.text, event.step)
    elif event.kind == "histogram":
        _add_histogram(writer, tag, event)
    else:
        _add_picture(writer, tag, event)


def _add_histogram(writer: Any, tag: str, event: Logged) -> None:
    least, greatest, counts = (event.value[key] for key in ("min", "max", "counts"))
    # Halves, since the difference of two float64 may be none.
    width = (greatest / 2 - least / 2) / len(counts)
    limits = [least + 2 * width * (number + 1) for number in range(len(counts))]
    centres = [limit - width for limit in limits]
    writer.add_histogram_raw(
        tag,
        min=least,
        max=greatest,
        num=sum(counts),
        sum=sum(count * centre for count, centre in zip(counts, centres, strict=True)),
        sum_squares=sum(n * centre * centre for n, centre in zip(counts, centres, strict=True)),
        bucket_limits=limits,
        bucket_counts=counts,
        global_step=event.step,
    )


def _add_picture(writer: Any, tag: str, event: Logged) -> None:
    """Add a PNG file as it is: `add_image` would need its pixels, and a library to encode them."""
    proto = importlib.import_module("tensorboard.compat.proto.summary_pb2")
    about = event.value
    image = proto.Summary.Image(
        height=about["height"], width=about["width"], colorspace=4, encoded_image_string=event.png
    )
    summary = proto.Summary(value=[proto.Summary.Value(tag=tag, image=image)])
    writer.file_writer.add_summary(summary, event.step)
