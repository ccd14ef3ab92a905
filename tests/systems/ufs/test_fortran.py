"""An ice model in Fortran, and the C interface below it, predict what Python predicts."""

from __future__ import annotations

import ctypes
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.apt import install
from tests.systems.ufs.building import built

from lockstep.systems.ufs.export import export_net
from lockstep.systems.ufs.fields.rows import Scale
from lockstep.systems.ufs.model import SeaIceNet
from lockstep.systems.ufs.report.scores import physical

pytestmark = pytest.mark.docs  # beside those of SLURM, since a compiler takes long

INPUTS, OUTPUTS = ("sst", "hi", "uatm", "qref", "tair"), ("aice", "tsfc")
OK, BAD_MODEL, BAD_ARGUMENT, BAD_VALUE = range(4)
Doubles = ctypes.POINTER(ctypes.c_double)


@pytest.fixture(scope="module")
def net() -> SeaIceNet:
    torch.manual_seed(0)
    mean = np.array([-1, 1, 2, 1e-3, -5, 0.5, -8])
    scale = Scale(mean, np.array([0.7, 0.2, 5, 2e-4, 8, 0.3, 6]))
    return SeaIceNet(INPUTS, OUTPUTS, (16, 16), scale, squash=True).requires_grad_(False)


@pytest.fixture(scope="module")
def exported(net: SeaIceNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_net(net, None, {}, folder)
    return folder


@pytest.fixture(scope="module")
def build(exported: Path) -> Path:
    """Library and example, without optimisation, which nothing here depends on.

    Fortran's traps are on: LibTorch must not spring them.
    """
    reason = install(["gfortran"], ["gfortran"])
    if reason:
        pytest.skip(reason)
    traps = "-DCMAKE_Fortran_FLAGS=-Wall -Werror -ffpe-trap=invalid,zero,overflow"
    options = ("-DUFS_FORTRAN=ON", "-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O0", traps)
    return built(exported / "cpp", exported / "build", "ice_model", *options)


def columns(net: SeaIceNet, count: int) -> torch.Tensor:
    noise = torch.rand(count, len(INPUTS), generator=torch.Generator().manual_seed(1)) - 0.5
    return noise * net.input_deviation + net.input_mean


def run(build: Path, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    command = [build / "ice_model", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def written(path: Path, x: torch.Tensor) -> Path:
    lines = [" ".join(f"{float(v):.9g}" for v in row) for row in x]
    path.write_text("\n".join([str(len(x)), *lines]) + "\n")
    return path


def test_an_ice_model_in_fortran(
    build: Path, exported: Path, net: SeaIceNet, tmp_path: Path
) -> None:
    model, x = exported / "emulator.ts", columns(net, 6)
    x[2, 1] = -5e-4  # as interpolation leaves it
    done = run(build, model, written(tmp_path / "rows.txt", x))
    assert (done.returncode, done.stderr) == (0, "")
    assert "input tair degC" in done.stdout
    assert "clipped 1" in done.stdout
    x[2, 1] = 0
    number = r" = *(-?[\d.]+E[+-]\d+)$"
    outputs = re.findall(rf"^column (\d+) (\w+){number}", done.stdout, re.M)
    assert [(int(c), name) for c, name, _ in outputs] == [
        (c, name) for c in range(1, 7) for name in OUTPUTS
    ]
    found = torch.tensor([float(v) for *_, v in outputs]).view(6, len(OUTPUTS))
    assert torch.allclose(found, net.predict(x), rtol=1e-6, atol=0)
    slopes = re.findall(rf"^  d \w+ / d \w+{number}", done.stdout, re.M)
    jacobian = torch.tensor([float(v) for v in slopes]).view(6, len(OUTPUTS), len(INPUTS))
    assert torch.allclose(jacobian, physical(net, x), rtol=1e-5, atol=1e-7)

    x[4, 4] = 268.0
    for arguments, code, message in (
        ((), 1, "usage: ice_model"),
        ((model, written(tmp_path / "kelvin.txt", x)), 2,
         "error: tair of column 5: is 268 degC, outside -95 to 65; tair must be in degC"),
        ((tmp_path / "none.ts", tmp_path / "rows.txt"), 2, "none.ts: is no TorchScript model"),
        ((tmp_path / "rows.txt", tmp_path / "rows.txt"), 2, "is no TorchScript model"),
        ((model, tmp_path / "none.txt"), 2, "error: "),
    ):  # fmt: skip
        done = run(build, *arguments)
        assert done.returncode == code, done.stderr
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1


class Library:
    """The C interface, by ctypes."""

    def __init__(self, build: Path) -> None:
        self.c = ctypes.CDLL(str(build / "libufs_emulator.so"))
        self.c.ufs_free.restype = None
        self.c.ufs_num_inputs.restype = ctypes.c_int64
        self.message = ctypes.create_string_buffer(512)

    def load(self, path: Path | None, length: int = 512) -> tuple[int, ctypes.c_void_p]:
        handle = ctypes.c_void_p(7)
        name = None if path is None else bytes(path)
        status = self.c.ufs_load(name, ctypes.byref(handle), self.message, ctypes.c_int64(length))
        return status, handle

    def jacobian(self, handle: Any, x: Any) -> tuple[int, Any, Any, str]:
        """Status, outputs [N, out], Jacobians [N, out, in] and message, for inputs [N, in]."""
        fields = np.ascontiguousarray(np.asarray(x, np.float64).T)
        count = fields.shape[1]
        outputs = np.full((len(OUTPUTS), count), 9.0)
        jacobian = np.full((len(OUTPUTS), len(INPUTS), count), 9.0)
        message = ctypes.create_string_buffer(512)
        status = self.c.ufs_jacobian(
            handle, ctypes.c_int64(count),
            *(a.ctypes.data_as(Doubles) for a in (fields, outputs, jacobian)),
            None, message, ctypes.c_int64(512),
        )  # fmt: skip
        return status, outputs.T, jacobian.transpose(2, 0, 1), message.value.decode()


def test_the_c_interface_says_what_is_wrong(
    build: Path, exported: Path, net: SeaIceNet, tmp_path: Path
) -> None:
    library = Library(build)
    model = exported / "emulator.ts"
    for path, status in ((tmp_path / "none.ts", BAD_MODEL), (None, BAD_ARGUMENT)):
        assert library.load(path)[0] == status
        assert not library.load(path)[1].value
        assert library.message.value
    library.load(tmp_path / "none.ts", length=5)
    assert library.message.value == bytes(tmp_path)[:4]
    status, handle = library.load(model)
    assert (status, library.message.value) == (OK, b"")
    assert library.c.ufs_num_inputs(handle) == len(INPUTS)
    assert library.c.ufs_num_inputs(None) == 0
    x = columns(net, 20_000).numpy()
    for value in (np.nan, np.inf, -np.inf, 1e300, 268.0):
        bad = x.astype(np.float64)
        bad[15_000, 4] = value
        status, outputs, jacobian, message = library.jacobian(handle, bad)
        assert status == BAD_VALUE
        assert message.startswith("tair of column 15001: is ")
        assert (outputs == 9).all()  # nothing is half written
        assert (jacobian == 9).all()
    size, none = ctypes.c_int64(-1), ctypes.c_int64(0)
    assert library.c.ufs_predict(handle, size, None, None, None, None, none) == BAD_ARGUMENT
    assert library.c.ufs_predict(handle, none, None, None, None, None, none) == OK
    one = ctypes.c_int64(1)
    assert library.c.ufs_predict(handle, one, None, None, None, None, none) == BAD_ARGUMENT
    assert library.jacobian(None, x[:2])[::3] == (BAD_ARGUMENT, "emulator: is null; load it first")
    for kind, number, name in ((0, 4, b"tair"), (1, 4, b"degC"), (2, 1, b"tsfc"), (3, 0, b"1")):
        arguments = kind, ctypes.c_int64(number), library.message, ctypes.c_int64(512)
        assert library.c.ufs_name(handle, *arguments) == OK
        assert library.message.value == name
    for kind, number in ((0, 5), (0, -1), (9, 0), (2, 2)):
        arguments = kind, ctypes.c_int64(number), library.message, ctypes.c_int64(512)
        assert library.c.ufs_name(handle, *arguments) == BAD_ARGUMENT
    library.c.ufs_free(handle)
    library.c.ufs_free(None)


def test_threads_share_an_emulator(build: Path, exported: Path, net: SeaIceNet) -> None:
    library = Library(build)
    _, handle = library.load(exported / "emulator.ts")
    parts = columns(net, 8 * 9_001).split(9_001)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda x: library.jacobian(handle, x.numpy()), parts))
    for x, (status, outputs, jacobian, _) in zip(parts, found, strict=True):
        assert status == OK
        assert np.allclose(outputs, net.predict(x), rtol=1e-5, atol=1e-6)
        unit = net.input_deviation / net.output_deviation[:, None]
        assert np.allclose(jacobian * unit.numpy(), physical(net, x) * unit, rtol=1e-4, atol=1e-5)
    library.c.ufs_free(handle)
