"""The models and synthetic data that all peers train, so that only the framework differs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODELS = ("mlp_small", "mlp_0p8m", "transformer_27m", "gpt_124m", "transformer_tiny")
VOCABULARY, CONTEXT = 1536, 64
GPT_VOCABULARY, GPT_CONTEXT = 50_257, 1024


@dataclass(frozen=True)
class Workload:
    """One model with its loss and a way to make data for it.

    Attributes:
        model: float32, initialised with seed 0.
        loss: mean loss, a scalar, of the model's output and the targets.
        data: number of samples to (inputs, targets), random with seed 0.
        batch: default samples per rank and step.
    """

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]
    data: Callable[[int], tuple[Tensor, Tensor]]
    batch: int


def workload(name: str) -> Workload:
    """The workload of that name, the same in every process."""
    torch.manual_seed(0)
    if name == "mlp_small":
        return Workload(mlp_small(), F.mse_loss, regression_data, batch=1000)
    if name == "mlp_0p8m":
        return Workload(mlp_0p8m(), F.cross_entropy, image_data, batch=256)
    if name == "transformer_27m":
        return Workload(Transformer(), next_token_loss, token_data, batch=8)
    if name == "gpt_124m":
        return Workload(gpt_124m(), next_token_loss, gpt_data, batch=8)
    if name == "transformer_tiny":
        return Workload(Transformer(32, 2, 2), next_token_loss, token_data, batch=2)
    raise ValueError(f"model={name!r}: must be one of {', '.join(MODELS)}")


def mlp_small() -> nn.Module:
    """14 → 64 → 64 → 64 → 1 with GELU: 9,345 parameters. Communication latency dominates."""
    layers: list[nn.Module] = []
    for inputs in (14, 64, 64):
        layers += [nn.Linear(inputs, 64), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def mlp_0p8m() -> nn.Module:
    """784 → 768 → 256 → 10 with ReLU: 802,314 parameters, the size of an MNIST classifier."""
    return nn.Sequential(
        nn.Linear(784, 768), nn.ReLU(), nn.Linear(768, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def gpt_124m() -> nn.Module:
    """The smallest GPT-2: 12 layers of width 768, the head tied to the embedding."""
    model = Transformer(768, 12, 12, GPT_VOCABULARY, GPT_CONTEXT)
    nn.init.normal_(model.tokens.weight, std=0.02)
    model.head.weight = model.tokens.weight
    return model


class Transformer(nn.Module):
    """A decoder of pre-norm layers; by default 26.9 million parameters, 107 MB of gradients."""

    def __init__(
        self,
        width: int = 512,
        num_layers: int = 8,
        num_heads: int = 8,
        vocabulary: int = VOCABULARY,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [N, T] to logits [N, T, vocabulary]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(positions))))


class Block(nn.Module):
    """Causal self-attention and a GELU perceptron of four times the width."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """[N, T, width] to the same shape."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of logits [N, T, vocabulary] and token ids [N, T]."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def regression_data(count: int) -> tuple[Tensor, Tensor]:
    """Inputs [count, 14] and targets [count, 1], float32."""
    torch.manual_seed(0)
    return torch.randn(count, 14), torch.randn(count, 1)


def image_data(count: int) -> tuple[Tensor, Tensor]:
    """Flat images [count, 784], float32, and labels [count] in 0..9, int64."""
    torch.manual_seed(0)
    return torch.randn(count, 784), torch.randint(10, (count,))


def gpt_data(count: int) -> tuple[Tensor, Tensor]:
    """As `token_data`, of GPT-2's vocabulary and context."""
    return token_data(count, GPT_VOCABULARY, GPT_CONTEXT)


def token_data(
    count: int, vocabulary: int = VOCABULARY, context: int = CONTEXT
) -> tuple[Tensor, Tensor]:
    """Token ids [count, context] and the ids one place on, int64."""
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (count, context + 1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
