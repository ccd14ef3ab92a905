"""The layouts that a task can be trained in, and what each rank then computes and exchanges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from lockstep.config.train_config import Sharding
from lockstep.parallel.layout import leaves, merges
from lockstep.parallel.mesh import Mesh, sizes_of_replicas
from lockstep.planning.facts import Anatomy

SHARDINGS: tuple[Sharding, ...] = ("none", "optimizer", "gradients", "parameters")


@dataclass(frozen=True)
class Layout:
    """Ranks, and what each of them holds.

    Attributes:
        num_ranks: number of ranks.
        pp: stages of a replica.
        tp: ranks that share the layers of each stage.
        sharding: what each rank keeps its slice of only.
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
        """What it adds to a config."""
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
        anatomy: what the model is made of.
        replicas: stages, and ranks of each stage, of the replicas that were measured.
    """
    return [layout for number in sorted(set(numbers)) for layout in _of(number, anatomy, replicas)]


def _of(number: int, anatomy: Anatomy, replicas: Set[tuple[int, int]]) -> Iterator[Layout]:
    kinds = [kind for kind in SHARDINGS if kind == "none" or (number > 1 and anatomy.can(kind))]
    yield from (Layout(number, sharding=kind) for kind in kinds)
    for pp, tp in sizes_of_replicas(number, anatomy.num_shards):
        if pp * tp > 1 and pp <= anatomy.num_blocks and (pp, tp) in replicas:
            yield Layout(number, pp, tp)
