"""Copies of what microbatches carry, at the published Sudoku size; started by `hrm.py` on ranks.

Prints one JSON line on rank 0: seconds of keeping, packing and sending in a step, and bytes.
"""

from __future__ import annotations

import argparse
import json
import os
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import torch

from lockstep.config import TrainConfig
from lockstep.engine.carry import Carry
from lockstep.engine.carry.distributed_carries import DistributedCarries
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport

SLOTS, POSITIONS, DIM, LENGTH = 384, 82, 512, 81


def carry(num_slots: int) -> dict[str, Any]:
    """Two states in bf16, and the puzzle of each slot."""
    states = torch.randn(2, num_slots, POSITIONS, DIM).to(torch.bfloat16)
    tokens = torch.randint(0, 11, (2, num_slots, LENGTH)).to(torch.uint8)
    steps, halted = torch.ones(num_slots, dtype=torch.int64), torch.ones(num_slots).bool()
    names = {"inputs": tokens[0], "labels": tokens[1], "steps": steps}
    return {"halted": halted, "slots": {**names, "z_H": states[0], "z_L": states[1]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--microbatches", type=int, default=4, help="of each rank")
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 60.0)
    size = transport.size
    trees = [carry(SLOTS // size // args.microbatches) for _ in range(args.microbatches)]
    runtime: Any = SimpleNamespace(
        transport=transport, device=torch.device("cpu"), at=lambda moment, step: None
    )
    places: Any = SimpleNamespace(world=transport, is_split=False)
    carries = DistributedCarries(runtime, TrainConfig(), places)
    kept, sent = [], []
    for step in range(1 + args.repeats):
        carries.begin()
        transport.barrier()
        started = perf_counter()
        for number, tree in enumerate(trees, transport.rank * args.microbatches):
            carries.make(number, Carry.of(tree, "benchmark"))
            if step:
                _ = carries.held[number].tree  # as the next step is given it
        kept.append(perf_counter() - started)
        started = perf_counter()
        length = carries.pack()
        carries.send_copies(step, [length] * size)
        carries.settle(1.0)
        sent.append(perf_counter() - started)
    if transport.rank == 0:
        found = {"kept_s": kept[1:], "sent_s": sent[1:], "mbytes": length * 8 / 1e6}
        print(json.dumps(found), flush=True)
    transport.close()


if __name__ == "__main__":
    main()
