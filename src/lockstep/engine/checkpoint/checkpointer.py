"""Keeping a run: when its state goes to disk, and how it comes back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.audit.pass_state import named
from lockstep.engine.carry.carries import Held, from_named
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.origin import check_data, facts_of
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.checkpoint.writer import AsyncWriter
from lockstep.engine.digests import check_rounding
from lockstep.engine.events import Checkpointed, Event, Resumed, Warned
from lockstep.engine.recovery.consistency import check_replicas, check_streams
from lockstep.engine.recovery.sharded_state import numbers_of_state, whole_state
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime, everywhere, on_first
from lockstep.engine.snapshot.capture import StreamedState, WholeTensors, capture, whole_tensors
from lockstep.engine.snapshot.fits import check_fits, check_optimizer_fits, check_optimizer_state
from lockstep.engine.snapshot.restore import restore, take_over
from lockstep.engine.snapshot.resumable import check_meta, check_training_state, stretch
from lockstep.engine.tables.files import StreamedTables
from lockstep.engine.task.rebuilt import asked_of
from lockstep.errors import CheckpointError

_UNKNOWN = "what it read under an earlier version is not known"


class Checkpointer:
    """Saves and restores the state of a run; all methods but `poll` are collectives."""

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        parts: Parts,
        directory: RunDirectory,
        on_written: Callable[[Path], None],
    ) -> None:
        """Begin with the checkpoints that there are.

        Args:
            config: config of the run.
            runtime: surroundings of this process.
            parts: parts of the run.
            directory: the run directory.
            on_written: takes the folder of each checkpoint that is complete, on rank 0.
        """
        self._config = config
        self._runtime = runtime
        self._transport = runtime.transport
        self._parts = parts
        self._directory = directory
        self._root = directory.checkpoints
        self._asked = asked_of(parts.task_state.task.config)
        self._on_written = on_written
        self._writer = self._new_writer()
        self._saved_step = -1

    def _new_writer(self) -> AsyncWriter:
        config = self._config.checkpoint
        return AsyncWriter(
            self._root,
            config.keep,
            config.background,
            self._emit,
            self._runtime.heartbeat,
            self._runtime.at,
            config.keep_every_s,
        )

    def rescue(self, progress: Progress) -> str:
        """Save the state in another folder, since that of the run is gone; its path.

        Raises:
            RunDirectoryError: there is no such folder.
            CheckpointError: the state could not be written.
        """
        path: str = on_first(self._transport, self._directory.rescue)
        with suppress(CheckpointError):  # of what went into the folder that is gone
            self._writer.wait()
        self._root = Path(path) / "checkpoints"
        self._writer, self._saved_step = self._new_writer(), -1
        self.finish(progress)
        return path

    def check_directory(self) -> bool:
        """Whether the run directory is gone; a collective."""
        return bool(on_first(self._transport, self._directory.is_gone))

    def poll(self) -> None:
        """Emit what the background thread has to say."""
        if self._runtime.is_first:
            self._writer.poll()

    def _emit(self, event: Event) -> None:
        self._runtime.emit(event)
        if isinstance(event, Checkpointed):
            self._on_written(Path(event.path))

    def save(self, progress: Progress, best: bool = False) -> None:
        """Copy the state, and have it written while training goes on; once for each step.

        Raises:
            DivergenceError: the ranks' parameters differ; nothing is written.
            TaskError: the optimizer or the task has state that cannot be saved; nothing is written.
        """
        if self._saved_step == progress.step:
            return
        started = perf_counter()
        self.check_replicas(progress)
        self._compare_reachable(progress.step)
        self.check_state(is_saved=True)
        self._share_asked()
        parts, is_first = self._parts, self._runtime.is_first
        dealt = parts.train_step.carries
        carries = dealt.on_first() if dealt is not None else None
        if parts.train_step.is_streamed:
            self._stream(progress, best, started, carries)
            self._done(progress, started)
            return
        streamed: StreamedTables | None = None
        if parts.train_step.tables is not None:
            streamed = parts.train_step.tables.streamed()
        # A whole optimizer is on rank 0 already; slices and shards of one are with everyone.
        if is_first or parts.train_step.shares_state:
            state = whole_state(parts.train_step)
        with parts.train_step.parameters.whole():
            whole: WholeTensors | None = None
            if parts.placement.is_split:
                whole = whole_tensors(parts.placement, parts.model, parts.train_step.flat, state)
            if is_first:
                meta = self._meta(progress)
                make = capture(parts.train_step, parts.model, progress, meta, state, whole, carries)
        if is_first and not self._directory.is_gone():  # else it would come into being again
            files = streamed.files if streamed is not None else None
            self._writer.save(make, best, started, files)
            if best and self._transport.can_regroup and self._transport.size > 1:
                # Should this rank die, the others write it anew; but they no longer could, once
                # they have done the next step, which they can't do without this rank.
                self._writer.wait()
        if streamed is not None:
            streamed.drain()  # what the others do, and rank 0 if the disk has failed
        self._done(progress, started)

    def _stream(self, progress: Progress, best: bool, started: float, carries: Held | None) -> None:
        """Write tensors as they come together: no rank need have the memory for all of them."""
        parts = self._parts
        state = numbers_of_state(parts.train_step)
        streamed = StreamedState(parts.train_step, parts.model, list(state.flats))
        files = {checkpoint.MODEL: streamed.model, checkpoint.OPTIMIZER: streamed.optimizer}
        rows: StreamedTables | None = None
        if parts.train_step.tables is not None:
            rows = parts.train_step.tables.streamed()
            files |= rows.files
        if self._runtime.is_first:
            nothing = WholeTensors({}, {})
            meta = self._meta(progress)
            make = capture(parts.train_step, parts.model, progress, meta, state, nothing, carries)
            self._writer.save(make, best, started, files)
        streamed.drain()  # what the others do, and rank 0 if the disk has failed
        if rows is not None:
            rows.drain()

    def _done(self, progress: Progress, started: float) -> None:
        self._parts.train_step.watch.checkpoint_s += perf_counter() - started
        self._saved_step = progress.step

    def _share_asked(self) -> None:
        """Have all ranks know what the task's code has asked for on any of them."""
        if self._asked is not None and self._transport.size > 1:
            for names in self._transport.gather_json(sorted(self._asked.names)):
                self._asked.add(names)

    def regroup(self) -> None:
        """After the loss of ranks: what was saved of this step may have been lost with them."""
        self._saved_step = -1

    def finish(self, progress: Progress) -> str:
        """Make sure that the state is on disk: the folder it is in.

        Raises:
            CheckpointError: it could not be written.
        """
        self.save(progress)
        folder: str = on_first(self._transport, lambda: str(self._writer.finish(progress.step)))
        return folder

    def check_replicas(self, progress: Progress) -> None:
        """Make sure that all ranks hold the same bits.

        Raises:
            DivergenceError: they don't.
        """
        if self._transport.size > 1:
            parts = self._parts
            train_step = parts.train_step
            check_streams(self._transport, parts.loader.landmarks(), progress.step)
            check_replicas(
                parts.placement,
                parts.model,
                train_step.state.unsaved,
                train_step.task_state,
                progress.step,
                train_step.parameters.slices(),
                train_step.carries.digests() if train_step.carries is not None else None,
                train_step.tables.digests() if train_step.tables is not None else None,
            )

    def _compare_reachable(self, step: int) -> None:
        """Make sure that task, hooks and datasets hold the same on all ranks.

        Raises:
            TaskError: they do not; nothing is written.
        """
        if self._transport.size == 1:
            return
        is_whole = not self._parts.placement.is_split
        paths = self._parts.pass_state.compare(self._transport, step, is_whole)
        if paths:
            self._runtime.emit(
                Warned(
                    step=step,
                    message=f"{named(paths)}: differs between ranks since the start; no result may "
                    f"depend on it. If none does, say so: `scratch = ({paths[0]!r},)` in the "
                    "task's class",
                )
            )

    def check_state(self, is_saved: bool = False) -> None:
        """Make sure that all state of the optimizer and of the task can be saved.

        Args:
            is_saved: whether it is to be saved now, with the tensors that the model was built with.

        Raises:
            TaskError: it cannot.
        """
        train_step = self._parts.train_step

        def check() -> None:
            train_step.flat_optimizer.check_state()
            train_step.task_state.check()
            if is_saved:
                train_step.check_modules()

        everywhere(self._transport, check)

    def resume(self) -> Progress:
        """Restore the newest valid checkpoint on all ranks, if there is one.

        If there is none, and the run starts from the weights of another, these are loaded.

        Raises:
            CheckpointError: none of those there is valid, or it is of another model or data.
        """
        snapshot: checkpoint.Snapshot | None = None
        folder: Path | None = None
        skipped: list[str] = []
        if self._runtime.is_first:
            self._writer.wait()  # in the middle of a run, one may be on its way
            snapshot, folder, skipped = checkpoint.newest_valid(self._root)

        def check() -> tuple[list[str], tuple[int, ...], list[str] | None, list[str]] | None:
            if snapshot is None:
                if skipped:
                    reasons = "\n".join(skipped)
                    raise CheckpointError(
                        f"{self._root}: no checkpoint is valid; put one back, or delete this "
                        f"folder to start over from step 0:\n{reasons}"
                    )
                self._directory.settle()
                return None
            parts, where = self._parts, str(folder)
            check_fits(snapshot, parts.model, where)
            _, data = check_meta(snapshot, where)
            check_data(data, parts, where)
            assert folder is not None
            said = [
                stretch(snapshot, self._config, parts, folder),
                check_rounding(
                    parts.rounding, snapshot.meta.get("rounding"), where, self._config.strict
                ),
            ]
            check_training_state(snapshot, self._config, parts.total_steps, parts.train_step, where)
            check_optimizer_fits(snapshot, parts.train_step, where)
            check_optimizer_state(snapshot, parts.train_step, where)
            listing.set_aside(self._root, folder)
            self._mark_best(Progress.from_state_dict(snapshot.meta["progress"]).best_step)
            missing = sorted(parts.train_step.state.unsaved.keys() - snapshot.buffers.keys())
            self._directory.settle()
            return missing, data.pass_starts, snapshot.meta.get("asked"), said

        checked = on_first(self._transport, check)
        if checked is None:
            if self._config.weights_from.path:
                train_step, model = self._parts.train_step, self._parts.model
                take_over(self._config.weights_from, train_step, model, self._transport)
            return Progress()
        missing, starts, asked, said = checked
        if self._asked is not None:
            self._asked.add([_UNKNOWN] if asked is None else asked)
        self._parts.loader.know_passes(starts)
        progress = restore(snapshot, self._parts.train_step, self._parts.model, self._transport)
        self._restore_carries(snapshot)
        if self._parts.train_step.tables is not None:
            self._parts.train_step.tables.load(folder)
        for reason in skipped:
            message = f"{reason}; the one before is used"
            self._runtime.emit(Warned(step=progress.step, message=message))
        for message in filter(None, said):
            self._runtime.emit(Warned(step=progress.step, message=message))
        if missing:
            message = (
                f"{folder}: was written before buffers that are not persistent were saved; "
                f"{', '.join(missing)} start anew, so the result may differ from an unbroken run's"
            )
            self._runtime.emit(Warned(step=progress.step, message=message))
        self._runtime.emit(Resumed(step=progress.step, path=str(folder), skipped=tuple(skipped)))
        self._saved_step = progress.step
        return progress

    def _restore_carries(self, snapshot: checkpoint.Snapshot | None) -> None:
        """Bring what microbatches carry to the ranks that compute them; a collective."""
        carries = self._parts.train_step.carries
        if carries is None:
            return
        there = {}
        if snapshot is not None:
            there = from_named(snapshot.carry, snapshot.meta["carry"], self._runtime.device)
        carries.take(there)
        carries.deal_out(self._parts.placement.mesh.microbatches)

    def _mark_best(self, step: int) -> None:
        """Have the hint name the best checkpoint, if any: who wrote it may have died just then."""
        if not step:  # what it names is of an evaluation that no longer counts
            listing.remove_hint(self._root, "best")
            return
        best = self._root / listing.folder_name(step)
        if best.is_dir() and listing.read_hint(self._root, "best") != best:
            listing.write_hint(self._root, "best", best.name)

    def _meta(self, progress: Progress) -> dict[str, Any]:
        config, transport = self._config, self._transport
        return facts_of(config, transport, self._parts, self._asked, progress.step)
