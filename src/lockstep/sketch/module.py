"""What sketched layers have in common: tensors that are made from two integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.sketch.signs import SEEDS


class Sketched(nn.Module):
    """A module with tensors that are a function of seed and layer.

    These tensors are buffers that its `state_dict` leaves out. The buffer `sketch_key`, int64
    [seed, layer], is there instead; what is loaded with another key is made anew.
    """

    sketch_key: Tensor

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """The tensors by name, on the module's device; subclasses say how they are made."""
        raise NotImplementedError

    def keep_key(self, seed: int | None, layer: int, device: torch.device | str | None) -> None:
        """Register the key and what is made from it, once the parameters are there.

        Args:
            seed: seed; None draws one from torch's global generator, as start values are.
            layer: number of the layer among those of the same seed.
            device: of the module.
        """
        if seed is None:
            seed = int(torch.randint(SEEDS - 1, (), device="cpu"))
        for name, tensor in self.made(seed, layer).items():
            self.register_buffer(name, tensor, persistent=False)
        key = torch.tensor([seed, layer], dtype=torch.int64, device=device)
        self.register_buffer("sketch_key", key)

    def key(self) -> tuple[int, int]:
        """Seed and layer."""
        seed, layer = self.sketch_key.tolist()
        return seed, layer

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name, tensor in self.made(*self.key()).items():
            kept = getattr(self, name)
            if kept.is_meta:
                setattr(self, name, tensor)
            elif not torch.equal(kept, tensor):  # what is right already keeps its version
                kept.copy_(tensor)
