"""The sinks of trackers, in processes that training never waits for, and of TensorBoard."""

from __future__ import annotations

import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lockstep.config.parsing import parse_object, shown
from lockstep.engine.events import (
    Evaluated,
    Event,
    Failed,
    Finished,
    Logged,
    RunStarted,
    StepDone,
    picture_path,
)
from lockstep.errors import ConfigError
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import opening
from lockstep.observe.storing.jsonl import scalars_of
from lockstep.observe.trackers import FOLDER, PACKAGES

_MOST_WAITING = 10_000
_END_S = 60.0
_OF_RANKS = ("LOCKSTEP_", "OMPI_", "PMI_", "PMIX_")
"""Prefixes of environment variables that make a process a rank, which the tracker's is not."""


class TrackerSink(Sink):
    """Sends the values of curves, and pictures, to a tracker.

    What is logged at a step is sent with the next event of another kind. So it is sent before a
    checkpoint of that step is on disk: a run resumed from there would not log it again.

    A failure of the tracker becomes an `OSError`, once, at the next event. If the tracker is slower
    than training, messages wait in a bounded queue; those that do not fit are lost.

    Args:
        name: name of the tracker.
        run_dir: path of the run directory.
        params: keys of the config with their values.
        command: command that serves a tracker; by default the module `process`.
        end_s: seconds that `close` waits for the tracker to take the rest.

    Raises:
        ConfigError: the tracker's package is not installed.
        RunDirectoryError: its folder cannot be made.
    """

    def __init__(
        self,
        name: str,
        run_dir: Path,
        params: Mapping[str, Any],
        *,
        command: Sequence[str] = (),
        end_s: float = _END_S,
    ) -> None:
        if not command and importlib.util.find_spec(PACKAGES[name]) is None:
            raise ConfigError(
                f"trackers={shown([name])}: the package {PACKAGES[name]} is not installed; "
                f'pip install "lockstep-train[{name}]"'
            )
        self._name, self._run_dir, self._params, self._end_s = name, run_dir, params, end_s
        self._row: dict[str, float] = {}
        self._step = -1
        self._is_open = self._is_reported = False
        self._problem = ""
        self._messages: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        folder = run_dir / FOLDER / name
        module = [sys.executable, "-m", "lockstep.observe.trackers.process"]
        with opening(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "output.log").open("ab") as output:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    [*(command or module), name, str(folder)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    env={k: v for k, v in os.environ.items() if not k.startswith(_OF_RANKS)},
                )
        self._threads = [
            threading.Thread(target=target, args=(self._process,), daemon=True)
            for target in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    def __call__(self, event: Event) -> None:
        """Queue what the tracker is to receive of an event.

        Raises:
            OSError: the tracker has failed, once.
        """
        if self._row and event.step != self._step:
            self._end_row()
        if isinstance(event, RunStarted) and not self._is_open:
            self._is_open = True
            about = {"task": event.task, "run_dir": str(self._run_dir), "params": self._params}
            self._put({"do": "open", **about})
        elif isinstance(event, (Finished, Failed)):
            self._end_row()
            status = event.status if isinstance(event, Finished) else "failed"
            self._put({"do": "end", "status": status})
        elif isinstance(event, Logged) and event.png:
            path = str(self._run_dir / picture_path(event.name, event.step))
            self._put({"do": "picture", "step": event.step, "name": event.name, "path": path})
        else:
            values = scalars_of(event)
            self._row |= values
            self._step = event.step if values else self._step
            if not isinstance(event, Logged):
                self._end_row()
        self._raise_problem()

    def close(self) -> None:
        """Wait until the tracker has taken the rest, for at most `end_s` seconds.

        Raises:
            OSError: it has failed, or has not taken all.
        """
        process, self._process = self._process, None
        if process is None:
            return
        deadline = time.monotonic() + self._end_s
        self._end_row()
        try:
            self._messages.put(None, timeout=self._end_s)
            process.wait(max(0.1, deadline - time.monotonic()))
        except (queue.Full, subprocess.TimeoutExpired):
            self._problem = self._problem or f"has not taken all within {self._end_s:g} s"
            process.kill()
            process.wait()
        for thread in self._threads:
            thread.join(1.0)
        if process.returncode:
            self._problem = self._problem or f"its process ended with {process.returncode}"
        self._raise_problem()

    def _end_row(self) -> None:
        row, self._row = self._row, {}
        if row:
            self._put({"do": "metrics", "step": self._step, "values": row})

    def _put(self, message: dict[str, Any]) -> None:
        try:
            self._messages.put_nowait(message)
        except queue.Full:
            self._problem = self._problem or "is slower than training: some values are lost"

    def _raise_problem(self) -> None:
        if self._problem and not self._is_reported:
            self._is_reported = True
            log = self._run_dir / FOLDER / self._name / "output.log"
            raise OSError(f"tracker {self._name}: {self._problem} (see {log})")

    def _send(self, process: subprocess.Popen[bytes]) -> None:
        """Write messages to the process until there are no more; called in a thread."""
        assert process.stdin is not None
        messages = iter(self._messages.get, None)
        try:
            with process.stdin as stdin:
                for message in messages:
                    stdin.write(json.dumps(message).encode() + b"\n")
                    stdin.flush()
        except (OSError, ValueError) as error:
            self._problem = self._problem or f"its process does not read: {error}"
            for _ in messages:  # so that the queue does not fill
                pass

    def _receive(self, process: subprocess.Popen[bytes]) -> None:
        """Note the first problem that the process reports; called in a thread."""
        assert process.stdout is not None
        with process.stdout as reports:
            for line in reports:
                problem = line.decode(errors="replace").strip()
                with suppress(ValueError):
                    problem = str(parse_object(line).get("problem", problem))
                self._problem = self._problem or problem


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
