"""On a GPU, kernels give the same bits each time; what has no such kernel is refused by name."""

from __future__ import annotations

import os
import re

import pytest
import torch

from lockstep import TrainConfig
from lockstep.errors import ConfigError, EnvironError, TaskError
from lockstep.launching.api import device as devices
from lockstep.launching.api import on_device
from lockstep.launching.api.device import advised
from lockstep.launching.rank.environment import Environment
from lockstep.launching.rank.join import open_transport

ALONE = Environment("python", 0, 1, 0, 1)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def settings() -> list[object]:
    return [
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        *(getattr(owner, name) for owner, name, _ in devices._FLAGS),
    ]


@pytest.fixture
def gpu_alone(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """One GPU, played where there is none: devices that were made current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    return current


def test_kernels_are_deterministic_while_a_run_lasts(gpu_alone: list[torch.device]) -> None:
    before = settings()
    with on_device(TrainConfig(device="cuda"), ALONE) as device:
        assert gpu_alone == [device] == [torch.device("cuda", 0)]
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cuda.mem_efficient_sdp_enabled()
        assert not torch.backends.cudnn.allow_tf32
        assert torch.backends.cudnn.deterministic
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert settings() == before


def test_it_can_be_turned_off(gpu_alone: list[torch.device]) -> None:
    before = settings()
    config = TrainConfig.model_validate({"device": "cuda", "precision": {"deterministic": False}})
    with on_device(config, ALONE):
        assert settings() == before
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_on_a_cpu_nothing_is_set() -> None:
    before = settings()
    with on_device(TrainConfig(device="cpu"), ALONE) as device:
        assert device.type == "cpu"
        assert settings() == before


def test_a_process_that_has_used_the_gpu_is_told_what_to_export(
    gpu_alone: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with (
        pytest.raises(ConfigError, match="export CUBLAS_WORKSPACE_CONFIG=:4096:8 before"),
        on_device(TrainConfig(device="cuda"), ALONE),
    ):
        pass
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with on_device(TrainConfig(device="cuda"), ALONE):
        pass


def test_an_operation_without_a_deterministic_kernel_is_named(
    gpu_alone: list[torch.device],
) -> None:
    with pytest.raises(RuntimeError) as raised, on_device(TrainConfig(device="cuda"), ALONE):
        # The same check that kernels of a GPU make; this one has it on the CPU too.
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    better = advised(raised.value, 0)
    assert isinstance(better, TaskError)
    assert re.match("put_: .* set precision.deterministic=false", str(better))


def test_errors_of_memory_are_named_and_others_stay_as_they_are() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a …")
    vars(error)["__notes__"] = ["held were: parameters 1.0 MiB"]
    better = advised(error, 3)
    assert isinstance(better, EnvironError)
    assert str(better).startswith(
        "rank 3 is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB; held were: "
        "parameters 1.0 MiB; more microbatches (num_microbatches"
    )
    for other in (RuntimeError("something else"), ConfigError("mine"), KeyboardInterrupt()):
        assert advised(other, 0) is other


def test_more_ranks_than_gpus_are_refused(gpu_alone: list[torch.device]) -> None:
    first, second = (Environment("local", rank, 2, rank, 2) for rank in range(2))
    said = []
    for rank in (first, second):  # else the first would wait for the second, which has ended
        with (
            pytest.raises(ConfigError, match="1 GPUs for 2 ranks") as raised,
            on_device(TrainConfig(device="cuda"), rank),
        ):
            pass
        said.append(raised.value.is_alone)
    assert said == [True, False]
    with on_device(TrainConfig(device="auto"), second) as device:
        assert device.type == "cpu"


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040). Please update it"


@pytest.mark.parametrize(
    ("built", "error", "message"),
    [
        (None, None, r"device='cuda': torch \S+ is a build without CUDA: install one"),
        (
            "13.0",
            TOO_OLD,
            r"for CUDA 13.0 finds no GPU \(The NVIDIA .* too old .*\): install a bui",
        ),
        ("13.0", None, "finds no GPU: see nvidia-smi and CUDA_VISIBLE_DEVICES, or set device=cpu"),
    ],
)
def test_why_there_is_no_gpu_is_said(
    monkeypatch: pytest.MonkeyPatch, built: str | None, error: str | None, message: str
) -> None:
    def init() -> None:
        if error:
            raise RuntimeError(error)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(torch.version, "cuda", built)
    with pytest.raises(ConfigError, match=message), on_device(TrainConfig(device="cuda"), ALONE):
        pass
    with on_device(TrainConfig(device="auto"), ALONE) as device:
        assert device.type == "cpu"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_an_accelerator_that_torch_does_not_know_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with (
        pytest.raises(ConfigError, match="finds no accelerator: install the package that adds"),
        on_device(TrainConfig(device="accelerator"), ALONE),
    ):
        pass


@pytest.mark.parametrize(
    ("kind", "message"), [("cuda", "has no NCCL, by which"), ("xla", "has no backend for xla")]
)
def test_ranks_without_a_way_to_exchange_are_told(
    monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    place = Environment("torchrun", 0, 2, 0, 2, "127.0.0.1", 29_500)
    with pytest.raises(EnvironError, match=message):
        open_transport(place, torch.device(kind, 0), 1.0)


@needs_gpu
def test_products_on_a_gpu_are_the_same_each_time() -> None:
    with on_device(TrainConfig(device="cuda"), ALONE) as device:
        left, right = (torch.randn(513, 513, device=device) for _ in range(2))
        assert all(torch.equal(left @ right, left @ right) for _ in range(20))
