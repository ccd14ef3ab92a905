"""A mean teacher: 40 labelled digits, and 1,360 that the teacher labels when it is sure enough.

The teacher is the moving average of the student's parameters (Tarvainen and Valpola 2017, "Mean
teachers are better role models"), by `ls.hooks.EMA`. It sees the images as they are, the student
sees them moved (Sohn et al. 2020, "FixMatch").
"""

from functools import cached_property
from typing import Literal, cast

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lockstep as ls

NUM_TRAIN, NUM_VAL, PER_CLASS = 1400, 200, 4
"""Images for training and validation, the others are for testing; labelled ones of each class."""


class TeacherConfig(ls.TrainConfig):
    consistency: float = 2.0
    """Weight of what the teacher says of unlabelled images; 0 learns from the labels alone."""
    threshold: float = 0.5
    """Probability above which the teacher's opinion of an unlabelled image counts."""
    decay: float = 0.99
    """Part of the teacher that a step leaves."""

    batch_size: int = 200
    num_microbatches: int = 4
    epochs: int = 60
    lr: float = 3e-3
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine")
    eval_every: int = 70
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=70)
    watch: str = "accuracy"
    watch_mode: Literal["min", "max"] = "max"


def moved(images: Tensor) -> Tensor:
    """Images [N, 1, 8, 8], each turned and shifted a little at random, with noise."""
    angle, *shift = (0.2 * torch.randn(3, len(images), device=images.device)).unbind()
    cos, sin = angle.cos(), angle.sin()
    rows = [torch.stack([cos, -sin, shift[0]], 1), torch.stack([sin, cos, shift[1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False) + 0.1 * torch.randn_like(images)


class MeanTeacher(ls.Task):
    Config = TeacherConfig
    config: TeacherConfig

    def __init__(self, config: TeacherConfig | None = None) -> None:
        super().__init__(config)
        self.teacher = ls.hooks.EMA(self.config.decay)

    def hooks(self) -> list[ls.Hook]:
        return [self.teacher]

    def build_model(self) -> nn.Module:
        """Images [N, 1, 8, 8] to logits [N, 10]."""
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10),
        )  # fmt: skip

    @cached_property
    def digits(self) -> tuple[Tensor, Tensor]:
        """All images [N, 1, 8, 8] and their labels [N]."""
        images, labels = load_digits(return_X_y=True)
        return torch.tensor(images / 16).float().reshape(-1, 1, 8, 8), torch.tensor(labels)

    @cached_property
    def is_labelled(self) -> Tensor:
        """Whether a training image's label may be used [NUM_TRAIN]: the first few of each class."""
        classes = F.one_hot(self.digits[1][:NUM_TRAIN], 10)
        earlier = (classes.cumsum(0) * classes).sum(1)
        return earlier <= PER_CLASS

    def dataset(self, split: str) -> TensorDataset:
        images, labels = self.digits
        if split == "train":
            return TensorDataset(images[:NUM_TRAIN], labels[:NUM_TRAIN], self.is_labelled)
        end = NUM_TRAIN + NUM_VAL
        part = slice(NUM_TRAIN, end) if split == "val" else slice(end, None)
        return TensorDataset(images[part], labels[part])

    def sample_weights(self) -> Tensor:
        """Half of the samples, on average, are labelled."""
        count = self.is_labelled.sum()
        return torch.where(self.is_labelled, 1 / count, 1 / (NUM_TRAIN - count))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> ls.Loss:
        images, labels, is_labelled = batch
        logits = model(moved(images))
        with torch.no_grad():
            certainty, opinion = self.teacher(model, images).softmax(1).max(1)
        is_sure = (certainty > self.config.threshold) & ~is_labelled
        agreed = F.cross_entropy(logits, opinion, reduction="none")[is_sure].sum()
        supervised = F.cross_entropy(logits, labels, reduction="none")[is_labelled].sum()
        return ls.Loss(
            supervised + self.config.consistency * agreed,
            len(images),
            {"sure": (is_sure.sum(), (~is_labelled).sum())},
        )

    def evaluate(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> ls.Loss:
        """Loss and accuracy of the teacher; and the student's accuracy, to compare."""
        images, labels = batch
        logits = cast(Tensor, self.teacher(model, images))
        correct = (logits.argmax(1) == labels).sum()
        student_correct = (model(images).argmax(1) == labels).sum()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        count = len(labels)
        return ls.Loss(
            loss, count, {"accuracy": (correct, count), "student": (student_correct, count)}
        )


if __name__ == "__main__":
    ls.main(MeanTeacher())
