"""How many flat copies of the gradient the engine uses for a step.

Two ways, each printing one JSON line: `count` runs the real ordered reduction on the meta device,
where tensors have sizes but no memory, and adds up every storage that is alive; `rss` trains in
this process and asks the system for its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lockstep
from lockstep.comm.transport import LocalTransport
from lockstep.config import CheckpointConfig, OptimizerConfig, TrainConfig
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.launching.api import Session, run
from lockstep.parallel.exchange import Leaves
from lockstep.parallel.layout import split
from lockstep.parallel.reduction import OrderedReduction
from lockstep_loop import Training
from peers.models import MODELS, workload

MICROBATCHES = (1, 2, 4, 8, 16, 32)
WORLD_SIZES = (1, 2, 3, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("how", choices=("count", "rss"))
    parser.add_argument("--model", choices=MODELS, default="transformer_27m")
    parser.add_argument("--num-microbatches", type=int, default=8, help="for rss")
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = count(args.model) if args.how == "count" else rss(args.model, args.num_microbatches)
    print(json.dumps(found), flush=True)


def count(model: str) -> dict[str, Any]:
    """The most any rank uses, for each number of microbatches and ranks."""
    flat = FlatTensors([list(workload(model).model.named_parameters())], "parameter")
    flat_bytes = sum(s.numel * s.dtype.itemsize for s in flat.segments)
    table = [
        {"num_microbatches": m, "world_size": w}
        | worst([use(flat, m, w, rank) for rank in range(min(m, w))])
        for m in MICROBATCHES
        for w in WORLD_SIZES
    ]
    return {"name": "count", "model": model, "flat_bytes": flat_bytes, "table": table}


def worst(uses: Sequence[dict[str, int]]) -> dict[str, int]:
    """The largest value under each key."""
    return {key: max(u[key] for u in uses) for key in uses[0]}


def use(flat: FlatTensors, num_microbatches: int, world_size: int, rank: int) -> dict[str, int]:
    """Bytes that are alive on a rank, from the real objects doing one step.

    Returns:
        `kept`: from step to step. `fold`: at most while microbatches are folded, their gradients
        included. `exchange`: at most while ranks exchange, beyond what is kept.
    """
    ranges = split(num_microbatches, world_size)
    meta = torch.device("meta")
    with LiveBytes() as live:
        reduction = OrderedReduction(
            RemoteTensor(rank, world_size),
            Leaves(flat.segments, flat.specs, 2, num_microbatches, meta),
            ranges,
            num_header=6,
            bucket_bytes=TrainConfig().bucket_bytes,
        )
        kept = live.now
        for _ in range(*ranges[rank]):
            scalars = torch.zeros(2, dtype=torch.float64, device=meta)
            reduction.fold.add([torch.empty(e.shape, device=meta) for e in flat.entries], scalars)
        del scalars
        fold, live.peak = live.peak, live.now
        reduction.reduce()
        return {"kept": kept, "fold": fold, "exchange": live.peak - kept}


class RemoteTensor(LocalTransport):
    """Pretends to be one of several ranks; nothing arrives."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_gather(self, own: Tensor, out: Tensor, counts: Sequence[int]) -> None:
        """Nothing to do."""

    def all_to_all(
        self,
        send: Tensor,
        send_counts: Sequence[int],
        send_offsets: Sequence[int],
        recv: Tensor,
        recv_counts: Sequence[int],
    ) -> None:
        """Nothing to do."""


class LiveBytes(TorchDispatchMode):
    """Adds up the storages of all tensors made within it for as long as they are alive.

    Attributes:
        now: bytes.
        peak: the most there have been.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation and count what it made."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.now -= num_bytes


def rss(model: str, num_microbatches: int) -> dict[str, Any]:
    """Train two steps of one-sample microbatches in this process; its peak as the last one ends."""
    config = TrainConfig(
        batch_size=num_microbatches,
        num_microbatches=num_microbatches,
        steps=2,
        optimizer=OptimizerConfig(name="adam"),
        device="cpu",
        checkpoint=CheckpointConfig(every=3),
    )
    task = Watched(model, 2 * num_microbatches, config)
    with tempfile.TemporaryDirectory() as folder:
        run(task, config, Session(run_dir=folder, console=False))
    return {"name": "rss", "num_microbatches": num_microbatches, "peak_bytes": task.peak_bytes}


class Watched(Training):
    """Notes the process's peak at each loss, so that the last checkpoint does not count."""

    peak_bytes = 0
    scratch = ("task.peak_bytes",)

    def loss(self, model: nn.Module, batch: Any) -> lockstep.Loss:
        """The loss, as ever."""
        unit = 1 if sys.platform == "darwin" else 1024
        self.peak_bytes = unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return super().loss(model, batch)


if __name__ == "__main__":
    main()
