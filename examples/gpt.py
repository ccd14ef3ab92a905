"""A small GPT on the text of Python's own help pages, byte by byte; and sampling from it.

`lockstep train examples/gpt.py -n 2 --run-dir runs/gpt` trains,
`python examples/gpt.py runs/gpt "The "` writes.
"""

import hashlib
import sys
from pydoc_data import topics
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep as ls

NUM_TOKENS = 128
"""Tokens are ASCII codes."""
NUM_SAMPLED = 400


class GptConfig(ls.TrainConfig):
    context: int = 64
    """Characters that the model sees."""
    width: int = 96
    """Length of a token's vector."""
    num_layers: int = 3
    num_heads: int = 4
    dropout: float = 0.1

    batch_size: int = 32
    steps: int | None = 800
    lr: float = 2e-3
    clip_norm: float | None = 1.0
    optimizer: ls.OptimizerConfig = ls.OptimizerConfig(betas=(0.9, 0.99), weight_decay=0.1)
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=100, min_ratio=0.1)
    eval_every: int = 200
    eval_batch_size: int = 32
    checkpoint: ls.CheckpointConfig = ls.CheckpointConfig(every=200)


class Block(nn.Module):
    """Causal self-attention and a perceptron, each behind a layer norm: [B, T, D] to [B, T, D]."""

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x_BTD)).chunk(3, -1)
        )
        heads_BHTd = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.dropout(self.out(heads_BHTd.transpose(1, 2).flatten(2)))
        return cast(Tensor, x_BTD + self.mlp(self.norms[1](x_BTD)))


class Gpt(nn.Module):
    """Tokens [B, T] to logits [B, T, NUM_TOKENS]."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(NUM_TOKENS, config.width)
        self.places = nn.Embedding(config.context, config.width)
        self.blocks = nn.Sequential(
            *(
                Block(config.width, config.num_heads, config.dropout)
                for _ in range(config.num_layers)
            )
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, NUM_TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        for embedding in (self.tokens, self.places):  # else the places would drown the tokens
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.places(places_T)
        return cast(Tensor, self.head(self.norm(self.blocks(x_BTD))))


class Windows(Dataset[Tensor]):
    """All windows of `length` tokens that begin at multiples of `stride`."""

    def __init__(self, tokens: Tensor, length: int, stride: int) -> None:
        self.windows = tokens.unfold(0, length, stride)  # a view: nothing is copied

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


class TextModel(ls.Task):
    Config = GptConfig
    config: GptConfig

    def __init__(self, config: GptConfig | None = None) -> None:
        super().__init__(config)
        pages = [page for _, page in sorted(topics.topics.items())]
        self.text = "\n\n".join(pages).encode("ascii", "ignore")

    def data_digest(self) -> str:
        return hashlib.sha256(self.text).hexdigest()  # another Python has another text

    def build_model(self) -> Gpt:
        return Gpt(self.config)

    def dataset(self, split: str) -> Windows | None:
        tokens = torch.tensor(list(self.text), dtype=torch.uint8)
        end = len(tokens) * 9 // 10
        length = self.config.context + 1
        if split == "train":
            return Windows(tokens[:end], length, stride=length // 4)
        return Windows(tokens[end:], length, stride=length) if split == "val" else None

    def loss(self, model: Gpt, batch: Tensor) -> ls.Loss:
        logits, next_tokens = model(batch[:, :-1]), batch[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), next_tokens.flatten(), reduction="sum")
        return ls.Loss(loss, next_tokens.numel())


@torch.no_grad()
def sample(model: Gpt, context: int, prompt: str, length: int) -> str:
    """The prompt, and `length` characters that the model writes after it."""
    tokens = torch.tensor([list(prompt.encode("ascii"))])
    for _ in range(length):
        logits = model(tokens[:, -context:])[:, -1] / 0.8
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return bytes(tokens[0].tolist()).decode("ascii")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        loaded = ls.load(sys.argv[1], "best")
        context = cast(GptConfig, loaded.config).context
        torch.manual_seed(0)
        print(sample(cast(Gpt, loaded.model), context, sys.argv[2], NUM_SAMPLED))
    else:
        ls.main(TextModel())
