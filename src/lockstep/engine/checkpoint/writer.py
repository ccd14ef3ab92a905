"""Writing checkpoints while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.choice import prune
from lockstep.engine.checkpoint.format import Snapshot, Tensors
from lockstep.engine.events import Checkpointed, Emit, Warned
from lockstep.engine.faults import At, nothing
from lockstep.engine.runtime import Heartbeat
from lockstep.errors import CheckpointError

SLOW_S = 60.0
"""Training that has waited for the disk for so long says so."""


class AsyncWriter:
    """Writes snapshots in a thread, one at a time, on rank 0.

    What the thread has to say is emitted by the training thread, from `poll`.

    A training thread that waits for the disk does not count as hanging, however long it takes: to
    end its process would not make the disk faster, and the next rank 0 would wait for the same one.

    Args:
        root: folder of all checkpoints.
        keep: number of the newest checkpoints to keep.
        background: whether training goes on while a checkpoint is written.
        emit: function that takes events.
        heartbeat: heartbeat of this process, held while it waits for the disk.
        at: function that is called in the middle of writing a checkpoint.
        keep_every_s: least time in seconds between two older checkpoints that are kept for good; 0
            keeps none.
    """

    def __init__(
        self,
        root: Path,
        keep: int,
        background: bool,
        emit: Emit,
        heartbeat: Heartbeat,
        at: At = nothing,
        keep_every_s: float = 0.0,
    ) -> None:
        self._root = root
        self._keep = keep
        self._keep_every_s = keep_every_s
        self._background = background
        self._emit = emit
        self._heartbeat = heartbeat
        self._at = at
        self._step = 0
        self._thread: threading.Thread | None = None
        self._done: Checkpointed | None = None
        self._error: tuple[int, Exception] | None = None

    def save(
        self,
        make: Callable[[], Snapshot],
        best: bool,
        started: float,
        streamed: Mapping[str, Tensors] | None = None,
    ) -> float:
        """Write a checkpoint.

        Args:
            make: function that returns the snapshot; it runs in the background, so what it reads
                must not change.
            best: whether the checkpoint is to be kept as the best.
            started: time at which training began to wait for it (`perf_counter`).
            streamed: files whose tensors come together while they are written. Other ranks take
                part in that, so it is done before this returns.

        Returns:
            Seconds the training thread stood still.
        """
        self.wait()
        if streamed is not None:
            self._write(make, best, started, streamed)
            self.poll()
            return perf_counter() - started
        arguments = (make, best, started)
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoints")
        self._thread.start()
        if not self._background:
            self.wait()
        return perf_counter() - started

    def poll(self) -> None:
        """Emit what has happened since the last call.

        Raises:
            Exception: anything but an OSError that went wrong in the background.
        """
        if self._done is not None:
            done, self._done = self._done, None
            self._emit(done)
        if self._error is not None:
            (step, error), self._error = self._error, None
            if not isinstance(error, OSError):
                raise error
            self._emit(
                Warned(
                    step=step,
                    message=f"the checkpoint of step {step} could not be written to {self._root}: "
                    f"{error}; earlier ones are untouched, training goes on",
                )
            )

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._heartbeat.wait()
            self._thread.join(SLOW_S)
            if self._thread.is_alive():
                self._emit(
                    Warned(
                        step=self._step,
                        message=f"{self._root}: the disk is slow: training has waited {SLOW_S:g} s "
                        f"for the checkpoint of step {self._step} to be written",
                    )
                )
                self._thread.join()
            self._thread = None
            self._heartbeat.go()
        self.poll()

    def finish(self, step: int) -> Path:
        """Wait, and make sure that the checkpoint of `step` is there.

        Raises:
            CheckpointError: it is not.
        """
        self.wait()
        folder = self._root / listing.folder_name(step)
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder}: the last checkpoint could not be written; free space, allow "
                "larger files (`ulimit -f`) or make the folder writable, then resume the run"
            )
        return folder

    def _write(
        self,
        make: Callable[[], Snapshot],
        best: bool,
        started: float,
        streamed: Mapping[str, Tensors] | None = None,
    ) -> None:
        stall_s = perf_counter() - started
        begun = perf_counter()
        self._step = step = 0
        try:
            snapshot = make()
            self._step = step = snapshot.step
            folder, size = checkpoint.write(
                self._root, snapshot, lambda: self._at("checkpoint", step), streamed
            )
            if best:
                listing.write_hint(self._root, "best", folder.name)
            prune(self._root, self._keep, self._keep_every_s)
        except Exception as error:
            self._error = (step, error)
            return
        self._done = Checkpointed(
            step=step,
            path=str(folder),
            num_bytes=size,
            stall_s=stall_s,
            write_s=perf_counter() - begun,
        )
