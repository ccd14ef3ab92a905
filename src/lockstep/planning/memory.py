"""The memory of a rank in a layout: measured in another one, and moved by what differs."""

from __future__ import annotations

from lockstep.engine.step.memory import kept_bytes
from lockstep.parallel.fold import rows_needed
from lockstep.parallel.layout import Range
from lockstep.parallel.reduction import SMALL_BYTES
from lockstep.planning.facts import Facts, Group, Timed
from lockstep.planning.layouts import Layout


def peak_bytes(facts: Facts, layout: Layout) -> int:
    """The most memory that a rank has in a layout, as the system counts it: its resident set.

    The nearest measurement, and what the two layouts keep otherwise of parameters, gradients,
    optimizer state and messages. Where no ranks were trained together, memory that libraries hold
    for connections is taken as that of two ranks.
    """
    group = _trained_together(facts, layout)
    if group is not None:
        whole = Layout(group.num_ranks)
        total = group.peak_bytes - _kept(facts, whole) + _kept(facts, layout)
        return total + _messages(facts, layout) - _messages(facts, whole)
    own = layout.most_microbatches(facts.num_microbatches)
    near = _nearest(facts, layout, own)
    total = near.peak_bytes - _kept_alone(facts, near) + _kept(facts, layout)
    if layout.num_ranks > layout.pp * layout.tp:
        total += _messages(facts, layout)
        total += facts.group_bytes if near.pp * near.tp == 1 else 0
    return total


def _trained_together(facts: Facts, layout: Layout) -> Group | None:
    """The ranks of this host that were as many as a layout has, where each is a replica.

    They say nothing of ranks on several hosts, which are not forked from a process of their host
    and so have more in memory for themselves.
    """
    if layout.pp * layout.tp > 1:
        return None
    return next((g for g in facts.groups if g.num_ranks == layout.num_ranks), None)


def _nearest(facts: Facts, layout: Layout, own: int) -> Timed:
    same = [t for t in facts.timed if (t.pp, t.tp) == (layout.pp, layout.tp)]
    return min(same, key=lambda timed: abs(timed.num_microbatches - own))


def _kept_alone(facts: Facts, timed: Timed) -> int:
    """What a measured replica kept: it was the only one, with a few microbatches."""
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
    )


def _messages(facts: Facts, layout: Layout) -> int:
    """Memory for the nodes of others, beyond that of two ranks with one node each."""
    column = facts.anatomy.gradient_bytes // (layout.pp * layout.tp)
    num_nodes = sum(layout.num_nodes(facts.num_microbatches))
    if layout.sharding == "none" and num_nodes * column <= SMALL_BYTES:
        return (num_nodes - 2) * column
    return 0
