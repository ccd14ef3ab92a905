"""How the survivors of a broken group go on, and how new processes join them.

`Recovery.run` is the whole procedure, from top to bottom. A further loss may interrupt it anywhere;
it then restarts. Each part checks what is already done, so nothing is done twice, and nothing that
one rank has committed is lost while that rank lives.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from lockstep.comm.transport import GroupBroken
from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.events import Warned
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.recovery.leader import (
    NOWHERE,
    Lead,
    Origin,
    Owned,
    collect,
    find_lead,
    find_origin,
    refuse_foreign_ranks,
)
from lockstep.engine.run.microbatches import Microbatches
from lockstep.engine.run.progress import Progress
from lockstep.engine.run.reporter import Reporter
from lockstep.engine.run.run_state import RunState
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.restore import copy_state
from lockstep.errors import RankFailure, shared

TOO_FEW_RANKS = "too few ranks left"


class Recovery:
    """Brings the ranks of a new group to one state.

    Attributes:
        is_new: whether this process has no state yet, since others began to train before it.
    """

    def __init__(
        self,
        config: TrainConfig,
        runtime: Runtime,
        parts: Parts,
        state: RunState,
        microbatches: Microbatches,
        checkpointer: Checkpointer,
        reporter: Reporter,
        is_new: bool,
    ) -> None:
        self._config = config
        self._runtime = runtime
        self._transport = runtime.transport
        self._parts = parts
        self._state = state
        self._microbatches = microbatches
        self._checkpointer = checkpointer
        self._reporter = reporter
        self.is_new = is_new
        self._owned = Owned() if is_new else self._owned_now()
        # Whether it has dropped its blocks and shards for others, which it has yet to receive.
        self._has_released = False
        # Whether it has begun to restore the newest checkpoint: then its newer state is gone.
        self._is_restoring = False
        self._is_save_lost = False

    def run(self) -> None:
        """Regroup, agree on the last committed step, and be ready to do the next one again.

        Raises:
            LockstepError: no surviving rank has the state; on all ranks.
        """
        started, reached = perf_counter(), self._state.progress.step
        # Read once: each regroup assigns new ranks, and after a further loss the rank in the last
        # group that trained is still the one that counts.
        former = NOWHERE if self.is_new else self._transport.rank
        row = self._reporter.own_row()
        while True:
            try:
                origin = self._regroup(former, row)
                if not self._must_restore():
                    lead = self._agree_on_lead()
                    optimizer = self._finish_interrupted_step(origin, lead)
                    self._connect()
                    near = self._lead_in_column(lead)
                    self._copy_from(near)
                    self._commit_like(near)
                    self._evaluate_like(lead)
                    copied, reached = lead.is_ahead, lead.step
                    self._is_restoring = self._is_state_lost(lead)
                if self._must_restore():
                    self._restore_checkpoint()
                    copied, optimizer = True, None
                self._microbatches.share_places(self._state.progress.step, all_known=True)
                break
            except GroupBroken:
                self._reporter.keep_calls(self._state.progress.step)
                continue  # from the top: the leading rank may be among the dead
        self._microbatches.regroup(self._state.progress.step, optimizer)
        self._owned = self._owned_now()
        self.is_new = self._has_released = self._is_restoring = False
        self._checkpointer.forget()
        # The former rank 0, or one with a share, may have died while it wrote a checkpoint.
        if origin.former[0] != 0 or self._is_save_lost:
            self._state.is_save_overdue = True
        # Reported last, so that the time covers all that the loss has cost.
        seconds = perf_counter() - started
        self._reporter.regroup(self._state.progress, origin, copied, seconds, reached)
        if self._transport.size < self._config.min_ranks:
            self._state.stop_reason = TOO_FEW_RANKS

    def _owned_now(self) -> Owned:
        """What this rank owns in the present group."""
        placement = self._parts.placement
        return Owned(placement.column, placement.data.rank, placement.data.size)

    def _regroup(self, former: int, row: dict[str, Any]) -> Origin:
        """Form a group of the survivors and of joining ranks that have the same facts.

        Raises:
            GroupBroken: a further rank was lost, or was refused.
            RankFailure: the last rank with some blocks or shards is lost, or all that had begun
                are; on all ranks.
        """
        step = self._state.progress.step
        self._runtime.at("regroup", step)
        self._transport.regroup(takes_in=True)
        # Rank 0 may be another process now. It needs the lock and the log files before any event
        # is emitted.
        for message in self._runtime.take_over():
            self._runtime.emit(Warned(step=step, message=message))
        origin = find_origin(self._transport, former, self._owned, row, self._parts.facts)
        refuse_foreign_ranks(self._runtime, origin, step)
        # Only now: for ranks that have all just begun, each checkpoint would be too new.
        self._is_save_lost = self._checkpointer.regroup(step)
        self._runtime.at("catch_up", step)
        self._parts.placement.assign([owned.column for owned in origin.owned])
        return origin

    def _agree_on_lead(self) -> Lead:
        """Undo what an interrupted step has left, and find out which rank is furthest."""
        state, train_step = self._state, self._parts.train_step
        # First, since an interrupted all-gather may have left arbitrary values in the parameters.
        train_step.give_up()
        return find_lead(
            self._transport, state.progress, state.result, train_step.applied, self.is_new
        )

    def _finish_interrupted_step(self, origin: Origin, lead: Lead) -> OptimizerState | None:
        """With a sharded optimizer, apply the step that some rank has applied, and gather slices.

        Before any rank applies a step, all have what they need to apply it (`TrainStep._share`). So
        those that have not applied it can still do so.

        Returns:
            The optimizer's whole state if it is sharded.
        """
        progress, train_step = self._state.progress, self._parts.train_step
        is_behind = not self.is_new and not self._has_released and progress.step < lead.step
        if lead.result is not None and is_behind:
            train_step.follow(progress.step, progress.decays, lead.result)
        if not train_step.shares_state:
            return None
        if not train_step.sharded:
            return None
        # A rank that has committed has all parameters, with the changes of `Task.after_step`.
        pairs = zip(origin.owned, lead.have_committed, strict=True)
        complete = {owned.column for owned, is_done in pairs if is_done}
        if self._parts.placement.in_slices:
            complete.clear()
        return collect(train_step, origin.owned, complete)

    def _connect(self) -> None:
        """Connect every rank to its neighbours on the mesh; few ranks change their units."""
        placement = self._parts.placement
        placement.connect()
        if placement.is_split and placement.column != self._owned.column:
            # From here on its former units are gone, also if a further loss interrupts this.
            self._owned, self._has_released = Owned(), True
            self._parts.train_step.move()

    def _lead_in_column(self, lead: Lead) -> Lead:
        """The furthest rank among those with the same blocks and shards; its state is copied."""
        placement, state = self._parts.placement, self._state
        if not placement.is_split:
            return lead
        is_new = self.is_new or self._has_released
        applied = self._parts.train_step.applied
        return find_lead(placement.data, state.progress, state.result, applied, is_new)

    def _copy_from(self, lead: Lead) -> None:
        """Copy the state of the leading rank to ranks that are behind, and to new ones."""
        state, parts = self._state, self._parts
        data = parts.placement.data
        if not lead.is_ahead:
            data.agree()
            return
        own = {"run": state.state_dict()}
        meta = copy_state(parts.train_step, state.progress, own, data, lead.rank)
        if self.is_new or self._has_released:
            state.progress = Progress.from_state_dict(meta["progress"])
            state.load_state_dict(meta["run"])
        # A hook of the leading rank may have ended the run after the step that this rank lacks.
        state.progress.finished = meta["progress"]["finished"]

    def _commit_like(self, lead: Lead) -> None:
        """Commit the step that the leading rank has committed, or has applied and will commit."""
        state = self._state
        if state.progress.step < lead.step:
            assert lead.result is not None
            # If it had committed the step, what its task did afterwards came with its state.
            state.commit(lead.result, with_task=lead.committed < lead.step)

    def _is_state_lost(self, lead: Lead) -> bool:
        """Move what microbatches carry to the ranks that compute them, and rows to their owners.

        Returns:
            Whether some of it is on no surviving rank.
        """
        train_step, mesh = self._parts.train_step, self._parts.placement.mesh
        carries, tables = train_step.carries, train_step.tables
        is_lost = carries is not None and bool(carries.redistribute(mesh.microbatches))
        if tables is not None and tables.redistribute():
            if lead.step > 0:
                return True
            tables.start()
        return is_lost and lead.step > 0

    def _must_restore(self) -> bool:
        """Whether some rank has begun to restore a checkpoint, maybe before a further loss.

        A collective.
        """
        train_step = self._parts.train_step
        if train_step.carries is None and train_step.tables is None:
            return False
        return any(self._transport.gather_json(self._is_restoring))

    def _restore_checkpoint(self) -> None:
        """Go on from the newest checkpoint, as a resumed run does, in these processes.

        Raises:
            RankFailure: there is none; on all ranks.
        """
        self._is_restoring = True
        self._connect()
        parts = self._parts
        parts.train_step.reset(parts.placement.mesh.microbatches)
        progress = self._checkpointer.resume()
        if not progress.step:
            raise shared(
                RankFailure(
                    "the ranks with what some microbatches carry (Task.carry, compression), or "
                    "with some rows of a SparseEmbedding, have died before there was a checkpoint; "
                    "start the run again, with checkpoint.every set, or set lower"
                )
            )
        # Joining ranks do not know whether the run was asked to stop.
        reasons = self._transport.gather_json(self._state.stop_reason)
        self._state.restore(progress, next(filter(None, reasons), ""))

    def _evaluate_like(self, lead: Lead) -> None:
        """Commit the newest evaluation of the leading rank."""
        state = self._state
        if state.progress.evaluated < lead.evaluated:
            state.commit_evaluation(lead.scores, {})
