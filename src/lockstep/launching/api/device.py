"""The device that a rank computes on, with kernels that give the same bits each time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.backends import cuda, cudnn

from lockstep.config import TrainConfig
from lockstep.errors import ConfigError, TaskError
from lockstep.launching.rank.environment import Environment

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_TWO_BUFFERS = ":4096:8"
"""The larger of the two workspaces with which cuBLAS gives the same bits on any stream (cuBLAS
manual, section 2.1.4)."""
_REFUSED = re.compile(r"^(\S+) does not have a deterministic implementation")
_FLAGS: tuple[tuple[Any, str, bool], ...] = (
    (cudnn, "deterministic", True),
    (cudnn, "benchmark", False),  # chooses kernels by time, which differs between processes
    (cudnn, "allow_tf32", False),
    (cuda.matmul, "allow_tf32", False),
    (cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    (cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    # Filling each new tensor would cost a kernel.
    (torch.utils.deterministic, "fill_uninitialized_memory", False),
)
"""Settings for deterministic kernels: object, attribute, value."""


@contextmanager
def on_device(config: TrainConfig, environment: Environment) -> Iterator[torch.device]:
    """Compute on this rank's own GPU if there is one for each rank of the host, else on the CPU.

    On a GPU, only kernels that give the same bits each time are used while this lasts, unless
    `precision.deterministic` is off.

    Raises:
        ConfigError: device=cuda, and there is no GPU for this rank; or the process has used the GPU
            already, so that it is too late to ask cuBLAS for the same bits.
        TaskError: an operation has no such kernel.
    """
    device = find_device(config.device, environment)
    if device.type != "cuda":
        yield device
        return
    with _deterministic() if config.precision.deterministic else nullcontext():
        torch.cuda.set_device(device)
        yield device


def find_device(wanted: str, environment: Environment) -> torch.device:
    """The device of this rank, without making it this process's current one.

    Raises:
        ConfigError: device=cuda, and there is no GPU for this rank.
    """
    is_of_agent = environment.host_timeout_s > 0  # whose groups of ranks over NCCL nobody has tried
    if is_of_agent and wanted == "cuda":
        raise ConfigError(
            "device='cuda': ranks of `lockstep agent` compute on CPUs; set device=cpu"
        )
    count = torch.cuda.device_count()
    is_without = wanted == "auto" and count < environment.local_world_size
    if wanted == "cpu" or is_of_agent or is_without:
        return torch.device("cpu")
    if environment.local_rank >= count:
        raise ConfigError(
            f"device='cuda': this host has {count} GPUs for {environment.local_world_size} ranks; "
            "start fewer ranks or set device=cpu"
        )
    return torch.device("cuda", environment.local_rank)


@contextmanager
def naming_kernels() -> Iterator[None]:
    """Add advice where torch refuses an operation that has no deterministic kernel.

    Raises:
        TaskError: instead of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        refused = _REFUSED.match(str(error))
        if refused is None:
            raise
        raise TaskError(
            f"{refused[1]}: torch has no kernel for it on a GPU that gives the same bits each "
            "time; use another operation or device=cpu, or set precision.deterministic=false, "
            "with which runs may differ"
        ) from error


@contextmanager
def _deterministic() -> Iterator[None]:
    if _WORKSPACE not in os.environ:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            raise ConfigError(
                f"{_WORKSPACE}: is not set, and this process has used the GPU already, so that "
                f"matrix products may differ from run to run; export {_WORKSPACE}="
                f"{_TWO_BUFFERS} before it starts, or set precision.deterministic=false"
            )
        os.environ[_WORKSPACE] = _TWO_BUFFERS
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _FLAGS]
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # Its gradient is summed in any order.
    had_efficient_attention = cuda.mem_efficient_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.use_deterministic_algorithms(True)
    cuda.enable_mem_efficient_sdp(False)
    for owner, name, value in _FLAGS:
        setattr(owner, name, value)
    try:
        with naming_kernels():
            yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        cuda.enable_mem_efficient_sdp(had_efficient_attention)
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
