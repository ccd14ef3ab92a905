"""What all sketched layers refuse, each with one message."""

from __future__ import annotations

from torch import Tensor

from lockstep.errors import ConfigError, TaskError


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


def check_floats(what: str, tensor: Tensor) -> None:
    """Refuse a tensor of integers: a sketch of them would be rounded at each sum.

    Raises:
        TaskError: names its dtype.
    """
    if not tensor.is_floating_point():
        raise TaskError(
            f"{what} is {tensor.dtype}, and sketches are of floating-point numbers; convert it, "
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
