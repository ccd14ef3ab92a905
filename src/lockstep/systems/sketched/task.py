"""Handwritten digits, learnt by a perceptron or a transformer of sketched layers."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.data.images import (
    Labelled,
    embedded_digits,
    hold_out,
    idx_digits,
    mean_and_deviation,
    simple_classifiers,
)
from lockstep.engine.task import Loss, Task
from lockstep.errors import DataError
from lockstep.systems.sketched.config import SketchedConfig
from lockstep.systems.sketched.networks import largest, mlp, narrower, of_low_rank, transformer


class Sketched(Task):
    """Handwritten digits with sketched layers: a perceptron or a transformer."""

    Config = SketchedConfig
    config: SketchedConfig

    def build_model(self) -> nn.Module:
        """The network `config.model` names: images [N, 1, S, S] to logits [N, classes].

        Raises:
            ConfigError: `low_rank` is larger than a layer.
        """
        classes = 1 + max(int(labels.max()) for _, labels in self._splits.values())
        if self.config.model == "mlp":
            return mlp(self.config, self.config.image_size**2, classes)
        return transformer(self.config, classes)

    def dataset(self, split: str) -> TensorDataset | None:
        """Images [N, 1, S, S] as float32 with mean 0 and deviation 1, labels [N] as int64.

        Raises:
            ConfigError: scikit-learn, which has the built-in images, is not installed.
            DataError: a file in `config.data_dir` is missing, damaged or does not fit the others.
        """
        if split not in self._splits:
            return None
        images, labels = self._splits[split]
        mean, deviation = mean_and_deviation(self._splits["train"][0])
        if deviation == 0:
            raise DataError(f"data_dir={self.config.data_dir}: all training pixels are {mean:g}")
        normal = ((images.float() - mean) / deviation).unsqueeze(1)
        size = (self.config.image_size,) * 2
        return TensorDataset(F.interpolate(normal, size, mode="bilinear"), labels)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Cross entropy and accuracy of a batch (images, labels)."""
        images, labels = batch
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum()
        return Loss(
            sum=F.cross_entropy(logits, labels, reduction="sum"),
            weight=len(labels),
            metrics={"accuracy": (correct, len(labels))},
        )

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """What simple classifiers reach, and networks without sketches, trained as this one.

        Of the mlp: as wide, and where that has more parameters, narrower ones and of low rank, too.
        """
        found = simple_classifiers(self._splits["train"], self._splits[split])
        train, held_out = self.dataset("train"), self.dataset(split)
        assert train is not None
        assert held_out is not None
        for name, net in self._without_sketches(model).items():
            size = sum(p.numel() for p in net.parameters())
            found[f"{name}, {size:,} parameters"] = self._trained(net, train, held_out)
        return found

    def _without_sketches(self, model: nn.Module) -> dict[str, nn.Module]:
        config = self.config.model_copy(update={"layers": "dense"})
        classes = 1 + max(int(labels.max()) for _, labels in self._splits.values())
        torch.manual_seed(config.seed)
        if config.model == "transformer":
            return {"dense": transformer(config, classes)}
        features = config.image_size**2
        sizes = features, *config.hidden, classes
        found: dict[str, nn.Module] = {"dense": mlp(config, features, classes)}
        most, dense = (sum(p.numel() for p in net.parameters()) for net in (model, found["dense"]))
        if most < dense:
            found["narrower"] = largest(partial(narrower, sizes), most)
            found["low rank"] = largest(partial(of_low_rank, sizes), most)
        return found

    def _trained(
        self, net: nn.Module, train: TensorDataset, held_out: TensorDataset
    ) -> dict[str, float]:
        config, order = self.config, torch.Generator().manual_seed(self.config.seed)
        optimizer = torch.optim.Adam(net.parameters(), config.lr)
        for _ in range(config.epochs or 1):
            for rows in torch.randperm(len(train), generator=order).split(config.batch_size):  # type: ignore[no-untyped-call]
                found = self.loss(net, train[rows])
                optimizer.zero_grad()
                torch.autograd.backward(found.sum / found.weight)
                optimizer.step()
        with torch.no_grad():
            found = self.loss(net.eval(), held_out[:])
        hits, count = map(float, found.metrics["accuracy"])
        return {"loss": float(found.sum) / count, "accuracy": hits / count}

    @cached_property
    def _splits(self) -> dict[str, Labelled]:
        if self.config.data_dir is None:
            by_split = {"train": embedded_digits()}
        else:
            by_split = idx_digits(self.config.data_dir.expanduser())
        return hold_out(by_split, self.config.val_fraction, self.config.test_fraction)
