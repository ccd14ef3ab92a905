"""Writing checkpoints while training goes on, and deleting old ones."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from lockstep.comm.transport import Transport
from lockstep.config import CheckpointConfig
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.listing import Owners
from lockstep.engine.checkpoint.share import Files, GivenUp, OwnShare, exhaust, meet, on_host
from lockstep.engine.checkpoint.tensor_files import Tensors
from lockstep.engine.events import Checkpointed, Emit, Warned
from lockstep.engine.faults import At, nothing
from lockstep.engine.runtime import Heartbeat
from lockstep.errors import CheckpointError

SLOW_S = 60.0
"""Training warns when it has waited for the disk for this long."""


class AsyncWriter:
    """Writes snapshots in a thread, one at a time: a saver alone, or each rank its share.

    Its events are emitted by the training thread, in `poll`.

    A training thread that waits for the disk does not count as hanging, however long it takes.

    Args:
        root: folder of all checkpoints.
        config: which checkpoints are kept, and whether they are written in the background.
        emit: function that takes events.
        heartbeat: heartbeat of this process, told while it waits for the disk.
        at: function that is called in the middle of writing a checkpoint.
    """

    def __init__(
        self,
        root: Path,
        config: CheckpointConfig,
        emit: Emit,
        heartbeat: Heartbeat,
        at: At = nothing,
    ) -> None:
        self._root = root
        self._config = config
        self._emit = emit
        self._heartbeat = heartbeat
        self._at = at
        self._step = 0
        self._thread: threading.Thread | None = None
        self._done: Checkpointed | None = None
        self._error: tuple[int, Exception] | None = None
        self._share: OwnShare | None = None

    def save(
        self,
        make: Callable[[], Snapshot],
        best: bool,
        started: float,
        share: OwnShare | None = None,
        files: Mapping[str, Tensors | bytes] | None = None,
    ) -> None:
        """Write a checkpoint.

        Args:
            make: function that returns the snapshot; it runs in the background, so what it reads
                must not change.
            best: whether the checkpoint is to be kept as the best.
            started: time at which training began to wait for it (`perf_counter`).
            share: what several ranks write of it, if they do.
            files: content of this rank's share by name; None if all ranks have written theirs, and
                the checkpoint is to be complete before this returns.
        """
        # One at a time: two snapshots would take the memory of two models beside the one in use.
        self.wait()
        self._share = share
        if share is not None and files is None:
            with self._heartbeat.on_disk():
                self._write(make, best, started, share)
            self.poll()
            return

        def work() -> None:
            if share is not None and files is not None:
                share.write(files)
            self._write(make, best, started, share)

        self._start(work)

    def save_together(
        self,
        transport: Transport,
        make: Callable[[], Snapshot] | None,
        files: Files,
        device: torch.device,
        step: int,
        best: bool,
        started: float,
        in_background: bool,
        owners: Owners,
    ) -> bool:
        """Write a checkpoint of which several ranks have some; a collective.

        Args:
            transport: the group of ranks.
            make: makes the snapshot of all that is not in `files`, on savers; None on others, and
                if there is to be no checkpoint.
            files: the files whose tensors are on several ranks.
            device: device of these.
            step: committed steps.
            best: whether the checkpoint is to be kept as the best.
            started: time at which training began to wait for it.
            in_background: whether the memory for copies may be used, if the config says so.
            owners: who keeps checkpoints.

        Returns:
            Whether several ranks write in the background.
        """
        # First, since the end of one removes the unfinished folders of all others.
        self.wait()
        size = self._config.file_bytes
        share = meet(transport, lambda: make and self._begun(step), files, size, owners)
        if share is None:
            return False
        own, stream = share.gathered(transport, device)
        at = partial(self._at, "checkpoint", step)
        if in_background and self._config.background:
            own = on_host(own)
            exhaust(stream)
            if make is not None and share.leads:
                self.save(make, best, started, share, own)
            elif own:
                self._start(lambda: share.write(own, at))
            return share.is_shared
        # In this thread: collectives of a background thread could overtake those of the step.
        with self._heartbeat.on_disk():
            if own:
                share.write(own, at)
            exhaust(stream)  # on the other ranks, and here if the disk has failed
        transport.gather_json(0)
        share.all_have_ended()
        if make is not None and share.leads:
            self.save(make, best, started, share)
        return False

    def _begun(self, step: int) -> Path | None:
        """The new folder of a checkpoint; None if it cannot be made."""
        try:
            return checkpoint.begin(self._root, step)
        except OSError as error:
            self._error = (step, error)
            return None

    @property
    def is_writing(self) -> bool:
        """Whether something is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def _start(self, work: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=work, name="checkpoints")
        self._thread.start()
        if not self._config.background:
            self.wait()

    def give_up(self) -> None:
        """Wait no longer for other ranks to write their share: some are lost."""
        if self._share is not None:
            self._share.give_up()

    def all_have_ended(self) -> None:
        """Expect no more of other ranks' shares than there is: all have written theirs."""
        if self._share is not None:
            self._share.all_have_ended()

    def poll(self) -> None:
        """Emit what has happened since the last call.

        Raises:
            Exception: anything but an OSError that went wrong in the background.
        """
        # Emitted here, since listeners, such as hooks, expect to be called by the training thread.
        if self._done is not None:
            done, self._done = self._done, None
            self._emit(done)
        if self._error is not None:
            (step, error), self._error = self._error, None
            # A disk may recover before the next checkpoint; anything else would fail again.
            if not isinstance(error, OSError):
                raise error
            message = (
                f"the checkpoint of step {step} could not be written to {self._root}: {error}; "
                "earlier ones are untouched, training goes on"
            )
            self._emit(Warned(step=step, message=message))

    def wait(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            with self._heartbeat.on_disk():
                self._thread.join(SLOW_S)
                if self._thread.is_alive():
                    message = (
                        f"{self._root}: the disk is slow: training has waited {SLOW_S:g} s for the "
                        f"checkpoint of step {self._step} to be written"
                    )
                    self._emit(Warned(step=self._step, message=message))
                    self._thread.join()
            self._thread = None
        self.poll()

    def finish(self, step: int) -> Path:
        """Wait, and make sure that the checkpoint of `step` exists.

        Raises:
            CheckpointError: it is not.
        """
        self.wait()
        folder = self._root / listing.folder_name(step)
        # Earlier failures were only warnings, but a session must not end without its state.
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
        share: OwnShare | None,
    ) -> None:
        stall_s = perf_counter() - started
        begun = perf_counter()
        self._step = step = 0
        try:
            snapshot = make()
            self._step = step = snapshot.step
            folder, size = checkpoint.write(
                self._root,
                snapshot,
                lambda: self._at("checkpoint", step),
                share,
                self._config.file_bytes,
            )
            if best:
                listing.write_hint(self._root, "best", folder.name)
            # After the hint, which protects the best checkpoint from being deleted.
            prune(self._root, self._config.keep, self._config.keep_every_s)
        except GivenUp:
            return
        except Exception as error:  # in a thread it would be printed and lost
            self._error = (step, error)
            return
        self._done = Checkpointed(
            step=step,
            path=str(folder),
            num_bytes=size,
            stall_s=stall_s,
            write_s=perf_counter() - begun,
        )


def prune(root: Path, keep: int, keep_every_s: float = 0.0) -> None:
    """Delete old checkpoints, and incomplete ones of killed processes.

    The `keep` newest, the best, those kept for good, and other files stay.

    Args:
        root: folder of all checkpoints.
        keep: number of the newest ones to keep, at least 1.
        keep_every_s: least time in seconds between two older ones that are kept for good, of which
            the oldest is the first; 0 keeps none.
    """
    # First, or a checkpoint would be deleted whose writer was killed while it replaced it.
    listing.bring_back(root)
    old = listing.folders(root)[keep:]
    stay = [
        listing.read_hint(root, "best"),
        *(_apart(old, keep_every_s) if keep_every_s else ()),
    ]
    for folder in (*(f for f in old if f not in stay), *root.glob(".step_*")):
        # A folder that cannot be deleted costs space only; training goes on.
        shutil.rmtree(folder, ignore_errors=True)


def _apart(folders: Sequence[Path], gap_s: float) -> list[Path]:
    """The oldest of some checkpoints (newest first), and each that is `gap_s` after the last kept.

    Computed each time from the times in the manifests, so the result does not depend on who wrote
    them, nor on a kill during an earlier deletion.
    """
    kept: list[Path] = []
    kept_at = -float("inf")
    for folder in reversed(folders):
        saved_at = _saved_at(folder)
        if saved_at is not None and saved_at >= kept_at + gap_s:
            kept.append(folder)
            kept_at = saved_at
    return kept


def _saved_at(folder: Path) -> float | None:
    """When a checkpoint was written, in Unix seconds; None if it is damaged."""
    try:
        saved_at: Any = checkpoint.read_manifest(folder).get("saved_at")
    except CheckpointError:
        return None
    if isinstance(saved_at, (int, float)):
        return float(saved_at)
    with suppress(OSError):  # earlier versions did not write it
        return folder.stat().st_mtime
    return None
