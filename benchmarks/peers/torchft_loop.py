"""A replica that trains with torchft until it is killed; prints the time of each committed step.

Started by `benchmarks/recovery.py` and `hosts.py`, one process for each replica group.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from datetime import timedelta
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, Optimizer, ProcessGroupGloo

BATCH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--steps", type=int, required=True, help="once all replicas take part")
    parser.add_argument("--kill-at", type=int, default=-1, help="SIGKILL itself after this one")
    parser.add_argument("--host", default="127.0.0.1", help="address of this host")
    parser.add_argument("--patience", type=float, help="seconds of all timeouts")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def state() -> dict[str, object]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def load(values: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(values["model"])
        optimizer.load_state_dict(values["optimizer"])

    patience: dict[str, Any] = {"timeout": timedelta(seconds=20)}
    if args.patience:
        wait = timedelta(seconds=args.patience)
        patience = {"timeout": wait, "connect_timeout": wait, "heartbeat_interval": wait / 8}
        # A replica whose quorum takes longer ends; and it comes once a lost one is found silent.
        patience["quorum_timeout"] = 4 * wait
    store = TCPStore(args.host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=args.patience or 5)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr=args.host,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=f"replica{args.replica}",
        hostname=args.host,
        **patience,
    )
    stepper = Optimizer(manager, optimizer)
    share = BATCH // args.replicas
    done = 0
    while done < args.steps:
        step = manager.current_step()
        first = (step * BATCH + args.replica * share) % (len(x) - share)
        stepper.zero_grad()
        logits = model(x[first : first + share])
        nn.functional.cross_entropy(logits, y[first : first + share]).backward()
        average(manager, [p.grad for p in model.parameters() if p.grad is not None])
        stepper.step()
        if manager.current_step() > step:
            told = {"step": manager.current_step(), "time": time.time()}
            told["of"] = manager.num_participants()
            print(json.dumps(told), flush=True)
            # Replicas start at different times, and do not wait for each other.
            done += done > 0 or manager.num_participants() == args.replicas
        if done == args.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.shutdown(wait=False)
    os._exit(0)


def average(manager: Manager, gradients: list[torch.Tensor]) -> None:
    """Average gradients over the replicas, at once.

    torchft's DistributedDataParallel does the same in a hook, but ends its process with a failed
    assertion where gloo finds a replica lost while it waits (0.2.0, `ddp.py`, `_comm_hook`).
    """
    flat = torch.nn.utils.parameters_to_vector(gradients)
    manager.allreduce(flat).wait()
    torch.nn.utils.vector_to_parameters(flat, gradients)


if __name__ == "__main__":
    main()
