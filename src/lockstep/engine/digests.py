"""Digests of tensors, and of the rounding of this machine.

The bits of a run depend on the processor and the libraries: other vector instructions, or another
maths library, sum in another order. Whether two machines round alike cannot be told from their
names, only from the results of their kernels for the same inputs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import socket
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.errors import CheckpointError

_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE", "CUBLAS_WORKSPACE_CONFIG",
)  # fmt: skip
"""Environment variables that decide which kernels are used."""
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_NUM_DIGITS = 16


def model_digest(model: nn.Module, more: Mapping[str, Tensor] | None = None) -> str:
    """SHA-256 of all parameters, persistent buffers and `more` tensors, by sorted name."""
    return tensors_digest(model.state_dict() | dict(more or {}))


def tensors_digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tensors by sorted name."""
    return combined_digest({name: tensor_digest(name, t) for name, t in tensors.items()})


def tensor_digest(name: str, tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's name, dtype, shape and bytes."""
    sha = hashlib.sha256(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
    plain = tensor.detach().cpu().contiguous()
    sha.update(bytes_of(plain))
    return sha.digest()


def combined_digest(digests: Mapping[str, bytes]) -> str:
    """`tensors_digest` of tensors, from their `tensor_digest` by name."""
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes: three times faster than SHA-256, and than to copy and compare."""
    plain = tensor.detach().cpu().contiguous()
    return zlib.crc32(bytes_of(plain))


def bytes_of(tensor: Tensor) -> Any:
    """The bytes of a contiguous tensor on the CPU, as a buffer that does not keep it alive."""
    # Not by numpy, after which the memory of a tensor cannot be freed (`FlatTensors.close`).
    return (ctypes.c_ubyte * (tensor.numel() * tensor.itemsize)).from_address(tensor.data_ptr())


class Rounding(NamedTuple):
    """How a machine rounds.

    Attributes:
        digest: hexadecimal digits that are the same on machines that round alike.
        machine: host, processor and libraries, in words.
    """

    digest: str
    machine: str


def rounding_of(precision: str, device: torch.device) -> Rounding:
    """How kernels round here, with the number of threads that torch uses now; takes some 10 ms.

    Random generators are left as they are.

    Args:
        precision: `precision.dtype` of the run.
        device: device that is computed on.
    """
    sha = hashlib.sha256()
    dtype = _DTYPES[precision]
    with torch.random.fork_rng(devices=[]):
        values = list(_computed(device))
        if dtype is not None:
            with torch.autocast(device.type, dtype):
                values += _computed(device)
        for value in values:
            plain = value.detach().float().cpu().contiguous()
            sha.update(bytes_of(plain))
    return Rounding(sha.hexdigest()[:_NUM_DIGITS], _machine(device))


def check_rounding(here: Rounding, there: Any, where: str, is_strict: bool) -> str:
    """A warning if a run goes on from a state that was computed on another kind of machine.

    Args:
        here: how this machine rounds.
        there: `Rounding._asdict()` of the machine that computed it; anything else if an earlier
            version wrote the state.
        where: path of the state.
        is_strict: whether a difference is an error.

    Returns:
        The warning; empty if both round alike, or that is not known.

    Raises:
        CheckpointError: they do not, and `is_strict`.
    """
    if not isinstance(there, dict) or there.get("digest") in (None, here.digest):
        return ""
    message = (
        f"{where}: was computed on another machine, which rounds differently, so the bits of the "
        f"result will differ from those of an unbroken run: {there.get('machine')} there, "
        f"{here.machine} here"
    )
    if is_strict:
        raise CheckpointError(f"{message}; go on there, or set strict=false")
    return message


def _computed(device: torch.device) -> Iterator[Tensor]:
    """Results of typical kernels of training, forward and backward."""
    x = _values(device, 16, 96)
    weight = _values(device, 200, 96).requires_grad_()
    y = F.linear(x, weight, _values(device, 200))
    y = F.layer_norm(F.gelu(y), (200,))
    loss = F.cross_entropy(y @ _values(device, 200, 11), torch.arange(16, device=device) % 11)
    loss.backward()  # type: ignore[no-untyped-call]
    yield loss
    yield weight.grad if weight.grad is not None else loss
    images = _values(device, 2, 6, 13, 13)
    filters = _values(device, 10, 6, 3, 3).requires_grad_()
    made = F.conv2d(images, filters, padding=1)
    made.square().mean().backward()  # type: ignore[no-untyped-call]
    yield made
    yield filters.grad if filters.grad is not None else made
    one = _values(device, 1, 700).float()
    yield torch.stack([one.sum(), one.mean(), one.square().sum().sqrt(), one.std()])
    yield torch.cat([f(one) for f in (torch.exp, torch.tanh, torch.sigmoid, torch.sin)])
    yield F.softmax(one, dim=-1)
    heads = _values(device, 1, 2, 20, 16)
    yield F.scaled_dot_product_attention(heads, heads, heads)
    yield torch.bmm(_values(device, 3, 33, 65), _values(device, 3, 65, 17))
    if device.type == "cpu":
        yield _recurrent(_values(device, 2, 5, 12))


def _recurrent(x: Tensor) -> Tensor:
    cell = nn.LSTM(12, 20, batch_first=True, dtype=x.dtype)  # tasks may set another default
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.copy_(_values(x.device, *parameter.shape))
        with torch.autocast("cpu", enabled=False):  # not all processors have it
            made: Tensor = cell(x)[0]
    return made


def _values(device: torch.device, *shape: int) -> Tensor:
    """Numbers between -0.5 and 0.5 that have many digits: float32 [*shape]."""
    count = torch.Size(shape).numel()
    values = (torch.arange(count, dtype=torch.float64) * 0.6180339887498949) % 1.0 - 0.5
    return values.float().reshape(shape).to(device)


def _machine(device: torch.device) -> str:
    parts = [socket.gethostname(), processor()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_device_name(device))
    parts.append(f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    parts += [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]
    return f"{parts[0]} ({', '.join(parts[1:])})"


def processor() -> str:
    """The model name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
