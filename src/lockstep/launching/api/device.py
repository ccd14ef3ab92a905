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
from lockstep.data.random import accelerator
from lockstep.engine.passes.precision import use_deterministic_algorithms
from lockstep.engine.runtime import is_out_of_memory, out_of_memory
from lockstep.errors import ConfigError, EnvironError, TaskError, alone
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
        ConfigError: a GPU is wanted, and there is none for this rank; or the process has used the
            GPU already, so that it is too late to ask cuBLAS for the same bits; or it was forked
            from one that has.
    """
    device = find_device(config.device, environment)
    if device.type == "cpu":
        yield device
        return
    module = torch.get_device_module(device)
    if module._is_in_bad_fork():
        raise ConfigError(
            f"device={config.device!r}: the process that this one was forked from has used the "
            "GPU, so that this one cannot; start ranks with `lockstep train`, or fork before "
            "anything uses the GPU"
        )
    with _deterministic(device) if config.precision.deterministic else nullcontext():
        module.set_device(device)
        yield device


def find_device(wanted: str, environment: Environment) -> torch.device:
    """The device of this rank, without making it this process's current one.

    Raises:
        ConfigError: a GPU is wanted, and there is none for this rank.
    """
    # Hosts of agents may differ, and all ranks must take the same kind.
    if wanted == "cpu" or (wanted == "auto" and environment.host_timeout_s > 0):
        return torch.device("cpu")
    kind, count = num_devices(wanted)
    if wanted == "auto" and count < environment.local_world_size:
        return torch.device("cpu")
    if not count:
        raise ConfigError(
            f"device={wanted!r}: torch {torch.__version__} {why_no_gpu(kind)}, or set device=cpu"
        )
    if max(environment.local_rank + 1, environment.local_world_size) > count:
        error = ConfigError(
            f"device={wanted!r}: this host has {count} GPUs for {environment.local_world_size} "
            "ranks; start fewer ranks or set device=cpu"
        )
        # All ranks of this host raise it, and one says it: other hosts may have enough.
        raise error if environment.local_rank else alone(error)
    return torch.device(kind, environment.local_rank)


def num_devices(wanted: str) -> tuple[str, int]:
    """The kind of device that `device` asks for, and how many this host has."""
    kind = "cuda"
    if wanted == "accelerator":
        found = torch.accelerator.current_accelerator() if accelerator() else None
        kind = found.type if found is not None else "accelerator"
    if kind != "cuda":
        return kind, torch.accelerator.device_count() if accelerator() is not None else 0
    return kind, torch.cuda.device_count()


def why_no_gpu(kind: str) -> str:
    """Why there is no accelerator of a kind, as torch says it, and what to do."""
    if kind != "cuda":
        return f"finds no {kind}: install the package that adds yours to torch"
    if torch.version.cuda is None and torch.version.hip is None:
        return "is a build without CUDA: install one with it"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().partition("\n")[0].partition(". ")[0]
        built = torch.version.cuda or torch.version.hip
        return (
            f"for CUDA {built} finds no GPU ({reason}): install a build that fits the driver, or "
            "update the driver"
        )
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return (
            "finds no GPU, since CUDA_VISIBLE_DEVICES is empty: unset it (Ray empties it for ranks "
            "of --launcher ray, which compute on CPUs: use `lockstep agent`)"
        )
    return "finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES"


def advised(error: BaseException, rank: int) -> BaseException:
    """An error of torch that is about the device as one for the user; any other as it is."""
    refused = _REFUSED.match(str(error)) if isinstance(error, RuntimeError) else None
    if refused is not None:
        return TaskError(
            f"{refused[1]}: torch has no kernel for it on a GPU that gives the same bits each "
            "time; use another operation or device=cpu, or set precision.deterministic=false, "
            "with which runs may differ"
        )
    return EnvironError(out_of_memory(rank, error)) if is_out_of_memory(error) else error


@contextmanager
def _deterministic(device: torch.device) -> Iterator[None]:
    if device.type == "cuda" and _WORKSPACE not in os.environ:
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
    use_deterministic_algorithms(True)
    cuda.enable_mem_efficient_sdp(False)
    for owner, name, value in _FLAGS:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        cuda.enable_mem_efficient_sdp(had_efficient_attention)
        use_deterministic_algorithms(was_on, warn_only=warned_only)
