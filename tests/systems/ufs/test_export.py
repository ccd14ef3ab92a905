"""Exports: what is read back predicts the same, and the C++ program agrees with Python."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import time
import warnings
from pathlib import Path
from typing import Any

import netCDF4
import numpy as np
import pytest
import torch
from tests.systems.ufs.building import built
from tests.systems.ufs.fields.layouts import SHAPE, write
from tests.systems.ufs.fields.test_layouts import LAYOUTS
from tests.systems.ufs.hostile_files import FORMATS, HOSTILE, NAMES, good, values

from lockstep.systems.ufs.decoding import Damaged, check_whole
from lockstep.systems.ufs.export import export_net, load_program, load_script
from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.bands import Selection, keep_bands
from lockstep.systems.ufs.fields.rows import Scale, gather
from lockstep.systems.ufs.fields.sources import find_sources
from lockstep.systems.ufs.model import SeaIceNet
from lockstep.systems.ufs.report.scores import physical

INPUTS = NAMES
OUTPUTS = ("aice", "tsfc")


@pytest.fixture(scope="module")
def net() -> SeaIceNet:
    torch.manual_seed(0)
    mean = np.array([-1, 1, 2, 1e-3, -5, 0.5, -8])
    scale = Scale(mean, np.array([0.7, 0.2, 5, 2e-4, 8, 0.3, 6]))
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
    assert script.levels == [0, 0, 127, 127, 127]
    said = json.loads((exported / "metadata.json").read_text())
    assert json.loads(script.metadata) == said
    assert said["input_names"][3] == "water_vapor_mixing_ratio_wrt_moist_air"
    assert said["input_units"] == ["degC", "m", "m/s", "kg/kg", "degC"]
    assert said["cf_units"] == ["degC", "m", "m/s", "kg/kg", "K"]
    assert script.units == [["degC", "K"], ["m", "cm", "mm"], ["m/s", "cm/s"], ["kg/kg", "g/kg"],
                            ["degC", "K"]]  # fmt: skip
    assert (script.factors[1], script.shifts[4]) == ([1, 0.01, 0.001], [0, -273.15])
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
    assert (done.returncode, done.stderr) == (
        2,
        "error: out: digits has no forms of its own; end it in .safetensors, .pt2, .ts, .onnx, or "
        "give --format\n",
    )
    done = here("export", "none", "out")
    assert done.returncode == 2
    assert "none: is no run directory" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def program(exported: Path) -> Path:
    """The C++ program, built as its CMakeLists.txt says."""
    return built(exported / "cpp", exported / "build", "ufs_emulator") / "ufs_emulator"


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


def written(path: Path, name: str, kind: str, values: Any, **attributes: Any) -> Path:
    """A good file, in which one variable has other values and attributes, as they are stored."""
    good(path, "rows")
    fill = attributes.pop("_FillValue", None)
    with netCDF4.Dataset(path, "a") as data:
        if name in data.variables:
            data.renameVariable(name, "other")
        if name == VARIABLES["tair"].cf_name:
            data.renameVariable("tair", "another")
        made = data.createVariable(name, kind, ("row",), fill_value=fill)
        made.set_auto_maskandscale(False)
        made[:] = values
        made.setncatts(attributes)
    return path


def damage(path: Path) -> str:
    """What Python finds wrong with a header."""
    try:
        check_whole(path)
    except Damaged as error:
        return str(error)
    return ""


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
    turned = [3, 1, 0, 4, 2]
    inputs = [
        csv(tmp_path / "plain.csv", rows),
        csv(tmp_path / "named.csv", rows[:, turned], ",".join(INPUTS[i] for i in turned)),
        netcdf(tmp_path / "rows.nc", rows),
    ]
    for path in inputs:
        done = call(program, exported / "emulator.ts", path)
        assert done.returncode == 0, done.stderr
        outputs, jacobians = parsed(done.stdout)
        assert torch.allclose(outputs, net.predict(rows), rtol=1e-6, atol=0)
        wanted = physical(net, rows)
        assert (jacobians - wanted).abs().max() <= 1e-6 * wanted.abs().max()
        assert torch.allclose(jacobians, wanted, rtol=1e-4, atol=0)
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
    (tmp_path / "text.csv").write_text("1,2,3,0,0\n1,2,x,0,0\n")
    (tmp_path / "nan.csv").write_text("1,2,nan,0,0\n")
    (tmp_path / "empty.csv").write_text("\n")
    (tmp_path / "broken.nc").write_bytes(b"CDF")
    long = torch.cat([rows, rows[:, :1]], dim=1)
    missing = netcdf(tmp_path / "missing.nc", rows[:, :3], INPUTS[:3])
    for path, message in {
        csv(tmp_path / "short.csv", rows[:, :3]): "short.csv: line 1: has 3 values; must be 5",
        csv(tmp_path / "long.csv", long): "long.csv: line 1: has 6 values; must be 5",
        csv(
            tmp_path / "names.csv", rows, "sst,hi,uatm,q,tair"
        ): "names.csv: line 1: has no column qref",
        tmp_path / "text.csv": "text.csv: line 2: uatm='x' is not a number",
        tmp_path / "nan.csv": "nan.csv: line 1: uatm=nan: is not a finite number",
        tmp_path / "empty.csv": "empty.csv: holds no rows",
        tmp_path / "none.csv": "none.csv: cannot be read",
        tmp_path / "broken.nc": "broken.nc: is not NetCDF, or is truncated or damaged",
        missing: "missing.nc: has no variable qref (water_vapor_mixing_ratio_wrt_moist_air)",
    }.items():
        done = call(program, model, path)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr
        assert len(done.stderr.splitlines()) == 1
    done = call(program, tmp_path / "text.csv", tmp_path / "text.csv")
    assert done.returncode == 2
    assert "is no TorchScript model" in done.stderr


PACKED = np.array([10, 15, 20, 25, 30, 40])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "attributes", "expected"),
    [
        ("sst", "i2", {"scale_factor": 0.1, "add_offset": -3.0}, PACKED * 0.1 - 3),
        ("sst", "i2", {"scale_factor": np.float32(0.1)}, PACKED * np.float32(0.1)),
        ("sst", "u1", {"scale_factor": np.float32(0.1), "add_offset": 1.0, "_FillValue": 7},
         PACKED.astype("u1") * np.float32(0.1) + 1.0),
        ("sst", "i4", {"add_offset": np.float32(-12.5)}, PACKED + np.float64(-12.5)),
        ("sst", "f8", {"missing_value": [1e30, -9.0], "units": " Celsius "}, PACKED),
        ("tair", "i2", {"units": "degC"}, PACKED),
        ("tair", "f4", {"units": "K"}, (PACKED + 200).astype("f4") + np.float32(-273.15)),
        ("air_temperature", "i2", {"units": "°C"}, PACKED),
        ("hi", "f8", {"units": " Cm "}, ((PACKED + 0.0) * 0.01).astype("f4")),
        ("uatm", "f8", {"units": "m·s⁻¹"}, PACKED),
        ("qref", "f8", {"units": "G kg**-1"}, ((PACKED + 0.0) * 0.001).astype("f4")),
        ("hi", "i1", {"_Unsigned": "true", "scale_factor": 0.1, "_FillValue": -1}, PACKED * 0.1),
        ("hi", "f8", {}, np.array([-5e-4, 1, 2, 3, 4, 5]).clip(0)),
        ("air_temperature", "f4", {"units": "Kelvin"},
         (PACKED + 200).astype("f4") + np.float32(-273.15)),
        ("air_temperature", "i2", {"scale_factor": 0.5, "add_offset": 250.0},
         (PACKED * 0.5 + 250.0).astype("f4") + np.float32(-273.15)),
    ],
)  # fmt: skip
def test_the_program_decodes_as_training_does(
    name: str, kind: str, attributes: Any, expected: Any,
    program: Path, exported: Path, net: SeaIceNet, tmp_path: Path,
) -> None:  # fmt: skip
    stored = PACKED + 200 if kind == "f4" else PACKED
    if not attributes:
        stored = np.array([-5e-4, 1, 2, 3, 4, 5])
    path = written(tmp_path / "rows.nc", name, kind, stored, **attributes)
    done = call(program, exported / "emulator.ts", path)
    assert done.returncode == 0, done.stderr
    assert bool(done.stderr) == (not attributes)
    column = "tair" if name == "air_temperature" else name
    plain = torch.stack([torch.from_numpy(values(n, "rows")) for n in INPUTS], 1)
    plain[:, INPUTS.index(column)] = torch.from_numpy(np.asarray(expected, np.float32))
    assert torch.allclose(parsed(done.stdout)[0], net.predict(plain), rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [name for name, layout in LAYOUTS.items() if layout.kind == "history" and not layout.twice],
)
def test_the_program_reads_history_files_as_training_does(
    layout: str, program: Path, exported: Path, net: SeaIceNet, tmp_path: Path
) -> None:
    wild = LAYOUTS[layout]
    keys = write(wild, tmp_path)
    done = call(program, exported / "emulator.ts", keys["history"][0])
    no_inputs = {"aice", "fswdn", "hs"}  # of this emulator
    if wild.refused and not no_inputs & {*wild.poked, *wild.units}:
        assert done.returncode == 2, done.stdout
        return
    assert done.returncode == 0, done.stderr
    bands = keep_bands(
        find_sources(keys["history"], [], [], None), Selection(INPUTS, "both"), tmp_path / "cache"
    )
    rows = gather(bands, 10**9)
    wanted = net.predict(torch.from_numpy(rows.values))
    assert torch.allclose(parsed(done.stdout)[0], wanted, rtol=1e-5, atol=1e-6)
    said = [int(number) for number in re.findall(r"^row (\d+)$", done.stdout, re.M)]
    assert said == (rows.cell + rows.time.astype(int) * np.prod(SHAPE)).tolist()


@pytest.mark.slow
def test_a_cf_name_means_the_unit_of_cf_files(
    program: Path, exported: Path, net: SeaIceNet, rows: torch.Tensor, tmp_path: Path
) -> None:
    kelvin = rows.double() + torch.tensor([0, 0, 0, 0, 273.15], dtype=torch.float64)
    names = [VARIABLES[name].cf_name for name in INPUTS]
    model = exported / "emulator.ts"
    for path in (
        csv(tmp_path / "cf.csv", kelvin, ",".join(names)),
        netcdf(tmp_path / "cf.nc", kelvin, tuple(names)),
    ):
        done = call(program, model, path)
        assert done.returncode == 0, done.stderr
        assert torch.allclose(parsed(done.stdout)[0], net.predict(rows), rtol=1e-4, atol=1e-6)
        assert torch.allclose(parsed(done.stdout)[0][:, 1], net.predict(rows)[:, 1], rtol=1e-5)
    both = ",".join([*INPUTS, "air_temperature"])
    wide = torch.cat([rows, kelvin[:, -1:].float()], 1)
    for path, message in {
        csv(tmp_path / "celsius.csv", rows, ",".join(names)):
            "outside -95 to 65; air_temperature must be in K",
        csv(tmp_path / "kelvin.csv", kelvin): "outside -95 to 65; tair must be in degC",
        csv(tmp_path / "both.csv", wide, both): "has more than one column tair (air_temperature)",
        csv(tmp_path / "huge.csv", [[1e300, 1, 1, 0, 0]]): "sst=1e+300: is inf degC, outside -5",
        netcdf(tmp_path / "celsius.nc", rows, tuple(names)): "air_temperature must be in K",
        written(tmp_path / "k.nc", "tair", "f4", -20, units="K"):
            "outside -95 to 65; tair must be in K",
        written(tmp_path / "c.nc", "air_temperature", "f4", 270, units="degC"):
            "air_temperature must be in degC",
        written(tmp_path / "o.nc", "hi", "f4", 1, units="kg/m2"):
            "hi: units='kg/m2': must be m or cm or mm",
        written(tmp_path / "f.nc", "hi", "i2", PACKED, _FillValue=20): "hi in row 2: is missing",
        written(tmp_path / "m.nc", "hi", "f4", PACKED / 100, missing_value=[9.0, 0.25]):
            "hi in row 3: is missing",
    }.items():  # fmt: skip
        done = call(program, model, path)
        assert done.returncode == 2, (path, done.stdout)
        assert message in done.stderr
        assert not parsed(done.stdout)[0].numel()


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOSTILE)
def test_the_program_refuses_hostile_files(
    kind: str, program: Path, exported: Path, tmp_path: Path
) -> None:
    path = tmp_path / "мёд ❄ hostile.nc"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        HOSTILE[kind](path, "rows")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    start = time.monotonic()
    done = call(program, exported / "emulator.ts", path)
    assert done.returncode == 2, done.stdout
    assert done.stderr.startswith(f"error: {path}: ")
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 2000
    assert time.monotonic() - start < 10
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss <= max(before, 1_000_000)


@pytest.mark.slow
def test_the_program_reads_headers_as_training_does(exported: Path, tmp_path: Path) -> None:
    main = tmp_path / "main.cpp"
    main.write_text(
        '#include "classic.h"\n#include <cstdio>\nint main(int n, char **paths) {\n'
        '  for (int i = 1; i < n; ++i) std::printf("%s\\n", damage_of(paths[i]).c_str());\n}\n'
    )
    source = exported / "cpp" / "classic.cpp"
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-I", source.parent, source]
    subprocess.run([*command, main, "-o", tmp_path / "check"], check=True)
    paths = []
    for version, form in FORMATS.items():
        good(tmp_path / "whole.nc", "grid", form)
        whole = (tmp_path / "whole.nc").read_bytes()
        for size in [*range(0, len(whole), 7), len(whole)]:
            paths.append(tmp_path / f"{version}-{size}.nc")
            paths[-1].write_bytes(whole[:size])
    for number, make in enumerate(HOSTILE.values()):
        path = tmp_path / f"hostile-{number}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(path, "grid")
        if path.is_file():
            paths.append(path)
    done = subprocess.run([tmp_path / "check", *paths], capture_output=True, text=True, check=True)
    expected = [damage(path) for path in paths]
    assert [*map(bool, done.stdout.splitlines())] == [*map(bool, expected)]
    agreed = sum(map(str.__eq__, done.stdout.splitlines(), expected))
    assert agreed > 0.8 * len(paths)  # of damaged headers it may be said in other words
