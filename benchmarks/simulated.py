"""What one rank of many sends in a step: real exchanges on a transport that moves nothing.

A rank's calls depend on numbers of ranks, microbatches and elements, never on what is in a tensor.
So one rank alone makes those of any group, with tensors that have no memory (torch's meta device),
and what it would send is counted. `tests/benchmarks/test_simulated.py` compares real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, log2
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.ahead import AheadTransport
from lockstep.comm.calls import CallGroup
from lockstep.comm.transport import Sending, Transport, collective, count_broadcast
from lockstep.engine.step.sums import Headers, num_values
from lockstep.parallel.axes import DepthAxis
from lockstep.parallel.exchange import Leaves, copy_to_next, gather_slices
from lockstep.parallel.fold import BLOCK, Segment
from lockstep.parallel.hosts import Hosts
from lockstep.parallel.layout import Range, split
from lockstep.parallel.mesh import Mesh, rearranged
from lockstep.parallel.norm import sharded_block_norms
from lockstep.parallel.reduction import OrderedReduction, Ways
from lockstep.parallel.rounds import Rounds

META = torch.device("meta")
ITEM_BYTES = 4
"""Parameters and gradients are float32."""
NUM_SCALARS = 4
"""Sums of a loss and a metric, and their weights."""
NUM_HEADER = num_values(0)


class SimulatedTransport(AheadTransport):
    """One rank of a group whose others are not there.

    All-gathers are those of `AheadTransport`. A broadcast or a barrier of a library counts as a
    binomial tree: log2 of the number of ranks.

    Attributes:
        messages: messages that this rank has sent, by kind of call.
    """

    name = "simulated"

    def __init__(self, rank: int, size: int, shares_memory: bool = False) -> None:
        """Be a rank of a group.

        Args:
            rank: the rank.
            size: number of ranks.
            shares_memory: whether small all-gathers are reads of the others' memory.
        """
        super().__init__()
        self.rank, self.size = rank, size
        self.messages: Counter[str] = Counter()
        self._shares_memory = shares_memory
        self._kind = "all-gather"
        self.call_group: CallGroup = self.call_ring.start(rank, size)

    @property
    def why_messages(self) -> str | None:
        """See `Transport.why_messages`."""
        return "" if self._shares_memory else None

    @collective
    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """See `Transport.all_gather`."""
        num_own, size = counts[self.rank], out.itemsize
        self.traffic.add(num_own * (self.size - 1) * size, (out.numel() - num_own) * size)
        if not self._shares_memory:
            self._gather(out, range(self.size), counts)

    @collective
    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """See `Transport.all_to_all`."""
        to_self, size = send_counts[self.rank], send.itemsize
        self.traffic.add((sum(send_counts) - to_self) * size, (recv.numel() - to_self) * size)
        self._begin(send, send_counts, send_offsets, recv, recv_counts)

    @collective
    def broadcast(self, tensor: Tensor, root: int) -> None:
        """See `Transport.broadcast`."""
        count_broadcast(self, tensor, root)
        self.messages["broadcast"] += ceil(log2(self.size))

    @collective
    def barrier(self) -> None:
        """See `Transport.barrier`."""
        self.traffic.add(0, 0)
        self.messages["barrier"] += ceil(log2(self.size))

    def send(self, tensor: Tensor, to: int) -> Sending:
        """See `Transport.send`."""
        self.traffic.add(tensor.nbytes, 0)
        self.messages["stages"] += 1
        return Sending(self, None, tensor)

    def finish_sending(self, handle: Any) -> None:
        """See `Transport.finish_sending`."""

    def gather_json(self, value: Any) -> list[Any]:
        """As if all ranks had the same value; two all-gathers."""
        for num_bytes in (8, len(str(value))):
            own = torch.empty(num_bytes, dtype=torch.uint8, device=META)
            self.all_gather(own, own.new_empty(self.size * num_bytes), [num_bytes] * self.size)
        return [value] * self.size

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """See `Transport.subgroup`."""
        own = next(group for group in groups if self.rank in group)
        return SimulatedTransport(list(own).index(self.rank), len(own))

    def close(self) -> None:
        """See `Transport.close`."""

    def runs_ahead(self, num_bytes: int) -> bool:
        """See `Transport.runs_ahead`; as over gloo."""
        return True

    def _trade(
        self, given: Sequence[tuple[Tensor, int]], taken: Sequence[tuple[Tensor, int]]
    ) -> None:
        self.messages["all-gather"] += len(given)

    def _begin(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> str:
        others = [n for rank, n in enumerate(send_counts) if n and rank != self.rank]
        # One receiver alone, as of a slice's copy, is not what grows.
        self.messages["all-to-all" if len(others) > 1 else "to next"] += len(others)
        return "begun"

    def _end(self, handle: Any) -> None:
        pass


@dataclass
class Part:
    """What a part of a step sends.

    Attributes:
        messages: messages by kind of call.
        sent_bytes: bytes for other ranks.
        received_bytes: bytes from other ranks.
        calls: number of calls of the transport.
        seconds: seconds that this process was busy with it.
    """

    messages: Counter[str] = field(default_factory=Counter)
    sent_bytes: int = 0
    received_bytes: int = 0
    calls: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Case:
    """A group of ranks, and what it trains.

    Attributes:
        ranks: number of ranks.
        per_host: ranks of each host; 1 for exchanges without hosts.
        parameters: number of parameters, float32.
        microbatches: number of microbatches of a step.
        sharding: as in the config.
        bucket_bytes: as in the config.
        blocks: number of blocks of the model, whose parameters come and go with `sharding`.
    """

    ranks: int
    per_host: int = 1
    parameters: int = 100_000_000
    microbatches: int = 16_384
    sharding: str = "none"
    bucket_bytes: int = 8 << 20
    blocks: int = 1

    def leaves(self, device: torch.device = META) -> Leaves:
        """What is summed."""
        numel = self.parameters // self.blocks // BLOCK * BLOCK
        segments = [Segment(torch.float32, numel)] * self.blocks
        specs = [[(0, torch.Size([numel]))]] * self.blocks
        return Leaves(segments, specs, NUM_SCALARS, self.microbatches, device)

    def hosts(self, rank: int, inside: Transport) -> Hosts | str:
        """The hosts of the ranks, for one of them."""
        if self.per_host == 1:
            return ""
        ranges = split(self.ranks, -(-self.ranks // self.per_host))
        return Hosts(ranges, inside)


class Step:
    """A step of one rank; the same calls on a real transport and on a simulated one.

    Attributes:
        world: transport between all ranks.
        parts: what each part of it has sent, by name.
        layout_s: seconds to lay it out, as after each loss of a rank.
    """

    def __init__(
        self,
        case: Case,
        world: Transport,
        messages: Counter[str],
        inside: Transport | None = None,
        device: torch.device = META,
    ) -> None:
        """Lay it out.

        Args:
            case: what is trained.
            world: transport between all ranks.
            messages: where messages are counted.
            inside: transport between the ranks of this one's host.
            device: device of the tensors; one that has memory for a real transport.
        """
        self.parts: dict[str, Part] = {}
        self._case, self.world, self._messages, self._device = case, world, messages, device
        started = perf_counter()
        leaves = case.leaves(device)
        # What a recovery does first: the last rank's place is filled again by another one.
        columns = rearranged(Mesh.of(case.microbatches, case.ranks).columns, 1)
        in_rounds = case.sharding in ("gradients", "parameters")
        mesh = Mesh(case.microbatches, columns, in_rounds=in_rounds)
        self._num_replicas = len(mesh.replicas)
        self._reduction: OrderedReduction | Rounds
        if in_rounds:
            self._reduction = Rounds(
                world, leaves, num_replicas=self._num_replicas, bucket_bytes=case.bucket_bytes
            )
        else:
            hosts = case.hosts(world.rank, inside or world)
            self._reduction = OrderedReduction(
                world, leaves, mesh.microbatches, num_header=NUM_HEADER,
                bucket_bytes=case.bucket_bytes, gather=case.sharding == "none",
                ways=Ways(hosts=hosts, is_measured=False),
            )  # fmt: skip
        self.layout_s = perf_counter() - started

    def run(self) -> None:
        """Send what a step sends."""
        case, world, made = self._case, self.world, self._reduction
        if case.sharding == "parameters":
            rounds = -(-case.microbatches // self._num_replicas)
            with self._part("parameters"):
                # Each block before its forward pass, and once more before its backward pass.
                for _ in range(2 * rounds):
                    self._gather(made)
        with self._part("gradients"):
            if isinstance(made, Rounds):
                self._run_rounds(made)
            else:
                made.restart()
                made.reduce()
        if isinstance(made, Rounds):
            with self._part("headers"):
                own = torch.zeros(NUM_HEADER, dtype=torch.float64, device=self._device)
                everyone = own.new_empty(world.size * NUM_HEADER)
                world.all_gather(own, everyone, [NUM_HEADER] * world.size)
        if case.sharding != "none":
            self._run_sharded(made)

    def _run_rounds(self, made: Rounds) -> None:
        leaves = self._case.leaves(self._device)
        scalars = torch.zeros(NUM_SCALARS, dtype=torch.float64, device=self._device)
        tensors = [torch.zeros(s.numel, device=self._device) for s in leaves.segments]
        made.restart()
        for first in range(0, self._case.microbatches, self._num_replicas):
            has_one = first + self.world.rank < self._case.microbatches
            made.add(tensors if has_one else None, scalars)

    def _run_sharded(self, made: OrderedReduction | Rounds) -> None:
        world, own = self.world, []
        for of_segment, slices in zip(made.total.segments, made.slices, strict=True):
            first, last = slices[world.rank]
            own.append(of_segment if isinstance(made, Rounds) else of_segment[first:last])
        with self._part("norm"):
            sharded_block_norms(world, own, made.slices)
        with self._part("copies"):
            for part, slices in zip(own, made.slices, strict=True):
                copy_to_next(world, part, part.new_empty(len(slices[world.rank - 1])), slices)
        if self._case.sharding != "parameters":
            with self._part("parameters"):
                self._gather(made)

    def _gather(self, made: OrderedReduction | Rounds) -> None:
        for number, (segment, slices) in enumerate(
            zip(self._case.leaves(self._device).segments, made.slices, strict=True)
        ):
            flat = torch.zeros(segment.numel, device=self._device)
            if isinstance(made, Rounds):
                gather_slices(self.world, flat, slices)
            else:
                made.gather_slices(flat, number)

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        traffic, messages = self.world.traffic, Counter(self._messages)
        before = traffic.sent_bytes, traffic.received_bytes, traffic.num_calls
        started = perf_counter()
        yield
        self.parts[name] = Part(
            self._messages - messages,
            traffic.sent_bytes - before[0],
            traffic.received_bytes - before[1],
            traffic.num_calls - before[2],
            perf_counter() - started,
        )


def simulated(case: Case, rank: int) -> Step:
    """A step of a rank whose others are not there."""
    hosts = case.hosts(rank, SimulatedTransport(0, 1))
    inside = SimulatedTransport(0, 1)
    if isinstance(hosts, Hosts):
        own = next(ranks for ranks in hosts.ranges if rank in range(*ranks))
        inside = SimulatedTransport(rank - own.first, len(own), shares_memory=True)
    world = SimulatedTransport(rank, case.ranks)
    step = Step(case, world, world.messages, inside)
    step.run()
    return step


def looked_at(case: Case) -> list[int]:
    """Ranks that stand for all: the first one, which is a host's, one inside a host, the last."""
    inside = case.ranks // 2 + min(case.per_host, case.ranks) // 2 - 1
    return sorted({0, max(inside, 0), case.ranks - 1})


def most(case: Case) -> dict[str, Part]:
    """For each part of a step, the most that any of these ranks sends."""
    found: dict[str, Part] = {}
    for rank in looked_at(case):
        step = simulated(case, rank)
        for name, part in step.parts.items():
            known = found.setdefault(name, Part())
            known.messages |= part.messages
            known.sent_bytes = max(known.sent_bytes, part.sent_bytes)
            known.received_bytes = max(known.received_bytes, part.received_bytes)
            known.calls = max(known.calls, part.calls)
            known.seconds = max(known.seconds, part.seconds)
    return found


def messages_of_a_microbatch(stages: int) -> int:
    """Messages that a stage in the middle of a pipeline sends for a microbatch."""
    transport = SimulatedTransport(stages // 2, stages)
    axis = DepthAxis([Range(s, s + 1) for s in range(stages)], transport)
    axis.enter(stages // 2)
    axis.send_outputs([torch.zeros(8)])
    axis.send_gradients([torch.zeros(8)])
    return transport.messages["stages"]


def seconds_of(function: Callable[[], object]) -> float:
    """Seconds that a call takes, at least, of three."""
    spent = []
    for _ in range(3):
        started = perf_counter()
        function()
        spent.append(perf_counter() - started)
    return min(spent)


def header_seconds(ranks: int) -> float:
    """Seconds that reading the headers of all ranks takes."""
    values = torch.zeros(ranks, NUM_HEADER, dtype=torch.float64).numpy()
    return seconds_of(lambda: Headers(values))
