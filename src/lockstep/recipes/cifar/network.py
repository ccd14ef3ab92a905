"""A small residual network (He et al., arXiv:1512.03385, section 4.2)."""

from __future__ import annotations

from torch import Tensor, nn

_STAGES = 3


class ResidualNetwork(nn.Module):
    """Three stages of residual blocks, of which each halves the image and doubles the width.

    The mean over an image is a sum, so it has a deterministic gradient on GPUs, which adaptive
    pooling has not.
    """

    def __init__(self, channels: int, width: int, depth: int, classes: int) -> None:
        """Make the layers.

        Args:
            channels: of an image.
            width: channels of the first stage.
            depth: number of layers with weights along the longest way: 6n + 2.
            classes: number of labels.
        """
        super().__init__()
        num_blocks = (depth - 2) // (2 * _STAGES)
        layers: list[nn.Module] = [*_convolution(channels, width, 1), nn.ReLU()]
        before = width
        for stage in range(_STAGES):
            for block in range(num_blocks):
                stride = 2 if stage and not block else 1
                layers.append(_Block(before, width << stage, stride))
                before = width << stage
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of images [N, channels, H, W], float32."""
        features: Tensor = self.features(images)
        logits: Tensor = self.classifier(features.mean(dim=(2, 3)))
        return logits


class _Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            *_convolution(inputs, outputs, stride), nn.ReLU(), *_convolution(outputs, outputs, 1)
        )
        is_same = inputs == outputs and stride == 1
        self.around = (
            nn.Identity()
            if is_same
            else nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        )
        self.relu = nn.ReLU()

    def forward(self, images: Tensor) -> Tensor:
        result: Tensor = self.relu(self.inner(images) + self.around(images))
        return result


def _convolution(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs)]
