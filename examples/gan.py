"""A Wasserstein GAN with gradient penalty, in phases, on a ring of eight Gaussians.

Gulrajani et al. 2017, "Improved training of Wasserstein GANs".
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

NUM_MODES, DEVIATION = 8, 0.1
"""Gaussians on the unit circle, and their standard deviation."""
NUM_LATENT = 4
NUM_DIRECTIONS = 32


class GanConfig(ls.TrainConfig):
    width: int = 64
    """Units of each hidden layer."""
    critic_steps: int = 3
    """Steps of the critic before each step of the generator."""
    penalty: float = 1.0
    """Weight of the gradient penalty."""

    batch_size: int = 128
    num_microbatches: int = 4
    steps: int | None = 4000
    lr: float = 2e-3
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="linear")
    eval_every: int = 500
    eval_batch_size: int = 2048
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=500)


class Pair(nn.Module):
    """A critic, points [N, 2] to scores [N, 1], and a generator of points."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.critic = perceptron(2, width, 1)
        self.generator = perceptron(NUM_LATENT, width, 2)

    def forward(self, latent: Tensor) -> Tensor:
        """Latent vectors [N, NUM_LATENT] to points [N, 2]."""
        return cast(Tensor, self.generator(latent))

    def draw(self, like: Tensor) -> Tensor:
        """As many generated points as there are points in `like` [N, 2]."""
        return cast(Tensor, self(torch.randn(len(like), NUM_LATENT, device=like.device)))


def perceptron(inputs: int, width: int, outputs: int) -> nn.Sequential:
    """A perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip


def modes() -> Tensor:
    """Centers of the Gaussians [NUM_MODES, 2]."""
    angles = torch.arange(NUM_MODES) * (2 * math.pi / NUM_MODES)
    return torch.stack([angles.cos(), angles.sin()], 1)


def points(count: int, seed: int) -> Tensor:
    """Real points [count, 2], the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    which = torch.randint(NUM_MODES, (count,), generator=generator)
    return modes()[which] + DEVIATION * torch.randn(count, 2, generator=generator)


def sliced_wasserstein(one: Tensor, other: Tensor) -> Tensor:
    """Mean over directions of the Wasserstein-1 distance of two sets of points' projections.

    Args:
        one: points [N, 2].
        other: as many others.
    """
    angles = torch.arange(NUM_DIRECTIONS, device=one.device) * (math.pi / NUM_DIRECTIONS)
    directions = torch.stack([angles.cos(), angles.sin()])
    sorted_one, sorted_other = (one @ directions).sort(0)[0], (other @ directions).sort(0)[0]
    return (sorted_one - sorted_other).abs().mean()


class Gan(ls.Task):
    Config = GanConfig
    config: GanConfig

    def build_model(self) -> Pair:
        return Pair(self.config.width)

    def dataset(self, split: str) -> TensorDataset | None:
        if split == "train":
            return TensorDataset(points(8192, seed=1))
        return TensorDataset(points(2048, seed=2)) if split == "val" else None

    def phases(self) -> list[ls.Phase]:
        return [
            ls.Phase("critic", self.critic_loss, steps=self.config.critic_steps),
            ls.Phase("generator", self.generator_loss),
        ]

    def build_optimizer(self, model: Pair) -> dict[str, torch.optim.Optimizer]:
        def adam(part: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.Adam(part.parameters(), lr=self.config.lr, betas=(0.0, 0.9))

        return {"critic": adam(model.critic), "generator": adam(model.generator)}

    def critic_loss(self, model: Pair, batch: list[Tensor]) -> ls.Loss:
        (real,) = batch
        made = model.draw(real).detach()
        share = torch.rand(len(real), 1, device=real.device)
        between = (share * real + (1 - share) * made).requires_grad_()
        scores = model.critic(between).sum()
        (slopes,) = torch.autograd.grad(scores, between, create_graph=True)
        penalty = (slopes.norm(dim=1) - 1).square().sum()
        gap = model.critic(real).sum() - model.critic(made).sum()
        loss = self.config.penalty * penalty - gap
        return ls.Loss(loss, len(real), {"gap": (gap.detach(), len(real))})

    def generator_loss(self, model: Pair, batch: list[Tensor]) -> ls.Loss:
        (real,) = batch
        return ls.Loss(-model.critic(model.draw(real)).sum(), len(real))

    def evaluate(self, model: Pair, batch: list[Tensor]) -> ls.Loss:
        """Distance to real points; and of these from others, which no generator can be better than.

        `near` is the share of generated points within three deviations of a centre, `least_mode`
        the share of those that the centre with the fewest has.
        """
        (real,) = batch
        count = len(real)
        made = model.draw(real)
        others = points(count, seed=3).to(real.device)
        distances, nearest = torch.cdist(made, modes().to(real.device)).min(1)
        is_near = distances < 3 * DEVIATION
        least = torch.bincount(nearest[is_near], minlength=NUM_MODES).min()
        return ls.Loss.mean(
            sliced_wasserstein(made, real),
            count,
            {
                "floor": (count * sliced_wasserstein(others, real), count),
                "near": (is_near.sum(), count),
                "least_mode": (least, is_near.sum()),
            },
        )


if __name__ == "__main__":
    ls.main(Gan())
