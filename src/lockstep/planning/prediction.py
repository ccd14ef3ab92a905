"""From what was measured to a step in a layout: its time, memory and messages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.parallel.reduction import SMALL_BYTES
from lockstep.planning.layouts import Layout, peak_bytes
from lockstep.planning.measurements import Facts, Timed
from lockstep.planning.network import Network


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
    own = layout.most_microbatches(facts.num_microbatches)
    return most.sent_bytes / (layout.pp * layout.tp) * own / most.num_microbatches
