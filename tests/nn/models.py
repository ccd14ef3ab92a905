"""A transformer as users write them, with no thought of shards, and its plan."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.optim import AdamATan2
from lockstep.sketch import SKLinear

TOKENS = 11
PLAN: dict[str, Any] = {
    "*.attention.[qkv]": ls.nn.Heads(divide=["num_heads"]),
    "*.attention.out": "row",
    "*.up": "column",
    "*.down": "row",
    "embedding": "vocabulary",
    "head": "vocabulary",
}


class Attention(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.num_heads, self.head_width = num_heads, width // num_heads
        self.dropout = dropout

    def forward(self, x: Tensor) -> Any:
        shape = (*x.shape[:-1], self.num_heads, self.head_width)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout)
        self.up: nn.Module = nn.Linear(width, 4 * width)
        self.down: nn.Module = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        hidden = self.dropout(F.gelu(self.up(self.norm2(x))))
        y: Tensor = x + self.dropout(self.down(hidden))
        return y


class Transformer(nn.Module):
    """Its embedding is its output layer too."""

    def __init__(self, dropout: float = 0.1, width: int = 16, num_heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, dropout) for _ in range(2))
        self.head = nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Language(ls.Task):
    """Next tokens of random sentences."""

    def build_model(self) -> nn.Module:
        return ls.nn.shard(Transformer(), PLAN)

    def dataset(self, split: str) -> Any:
        tokens = torch.randint(0, TOKENS, (60, 7), generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(tokens[:48] if split == "train" else tokens[48:])

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        (tokens,) = batch
        logits, targets = model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
        return ls.Loss(
            F.cross_entropy(logits, targets, reduction="sum"),
            len(targets),
            {"accuracy": ((logits.argmax(-1) == targets).sum(), len(targets))},
        )


class Marked(Language):
    """In stages, by name."""

    def build_model(self) -> nn.Module:
        return ls.nn.stages(super().build_model(), "blocks")


class Recomputing(Transformer):
    """Keeps no activations of its blocks."""

    def forward(self, tokens: Tensor) -> Any:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


class Recomputed(Language):
    """In stages, with activations that are computed again."""

    def build_model(self) -> nn.Module:
        return ls.nn.stages(ls.nn.shard(Recomputing(), PLAN), "blocks")


class Start(nn.Module):
    """Passes the tokens on, as whole numbers, beside their vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(tokens), tokens


class Layer(Block):
    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__(width, num_heads, dropout)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, tokens: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * self.gain, tokens


class Normed(nn.Module):
    """Averages over samples: its buffers change in forward passes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        return self.norm(x.transpose(1, 2)).transpose(1, 2), tokens


class End(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.head = nn.Linear(embedding.embedding_dim, TOKENS, bias=False)
        self.head.weight = embedding.weight

    def forward(self, x: Tensor, tokens: Tensor) -> Any:
        return self.head(x)


class Deep(Language):
    """`Language` with a model of seven blocks, of which the first and the last share a weight."""

    feed_forward: Mapping[str, str] = MappingProxyType({"*.up": "column", "*.down": "row"})

    def layer(self, width: int, number: int) -> Layer:
        return Layer(width, 4, 0.1)

    def build_model(self) -> nn.Module:
        width, start = 16, Start(16)
        layers = [self.layer(width, number) for number in range(4)]
        blocks = [start, *layers[:2], Normed(width), *layers[2:], End(start.embedding)]
        plan = {
            "*.attention.[qkv]": ls.nn.Heads(divide=["num_heads"]),
            "*.attention.out": "row",
            **self.feed_forward,
            "0.embedding": "vocabulary",
            "6.head": "vocabulary",
        }
        return ls.nn.shard(ls.nn.Pipeline(*blocks), plan)


class Lean(Deep):
    """Fails where torch's compiler is imported, or what it has for shapes."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        assert not {"torch._dynamo", "torch.fx.experimental.symbolic_shapes"} & set(sys.modules)
        return super().loss(model, batch)


class Sketched(Deep):
    """`Deep` with sketched feed-forward layers."""

    feed_forward = MappingProxyType({"*.up": "sketched", "*.down": "sketched_row"})

    def layer(self, width: int, number: int) -> Layer:
        layer = super().layer(width, number)
        layer.up = SKLinear(width, 4 * width, low_rank=8, seed=1, layer=2 * number)
        layer.down = SKLinear(4 * width, width, low_rank=8, seed=1, layer=2 * number + 1)
        return layer


class Twice(Deep):
    """Calls the model twice, which stages cannot."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        model(batch[0][:, :-1])
        return super().loss(model, batch)


class Around(Deep):
    """Calls a block past the model."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        assert isinstance(model, nn.Sequential)
        x, tokens = model[0](batch[0][:, :-1])
        return ls.Loss(x.square().sum(), len(tokens))


class Shared(Deep):
    """A module in two blocks."""

    def build_model(self) -> nn.Module:
        layer = nn.Linear(3, 3)
        return ls.nn.Pipeline(layer, nn.Tanh(), nn.Sequential(layer))


class Ends(Deep):
    """Looks at the whole model."""

    def after_step(self, model: nn.Module, step: int) -> None:
        pass


class Few(Deep):
    """A single block."""

    def build_model(self) -> nn.Module:
        return ls.nn.Pipeline(Transformer())


class Groups(Deep):
    """The first blocks and the last are in groups of their own."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        assert isinstance(model, nn.Sequential)
        last = list(model[4].parameters()) + list(model[5].parameters())
        ids = {id(p) for p in last}
        first = [p for p in model.parameters() if id(p) not in ids]
        return torch.optim.AdamW([{"params": first}, {"params": last, "lr": 0.003}], lr=0.01)


class Penalised(Deep):
    """A loss that reads a parameter itself, when the model has been called."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum + model[1].gain.square(), loss.weight)  # type: ignore[index]


class Early(Deep):
    """A loss that reads a parameter itself, before the model is called."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        penalty = model[1].gain.square()  # type: ignore[index]
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum + penalty, loss.weight)


class Measured(Deep):
    """A metric that reads a parameter itself."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        norm = model[1].norm1.weight.detach().norm()  # type: ignore[index, union-attr]
        return ls.Loss(loss.sum, loss.weight, {"norm": (norm, 1)})


class Unmeasured(Deep):
    """An evaluation without the model."""

    def evaluate(self, model: nn.Module, batch: Any) -> ls.Loss:
        return ls.Loss(torch.zeros(()), len(batch[0]))


class Limited(Deep):
    """Cannot write files as large as its model."""

    def build_model(self) -> nn.Module:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
        return super().build_model()


class Cached(Deep):
    """A layer that keeps a view of a parameter."""

    scratch = ("cached",)

    def layer(self, width: int, number: int) -> Layer:
        layer = super().layer(width, number)
        layer.cached = None
        layer.register_forward_pre_hook(keep_view)
        return layer


def keep_view(layer: nn.Module, inputs: Any) -> None:
    if layer.cached is None:
        layer.cached = layer.norm1.weight.detach()[:3]  # type: ignore[union-attr, operator, assignment]


class Graded(Deep):
    """A loss that computes gradients itself."""

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        if not torch.is_grad_enabled():
            return loss
        gains = [model[number].gain for number in (1, 2)]  # type: ignore[index, union-attr]
        grads = torch.autograd.grad(loss.sum, gains, create_graph=True)  # type: ignore[arg-type]
        return ls.Loss(loss.sum + sum(g.square() for g in grads), loss.weight)


class Looking(ls.Hook):
    """Takes part everywhere, and changes nothing."""

    def __init__(self) -> None:
        self.seen = 0

    def on_start(self, run: Any) -> None:
        assert run.step == 0

    def after_evaluation(self, run: Any, split: str, metrics: Any) -> None:
        self.seen += 1

    def after_checkpoint(self, run: Any, folder: Any) -> None:
        assert folder.is_dir()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Hooked(Deep):
    """With a hook that runs on every rank."""

    def hooks(self) -> list[ls.Hook]:
        return [Looking()]


class Exposed(Deep):
    """A layer that gives the memory of a parameter to numpy."""

    def layer(self, width: int, number: int) -> Layer:
        layer = super().layer(width, number)
        layer.register_forward_pre_hook(self.look)
        return layer

    def look(self, layer: nn.Module, inputs: Any) -> None:
        self.mean = float(layer.norm1.weight.detach().numpy().mean())  # type: ignore[union-attr, operator]

    scratch = ("mean",)


class Everywhere(nn.Module):
    """Uses the embedding's weight once more."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.linear(x, self.weight).tanh(), self.weight.t())


class Moving(Language):
    """A weight of four blocks, one of them in place, and a loss that changes its batch."""

    def build_model(self) -> nn.Module:
        start = nn.Embedding(TOKENS, 16)
        head = nn.Linear(16, TOKENS, bias=False)
        head.weight = start.weight
        return ls.nn.Pipeline(
            start, nn.Linear(16, 16), Everywhere(start), nn.ReLU(inplace=True), Everywhere(start),
            nn.Linear(16, 16), nn.Dropout(0.1, inplace=True), head,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        batch[0].add_(1).remainder_(TOKENS)
        return super().loss(model, batch)


class SeveralConfig(ls.TrainConfig):
    schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="cosine", warmup_steps=2)
    body_schedule: ls.ScheduleConfig = ls.ScheduleConfig(name="linear", min_ratio=0.5)


class Several(Deep):
    """Three optimizers: of the tied ends with a momentum, of the body in two groups, of averages.

    A gain is frozen in its group, and another one is in no optimizer.
    """

    Config = SeveralConfig
    config: SeveralConfig

    def build_optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        model[1].gain.requires_grad_(False)
        layers = [model[number] for number in (1, 2, 4, 5)]
        body = [(n, p) for layer in layers for n, p in layer.named_parameters()]
        body = [(n, p) for n, p in body if p is not model[4].gain]
        weights = [p for n, p in body if "weight" in n]
        rest = [p for n, p in body if "weight" not in n]
        return {
            "ends": optim.SGD(model[0].parameters(), lr=0.05, momentum=0.9),
            "body": optim.AdamW(
                [{"params": weights, "weight_decay": 0.1}, {"params": rest, "lr": 0.02}], lr=0.01
            ),
            "norm": AdamATan2(model[3].parameters(), lr=0.003),
        }

    def lr_factor(self, step: int, total_steps: int) -> dict[str, float | list[float]]:
        ends = ls.lr_factor(self.config.schedule, step, total_steps)
        body = ls.lr_factor(self.config.body_schedule, step, total_steps)
        return {"norm": 1.0, "ends": ends, "body": [body, 0.5 * body]}


class InTurn(Several):
    """The ends with the averages, then the body twice, each with a loss of its own."""

    def build_optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        made = super().build_optimizer(model)
        ends = [*model[0].parameters(), *model[3].parameters()]
        return {"body": made["body"], "ends": optim.SGD(ends, lr=0.05, momentum=0.9)}

    def phases(self) -> list[ls.Phase]:
        return [ls.Phase("ends", self.loss), ls.Phase("body", self.softer, steps=2)]

    def softer(self, model: nn.Module, batch: Any) -> ls.Loss:
        loss = self.loss(model, batch)
        return ls.Loss(0.5 * loss.sum, loss.weight)

    def lr_factor(self, step: int, total_steps: int) -> dict[str, float]:
        return {"ends": 1.0, "body": 1.0 - step / total_steps}


class Whole(Several):
    """One of the optimizers is not known to be element-wise."""

    def build_optimizer(self, model: Any) -> dict[str, optim.Optimizer]:
        made = super().build_optimizer(model)
        return made | {"ends": Tuned(model[0].parameters(), lr=0.05)}


class Tuned(optim.SGD):
    """May be anything."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            super().step(closure)
