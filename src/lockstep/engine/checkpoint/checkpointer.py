"""Saving and restoring the state of a run in checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.audit.saved_state import Comparison, unequal
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.copies import catch_up, even_out, opened_everywhere
from lockstep.engine.checkpoint.origin import check_data, manifest_of
from lockstep.engine.checkpoint.owners import on_owners, settle
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.checkpoint.share import Files, files_of
from lockstep.engine.checkpoint.writer import AsyncWriter
from lockstep.engine.digests import check_rounding
from lockstep.engine.events import Checkpointed, Event, Resumed, Warned
from lockstep.engine.recovery.leader import numbers_of_state
from lockstep.engine.recovery.replica_checks import check_all, check_streams
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime, everywhere, on_first
from lockstep.engine.snapshot.capture import ScatteredState, capture
from lockstep.engine.snapshot.compatibility import (
    check_fits,
    check_optimizer_fits,
    check_optimizer_state,
)
from lockstep.engine.snapshot.restore import restore, restore_own, start_from
from lockstep.engine.snapshot.resumable import check_meta, check_training_state, stretch
from lockstep.engine.task_config import length_reads
from lockstep.engine.training_data import share_places
from lockstep.errors import CheckpointError, RunDirectoryError, file_errors


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
        self._config, self._parts = config, parts
        self._comparison = Comparison(parts.pass_state)
        self._runtime, self._transport = runtime, runtime.transport
        self._directory, self._root = directory, directory.checkpoints
        self._length_reads = length_reads(parts.task_state.task.config)
        self._on_written = on_written
        self._writer = self._new_writer()
        self._saved_step, self._problems = -1, list[str]()
        self._is_shared = self._is_cut_short = self._has_saved = False
        # Whether its directory was the run's in the last group; whether all know of a checkpoint.
        self._is_kept = self._is_known = False

    @property
    def _saves(self) -> bool:
        """Whether this rank writes checkpoints."""
        return self._transport.rank in self._directory.owners.savers

    def _new_writer(self) -> AsyncWriter:
        config, runtime = self._config.checkpoint, self._runtime
        return AsyncWriter(self._root, config, self._emit, runtime.heartbeat, runtime.at)

    def rescue(self, progress: Progress) -> str:
        """Save the state in another folder, since that of the run is gone; returns its path.

        Raises:
            RunDirectoryError: there is no such folder.
            CheckpointError: the state could not be written.
        """
        self._settle()
        path: str = on_first(self._transport, self._directory.rescue)
        if self._directory.owners.of(self._transport.rank) == 0:
            self._directory.follow(Path(path))
        with suppress(CheckpointError):  # of one in the folder that is gone
            self._writer.wait()
        self._root = self._directory.checkpoints
        self._writer, self._saved_step = self._new_writer(), -1
        self.finish(progress)
        return path

    def check_directory(self) -> bool:
        """Whether the run directory is gone; a collective."""
        return bool(on_first(self._transport, self._directory.is_gone))

    def poll(self) -> None:
        """Emit the events of the background thread."""
        if self._saves:
            self._writer.poll()

    def _emit(self, event: Event) -> None:
        self._runtime.emit(event)
        if not self._runtime.is_first:
            self._problems += [event.message] if isinstance(event, Warned) else []
        elif isinstance(event, Checkpointed):
            with self._runtime.heartbeat.in_user_code():
                self._on_written(Path(event.path))

    def _warn(self, step: int, *messages: str) -> None:
        for message in messages:
            self._runtime.emit(Warned(step=max(0, step), message=message))

    def save(self, progress: Progress, best: bool = False) -> None:
        """Copy the state, and write it while training goes on; once for each step.

        Raises:
            DivergenceError: the ranks' parameters differ; nothing is written.
            TaskError: the optimizer or the task has state that cannot be saved; nothing is written.
        """
        if self._saved_step == progress.step:
            return
        started = perf_counter()
        # Before anything is copied: a checkpoint of diverged replicas would hide the error.
        self.check_replicas(progress)
        self._compare_reachable(progress.step)
        share_places(self._parts.loader, self._runtime, progress.step)
        self.check_state(is_saved=True)
        if self._length_reads is not None:
            self._length_reads.share(self._transport)
        self._settle()
        train_step, owners = self._parts.train_step, self._directory.owners
        files: Files = {}
        make: Callable[[], checkpoint.Snapshot] | None = None
        is_scattered, most_bytes = train_step.shares_state, self._config.checkpoint.file_bytes
        if is_scattered:
            state = numbers_of_state(train_step)
            scattered = ScatteredState(train_step, sorted(state.flats))
            files |= files_of(checkpoint.MODEL, scattered.model, most_bytes)
            files |= files_of(checkpoint.OPTIMIZER, scattered.optimizer, most_bytes)
        elif self._saves:
            state = train_step.flat_optimizer.state(device="cpu")
        if train_step.tables is not None:
            files |= train_step.tables.scattered()
        structures: dict[str, Any] = {}
        if train_step.carries is not None:
            carried, structures = train_step.carries.scattered()
            if carried:
                files |= files_of(checkpoint.CARRY, carried, most_bytes)
        meta: dict[str, Any] = {}
        if self._runtime.is_first:
            reads, step = self._length_reads, progress.step
            meta = manifest_of(self._config, self._transport, self._parts, reads, step)
        if owners.are_several:  # so that copies are the same to the byte
            meta = self._transport.gather_json(meta)[0]
        # A writer would create the folder of a run again that is gone, and `rescue` comes first.
        if self._saves and not self._directory.is_gone():
            if train_step.carries is not None:
                meta["carry"] = structures
            make = capture(train_step, progress, meta, state, is_scattered)
        if files:
            self._is_shared = self._writer.save_together(
                self._transport, make, files, train_step.flat.flats[0].device,
                progress.step, best, started,
                in_background=not train_step.is_streamed and train_step.tables is None,
                owners=owners,
            )  # fmt: skip
        elif make is not None:
            self._writer.save(make, best, started)
        self._is_shared |= owners.are_several
        is_first = not self._is_known and owners.ranks != owners.savers
        if is_first or (best and self._transport.can_regroup and self._transport.size > 1):
            # If this rank dies, the others write it again; but they no longer could once they
            # have done the next step, which they can't do without this rank.
            self._settle()
            if self._saves:
                self._writer.wait()
        train_step.watch.checkpoint_s += perf_counter() - started
        self._saved_step = progress.step

    def _settle(self) -> None:
        """Wait until all ranks have written their shares of the last checkpoint; a collective.

        Before rank 0 waits for these: it does not notice if a rank is lost that writes one.
        """
        if not self._is_shared:
            return
        if not self._saves:
            self._writer.wait()
        self._transport.gather_json(0)
        self._writer.all_have_ended()
        self._is_shared = False
        if self._directory.owners.are_several:
            if self._saves:
                self._writer.wait()
            self._note_newest()

    def _note_newest(self) -> None:
        owners = self._directory.owners
        self._is_known, told = settle(self._transport, owners, self._root, self._problems)
        self._warn(self._saved_step, *told)

    def regroup(self, step: int) -> bool:
        """Go on in another group; a collective.

        Args:
            step: committed steps.

        Returns:
            Whether a lost rank may not have written its share of the last checkpoint.
        """
        self._is_cut_short |= self._is_shared and self._saves and self._writer.is_writing
        self._writer.give_up()
        self._is_shared = False
        owners, rank = self._directory.owners, self._transport.rank
        is_new = rank in owners.ranks and not self._is_kept
        lacks = is_new or (owners.are_several and self._saves and not self._has_saved)
        told = self._transport.gather_json([self._is_cut_short, lacks])
        if any(lacks for _, lacks in told):
            self._writer.wait()
            saved = self._has_saved
            self._warn(step, *catch_up(self._runtime, self._directory, step, is_new, saved))
        self._has_saved, self._is_kept = self._saves, owners.of(rank) >= 0
        if owners.are_several:
            self._note_newest()
        return any(is_cut_short for is_cut_short, _ in told)

    def forget(self) -> None:
        """Save the step again, though it was: lost ranks may have it, or the run ends with it."""
        self._saved_step, self._is_cut_short = -1, False

    def finish(self, progress: Progress) -> str:
        """Make sure that the state is on disk; returns its folder.

        Raises:
            CheckpointError: it could not be written.
        """
        self.save(progress)
        self._settle()

        def finish() -> str:
            return str(self._writer.finish(progress.step)) if self._saves else ""

        return on_owners(self._transport, self._directory.owners, finish)

    def check_replicas(self, progress: Progress) -> None:
        """Make sure that all ranks hold the same bits.

        Raises:
            DivergenceError: they don't.
        """
        if self._transport.size > 1:
            check_streams(self._transport, self._parts.loader.landmarks(), progress.step)
            check_all(self._parts.train_step, progress.step)

    def _compare_reachable(self, step: int) -> None:
        """Make sure that task, hooks and datasets hold the same on all ranks.

        Raises:
            TaskError: they do not; nothing is written.
        """
        if self._transport.size > 1:
            is_whole = not self._parts.placement.is_split
            paths = self._comparison.run(self._transport, step, is_whole)
            if paths:
                self._warn(step, unequal(paths))

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

        def read() -> None:
            nonlocal snapshot, folder, skipped
            self._writer.wait()  # in the middle of a run, one may still be being written
            kept = file_errors(RunDirectoryError, self._root, "read")
            with kept, self._runtime.heartbeat.on_disk():
                snapshot, folder, skipped = checkpoint.newest_valid(self._root, is_mapped=True)

        owners, instead = self._directory.owners, "the one before"
        on_owners(self._transport, owners, read)
        if owners.are_several:
            step = snapshot.step if snapshot is not None else -1
            evened = even_out(self._runtime, self._directory, step, skipped)
            if self._runtime.is_first and step < evened.step:
                read()
            self._warn(self._saved_step, *evened.copied)
            instead, skipped = evened.name, evened.reasons

        def check() -> tuple[list[str], Sequence[int], Sequence[Any], list[str] | None] | None:
            if snapshot is None:
                if skipped:
                    reasons = "\n".join(skipped)
                    raise CheckpointError(
                        f"{self._root}: no checkpoint is valid; put one back, or delete this "
                        f"folder to start over from step 0:\n{reasons}"
                    )
                self._directory.settle()
                return None
            assert folder is not None
            parts, where = self._parts, str(folder)
            if "imported" in snapshot.meta:
                hint = "start a run with them: lockstep train RECIPE --from RUN_DIR"
                raise CheckpointError(f"{where}: holds imported weights alone; {hint}")
            check_fits(snapshot, parts.model, where)
            _, data = check_meta(snapshot, where)
            check_data(data, parts, where)
            there = snapshot.meta.get("rounding")
            warnings = [
                stretch(snapshot, self._config, parts, folder),
                check_rounding(parts.rounding, there, where, self._config.strict),
            ]
            check_training_state(snapshot, self._config, parts.total_steps, parts.train_step, where)
            check_optimizer_fits(snapshot, parts.train_step, where)
            check_optimizer_state(snapshot, parts.train_step, where)
            missing = sorted(parts.train_step.state.unsaved.keys() - snapshot.buffers.keys())
            if missing:
                warnings.append(
                    f"{folder}: was written before buffers that are not persistent were saved; "
                    f"{', '.join(missing)} have their initial values, so the result may differ "
                    "from an uninterrupted run's"
                )
            places = snapshot.meta["sampler"].get("places", ())
            return warnings, data.pass_starts, places, snapshot.meta.get("asked")

        checked = on_first(self._transport, check)
        train_step = self._parts.train_step
        self._has_saved, self._is_kept = self._saves, owners.of(self._transport.rank) >= 0
        self._is_known = checked is not None
        if checked is None:
            on_owners(self._transport, owners, self._directory.settle)
            if start := self._config.weights_from.path:
                start_from(self._config.weights_from, train_step, self._transport)
                if train_step.tables is not None:
                    train_step.tables.load_weights(Path(start))
            return Progress()
        warnings, starts, places, asked = checked
        if self._length_reads is not None:
            unknown = "what it read under an earlier version is not known"
            self._length_reads.add([unknown] if asked is None else asked)
        self._parts.loader.know_passes(starts)
        self._parts.loader.set_places(places)
        meta = self._transport.gather_json(snapshot.meta if snapshot else {})[0]
        progress = Progress.from_state_dict(meta["progress"])
        # Only now that this one can be used: damaged newer ones stay if it is refused.
        on_owners(self._transport, owners, lambda: self._adopt(progress))
        opened = opened_everywhere(self._transport, snapshot)
        if opened is not None:
            with self._runtime.heartbeat.on_disk():
                everywhere(self._transport, lambda: restore_own(opened, train_step, meta))
        else:
            restore(snapshot, train_step, self._transport)
        if train_step.carries is not None:
            there, microbatches = opened or snapshot, self._parts.placement.mesh.microbatches
            train_step.carries.restore(there, opened is not None, microbatches)
        if train_step.tables is not None:
            where = opened.folder if opened is not None else folder
            train_step.tables.load(where, opened is not None)
        told = [f"{reason}; {instead} is used" for reason in skipped] + warnings
        self._warn(progress.step, *filter(None, told))
        self._runtime.emit(Resumed(step=progress.step, path=str(folder), skipped=tuple(skipped)))
        self._saved_step = progress.step
        return progress

    def _adopt(self, progress: Progress) -> None:
        """Have the directory of this process name what the run goes on from."""
        with file_errors(CheckpointError, self._root, advice="make it writable, or free space"):
            listing.set_aside(self._root, progress.step)
            listing.mark_latest(self._root, progress.step)
            listing.mark_best(self._root, progress.best_step)
        self._directory.settle()
