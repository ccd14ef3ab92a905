"""Which rank computes which microbatches, and the stream of those of this rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from lockstep.config import TrainConfig
from lockstep.engine.assembly import Parts
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.recovery.balance import Balancer, Proposal
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.timing import Times
from lockstep.parallel.layout import Dealt


class Microbatches:
    """Deals microbatches out to the ranks; the result does not depend on how.

    Attributes:
        stream: yields the step, the number and the batch of each microbatch of this rank, from the
            present step on.
    """

    def __init__(
        self, config: TrainConfig, runtime: Runtime, parts: Parts, progress: Progress
    ) -> None:
        """Begin with the microbatches that the mesh gives this rank.

        Args:
            config: config of the run.
            runtime: the group of ranks.
            parts: model, loader and training step of the run.
            progress: position of the run; the stream begins at its step.
        """
        self._transport = runtime.transport
        self._parts = parts
        # In rounds all wait for the slowest rank, whoever has more of them.
        every = 0 if config.shards_gradients else config.balance_every
        self._balancer = Balancer(every, parts.places.mesh.of_each_replica)
        self.stream = self._open(progress.step)

    def regroup(self, step: int, state: OptimizerState | None) -> None:
        """Deal everything out to a new group of ranks.

        Args:
            step: number of the next step, from 0.
            state: whole state of the optimizer if it is sharded.
        """
        self._balancer.restart(self._parts.places.mesh.of_each_replica)
        self._deal_out(self._balancer.ranges, step, state)

    def balance(self, step: int, times: Sequence[Times]) -> Proposal | None:
        """Deal microbatches out by measured speed, if that gains enough; what each rank then gets.

        Args:
            step: number of the next step, from 0.
            times: seconds that each rank has spent so far, by kind of work.
        """
        if self._balancer.is_idle:
            return None
        # A replica's ranks wait for one another inside a microbatch: any of them tells its speed.
        mesh = self._parts.places.mesh
        proposal = self._balancer.propose([times[ranks[0]] for ranks in mesh.replicas])
        if proposal is None:
            return None
        of_ranks = mesh.of_ranks(proposal.ranges)
        carries = self._parts.train_step.carries
        if carries is not None:
            carries.deal_out(of_ranks)
        self._deal_out(proposal.ranges, step)
        return Proposal(of_ranks, mesh.replicas[proposal.slowest][0], proposal.slowdown)

    def fetch_anew(self, step: int) -> None:
        """Fetch from a step on, with other worker processes if there are any."""
        self.stream.close()  # exceptions may refer to it for long, and so keep its workers alive
        self.stream = self._open(step)

    def close(self) -> None:
        """Fetch no more."""
        self.stream.close()

    def _deal_out(
        self, ranges: Sequence[Dealt], step: int, state: OptimizerState | None = None
    ) -> None:
        self._parts.train_step.deal_out(self._parts.places.mesh.of_ranks(ranges), state)
        self._balancer.use(ranges)
        self.fetch_anew(step)

    def _open(self, step: int) -> Generator[Any, None, None]:
        ranges = self._parts.places.mesh.of_ranks(self._balancer.ranges)
        microbatches = ranges[self._transport.rank]
        return self._parts.loader.stream(microbatches, step, self._parts.total_steps)
