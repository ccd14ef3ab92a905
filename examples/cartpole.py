"""REINFORCE: a policy learns to balance a pole on a cart, from episodes that it plays itself.

There are no data. A sample is an episode: it is played in `loss`, all of a microbatch at once, with
random numbers that depend on seed, step and microbatch only.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import lockstep as ls

GRAVITY, CART_KG, POLE_KG, HALF_POLE_M, FORCE_N, DT_S = 9.8, 1.0, 0.1, 0.5, 10.0, 0.02
MOST_M, MOST_RAD = 2.4, math.radians(12)
"""An episode ends when the cart or the pole is beyond these."""


class CartPoleConfig(ls.TrainConfig):
    longest: int = 200
    """Steps after which an episode ends in any case."""
    discount: float = 0.99

    batch_size: int = 64
    num_microbatches: int = 4
    epochs: int = 40
    lr: float = 0.01
    eval_every: int = 10
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=10)
    watch: str = "balanced_steps"
    watch_mode: Literal["min", "max"] = "max"


def moved(state: Tensor, pushes_right: Tensor) -> Tensor:
    """States [N, 4] one time step later: position, velocity, angle, angular velocity (SI units)."""
    _, v, angle, spin = state.unbind(1)
    force = torch.where(pushes_right, FORCE_N, -FORCE_N)
    total = CART_KG + POLE_KG
    pole = POLE_KG * HALF_POLE_M
    push = (force + pole * spin.square() * angle.sin()) / total
    turn = (GRAVITY * angle.sin() - angle.cos() * push) / (
        HALF_POLE_M * (4 / 3 - POLE_KG * angle.cos().square() / total)
    )
    gain = push - pole * turn * angle.cos() / total
    return state + DT_S * torch.stack([v, gain, spin, turn], 1)


class CartPole(ls.Task):
    Config = CartPoleConfig
    config: CartPoleConfig

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def dataset(self, split: str) -> TensorDataset | None:
        """Numbers of episodes: an epoch is one batch."""
        return None if split == "test" else TensorDataset(torch.arange(self.config.batch_size))

    def loss(self, model: nn.Module, batch: tuple[Tensor]) -> ls.Loss:
        log_probs, alive = self.play(model, len(batch[0]))
        with torch.no_grad():
            returns = torch.zeros_like(alive)
            for step in reversed(range(len(alive))):
                after = returns[step + 1] if step + 1 < len(alive) else 0.0
                returns[step] = alive[step] * (1 + self.config.discount * after)
            # The mean over the microbatch's episodes at the same time is the baseline.
            baseline = returns.sum(1) / alive.sum(1).clamp(min=1)
            advantage = (returns - baseline[:, None]) * alive
        loss = -(advantage * log_probs).sum() / self.config.longest
        return ls.Loss(loss, alive.shape[1], self.balanced(alive))

    def evaluate(self, model: nn.Module, batch: tuple[Tensor]) -> ls.Loss:
        _, alive = self.play(model, len(batch[0]), is_greedy=True)
        return ls.Loss(-alive.sum(), alive.shape[1], self.balanced(alive))

    def balanced(self, alive: Tensor) -> dict[str, tuple[Tensor, int]]:
        return {"balanced_steps": (alive.sum(), alive.shape[1])}

    def play(
        self, model: nn.Module, num_episodes: int, is_greedy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Episodes side by side.

        Returns:
            For each step and episode [T, N], the log probability of what was done, and 1 while the
            episode goes on, else 0.
        """
        state = 0.1 * torch.rand(num_episodes, 4) - 0.05
        goes_on = torch.ones(num_episodes)
        log_probs, alive = [], []
        for _ in range(self.config.longest):
            logits = model(state).squeeze(1)
            threshold = 0.5 if is_greedy else torch.rand(num_episodes)
            is_right = logits.detach().sigmoid() > threshold
            log_probs.append(-nn.functional.softplus(torch.where(is_right, -logits, logits)))
            alive.append(goes_on)
            state = moved(state, is_right)
            is_up = (state[:, 0].abs() < MOST_M) & (state[:, 2].abs() < MOST_RAD)
            goes_on = goes_on * is_up
            if not goes_on.any():
                break
        return torch.stack(log_probs), torch.stack(alive)


if __name__ == "__main__":
    ls.main(CartPole())
