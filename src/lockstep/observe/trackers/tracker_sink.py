"""The sinks of trackers, in processes that training never waits for, and of TensorBoard."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from lockstep.config.parsing import parse_object, shown
from lockstep.engine.events import Event, Failed, Finished, Logged, RunStarted, picture_path
from lockstep.errors import ConfigError
from lockstep.observe.sink import Sink
from lockstep.observe.storing.files import AppendFile, opening
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
    earlier session wrote of later steps. Records are appended here, since a thread of TensorBoard's
    own writer prints its errors.

    Args:
        directory: directory of the event files; created if it does not exist.

    Raises:
        ConfigError: TensorBoard is not installed.
        RunDirectoryError: the directory is not writable.
    """

    def __init__(self, directory: Path) -> None:
        try:
            self._summary = importlib.import_module("torch.utils.tensorboard.summary")
            self._protos = importlib.import_module("tensorboard.compat.proto.event_pb2")
            writer = importlib.import_module("tensorboard.summary.writer.record_writer")
        except ImportError as error:
            raise ConfigError(
                f"tensorboard=true: TensorBoard cannot be imported ({error}); "
                'pip install "lockstep-train[tensorboard]"'
            ) from error
        self._new_records = writer.RecordWriter
        self._directory = directory
        self._purge_step: int | None = None
        self._file: AppendFile | None = None
        with opening(directory):
            directory.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=directory).close()

    def __call__(self, event: Event) -> None:
        """Write the scalars of a `StepDone` or `Evaluated`, and what was logged."""
        if isinstance(event, RunStarted):
            self._purge_step = event.step + 1  # also where what waits is lost
            self.close()
        elif (summary := self._summary_of(event)) is not None:
            self._append(self._record(event.step, summary=summary))
        elif self._file is not None:
            self._file.flush()

    def close(self) -> None:
        """Write what is still in memory and close the event file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def _append(self, record: bytes) -> None:
        records = [record]
        if self._file is None:
            seconds, rest = divmod(time.time_ns(), 10**9)  # by its name TensorBoard sorts files
            name = (
                f"events.out.tfevents.{seconds:010}.{socket.gethostname()}.{os.getpid()}.{rest:09}"
            )
            self._file = AppendFile(self._directory / name)
            records = [*self._begin(), record]
        self._file.append(b"".join(records))

    def _begin(self) -> Iterator[bytes]:
        step, self._purge_step = self._purge_step, None
        yield self._record(step or 0, file_version="brain.Event:2")
        if step is not None:
            log = self._protos.SessionLog
            yield self._record(step, session_log=log(status=log.START))

    def _record(self, step: int, **what: Any) -> bytes:
        event = self._protos.Event(step=step, wall_time=time.time(), **what)
        record = io.BytesIO()
        self._new_records(record).write(event.SerializeToString())
        return record.getvalue()

    def _summary_of(self, event: Event) -> Any | None:
        """What is to be shown of an event, all of its scalars as one; None if there is nothing."""
        new = self._summary
        if isinstance(event, Logged) and event.kind != "scalar":
            tag = f"log/{event.name}"
            if event.kind == "text":
                return new.text(tag, event.text)
            histogram = event.kind == "histogram"
            return _histogram(new, tag, event) if histogram else _picture(new, tag, event)
        scalars = [new.scalar(name, value) for name, value in scalars_of(event).items()]
        values = [value for scalar in scalars for value in scalar.value]
        return new.Summary(value=values) if values else None


def _histogram(new: Any, tag: str, event: Logged) -> Any:
    least, greatest, counts = (event.value[key] for key in ("min", "max", "counts"))
    # Halves, since the difference of two float64 may be none.
    width = (greatest / 2 - least / 2) / len(counts)
    limits = [least + 2 * width * (number + 1) for number in range(len(counts))]
    centres = [limit - width for limit in limits]
    total = sum(count * centre for count, centre in zip(counts, centres, strict=True))
    squares = sum(n * centre * centre for n, centre in zip(counts, centres, strict=True))
    return new.histogram_raw(tag, least, greatest, sum(counts), total, squares, limits, counts)


def _picture(new: Any, tag: str, event: Logged) -> Any:
    """A PNG file as it is: `summary.image` would need its pixels, and a library to encode them."""
    about = event.value
    image = new.Summary.Image(
        height=about["height"], width=about["width"], colorspace=4, encoded_image_string=event.png
    )
    return new.Summary(value=[new.Summary.Value(tag=tag, image=image)])
