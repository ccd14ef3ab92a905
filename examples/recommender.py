"""Two towers: users and items have rows of two tables, of which each step needs a few.

Users click on items that this script makes up: each user likes one genre best, and some items of a
genre are clicked far more often than others. The model learns to tell a clicked item from others.
"""

import hashlib
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep as ls
from lockstep.optim import RowAdagrad

NUM_GENRES = 40
FAVOURITE = 0.8
"""Part of a user's clicks that go to items of the genre that the user likes best."""

Clicks = tuple[Tensor, Tensor]
"""Users [B], and items [B, 1 + others]: the one that was clicked, then others."""


class RecommenderConfig(ls.TrainConfig):
    num_users: int = 20_000
    num_items: int = 4_000
    num_clicks: int = 200_000
    num_others: int = 20
    """Items drawn at random that a clicked one is to be told from."""
    width: int = 32
    """Elements of a row, and of what the towers are compared by."""
    table_lr: float = 0.2

    batch_size: int = 512
    num_microbatches: int = 4
    steps: int | None = 1000
    lr: float = 3e-3
    eval_every: int = 250
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=250)


class ClickData(Dataset[Clicks]):
    """Clicks with other items, which are drawn again each time."""

    def __init__(self, users: Tensor, items: Tensor, num_items: int, num_others: int) -> None:
        self.users, self.items = users, items
        self.num_items, self.num_others = num_items, num_others

    def __len__(self) -> int:
        return len(self.users)

    def __getitems__(self, indices: list[int]) -> Clicks:
        others = torch.randint(self.num_items, (len(indices), self.num_others))
        return self.users[indices], torch.cat([self.items[indices, None], others], dim=1)


def made(config: RecommenderConfig) -> tuple[Tensor, Tensor]:
    """Users and items of all clicks, each [num_clicks]."""
    generator = torch.Generator().manual_seed(0)
    count = config.num_clicks

    def drawn(below: int) -> Tensor:
        return torch.randint(below, (count,), generator=generator)

    users = drawn(config.num_users)
    favours = torch.rand(count, generator=generator) < FAVOURITE
    # A user's number says which genre it likes best, an item's number which genre it is of.
    genres = torch.where(favours, users % NUM_GENRES, drawn(NUM_GENRES))
    each = config.num_items // NUM_GENRES
    popular = torch.rand(count, generator=generator) ** 3
    return users, (popular * each).long() * NUM_GENRES + genres


class TwoTowers(nn.Module):
    """Users [B] and items [B, N] to how well they go together [B, N]."""

    def __init__(self, config: RecommenderConfig) -> None:
        super().__init__()
        rows = RowAdagrad(lr=config.table_lr)
        self.users = ls.nn.SparseEmbedding(config.num_users, config.width, rows, std=0.1)
        self.items = ls.nn.SparseEmbedding(config.num_items, config.width, rows, std=0.1)
        self.of_user = nn.Linear(config.width, config.width)
        self.of_item = nn.Linear(config.width, config.width)

    def forward(self, users_B: Tensor, items_BN: Tensor) -> Tensor:
        user_BD = self.of_user(self.users(users_B))
        item_BND = self.of_item(self.items(items_BN))
        return torch.einsum("bd,bnd->bn", user_BD, item_BND)


class Recommend(ls.Task):
    Config = RecommenderConfig
    config: RecommenderConfig

    def build_model(self) -> TwoTowers:
        return TwoTowers(self.config)

    @cached_property
    def _clicks(self) -> tuple[Tensor, Tensor]:
        return made(self.config)

    def dataset(self, split: str) -> ClickData | None:
        held_out = self.config.num_clicks // 20
        part = {"train": slice(held_out, None), "val": slice(None, held_out)}.get(split)
        if part is None:
            return None
        users, items = self._clicks
        return ClickData(users[part], items[part], self.config.num_items, self.config.num_others)

    def data_digest(self) -> str:
        users, items = self._clicks
        return hashlib.sha256(users.numpy().tobytes() + items.numpy().tobytes()).hexdigest()

    def collate(self, samples: Any) -> Any:
        return samples

    def lookups(self, batch: Clicks) -> dict[str, Tensor]:
        """The rows of each table that a batch needs, by the names of the modules."""
        users, items = batch
        return {"users": users, "items": items}

    def loss(self, model: TwoTowers, batch: Clicks) -> ls.Loss:
        scores = model(*batch)
        clicked = torch.zeros(len(scores), dtype=torch.int64)
        first = (scores.argmax(1) == clicked).sum()
        loss = F.cross_entropy(scores, clicked, reduction="sum")
        return ls.Loss(loss, len(scores), {"first": (first, len(scores))})


if __name__ == "__main__":
    ls.main(Recommend())
