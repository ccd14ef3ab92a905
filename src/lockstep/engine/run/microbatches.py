"""Which rank computes which microbatches, and the stream of those of this rank."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from lockstep.config import TrainConfig
from lockstep.data.loader import BatchCopies
from lockstep.engine.assembly import Parts
from lockstep.engine.optimizer.optimizer_state import OptimizerState
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.step.sums import StepResult
from lockstep.engine.timing import Times
from lockstep.engine.training_data import share_places
from lockstep.errors import ConfigError, RankFailure, shared
from lockstep.parallel.layout import Assigned, share
from lockstep.parallel.mesh import sizes_of_replicas


def check_size(config: TrainConfig, runtime: Runtime) -> None:
    """Refuse a group that is smaller than it may become.

    Raises:
        ConfigError: there are less than `min_ranks` ranks, or less than a replica needs; on all
            ranks.
    """
    size = runtime.transport.size
    needed = config.mesh.tp * config.mesh.pp
    if needed > size:
        keys = {"mesh.pp": config.mesh.pp, "mesh.tp": config.mesh.tp}
        sizes = ", ".join(f"{key}={value}" for key, value in keys.items() if value > 1)
        fitting = [f"{pp}x{tp}" for pp, tp in sizes_of_replicas(size, config.num_shards)]
        raise shared(
            ConfigError(
                f"{sizes}: a replica needs {needed} ranks, and world size is {size}; start more "
                f"ranks, or set mesh.pp x mesh.tp to one of {', '.join(fitting)}, or "
                "mesh.shrink=replan"
            )
        )
    if config.min_ranks > runtime.transport.size:
        raise shared(
            ConfigError(
                f"min_ranks={config.min_ranks}: is more than the {runtime.transport.size} ranks "
                "there are; start more ranks or lower it"
            )
        )


def check_enough_left(config: TrainConfig, num_ranks: int) -> None:
    """Check that the ranks that are left after a loss during the start can train.

    Raises:
        RankFailure: they are less than `min_ranks`, or less than a replica needs; on all ranks.
    """
    needed = max(config.mesh.tp * config.mesh.pp, config.min_ranks)
    if num_ranks < needed:
        raise shared(
            RankFailure(
                f"a rank was lost while ranks started, and of {needed} that are needed {num_ranks} "
                "are left"
            )
        )


_PLACES_EVERY = 32
"""Steps between two exchanges of how far parts of a stream were read: survivors of a loss read what
the lost rank's microbatches have had since the last one again."""
_LEAST_GAIN = 0.1
"""Fraction of a step's time that a new assignment must save; less may be noise."""


class Proposal(NamedTuple):
    """Ranges of microbatches, and why."""

    ranges: Sequence[Assigned]
    slowest: int
    """The rank that takes longest for one microbatch."""
    slowdown: float
    """Time of the slowest rank as a multiple of that of the fastest."""


class Balancer:
    """Watches how long ranks take, and proposes ranges of microbatches that suit them.

    It sees what all ranks see, so all come to the same proposal.

    Args:
        every: number of steps to watch before each proposal; 0 makes none.
        ranges: present range of microbatches of each rank.

    Attributes:
        ranges: present range of microbatches of each rank.
    """

    def __init__(self, every: int, ranges: Sequence[Assigned]) -> None:
        self._every = every
        self.restart(ranges)

    def restart(self, ranges: Sequence[Assigned]) -> None:
        """Watch a new group from now on, with these ranges."""
        self._each: dict[int, float] = {}
        self.use(ranges)

    def use(self, ranges: Sequence[Assigned]) -> None:
        """Watch the same group with other ranges."""
        self.ranges = list(ranges)
        self._before: list[float] | None = None
        self._num_steps = 0

    def propose(self, times: Callable[[], Sequence[Times]]) -> Proposal | None:
        """Count a step in; better ranges if there are any.

        Args:
            times: seconds that each rank has spent so far, by kind of work; called where they are
                looked at.
        """
        if not self._every or len(self.ranges) == 1:
            return None
        if self._before is not None and self._num_steps + 1 < self._every:
            self._num_steps += 1
            return None
        # Without communication, in which the fast ranks wait for the slow ones.
        spent = [t.compute_s + t.data_s for t in times()]
        if self._before is None:
            self._before = spent
            return None
        self._num_steps += 1
        for rank, r in enumerate(self.ranges):
            seconds = (spent[rank] - self._before[rank]) / self._num_steps
            if len(r) and seconds > 0:
                self._each[rank] = seconds / len(r)
        self._before, self._num_steps = spent, 0
        return better(self.ranges, self._each)


def better(ranges: Sequence[Assigned], each: Mapping[int, float]) -> Proposal | None:
    """Ranges by measured speed, if the slowest rank would be done sooner by a tenth.

    Args:
        ranges: present range of microbatches of each rank.
        each: seconds that each rank took for one microbatch.
    """
    if len(each) < 2:
        return None
    # A replica that has not computed yet counts as having the median speed.
    usual = sorted(each.values())[(len(each) - 1) // 2]
    costs = [each.get(rank, usual) for rank in range(len(ranges))]
    proposed = share(ranges[-1].last, [1 / cost for cost in costs])
    now = max(len(r) * cost for r, cost in zip(ranges, costs, strict=True))
    then = max(len(r) * cost for r, cost in zip(proposed, costs, strict=True))
    if then >= (1 - _LEAST_GAIN) * now:
        return None
    slowest = max(each, key=each.__getitem__)
    return Proposal(proposed, slowest, each[slowest] / min(each.values()))


Numbered: TypeAlias = tuple[int, int, Any]
"""Step, number and batch of a microbatch."""


class DeviceBatches(Iterator[Numbered]):
    """Batches that come to a device, the next one possibly before it is needed.

    Args:
        batches: microbatches in order, in host memory.
        copies: copies them to the device.
    """

    def __init__(self, batches: Generator[Numbered, None, None], copies: BatchCopies) -> None:
        self._batches, self._copies = batches, copies
        self._begun: tuple[int, int, Callable[[], Any]] | Exception | None = None

    def __next__(self) -> Numbered:
        begun, self._begun = self._begun, None
        if isinstance(begun, Exception):
            raise begun
        step, number, batch = begun or self._begin()
        return step, number, batch()

    def begin(self) -> None:
        """Fetch the next batch and start its copy; what this raises comes when it is needed."""
        try:
            self._begun = self._begin()
        except StopIteration:
            return
        except Exception as error:
            self._begun = error

    def close(self) -> None:
        """Fetch no more, and forget what was begun."""
        self._begun = None
        self._batches.close()

    def _begin(self) -> tuple[int, int, Callable[[], Any]]:
        step, number, batch = next(self._batches)
        return step, number, self._copies.begin(batch)


class Microbatches:
    """Assigns microbatches to ranks; the result of a step does not depend on the assignment.

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
        self._runtime = runtime
        self._transport = runtime.transport
        self._parts = parts
        # In rounds all ranks wait for the slowest one, however many microbatches it has.
        every = 0 if config.shards_gradients else config.balance_every
        self._balancer = Balancer(every, parts.placement.mesh.of_each_replica)
        self._may_change = parts.task_state.may_change_data
        if parts.loader.copies.stream is not None:
            parts.train_step.meanwhile = self._begin_next
        self.stream = self._open(progress.step)

    def regroup(self, step: int, state: OptimizerState | None) -> None:
        """Assign all microbatches to a new group of ranks.

        Args:
            step: number of the next step, from 0.
            state: whole state of the optimizer if it is sharded.
        """
        self._balancer.restart(self._parts.placement.mesh.of_each_replica)
        self._assign(self._balancer.ranges, step, state)

    def balance(self, step: int, result: StepResult) -> Proposal | None:
        """Reassign microbatches by measured speed, if that gains enough; returns the assignment.

        Args:
            step: number of the next step, from 0.
            result: result of the newest one.
        """
        mesh = self._parts.placement.mesh

        def times() -> list[Times]:
            # The ranks of a replica wait for one another inside a microbatch: one of them will do.
            of_ranks = result.rank_times()
            return [of_ranks[ranks[0]] for ranks in mesh.replicas]

        proposal = self._balancer.propose(times)
        if proposal is None:
            return None
        of_ranks = mesh.of_ranks(proposal.ranges)
        carries = self._parts.train_step.carries
        if carries is not None:
            carries.redistribute(of_ranks)
        self.share_places(step)
        self._assign(proposal.ranges, step)
        return Proposal(of_ranks, mesh.replicas[proposal.slowest][0], proposal.slowdown)

    def share_places(self, step: int, all_known: bool = False) -> None:
        """Tell all ranks how far the parts of a stream have been read; a collective.

        Args:
            step: number of the next step, from 0.
            all_known: whether some ranks may not know what was told before.
        """
        share_places(self._parts.loader, self._runtime, step, all_known)

    def share_places_if_due(self, step: int) -> None:
        """The same, every few steps."""
        if step % _PLACES_EVERY == 0:
            self.share_places(step)

    def refetch(self, step: int) -> None:
        """Restart the stream at a step, with new worker processes if there are any."""
        self.stream.close()  # exceptions may refer to it for long, and so keep its workers alive
        self.stream = self._open(step)

    def close(self) -> None:
        """Fetch no more."""
        self.stream.close()

    def _assign(
        self, ranges: Sequence[Assigned], step: int, state: OptimizerState | None = None
    ) -> None:
        self._parts.train_step.assign(self._parts.placement.mesh.of_ranks(ranges), state)
        self._balancer.use(ranges)
        self.refetch(step)

    def _begin_next(self) -> None:
        """Begin the next step's first batch; within the next step, the device hides all others."""
        if not self._parts.loader.is_settled(self._parts.placement.step + 1, self._may_change):
            return
        assert isinstance(self.stream, DeviceBatches), "there is a stream for copies to a device"
        watch, computed = self._parts.train_step.watch, torch.Event(self._runtime.device)
        computed.record()
        watch.compute_s += watch.lap()
        self.stream.begin()
        if computed.query():  # the device has waited for this process
            watch.data_s += watch.lap()

    def _open(self, step: int) -> Generator[Numbered, None, None] | DeviceBatches:
        ranges = self._parts.placement.mesh.of_ranks(self._balancer.ranges)
        microbatches = ranges[self._transport.rank]
        loader = self._parts.loader
        batches = loader.stream(microbatches, step, self._parts.total_steps)
        return batches if self._runtime.is_on_cpu else DeviceBatches(batches, loader.copies)
