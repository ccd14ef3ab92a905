"""Pictures as PNG files, with the same bytes on every rank."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.data.random import kept_generators
from lockstep.errors import TaskError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {1: 0, 3: 2, 4: 6}
"""The format's colour types by number of channels: grey, RGB, RGB with alpha."""
_MOST_PIXELS = 1 << 24

Pixels = NDArray[np.uint8]
"""Shape (height, width, channels), with 1, 3 or 4 channels."""


def pixels(where: str, image: Tensor, channels_first: bool) -> Pixels:
    """The pixels of a tensor.

    Args:
        where: what it is called, for messages.
        image: shape HxW, HxWxC or CxHxW; uint8, or float in [0, 1], which is rounded to 1/255.
        channels_first: whether it is CxHxW where it could be both.

    Raises:
        TaskError: it is empty, too large, of another dtype, or has other values.
    """
    _check_size(where, tuple(image.shape), image.numel())
    if image.ndim == 2:
        image = image[..., None]
    elif image.shape[0] in _COLOURS and (channels_first or image.shape[2] not in _COLOURS):
        image = image.permute(1, 2, 0)
    if image.dtype == torch.uint8:
        return np.ascontiguousarray(image.cpu().numpy())
    if not image.is_floating_point():
        raise TaskError(
            f"{where}: an image of {image.dtype}; must be uint8, or float in [0, 1]: divide by "
            "the greatest value"
        )
    image = image.to("cpu", torch.float64, copy=True)
    if not bool(((image >= 0) & (image <= 1)).all()):
        raise TaskError(
            f"{where}: an image with values from {image.min().item():.6g} to "
            f"{image.max().item():.6g}; those of floats must be in [0, 1]: clamp or scale it"
        )
    return np.ascontiguousarray((image * 255).round_().to(torch.uint8).numpy())


def pixels_of_image(where: str, image: Any) -> Pixels:
    """The pixels of a `PIL.Image.Image`: grey, RGB, or else RGB with alpha.

    Raises:
        TaskError: it is empty or too large, its pixels have more than 8 bits, or PIL cannot convert
            it.
    """
    _check_size(where, (image.height, image.width), 4 * image.height * image.width)
    if image.mode.startswith(("I", "F")):  # PIL would cut off what is above 255
        raise TaskError(
            f"{where}: an image of PIL of mode {image.mode}; must have 8 bits for each channel: "
            "scale its values to [0, 1] and log them as an array"
        )
    try:
        found = np.array(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: an image of PIL that cannot be converted: {error}") from None
    return found[..., None] if found.ndim == 2 else found


def encoded(image: Pixels) -> bytes:
    """A PNG file (W3C Portable Network Graphics, third edition, section 5).

    Written here, since encoders of libraries differ in their bytes, and need not be installed.
    """
    height, width, channels = image.shape
    lines = image.reshape(height, width * channels)
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 0] = 2  # the filter Up: differences to the row above, which compress better
    rows[0, 1:] = lines[0]
    rows[1:, 1:] = lines[1:] - lines[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def drawn(figure: Any) -> bytes:
    """A `matplotlib.figure.Figure` as a PNG file; without time and version, as they differ."""
    file = io.BytesIO()
    with kept_generators():
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def size_of(png: bytes) -> tuple[int, int]:
    """Width and height of a PNG file, in pixels."""
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _check_size(where: str, shape: tuple[int, ...], num_values: int) -> None:
    if not 0 < num_values <= 4 * _MOST_PIXELS:
        raise TaskError(
            f"{where}: an image of shape {shape}; must have at least one pixel and at most "
            f"{_MOST_PIXELS:,}"
        )
