"""Logged values of each kind as plain data, and pictures as PNG files."""

from __future__ import annotations

import hashlib
import io
import math
import struct
import sys
import zlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.config.parsing import shown
from lockstep.data.random import kept_generators
from lockstep.engine.events import Logged, picture_path
from lockstep.errors import TaskError

KINDS = ("scalar", "text", "histogram", "image", "figure")
NUM_BINS = 64
_MOST_LETTERS = 1 << 16

_CHUNK = 1 << 20
"""Elements of a histogram that are counted at a time: a copy in float64 takes 8 MiB."""
_MOST_PIXELS = 1 << 24
_SIGNATURE = b"\x89PNG\r\n\x1a\n"

_COLOURS = {1: 0, 3: 2, 4: 6}
"""The format's colour types by number of channels: grey, RGB, RGB with alpha."""

Pixels = NDArray[np.uint8]
"""Shape (height, width, channels), with 1, 3 or 4 channels."""


def logged(step: int, name: str, value: Any, kind: str | None) -> Logged:
    """The event for a value.

    Args:
        step: number of optimizer steps that have been done.
        name: of the value.
        value: number, text, tensor, array or picture.
        kind: one of `KINDS`; None to derive it from the value.

    Raises:
        TaskError: the value has no kind, several possible ones, or not this one.
    """
    where = f"lockstep.log({name!r})"
    if kind is not None and kind not in KINDS:
        raise TaskError(f"{where}: kind={shown(kind)}: must be one of {', '.join(KINDS)}")
    array = _tensor(where, value)
    kind = kind or _kind(where, value, array)
    if kind == "scalar":
        return Logged(step=step, name=name, kind=kind, value=_number(where, value, array))
    if kind == "text":
        return Logged(step=step, name=name, kind=kind, text=_text(where, value))
    if kind == "histogram":
        if array is None:
            raise _wrong(where, kind, value, "a tensor or array of numbers")
        return Logged(step=step, name=name, kind=kind, value=histogram(array))
    png = _picture(where, kind, value, array)
    width, height = size_of(png)
    about = {
        "path": picture_path(name, step),
        "sha256": hashlib.sha256(png).hexdigest(),
        "width": width,
        "height": height,
    }
    return Logged(step=step, name=name, kind=kind, value=about, png=png)


def histogram(values: Tensor) -> dict[str, Any]:
    """Counts in `NUM_BINS` bins of equal width between the least and the greatest finite value.

    Args:
        values: of any shape, real; looked at in float64.

    Returns:
        `min`, `max` (0 if no value is finite), `counts`, `num_nan`, `num_inf`. A value on the edge
        of two bins is counted in the upper one, the greatest in the last.
    """
    flat = values.detach().reshape(-1)
    parts = [flat[first : first + _CHUNK] for first in range(0, flat.numel(), _CHUNK)]
    least, greatest, num_nan, num_inf = math.inf, -math.inf, 0, 0
    for part in parts:
        part = part.to("cpu", torch.float64)
        num_nan += int(part.isnan().sum())
        num_inf += int(part.isinf().sum())
        part = part[part.isfinite()]
        if len(part):
            least, greatest = min(least, part.min().item()), max(greatest, part.max().item())
    counts = torch.zeros(NUM_BINS, dtype=torch.int64)
    # The width of the widest range overflows float64, and that of numbers near 0 loses digits.
    scale = 0.25 if greatest > 1 or least < -1 else 2.0**60
    width = greatest * scale - least * scale
    for part in parts if least <= greatest else ():
        part = part.to("cpu", torch.float64)
        part = part[part.isfinite()]
        places = torch.zeros_like(part, dtype=torch.int64)
        if width > 0:
            parts_of_width = (part * scale - least * scale) / width
            places = (parts_of_width * NUM_BINS).long().clamp_(0, NUM_BINS - 1)
        counts += torch.bincount(places, minlength=NUM_BINS)
    is_any = least <= greatest
    return {
        "min": least if is_any else 0.0,
        "max": greatest if is_any else 0.0,
        "counts": counts.tolist(),
        "num_nan": num_nan,
        "num_inf": num_inf,
    }


def encoded(image: Pixels) -> bytes:
    """A PNG file (W3C Portable Network Graphics, third edition, section 5).

    Written by hand: the encoders of libraries differ in their bytes, and may not be installed.
    """
    height, width, channels = image.shape
    lines = image.reshape(height, width * channels)
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 0] = 2  # filter type 2, Up: differences to the row above, which compress better
    rows[0, 1:] = lines[0]
    rows[1:, 1:] = lines[1:] - lines[:-1]
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOURS[channels], 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return _SIGNATURE + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def _tensor(where: str, value: Any) -> Tensor | None:
    """The elements of a tensor or array, sharing its memory; None for other values.

    Raises:
        TaskError: its elements cannot be read, or are not real numbers.
    """
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype.kind not in "buif":
            raise TaskError(f"{where}: is an array of {value.dtype}; must be of real numbers")
        # A copy: torch warns about read-only memory, and does not support negative strides.
        is_whole = value.dtype.kind in "bi" or (value.dtype.kind == "u" and value.itemsize < 8)
        kind = np.uint8 if value.dtype == np.uint8 else np.int64 if is_whole else np.float64
        return torch.from_numpy(np.array(value, kind, order="C"))
    if not isinstance(value, Tensor):
        return None
    if value.layout != torch.strided or value.device.type == "meta":
        raise TaskError(
            f"{where}: is a tensor of {value.layout} on {value.device}; log a dense one with values"
        )
    if value.is_complex() or value.is_quantized:
        raise TaskError(f"{where}: is a tensor of {value.dtype}; must be of real numbers")
    return value.detach().to(torch.int64) if value.dtype == torch.bool else value.detach()


def _kind(where: str, value: Any, array: Tensor | None) -> str:
    """The kind of a value.

    Raises:
        TaskError: it has several possible ones, or none.
    """
    if isinstance(value, (bool, int, float)):
        return "scalar"
    if isinstance(value, str):
        return "text"
    if _is_a(value, "matplotlib.figure", "Figure"):
        return "figure"
    if _is_a(value, "PIL.Image", "Image"):
        return "image"
    if array is None:
        raise TaskError(
            f"{where}: is a {type(value).__name__}; log a number, text, tensor, array, image of "
            "PIL or figure of matplotlib"
        )
    if array.ndim == 0:
        return "scalar"
    may_be_image = array.dtype == torch.uint8 or array.is_floating_point()
    if not may_be_image or not _has_shape_of_image(array):
        return "histogram"
    if array.dtype == torch.uint8:
        return "image"
    raise TaskError(
        f"{where}: a tensor of shape {tuple(array.shape)} may be an image or a histogram; say "
        "kind='image' or kind='histogram'"
    )


def _has_shape_of_image(array: Tensor) -> bool:
    shape = tuple(array.shape)
    return array.ndim == 2 or (array.ndim == 3 and (shape[2] in (1, 3, 4) or shape[0] in (1, 3, 4)))


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether a value is of a class, without importing its module."""
    kind = getattr(sys.modules.get(module), name, None)
    return isinstance(kind, type) and isinstance(value, kind)


def _number(where: str, value: Any, array: Tensor | None) -> float:
    if array is not None and array.numel() == 1:
        return float(array.item())
    if isinstance(value, (bool, int, float)):
        try:
            return float(value)
        except OverflowError:
            raise TaskError(f"{where}: is greater than a float64 can be") from None
    raise _wrong(where, "scalar", value, "a number, or a tensor of one element")


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(where, "text", value, "a str")
    left = len(value) - _MOST_LETTERS
    return value if left <= 0 else f"{value[:_MOST_LETTERS]}… ({left:,} more characters)"


def _wrong(where: str, kind: str, value: Any, wanted: str) -> TaskError:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, (Tensor, np.ndarray)) else ""
    return TaskError(
        f"{where}: kind={kind!r}: is a {type(value).__name__}{shape}; must be {wanted}"
    )


def _picture(where: str, kind: str, value: Any, array: Tensor | None) -> bytes:
    """The content of a PNG file."""
    if kind == "figure":
        if not _is_a(value, "matplotlib.figure", "Figure"):
            raise _wrong(where, kind, value, "a matplotlib.figure.Figure")
        return drawn(value)
    if _is_a(value, "PIL.Image", "Image"):
        return encoded(pixels_of_image(where, value))
    if array is None or not _has_shape_of_image(array):
        raise _wrong(
            where, kind, value,
            "an image of PIL, or a tensor or array of shape HxW, HxWx1, HxWx3, HxWx4, 1xHxW, 3xHxW "
            "or 4xHxW",
        )  # fmt: skip
    return encoded(pixels(where, array, channels_first=isinstance(value, Tensor)))


def drawn(figure: Any) -> bytes:
    """A `matplotlib.figure.Figure` as a PNG file; without time and version, as they differ."""
    file = io.BytesIO()
    with kept_generators():
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def pixels(where: str, image: Tensor, channels_first: bool) -> Pixels:
    """The pixels of a tensor.

    Args:
        where: its name, for messages.
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
    if image.mode.startswith(("I", "F")):  # PIL would clip values above 255
        raise TaskError(
            f"{where}: an image of PIL of mode {image.mode}; must have 8 bits for each channel: "
            "scale its values to [0, 1] and log them as an array"
        )
    try:
        found = np.array(image if image.mode in ("L", "RGB", "RGBA") else image.convert("RGBA"))
    except (OSError, ValueError) as error:
        raise TaskError(f"{where}: an image of PIL that cannot be converted: {error}") from None
    return found[..., None] if found.ndim == 2 else found


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
