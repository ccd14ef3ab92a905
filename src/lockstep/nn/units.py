"""What a mesh deals out of a model: each block of a pipeline, and each shard of a layer."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.parallel.layout import Range

WHOLE = -1
"""In place of a number: of no block, or not cut into shards."""


class Unit(NamedTuple):
    """A part of a model that is never divided."""

    block: int = WHOLE
    """Number of the block; `WHOLE` if the model is no pipeline."""
    shard: int = WHOLE
    """Number of the shard; `WHOLE` for what is not cut, which all ranks of a stage hold."""


EVERYWHERE = Unit()
"""What every rank holds."""


class Holding(NamedTuple):
    """The blocks and shards that a rank holds."""

    blocks: tuple[Range, ...]
    """One range for each of its stages."""
    shards: Range

    def has(self, unit: Unit) -> bool:
        """Whether a unit is among them."""
        has_block = any(_is_in(unit.block, blocks) for blocks in self.blocks)
        return has_block and _is_in(unit.shard, self.shards)


def _is_in(number: int, range_: Range) -> bool:
    return number == WHOLE or range_.first <= number < range_.last
