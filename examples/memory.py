"""Reading on: a recurrent network whose memory goes from step to step (truncated backpropagation).

A text is cut into as many tracks as a global batch has samples. Each step reads the next few
characters of all tracks, with what the step before has left in memory. Gradients reach back to the
beginning of the step; the memory reaches back to the beginning of the track.
"""

import hashlib
import sysconfig
from functools import cached_property
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep as ls

NUM_TOKENS = 128
"""Tokens are ASCII codes."""
LONG = 512
"""Characters of a track of an evaluation."""
HELD_OUT = 10
"""Every tenth file is for validation."""

Windows = tuple[Tensor, Tensor]
"""Tokens [B, window + 1], and whether each row begins its track [B]."""


class MemoryConfig(ls.TrainConfig):
    window: int = 16
    """Characters of each track that a step reads."""
    width: int = 128
    """Units of the recurrent layer."""
    remembers: bool = True
    """Whether a step goes on from the memory of the step before."""
    num_eval: int = 64
    """Tracks of an evaluation, each read in one go."""

    batch_size: int = 64
    num_microbatches: int = 4
    steps: int | None = 800
    lr: float = 4e-3
    clip_norm: float | None = 1.0
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=20)
    eval_every: int = 200
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=200)


def text(is_held_out: bool) -> Tensor:
    """The ASCII codes of modules at the top of the standard library, one after another."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py"))
    chosen = [path for i, path in enumerate(paths) if (i % HELD_OUT == 0) == is_held_out]
    whole = "".join(path.read_bytes().decode("utf-8", "ignore") for path in chosen)
    return torch.frombuffer(bytearray(whole.encode("ascii", "ignore")), dtype=torch.uint8)


class Tracks(Dataset[Windows]):
    """Window w of track t is sample `w * num_tracks + t`: a batch has the same window of all."""

    def __init__(self, tokens: Tensor, num_tracks: int, window: int) -> None:
        self.num_tracks, self.window = num_tracks, window
        self.num_windows = (len(tokens) // num_tracks - 1) // window
        self.tokens = tokens[: len(tokens) // num_tracks * num_tracks].view(num_tracks, -1)

    def __len__(self) -> int:
        return self.num_tracks * self.num_windows

    def __getitem__(self, index: int) -> Windows:
        number, track = divmod(index, self.num_tracks)
        start = number * self.window
        row = self.tokens[track, start : start + self.window + 1]
        return row.long(), torch.tensor(number == 0)


class CharModel(nn.Module):
    """Tokens [B, T] and memory [B, D] to logits of the next tokens [B, T, NUM_TOKENS], memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, width // 2)
        self.recurrent = nn.GRU(width // 2, width, batch_first=True)
        self.head = nn.Linear(width, NUM_TOKENS)

    def forward(self, tokens_BT: Tensor, memory_BD: Tensor) -> tuple[Tensor, Tensor]:
        states_BTD, last_1BD = self.recurrent(self.tokens(tokens_BT), memory_BD.unsqueeze(0))
        return cast(Tensor, self.head(states_BTD)), last_1BD.squeeze(0)


class ReadOn(ls.Task):
    Config = MemoryConfig
    config: MemoryConfig

    def build_model(self) -> CharModel:
        return CharModel(self.config.width)

    def dataset(self, split: str) -> Tracks | None:
        return self._splits.get(split)

    @cached_property
    def _splits(self) -> dict[str, Tracks]:
        config = self.config
        num_tokens = config.num_eval * (LONG + 1)
        return {
            "train": Tracks(text(False), config.batch_size, config.window),
            "val": Tracks(text(True)[:num_tokens], config.num_eval, LONG),
        }

    def data_digest(self) -> str:
        """Of all text: another Python has another one."""
        digest = hashlib.sha256()
        for split in self._splits.values():
            digest.update(split.tokens.numpy().tobytes())
        return digest.hexdigest()

    def epoch_indices(self, epoch: int, generator: np.random.Generator) -> Tensor:
        """In the order of the text: what is read next must be next."""
        return torch.arange(len(self._splits["train"]))

    def carry(self, model: CharModel, batch: Windows) -> Tensor:
        """An empty memory [B, D]."""
        return torch.zeros(len(batch[0]), self.config.width)

    def loss(self, model: CharModel, batch: Windows, carry: Tensor) -> tuple[ls.Loss, Tensor]:
        tokens, is_start = batch
        memory = carry.masked_fill(is_start.unsqueeze(1), 0.0)
        if not self.config.remembers:
            memory = torch.zeros_like(memory)
        logits, memory = model(tokens[:, :-1], memory)
        logits, next_tokens = logits.flatten(0, 1), tokens[:, 1:].flatten()
        loss = F.cross_entropy(logits, next_tokens, reduction="sum")
        correct = (logits.argmax(1) == next_tokens).sum()
        return ls.Loss(loss, len(next_tokens), {"accuracy": (correct, len(next_tokens))}), memory


if __name__ == "__main__":
    ls.main(ReadOn())
