"""What all peers share: arguments, this rank's batches, and the clock."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from models import MODELS, Workload
from torch import Tensor, nn

NUM_BATCHES = 16
"""Batches of data each rank holds; they are passed over again and again."""


def arguments(description: str | None, *flags: str) -> argparse.Namespace:
    """The command line, with flags of a peer's own, and torch's threads set as it says."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=MODELS, default="mlp_small")
    parser.add_argument("--batch", type=_positive, help="samples per rank and step")
    parser.add_argument("--steps", type=_positive, default=200, help="steps per repeat")
    parser.add_argument("--warmup", type=_count, default=20, help="steps before the clock starts")
    parser.add_argument("--repeats", type=_positive, default=5, help="the median is printed")
    parser.add_argument("--threads", type=_positive, default=1, help="threads per rank")
    parser.add_argument("--fused", action="store_true", help="Adam(fused=True)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or accelerator")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="of autocast")
    for flag in flags:
        parser.add_argument(flag, action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.device == "accelerator":
        args.device = str(torch.accelerator.current_accelerator())
    if args.device != "cpu":
        _ask_for_the_same_bits()
    return args


def _ask_for_the_same_bits() -> None:
    """What PyTorch's page on reproducibility says, so that all programs run the same kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def wait_for(device: str) -> None:
    """Return when the device has done all that it was given."""
    if device != "cpu":
        torch.accelerator.synchronize()


def world() -> tuple[int, int]:
    """This process's rank and the number of processes, as the launcher says; else (0, 1)."""
    for rank, size in (("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")):
        if rank in os.environ:
            return int(os.environ[rank]), int(os.environ[size])
    return 0, 1


def adam(model: nn.Module, args: argparse.Namespace) -> torch.optim.Adam:
    """Adam as torch makes it by default, a few kernels for each parameter; or all in one."""
    return torch.optim.Adam(model.parameters(), fused=args.fused or None)


def batches(work: Workload, batch: int, device: str = "cpu") -> Iterator[tuple[Tensor, Tensor]]:
    """Endless shuffled batches of this rank's shard, gathered from tensors in memory.

    No DataLoader: its overhead would be most of a small model's step, and is not what is compared.
    """
    rank, world_size = world()
    inputs, targets = work.data(NUM_BATCHES * batch * world_size)
    inputs, targets = inputs[rank::world_size].contiguous(), targets[rank::world_size].contiguous()
    while True:
        for rows in torch.randperm(len(inputs)).split(batch):
            yield inputs[rows].to(device), targets[rows].to(device)


def report(
    name: str,
    args: argparse.Namespace,
    batch: int,
    step: Callable[[], None],
    barrier: Callable[[], None],
) -> None:
    """Time `step` and print one JSON line on rank 0.

    Args:
        name: of the peer.
        args: from `arguments`.
        batch: samples per rank and step.
        step: does one optimizer step.
        barrier: returns once all ranks have called it.
    """
    rank, world_size = world()
    for _ in range(args.warmup):
        step()
    wait_for(args.device)
    seconds = []
    for _ in range(args.repeats):
        barrier()
        start = time.perf_counter()
        for _ in range(args.steps):
            step()
        wait_for(args.device)
        seconds.append((time.perf_counter() - start) / args.steps)
    step_s = statistics.median(seconds)
    if rank == 0:
        result = {
            "name": name,
            "world_size": world_size,
            "batch_per_rank": batch,
            "model": args.model,
            "steps": args.steps,
            "samples_per_s": batch * world_size / step_s,
            "step_s": step_s,
            "step_s_range": [min(seconds), max(seconds)],
            "threads": torch.get_num_threads(),
        }
        print(json.dumps(result), flush=True)


def leave() -> None:
    """Leave the group, if there is one, and end the process.

    Without taking it down: what still holds the group (DDP does) then frees it with Python's
    lock held, and gloo's thread, which wants that lock too, is waited for. Sometimes for good.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def _positive(text: str) -> int:
    value = _count(text)
    if not value:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number ≥ 0")
    return int(text)
