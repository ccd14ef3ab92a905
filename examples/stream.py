"""Streaming text: a character model on the sources of Python's own standard library.

The training data are a stream: files are opened one after another, nothing is indexed, and nobody
knows how many windows there will be. So `steps` is set.
"""

import hashlib
import itertools
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import lockstep as ls

NUM_TOKENS = 128
"""Tokens are ASCII codes."""
HELD_OUT = 10
"""Every tenth file is for validation."""


class StreamConfig(ls.TrainConfig):
    context: int = 64
    """Characters in a window."""
    width: int = 128
    """Units of the recurrent layer."""
    num_eval: int = 512
    """Windows of an evaluation."""

    batch_size: int = 64
    num_microbatches: int = 4
    steps: int | None = 400
    lr: float = 4e-3
    clip_norm: float | None = 1.0
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=20)
    data: ls.DataConfig = ls.DataConfig(shuffle_buffer=2000)
    eval_every: int = 200
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=200)


def sources() -> list[Path]:
    """Modules at the top of the standard library, in the order of their names."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))


def ascii_of(path: Path) -> bytes:
    """A file's text without what is not ASCII."""
    return path.read_bytes().decode("utf-8", "ignore").encode("ascii", "ignore")


class Windows(IterableDataset[Tensor]):
    """Windows of `length` tokens from one file after another, from `limit` windows at most."""

    def __init__(self, paths: list[Path], length: int, limit: int | None = None) -> None:
        self.paths, self.length, self.limit = paths, length, limit

    def shard(self, index: int, count: int) -> "Windows":
        """Every `count`-th file, for `data.stream_shards`."""
        return Windows(self.paths[index::count], self.length, self.limit)

    def __iter__(self) -> Iterator[Tensor]:
        return itertools.islice(self.windows(), self.limit)

    def windows(self) -> Iterator[Tensor]:
        """All windows that do not overlap; the rest of a file is left out."""
        for path in self.paths:
            tokens = torch.tensor(list(ascii_of(path)))
            for start in range(0, len(tokens) - self.length + 1, self.length):
                yield tokens[start : start + self.length]


class CharModel(nn.Module):
    """Tokens [B, T] to logits of the next ones [B, T, NUM_TOKENS]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width // 2)
        self.recurrent = nn.GRU(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        states_BTD, _ = self.recurrent(self.tokens(tokens_BT))
        return cast(Tensor, self.head(states_BTD))


class SourceText(ls.Task):
    Config = StreamConfig
    config: StreamConfig

    def data_digest(self) -> str:
        """Of all files: another Python has other ones."""
        digest = hashlib.sha256()
        for path in sources():
            digest.update(path.name.encode() + path.read_bytes())
        return digest.hexdigest()

    def build_model(self) -> CharModel:
        return CharModel(self.config.width)

    def dataset(self, split: str) -> Windows | None:
        paths, length = sources(), self.config.context + 1
        if split == "train":
            return Windows([p for i, p in enumerate(paths) if i % HELD_OUT], length)
        return Windows(paths[::HELD_OUT], length, self.config.num_eval) if split == "val" else None

    def loss(self, model: CharModel, batch: Tensor) -> ls.Loss:
        logits, next_tokens = model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()
        loss = F.cross_entropy(logits, next_tokens, reduction="sum")
        correct = (logits.argmax(1) == next_tokens).sum()
        return ls.Loss(loss, len(next_tokens), {"accuracy": (correct, len(next_tokens))})


if __name__ == "__main__":
    ls.main(SourceText())
