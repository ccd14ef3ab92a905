"""Jacobians of many rows: in batches, and a row at a time; one JSON line."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.report.scores import physical
from lockstep.systems.ufs.task import Ufs


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = Ufs(UfsConfig(mask_mode="both"))
    net = task.build_model()
    x = torch.from_numpy(task.rows_by_split["train"].values[:, :14]).contiguous()

    def row(values: Tensor) -> Tensor:
        single = values.unsqueeze(0).requires_grad_()
        return torch.autograd.grad(net.predict(single).sum(), single)[0]

    found, wanted = physical(net, x[:500])[:, 0], torch.cat([row(v) for v in x[:500]])
    assert ((found - wanted).abs().amax(0) <= 1e-4 * wanted.abs().amax(0)).all()
    batched = best(lambda: physical(net, x), len(x))
    loop = best(lambda: [row(v) for v in x[:2000]], 2000)
    print(json.dumps({"batched": batched, "loop": loop, "rows": len(x)}), flush=True)


def best(work: Callable[[], object], rows: int) -> float:
    """Rows a second, the best of five."""
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return rows / min(seconds)


if __name__ == "__main__":
    main()
