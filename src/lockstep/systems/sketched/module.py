"""Base of sketched layers: tensors that are made from two integers, and checks of arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError, TaskError
from lockstep.systems.sketched.products import SEEDS


def check_positive(**sizes: int) -> None:
    """Refuse sizes that are not positive.

    Raises:
        ConfigError: names the first one.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name}={size}: must be at least 1")


def check_rank(low_rank: int, features: dict[str, int]) -> None:
    """Refuse a sketch that is larger than every side of its layer.

    Args:
        low_rank: size of the sketch of one term.
        features: sizes of the layer's sides by name.

    Raises:
        ConfigError: names the sizes, and the largest possible one.
    """
    most = max(features.values())
    if low_rank > most:
        shown = ", ".join(f"{name}={size}" for name, size in features.items())
        raise ConfigError(
            f"low_rank={low_rank}: larger than the layer ({shown}); take at most {most}"
        )


def check_floats(subject: str, tensor: Tensor) -> None:
    """Refuse a tensor of integers: a sketch of them would be rounded at each sum.

    Raises:
        TaskError: names its dtype.
    """
    if not tensor.is_floating_point():
        raise TaskError(
            f"{subject} is {tensor.dtype}, and sketches are of floating-point numbers; convert it, "
            "as with x.float()"
        )


def part_of(name: str, part: range | None, size: int) -> range:
    """A range of features, all if it is None.

    Raises:
        ConfigError: it is empty, or not within the layer.
    """
    part = range(size) if part is None else part
    if part.step != 1 or not 0 <= part.start < part.stop <= size:
        raise ConfigError(f"{name}={part}: must be a range of step 1 within 0 … {size}")
    return part


class Sketched(nn.Module):
    """A module with tensors that are a function of seed and layer.

    These tensors are buffers that are not part of its `state_dict`, which has the buffer
    `sketch_key`, int64 [seed, layer], instead. If another key is loaded, they are made again.
    """

    sketch_key: Tensor

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """The tensors by name, on the module's device; for subclasses to implement."""
        raise NotImplementedError

    def keep_key(self, seed: int | None, layer: int, device: torch.device | str | None) -> None:
        """Register the key and the tensors made from it; call it after the parameters are made.

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
            buffer = getattr(self, name)
            if buffer.is_meta:
                setattr(self, name, tensor)
            elif not torch.equal(buffer, tensor):  # writing equal values would change its version
                buffer.copy_(tensor)
