"""Images as they could be as well: mirrored, and moved by some pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def augmented(images: Tensor, shift: int, generator: torch.Generator) -> Tensor:
    """Each image mirrored or not, and moved by up to `shift` pixels in both directions.

    Args:
        images: [N, C, H, W]; what comes in from beyond an edge is 0.
        shift: the most that an image is moved by, in pixels.
        generator: of the microbatch, on the CPU, so that all devices draw the same.

    Returns:
        As many images of the same shape and dtype.
    """
    count, _, height, width = images.shape
    mirrored = torch.rand(count, generator=generator) < 0.5
    offsets = torch.randint(0, 2 * shift + 1, (2, count, 1), generator=generator)
    rows = offsets[0] + torch.arange(height)
    columns = offsets[1] + torch.arange(width)
    columns = torch.where(mirrored[:, None], columns.flip(1), columns)
    padded = F.pad(images, (shift,) * 4)
    place = torch.arange(count)[:, None, None].to(images.device)
    rows, columns = rows[:, :, None].to(images.device), columns[:, None, :].to(images.device)
    return padded.permute(0, 2, 3, 1)[place, rows, columns].permute(0, 3, 1, 2).contiguous()
