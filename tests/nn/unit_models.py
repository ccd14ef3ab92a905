"""Models as users write them, whose own code calls a list of blocks; nothing in them is random."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import lockstep as ls

TOKENS, WIDTH = 13, 16


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Any]:
        mixed = (mask @ x) / mask.sum(-1, keepdim=True)
        return x + scale * self.down(F.gelu(self.up(self.norm(mixed)))), {"attention": None}


class Decoder(nn.Module):
    """A list of blocks around which there is a parameter of the model itself, and a tied head."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)  # before what the pass begins with
        self.words = nn.Embedding(TOKENS, WIDTH)
        self.place = nn.Parameter(torch.zeros(6, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head.weight = self.words.weight

    def start(self, tokens: Tensor) -> Tensor:
        started: Tensor = self.words(tokens) + self.place[: tokens.shape[1]]
        return started

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x = self.start(tokens)
        mask = torch.ones(tokens.shape[1], tokens.shape[1]).tril()
        for block in self.blocks:
            x, _ = block(x, mask=mask)
        return {"logits": self.head(self.norm(x))}


class NormedBlock(Block):
    """Averages over samples: its buffers change in forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> tuple[Tensor, Any]:
        y, rest = super().forward(x, mask=mask, scale=scale)
        return self.average(y.transpose(1, 2)).transpose(1, 2), rest


class Normed(Decoder):
    """Buffers change in blocks, and before them."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.BatchNorm1d(WIDTH)
        self.blocks = nn.ModuleList(NormedBlock() for _ in range(3))

    def start(self, tokens: Tensor) -> Tensor:
        averaged: Tensor = self.average(super().start(tokens).transpose(1, 2))
        return averaged.transpose(1, 2)


class Functional(Decoder):
    """Its head is the embedding's weight, by no other name."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.__dict__["head"] = lambda x: F.linear(x, self.words.weight)
        try:
            return super().forward(tokens)
        finally:
            del self.__dict__["head"]


class Around(Decoder):
    """A connection past all blocks."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        logits = super().forward(tokens)["logits"]
        return {"logits": logits + self.head(self.start(tokens))}


class Turned(Decoder):
    """Calls its blocks from the last to the first."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, mask = self.start(tokens), torch.eye(tokens.shape[1])
        for block in reversed(list(self.blocks)):
            x, _ = block(x, mask=mask)
        return {"logits": self.head(self.norm(x))}


class Moody(Decoder):
    """Calls its blocks the other way round for some batches."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, mask = self.start(tokens), torch.eye(tokens.shape[1])
        is_small = len(tokens) == 3  # not in the first microbatch
        for block in reversed(list(self.blocks)) if is_small else self.blocks:
            x, _ = block(x, mask=mask)
        return {"logits": self.head(self.norm(x))}


class Remembering(Decoder):
    """A block keeps something for later ones, which the model looks at."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, mask, seen = self.start(tokens), torch.eye(tokens.shape[1]), []
        handles = [
            block.norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
            for block in self.blocks
        ]
        for block in self.blocks:
            x, _ = block(x, mask=mask)
        for handle in handles:
            handle.remove()
        return {"logits": self.head(self.norm(x + seen[0]))}


class Twin(Decoder):
    """Calls a second list of blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList(Block() for _ in range(2))

    def start(self, tokens: Tensor) -> Tensor:
        x, mask = super().start(tokens), torch.eye(tokens.shape[1])
        for _ in range(2):
            for block in self.more:
                x, _ = block(x, mask=mask)
        return x


class Bare(nn.Module):
    """Without a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(TOKENS, TOKENS)

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.words(tokens)}


class Long(Decoder):
    """With eight blocks."""

    def __init__(self) -> None:
        super().__init__(8)


class Words(ls.Task):
    """Next tokens; subclasses have other models."""

    kind: type[nn.Module] = Decoder

    def begun(self) -> nn.Module:
        model, generator = self.kind(), torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) / 5
        return model

    def build_model(self) -> nn.Module:
        return ls.nn.stages(self.begun(), "blocks")

    def dataset(self, split: str) -> Dataset[Any] | None:
        tokens = torch.randint(0, TOKENS, (60, 7), generator=torch.Generator().manual_seed(1))
        return TensorDataset(tokens[:48] if split == "train" else tokens[48:])

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        (tokens,) = batch
        logits, targets = model(tokens[:, :-1])["logits"].flatten(0, 1), tokens[:, 1:].flatten()
        return ls.Loss(F.cross_entropy(logits, targets, reduction="sum"), len(targets))


class InUnits(Words):
    def build_model(self) -> nn.Module:
        return ls.nn.units(self.begun())


class AsItIs(Words):
    def build_model(self) -> nn.Module:
        return self.begun()
