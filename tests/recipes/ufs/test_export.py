"""Exports: what is read back predicts the same, and the C++ program agrees with Python."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import torch

from lockstep.recipes.ufs.export import export_net, load_program, load_script
from lockstep.recipes.ufs.jacobian import physical
from lockstep.recipes.ufs.model import SeaIceNet
from lockstep.recipes.ufs.rows import Scale
from lockstep.recipes.ufs.variables import VARIABLES

INPUTS = ("sst", "hi", "uatm", "qref")
OUTPUTS = ("aice", "tsfc")


@pytest.fixture(scope="module")
def net() -> SeaIceNet:
    torch.manual_seed(0)
    scale = Scale(np.array([-1, 1, 2, 1e-3, 0.5, -8]), np.array([0.7, 0.5, 5, 5e-4, 0.3, 6]))
    return SeaIceNet(INPUTS, OUTPUTS, (16, 16), scale, squash=True).requires_grad_(False)


@pytest.fixture(scope="module")
def exported(net: SeaIceNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    export_net(net, 127, {"config_hash": "abc"}, folder)
    return folder


@pytest.fixture(scope="module")
def rows(net: SeaIceNet) -> torch.Tensor:
    noise = torch.randn(7, len(INPUTS), generator=torch.Generator().manual_seed(1))
    return noise * net.input_deviation + net.input_mean


@pytest.mark.parametrize(
    ("name", "load"), [("emulator.ts", load_script), ("emulator.pt2", load_program)]
)
@pytest.mark.parametrize("count", [1, 7])
def test_what_is_read_back_predicts_the_same(
    exported: Path, net: SeaIceNet, rows: torch.Tensor, name: str, load: Any, count: int
) -> None:
    found = load(exported / name)(rows[:count])
    assert torch.allclose(found, net.predict(rows[:count]), rtol=1e-6, atol=0)


def test_metadata_is_in_every_form(exported: Path) -> None:
    script: Any = load_script(exported / "emulator.ts")
    assert script.inputs == list(INPUTS)
    assert script.output_names == ["sea_ice_area_fraction", "skin_temperature_at_surface"]
    assert script.levels == [0, 0, 127, 127]
    said = json.loads((exported / "metadata.json").read_text())
    assert json.loads(script.metadata) == said
    assert said["input_names"][3] == "water_vapor_mixing_ratio_wrt_moist_air"
    assert said["input_units"] == ["degC", "m", "m/s", "kg/kg"]
    assert said["config_hash"] == "abc"
    extra = {"metadata.json": ""}
    torch.export.load(exported / "emulator.pt2", extra_files=extra)
    assert json.loads(extra["metadata.json"]) == said


def test_the_command_needs_no_data(here: Any, files: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(files, data)
    keys = ("steps=2", "hidden=[4]", "batch_size=64", "log_every=2", "optimizer.name=sgd")
    trained = here("train", "ufs", f"history={data}/iceh.*.nc", *keys, "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    shutil.rmtree(data)
    done = here("export", "run", "out")
    assert done.returncode == 0, done.stderr
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "emulator.ts", "emulator.pt2", "metadata.json", "cpp",
    }  # fmt: skip
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    said = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert said["params_sha256"] == result["params_sha256"]


def test_exports_that_cannot_be_made(here: Any, tmp_path: Path) -> None:
    assert here("train", "digits", "steps=1", "hidden=4", "--run-dir", "run").returncode == 0
    done = here("export", "run", "out")
    assert (done.returncode, done.stderr) == (2, "error: run: digits has nothing to export\n")
    done = here("export", "none", "out")
    assert done.returncode == 2
    assert "none: is no run directory" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def program(exported: Path) -> Path:
    """The C++ program, built as its CMakeLists.txt says."""
    if shutil.which("cmake") is None or shutil.which("c++") is None:
        pytest.skip("no cmake or no C++ compiler")
    build = exported / "build"
    python = f"-DPython3_EXECUTABLE={sys.executable}"
    for command in (
        ["cmake", "-S", exported / "cpp", "-B", build, python],
        ["cmake", "--build", build],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "ufs_emulator"


def call(program: Path, *arguments: Path | str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def csv(path: Path, rows: Any, header: str = "") -> Path:
    lines = [",".join(f"{float(v):.9g}" for v in row) for row in rows]
    path.write_text("\n".join([header, *lines] if header else lines) + "\n")
    return path


def netcdf(path: Path, rows: torch.Tensor, names: tuple[str, ...] = INPUTS) -> Path:
    with netCDF4.Dataset(path, "w") as data:
        data.createDimension("row", len(rows))
        for name, column in zip(names, rows.T, strict=True):
            data.createVariable(name, "f8", ("row",))[:] = column.double().numpy()
    return path


def parsed(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, out] and Jacobians [N, out, in] of what the program printed."""
    values = [float(v) for v in re.findall(r"^  \w+ = (\S+)$", text, re.M)]
    slopes = [float(v) for v in re.findall(r"^  d \w+ / d \w+ = (\S+)$", text, re.M)]
    outputs = torch.tensor(values).view(-1, len(OUTPUTS))
    return outputs, torch.tensor(slopes).view(len(outputs), len(OUTPUTS), len(INPUTS))


@pytest.mark.slow
def test_the_program_agrees_with_python(
    program: Path, exported: Path, net: SeaIceNet, rows: torch.Tensor, tmp_path: Path
) -> None:
    turned = [3, 1, 0, 2]
    inputs = [
        csv(tmp_path / "plain.csv", rows),
        csv(tmp_path / "named.csv", rows[:, turned], ",".join(INPUTS[i] for i in turned)),
        netcdf(tmp_path / "rows.nc", rows),
        netcdf(tmp_path / "cf.nc", rows, tuple(VARIABLES[name].cf_name for name in INPUTS)),
    ]
    for path in inputs:
        done = call(program, exported / "emulator.ts", path)
        assert done.returncode == 0, done.stderr
        outputs, jacobians = parsed(done.stdout)
        assert torch.allclose(outputs, net.predict(rows), rtol=1e-6, atol=0)
        wanted = physical(net, rows)
        assert (jacobians - wanted).abs().max() <= 1e-6 * wanted.abs().max()
        assert torch.allclose(jacobians, wanted, rtol=1e-5, atol=0)
        said = done.stdout.splitlines()[0].removeprefix("metadata ")
        assert json.loads(said)["inputs"] == list(INPUTS)


@pytest.mark.slow
def test_the_program_names_what_is_wrong(
    program: Path, exported: Path, rows: torch.Tensor, tmp_path: Path
) -> None:
    done = call(program)
    assert done.returncode == 1
    assert done.stderr.startswith("usage: ")
    model = exported / "emulator.ts"
    (tmp_path / "text.csv").write_text("1,2,3,4\n1,2,x,4\n")
    (tmp_path / "nan.csv").write_text("1,2,nan,4\n")
    (tmp_path / "empty.csv").write_text("\n")
    (tmp_path / "broken.nc").write_bytes(b"CDF")
    long = torch.cat([rows, rows[:, :1]], dim=1)
    missing = netcdf(tmp_path / "missing.nc", rows[:, :3], INPUTS[:3])
    for path, message in {
        csv(tmp_path / "short.csv", rows[:, :3]): "short.csv: line 1: has 3 values; must be 4",
        csv(tmp_path / "long.csv", long): "long.csv: line 1: has 5 values; must be 4",
        csv(tmp_path / "names.csv", rows, "sst,hi,uatm,q"): "names.csv: line 1: has no column qref",
        tmp_path / "text.csv": "text.csv: line 2: uatm='x' is not a number",
        tmp_path / "nan.csv": "nan.csv: line 1: uatm=nan: is not a finite number",
        tmp_path / "empty.csv": "empty.csv: holds no rows",
        tmp_path / "none.csv": "none.csv: cannot be read",
        tmp_path / "broken.nc": "broken.nc: cannot be read: NetCDF",
        missing: "missing.nc: has no variable qref (water_vapor_mixing_ratio_wrt_moist_air)",
    }.items():
        done = call(program, model, path)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = call(program, tmp_path / "text.csv", tmp_path / "text.csv")
    assert done.returncode == 2
    assert "is no TorchScript model" in done.stderr
