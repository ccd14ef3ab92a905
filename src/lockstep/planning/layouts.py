"""The layouts that a task can be trained in, and the memory of their ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from lockstep.config.train_config import Sharding
from lockstep.engine.step.memory import kept_bytes
from lockstep.parallel.fold import rows_needed
from lockstep.parallel.layout import Range, leaves, merges
from lockstep.parallel.mesh import Mesh, sizes_of_replicas
from lockstep.parallel.reduction import SMALL_BYTES
from lockstep.planning.measurements import Anatomy, Facts, Group, Timed

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
        said = [f"{key}={size}" for key, size in items.items() if size > 1]
        return said + ([] if self.sharding == "none" else [f"sharding={self.sharding}"])

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
    """The peak memory (resident set) of a rank in a layout.

    The nearest measurement, corrected for the difference of the two layouts in parameters,
    gradients, optimizer state and messages. Where no ranks were trained together, the memory of
    libraries for connections is taken as that of two ranks.
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
    )


def _messages(facts: Facts, layout: Layout) -> int:
    """Memory for the nodes of others, beyond that of two ranks with one node each."""
    column = facts.anatomy.gradient_bytes // (layout.pp * layout.tp)
    num_nodes = sum(layout.num_nodes(facts.num_microbatches))
    if layout.sharding == "none" and num_nodes * column <= SMALL_BYTES:
        return (num_nodes - 2) * column
    return 0
