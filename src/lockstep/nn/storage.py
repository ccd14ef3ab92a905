"""What a pipeline wants of whatever keeps the parameters of its blocks."""

from __future__ import annotations

from typing import Protocol


class Storage(Protocol):
    """Where the parameters of blocks are while these are not computed.

    Each call may talk to other ranks, and all of them make the same ones.
    """

    def unshard(self, block: int) -> None:
        """Have the parameters of a block, for a forward pass."""

    def reshard(self, block: int) -> None:
        """Free the parameters of a block, of which the forward pass is over."""

    def skip_forward(self) -> None:
        """Do for other ranks what a forward pass has to, without computing one."""
