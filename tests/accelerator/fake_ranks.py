"""Trains as rank 0 of many on devices, with torch's `fake` group, whose other ranks send nothing.

    python fake_ranks.py FOLDER WORLD_SIZE ...

What is received is this rank's own data, so numbers mean nothing; but each collective is given what
it would be. Prints, for each number of ranks, the last step and the number of calls in the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.testing._internal.distributed import fake_pg
from torch.utils.data import TensorDataset

import lockstep as ls
from lockstep.comm.torchdist.process_group_transport import GroupTransport, Subgroup
from lockstep.comm.transport import LocalTransport, Transport
from lockstep.config import override
from lockstep.launching.api import Session
from lockstep.launching.api import rank as api
from lockstep.launching.rank.environment import Environment

WIDTH, RANKS_A_HOST = 32, 8


class Model(ls.Task):
    """Some layers."""

    def build_model(self) -> nn.Module:
        """See `ls.Task`."""
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))

    def dataset(self, split: str) -> TensorDataset | None:
        """See `ls.Task`."""
        x = torch.randn(2048, WIDTH, generator=torch.Generator().manual_seed(1))
        return TensorDataset(x, x.argmax(1) % 4) if split == "train" else None

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        """See `ls.Task`."""
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return ls.Loss.mean(loss, len(batch[0]))


class FakeTransport(GroupTransport):
    """A rank among fake ones."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        super().__init__("fake", device)
        self.group, self.rank, self.size = fake(rank, size), rank, size
        self._timeout_s = 10.0
        self.call_group = self.call_ring.start(rank, size)

    def barrier(self) -> None:
        """Nobody is waited for."""

    def is_damaged(self) -> bool:
        """Nobody can be lost."""
        return False

    def close(self) -> None:
        """Nothing to do."""

    def subgroup(self, groups: Sequence[Sequence[int]]) -> Transport:
        """See `Transport.subgroup`."""
        ranks = next(ranks for ranks in groups if self.rank in ranks)
        if len(ranks) == 1:
            return LocalTransport()
        own, calls = ranks.index(self.rank), self.call_ring.subgroup(ranks)
        return Subgroup(self, fake(own, len(ranks)), own, len(ranks), calls)


def fake(rank: int, size: int) -> Any:
    """A group of torch's."""
    return fake_pg.FakeProcessGroup._create_internal(rank, size, None)


def main() -> None:
    folder, *sizes = sys.argv[1:]
    found = {}
    for size in sizes:
        place = Environment("torchrun", 0, int(size), 0, RANKS_A_HOST)
        made: list[FakeTransport] = []

        def opened(
            environment: Environment, device: torch.device, *_: Any, made: Any = made
        ) -> Transport:
            made.append(FakeTransport(environment.rank, environment.world_size, device))
            return made[-1]

        api.open_transport = opened
        api.detect = lambda _, place=place: place
        config = override(
            ls.TrainConfig(),
            ["device=accelerator", "batch_size=1024", "num_microbatches=1024", "steps=2"],
        )
        ended = api.run(Model(config), config, Session(str(Path(folder) / size), console=False))
        found[size] = [ended.step, made[0].traffic.num_calls]
    print("RESULT " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
