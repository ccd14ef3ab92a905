"""Layouts that a task can be trained in, and what a step in them costs, from what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from lockstep.config.train_config import Sharding, TrainConfig
from lockstep.engine.checkpoint.share import ROUND_BYTES
from lockstep.engine.step.memory import kept_bytes
from lockstep.parallel.fold import rows_needed
from lockstep.parallel.layout import Range, leaves, merges
from lockstep.parallel.mesh import Mesh, sizes_of_replicas
from lockstep.parallel.reduction import SMALL_BYTES
from lockstep.planning.measurements import Anatomy, Facts, Group, Network, Timed

SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Layout:
    """Ranks, and what each of them holds.

    Attributes:
        num_ranks: number of ranks.
        pp: stages of a replica.
        tp: ranks that share the layers of each stage.
        sharding: what is sharded over the ranks of a column.
    """

    num_ranks: int
    pp: int = 1
    tp: int = 1
    sharding: Sharding = "none"

    @property
    def num_replicas(self) -> int:
        """Replicas that the ranks make."""
        return self.num_ranks // (self.pp * self.tp)

    @property
    def name(self) -> str:
        """Sizes of the axes of data, depth and features, as `lockstep verify --meshes` has them."""
        of = "" if self.sharding == "none" else f"+{self.sharding}"
        return f"{self.num_replicas}x{self.pp}x{self.tp}{of}"

    @property
    def overrides(self) -> list[str]:
        """The `key=value` items of a config for it."""
        items = {"mesh.pp": self.pp, "mesh.tp": self.tp}
        parts = [f"{key}={size}" for key, size in items.items() if size > 1]
        return parts + ([] if self.sharding == "none" else [f"sharding={self.sharding}"])

    def most_microbatches(self, num_microbatches: int) -> int:
        """Microbatches of the replica that computes most."""
        return -(-num_microbatches // self.num_replicas)

    def num_nodes(self, num_microbatches: int) -> list[int]:
        """Nodes of the canonical tree that each replica sends."""
        if self.num_replicas >= num_microbatches:  # a leaf for each of the first ones
            return [1] * num_microbatches + [0] * (self.num_replicas - num_microbatches)
        ranges = Mesh.of(num_microbatches, self.num_replicas).microbatches
        return [len(merges(leaves(own), num_microbatches)[1]) for own in ranges]


def layouts(
    numbers: Sequence[int], anatomy: Anatomy, replicas: Set[tuple[int, int]]
) -> list[Layout]:
    """All layouts of some numbers of ranks, fewest ranks first.

    Args:
        numbers: numbers of ranks.
        anatomy: sizes and parts of the model.
        replicas: stages, and ranks of each stage, of the replicas that were measured.
    """
    return [layout for number in sorted(set(numbers)) for layout in _of(number, anatomy, replicas)]


def _of(number: int, anatomy: Anatomy, replicas: Set[tuple[int, int]]) -> Iterator[Layout]:
    kinds = [kind for kind in SHARDINGS if kind == "none" or (number > 1 and anatomy.can(kind))]
    yield from (Layout(number, sharding=kind) for kind in kinds)
    for pp, tp in sizes_of_replicas(number, anatomy.num_shards):
        if pp * tp > 1 and pp <= anatomy.num_blocks and (pp, tp) in replicas:
            yield Layout(number, pp, tp)


def peak_bytes(facts: Facts, layout: Layout) -> int:
    """The peak memory of a rank in a layout: its resident set, or what it allocates of a device."""
    return max(_in_steps(facts, layout), _at_checkpoints(facts, layout))


def _at_checkpoints(facts: Facts, layout: Layout) -> int:
    """Memory of a device while slices come together, when steps have freed what they can."""
    whole = facts.anatomy
    if facts.device == "cpu" or layout.sharding == "none":  # the host's has copies too
        return 0
    kept, freed = _kept(facts, layout), whole.largest_bytes
    if layout.sharding == "optimizer":
        freed = whole.gradient_bytes
    elif layout.sharding == "parameters":
        freed += whole.largest_bytes
    largest = min(max(ROUND_BYTES, whole.largest_bytes), whole.gradient_bytes)
    return kept - freed + largest + 3 * largest // 4  # received and sent


def _in_steps(facts: Facts, layout: Layout) -> int:
    """The peak of steps.

    The nearest measurement, corrected for the difference of the two layouts in parameters,
    gradients, optimizer state and messages. Where no ranks were trained together, the memory of
    libraries for connections is taken as that of two ranks.
    """
    # With slices of gradients on a device, what ranks exchange is counted.
    is_measured = facts.device == "cpu" or layout.sharding in ("none", "optimizer")
    group = _trained_together(facts, layout)
    if group is not None and is_measured:
        whole = Layout(group.num_ranks)
        total = group.peak_bytes - _kept(facts, whole) + _kept(facts, layout)
        return total + _messages(facts, layout) - _messages(facts, whole)
    num_own = layout.most_microbatches(facts.num_microbatches)
    near = _nearest(facts, layout, num_own)
    total = near.peak_bytes - _kept_alone(facts, near) + _kept(facts, layout)
    if layout.num_ranks > layout.pp * layout.tp:
        total += _messages(facts, layout)
        total += facts.group_bytes if near.pp * near.tp == 1 and is_measured else 0
    return total


def _trained_together(facts: Facts, layout: Layout) -> Group | None:
    """The ranks of this host that were as many as a layout has, where each is a replica.

    They do not stand for ranks on several hosts, which are not forked from a process of their host
    and so share less memory.
    """
    if layout.pp * layout.tp > 1:
        return None
    return next((g for g in facts.groups if g.num_ranks == layout.num_ranks), None)


def _nearest(facts: Facts, layout: Layout, own: int) -> Timed:
    same = [t for t in facts.timed if (t.pp, t.tp) == (layout.pp, layout.tp)]
    return min(same, key=lambda timed: abs(timed.num_microbatches - own))


def _kept_alone(facts: Facts, timed: Timed) -> int:
    """The memory of a measured replica, which was the only one and had few microbatches."""
    whole, part = facts.anatomy, timed.pp * timed.tp
    rows = rows_needed(Range(0, timed.num_microbatches), timed.num_microbatches)
    return ((2 + rows) * whole.gradient_bytes + whole.state_bytes) // part


def _kept(facts: Facts, layout: Layout) -> int:
    whole, part = facts.anatomy, layout.pp * layout.tp
    return kept_bytes(
        layout.sharding,
        layout.num_replicas,
        facts.num_microbatches,
        parameters=whole.gradient_bytes // part,
        gradient=whole.gradient_bytes // part,
        largest=whole.largest_bytes // layout.tp,
        states=whole.state_bytes // part,
        copies=2 if facts.buddy else 1,
        whole_blocks=2 if facts.device == "cpu" else 1,  # where the next one comes ahead
    ) + _in_rounds(facts, layout)


def _in_rounds(facts: Facts, layout: Layout) -> int:
    """Memory of `Rounds`: a gradient of the largest block that is sent, and what comes of it.

    Activations may be at their most before the first gradient: those of others free nothing then.
    """
    if layout.sharding not in ("gradients", "parameters"):
        return 0
    sent, senders = facts.anatomy.largest_bytes, min(layout.num_replicas, facts.num_microbatches)
    bucket: int = TrainConfig.model_fields["bucket_bytes"].default
    early = facts.anatomy.gradient_bytes - sent if facts.device != "cpu" else 0
    return sent + early + min(bucket, sent * senders // layout.num_replicas)


def _messages(facts: Facts, layout: Layout) -> int:
    """Memory for the nodes of others, beyond that of two ranks with one node each."""
    column = facts.anatomy.gradient_bytes // (layout.pp * layout.tp)
    num_nodes = sum(layout.num_nodes(facts.num_microbatches))
    if layout.sharding == "none" and num_nodes * column <= SMALL_BYTES:
        return (num_nodes - 2) * column
    return 0


@dataclass(frozen=True)
class Prediction:
    """The predicted cost of a step in a layout.

    Attributes:
        layout: the ranks.
        num_hosts: hosts that they are on.
        compute_s: seconds in which the slowest rank computes, fetches batches and steps.
        exchange_s: seconds in which ranks sum their gradients.
        waiting_s: seconds in which ranks wait for the slowest of them, or for resources of their
            host.
        samples_per_s: samples of all ranks for each second.
        efficiency: throughput of a rank, relative to a single rank.
        peak_bytes: the most memory that a rank has.
        sent_bytes: bytes that a rank sends in a step.
        num_spares: ranks that have nothing to compute.
        fits: whether the ranks of a host fit into its memory.
    """

    layout: Layout
    num_hosts: int
    compute_s: float
    exchange_s: float
    waiting_s: float
    samples_per_s: float
    efficiency: float
    peak_bytes: int
    sent_bytes: float
    num_spares: int
    fits: bool

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.exchange_s + self.waiting_s


def predict(facts: Facts, network: Network, layout: Layout, ranks_per_host: int) -> Prediction:
    """The predicted cost of a step in a layout.

    Args:
        facts: measurements of the task.
        network: costs of collectives.
        layout: the ranks.
        ranks_per_host: most ranks of a host.
    """
    per_host = min(layout.num_ranks, ranks_per_host)
    num_microbatches = facts.num_microbatches
    compute, exchange, waiting = _parts(facts, network, layout, per_host)
    beyond = max(0.0, exchange + waiting + surplus_seconds(facts, layout, per_host))
    exchange = min(exchange, beyond)
    waiting = beyond - exchange
    total = compute + beyond
    working = min(layout.num_replicas, num_microbatches)
    alone = step_seconds(facts, Layout(1), num_microbatches, 1)
    peak = peak_bytes(facts, layout)
    return Prediction(
        layout=layout,
        num_hosts=network.num_hosts(layout.num_ranks),
        compute_s=compute,
        exchange_s=exchange,
        waiting_s=waiting,
        samples_per_s=facts.batch_size / total,
        efficiency=alone / (total * layout.num_ranks),
        peak_bytes=peak,
        sent_bytes=sent_bytes(facts, layout),
        num_spares=layout.num_ranks - working * layout.pp * layout.tp,
        fits=peak * per_host <= facts.memory_bytes,
    )


def surplus_seconds(facts: Facts, layout: Layout, per_host: int) -> float:
    """Seconds by which a step of ranks that trained together on this host exceeds its parts.

    Messages between ranks that have just computed, and arrive at different times, cost more than
    messages alone; and ranks that wait take time from others if there are more ranks than cores.
    The surplus is that of the most similar measured group, and the same for all layouts.

    Args:
        facts: measurements of the task.
        layout: the ranks.
        per_host: ranks of a host.
    """
    if layout.num_replicas == 1 or per_host == 1 or not facts.groups:
        return 0.0
    near = min(facts.groups, key=lambda group: abs(group.num_ranks - per_host))
    network = Network(facts.messages, near.num_ranks)
    return near.step_s - sum(_parts(facts, network, Layout(near.num_ranks), near.num_ranks))


def _parts(
    facts: Facts, network: Network, layout: Layout, per_host: int
) -> tuple[float, float, float]:
    """Seconds of computing, of messages, and of waiting for the slowest."""
    most = layout.most_microbatches(facts.num_microbatches)
    compute = step_seconds(facts, layout, most, per_host)
    working = min(layout.num_replicas, facts.num_microbatches)
    waiting = compute * excess_of_slowest(facts.jitter, working)
    return compute, exchange_seconds(facts, network, layout), waiting


def step_seconds(facts: Facts, layout: Layout, num_microbatches: int, per_host: int) -> float:
    """Seconds of a replica's step without other replicas.

    Linear in the number of microbatches between those that were measured, and beyond them.

    Args:
        facts: measurements of the task.
        layout: whose replica.
        num_microbatches: microbatches that it computes.
        per_host: ranks of its host, which compute at the same time.
    """
    same = [t for t in facts.timed if (t.pp, t.tp) == (layout.pp, layout.tp) and not t.jitter]
    exact = [t for t in same if (t.num_ranks, t.num_microbatches) == (per_host, num_microbatches)]
    if exact:
        return exact[0].step_s
    busy = min({t.num_ranks for t in same}, key=lambda n: (abs(n - per_host), -n))
    points = sorted(
        ((t.num_microbatches, t.step_s) for t in same if t.num_ranks == busy), key=lambda p: p[0]
    )
    seconds = _line(points, num_microbatches)
    # With more ranks than cores, ranks wait for a core.
    return seconds * max(1.0, per_host / max(facts.cores, busy))


def _line(points: Sequence[tuple[int, float]], at: int) -> float:
    if len(points) == 1:
        return points[0][1] * at / points[0][0]
    ends = [p for p in points if p[0] >= at][:1] or points[-1:]
    upper = points.index(ends[0])
    (x0, y0), (x1, y1) = points[max(0, upper - 1)], points[max(1, upper)]
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), 0.0)


def excess_of_slowest(jitter: Sequence[float], num: int) -> float:
    """By how much the slowest of several steps exceeds their mean, relative to the mean.

    The expected greatest of `num` draws from the measured ones, with replacement.
    """
    count = len(jitter)
    if num < 2 or not count:
        return 0.0
    mean = sum(jitter) / count
    weights = (((i + 1) / count) ** num - (i / count) ** num for i in range(count))
    greatest = sum(value * weight for value, weight in zip(sorted(jitter), weights, strict=True))
    return max(0.0, greatest / mean - 1.0)


def exchange_seconds(facts: Facts, network: Network, layout: Layout) -> float:
    """Seconds in which the ranks of a column sum gradients, and gather what they have stepped."""
    ranks, column = layout.num_replicas, _column_bytes(facts, layout)
    if ranks == 1:
        return 0.0
    if layout.sharding in ("gradients", "parameters"):
        rounds = layout.most_microbatches(facts.num_microbatches)
        once = network.seconds("all_to_all", column, ranks)
        gathers = 2 * rounds if layout.sharding == "parameters" else 1
        return rounds * once + gathers * network.seconds("all_gather", column, ranks)
    nodes = layout.num_nodes(facts.num_microbatches)
    total = sum(nodes) * column
    if layout.sharding == "none" and total <= SMALL_BYTES:
        seconds = network.seconds("all_gather", total, ranks)
        adding = network.seconds("ordered_sum", column, ranks)
        # With a node of each rank both are the same call, and the second has the additions too.
        return max(adding, seconds) if sum(nodes) == ranks else seconds + adding / 2
    seconds = network.seconds("ordered_sum", column, ranks)
    # A rank that has no node still adds up its slice of the others', who send all of theirs.
    more = max(0.0, sum(nodes) / ranks - 1.0)
    seconds += more * network.seconds("all_to_all", column, ranks)
    if layout.sharding == "optimizer" and facts.buddy:
        seconds += network.seconds("to_next", column / ranks, ranks)
    return seconds


def sent_bytes(facts: Facts, layout: Layout) -> float:
    """Bytes that a rank sends in a step: to its column, and to the others of its replica."""
    ranks, column = layout.num_replicas, _column_bytes(facts, layout)
    inside = _inside_bytes(facts, layout)
    if ranks == 1:
        return inside
    others = (ranks - 1) / ranks
    if layout.sharding in ("gradients", "parameters"):
        rounds = layout.most_microbatches(facts.num_microbatches)
        gathers = 2 * rounds if layout.sharding == "parameters" else 1
        return inside + (rounds + gathers) * column * others
    nodes = layout.num_nodes(facts.num_microbatches)
    if layout.sharding == "none" and sum(nodes) * column <= SMALL_BYTES:
        return inside + max(nodes) * column * (ranks - 1)
    buddy = column / ranks if layout.sharding == "optimizer" and facts.buddy else 0.0
    return inside + (max(nodes) + 1) * column * others + buddy


def _column_bytes(facts: Facts, layout: Layout) -> float:
    return facts.anatomy.gradient_bytes / (layout.pp * layout.tp)


def _inside_bytes(facts: Facts, layout: Layout) -> float:
    """What a rank sends to others of its replica, by microbatch as it was measured."""
    same = [t for t in facts.timed if (t.pp, t.tp) == (layout.pp, layout.tp)]
    most: Timed = max(same, key=lambda timed: timed.num_microbatches)
    num_own = layout.most_microbatches(facts.num_microbatches)
    return most.sent_bytes / (layout.pp * layout.tp) * num_own / most.num_microbatches
