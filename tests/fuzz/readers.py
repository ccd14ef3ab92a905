"""Calls of all other readers, each with what must hold of what it accepts, and samples."""

from __future__ import annotations

import gzip
import math
import os
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from lockstep.cli.clusters.slurm import job_file
from lockstep.comm.call_records import read_calls
from lockstep.comm.calls import CallRing
from lockstep.config import load, override
from lockstep.data.images import read_labelled
from lockstep.engine.checkpoint import listing
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.faults import FAULTS, PlannedFault, injector, to_env
from lockstep.launching.api import SESSION, Session
from lockstep.launching.rank.environment import detect, first_host, num_hosts
from lockstep.launching.targets import trusted_target
from lockstep.observe import Measured, Predicted, StepCost, event_from_row, read_events, read_result
from lockstep.observe.reading.diagnosis import calls_of
from lockstep.observe.reading.diagnosis.verdict import causes, diagnosis_lines
from lockstep.observe.reading.differences import cost_of_run, part_of_curves
from lockstep.observe.reading.follow import read_run
from lockstep.observe.reading.listing import summarise
from lockstep.observe.step_costs import peak_memory, step_time
from lockstep.observe.storing.jsonl import EventsJsonl, dumps, row_of
from lockstep.observe.storing.metrics_csv import MetricsCsv
from lockstep.observe.storing.result import cost_of
from lockstep.quantum import from_qasm
from lockstep.systems.cifar.task import read_cifar
from lockstep.systems.quantum.commands import training_log
from lockstep.systems.ufs.fields.bands import Selection, keep_bands, read_band
from lockstep.systems.ufs.fields.bands import load as load_band
from lockstep.systems.ufs.fields.sources import check_sources, find_sources
from lockstep.systems.ufs.report.maps import read_curves
from lockstep.systems.ufs.synthetic import write_synthetic
from tests.data.idx_files import write_idx
from tests.distributed.tasks import EverythingConfig
from tests.fuzz.base import Made
from tests.observe.sample_events import evaluated, finished, joined, run_started, step_done

SELECTION = Selection(("tair", "sst", "aice"))


def identity_of(path: Path) -> None:
    identity = RunDirectory(path.parent).identity()
    assert isinstance(identity.task, str)
    assert all(isinstance(item, str) for item in identity.overrides)
    trusted_target(RunDirectory(path.parent))


def config_file(path: Path) -> None:
    config = load(EverythingConfig, path)
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(EverythingConfig, path).hash == config.hash
    assert math.isfinite(config.lr)


def overrides(data: bytes) -> None:
    items = data.decode("utf-8", "replace").split("\x02")
    config = override(EverythingConfig(), items)
    assert math.isfinite(config.lr)
    assert len(config.hash) == 16


def events(path: Path) -> None:
    rows = read_events(path)
    events = [event_from_row(row) for row in rows]
    training_log(rows)
    sink = EventsJsonl(path)
    sink(run_started(step=1, continued=True))
    sink(step_done(9))
    sink.close()
    assert len(read_events(path)) >= len(events)


def shown(path: Path) -> None:
    history, summary = read_run(path.parent), summarise(path.parent)
    list(diagnosis_lines(summary, history, causes(summary, history, calls_of(summary))))
    step_time(cost_of_run(summary, history))
    peak_memory(cost_of_run(summary, history))
    parting, _ = part_of_curves(history, history)
    assert parting is None
    assert summary.step >= 0
    time.localtime(history.newest)
    time.localtime(summary.newest)


def metrics(path: Path) -> None:
    sink = MetricsCsv(path)
    sink(run_started(step=1))
    sink(step_done(2))
    sink.close()
    curves = read_curves(path)
    assert all(step <= 2 for steps, _ in curves.values() for step in steps)


def result(path: Path) -> None:
    result = read_result(path)
    assert result["status"] in ("completed", "stopped", "failed")
    assert all(isinstance(value, float) for value in result["metrics"].values())
    told = cost_of(result)
    step_time(told)
    peak_memory(told)


def hint(path: Path) -> None:
    found = listing.read_hint(path.parent, path.name)
    assert found is None or found.parent == path.parent


def hang(path: Path) -> None:
    assert isinstance(RunDirectory(path.parent).hang_reason(0), str)


def recorded() -> bytes:
    ring = CallRing()
    group = ring.start(0, 4)
    for each in (group, ring.subgroup([0, 2]), group):
        ring.end(ring.begin(each, 0, (8, 32, -1)), is_done=True)
    return ring.copy()


CALLS = (recorded(),)


def calls(path: Path) -> None:
    read_calls(path)


def job(path: Path) -> None:
    job_file(path, {})


def struck(path: Path) -> None:
    injector(to_env([PlannedFault(0, 1)], path), 0)


def labelled(folder: Path, _: Path) -> Made:
    write_idx(folder / "t10k-images-idx3-ubyte", torch.zeros(3, 4, 4, dtype=torch.uint8))
    labels = folder / "t10k-labels-idx1-ubyte"
    write_idx(labels, torch.arange(3, dtype=torch.uint8))

    def call(data: bytes) -> None:
        labels.write_bytes(data)
        images, found = read_labelled(folder, "t10k")
        assert len(images) == len(found)

    return [labels.read_bytes()], call


def cifar_batch(folder: Path, _: Path) -> Made:
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    rows = bytes([3, *([0] * 3072)] * 2)
    for name in names:
        (folder / name).write_bytes(rows)

    def call(data: bytes) -> None:
        (folder / names[1]).write_bytes(data)
        images, labels = read_cifar(folder)["train"]
        assert len(images) == len(labels)
        assert int(labels.max()) < 10

    return [rows], call


def idx_samples() -> list[bytes]:
    header = bytes([0, 0, 0x0D, 2, 0, 0, 0, 3, 0, 0, 0, 4])
    plain = header + np.arange(12, dtype=">f4").tobytes()
    return [plain, gzip.compress(plain), bytes([0, 0, 8, 1, 0, 0, 0, 5]) + b"\1\2\3\4\5"]


@contextmanager
def environ(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def text_of(data: bytes) -> str:
    """What an environment variable can hold."""
    return data.replace(b"\0", b"").decode("utf-8", "surrogateescape")[:100_000]


def session_variable(data: bytes) -> None:
    with environ({SESSION: text_of(data)}):
        found = Session.from_env()
    assert found is not None
    assert isinstance(found.resume, bool)
    assert isinstance(found.console, bool)
    override(EverythingConfig(), found.overrides)


def faults_variable(data: bytes) -> None:
    injector({FAULTS: text_of(data)}, 0)


def environment(data: bytes) -> None:
    pairs = [line.partition("=") for line in text_of(data).split("\n")]
    place = detect({name: value for name, _, value in pairs if name})
    assert place.rank >= 0
    assert place.world_size >= 1
    assert place.local_rank >= 0
    assert place.rank < place.world_size or place.joins


def nodes(data: bytes) -> None:
    text = text_of(data)
    assert isinstance(first_host(text), str)
    assert num_hosts(text) >= 0


ENVIRONMENTS = [
    "RANK=1\nWORLD_SIZE=4\nMASTER_ADDR=host\nMASTER_PORT=29500\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2",
    "TORCHELASTIC_RUN_ID=x\nRANK=0\nWORLD_SIZE=2\nLOCAL_RANK=0\nMASTER_ADDR=h\nMASTER_PORT=1\nGROUP_RANK=0",
    "OMPI_COMM_WORLD_RANK=1\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=1\n"
    "OMPI_COMM_WORLD_LOCAL_SIZE=2\nLOCKSTEP_MPI_REPLACE=1",
    "PMI_RANK=0\nPMI_SIZE=2\nMPI_LOCALRANKID=0\nMPI_LOCALNRANKS=2",
    "SLURM_STEP_ID=0\nSLURM_PROCID=3\nSLURM_STEP_NUM_TASKS=4\nSLURM_NODEID=1\nSLURM_LOCALID=1\n"
    "SLURM_JOB_ID=77\nSLURM_STEP_NODELIST=n[01-02]\nSLURM_STEP_TASKS_PER_NODE=2(x2)",
    "SLURM_STEP_ID=0\nSLURM_PROCID=3\nSLURM_NTASKS=4\nSLURM_LOCALID=1\nSLURM_JOB_ID=77\n"
    "SLURM_STEP_NODELIST=a[1-2],b\nPMIX_RANK=3",
    "LOCKSTEP_LOCAL_RANK=0\nLOCKSTEP_LOCAL_SIZE=2\nLOCKSTEP_LOCAL_PORT=2000\nLOCKSTEP_LOCAL_SUPERVISOR=3",
]

QASM_2 = """OPENQASM 2.0;
include "qelib1.inc";
gate mine(a) x, y { rz(a) x; cx x, y; }
qreg q[3];
creg c[3];
h q[0];
cx q[0], q[1];
rz(pi/4) q[2];
cu3(0.1, 0.2, 0.3) q[0], q[2];
mine(0.5) q[1], q[2];
measure q -> c;
"""
QASM_3 = """OPENQASM 3.0;
include "stdgates.inc";
input float[64] theta;
qubit[3] q;
bit[3] c;
h q[0];
cx q[0], q[1];
rz(theta) q[2];
ctrl @ x q[0], q[1];
c = measure q;
"""


def qasm(data: bytes) -> None:
    from_qasm(data.decode("utf-8", "replace"))


def netcdf(folder: Path, _: Path) -> Made:
    import netCDF4

    write_synthetic(folder, 6, 8, 1)
    whole = folder / "iceh.000.nc"
    classic = folder / "classic.nc"
    with (
        netCDF4.Dataset(whole) as source,
        netCDF4.Dataset(classic, "w", format="NETCDF3_64BIT_OFFSET") as copy,
    ):
        for name, dim in source.dimensions.items():
            copy.createDimension(name, None if dim.isunlimited() else len(dim))
        for name, variable in source.variables.items():
            fill = getattr(variable, "_FillValue", None)
            new = copy.createVariable(name, variable.dtype, variable.dimensions, fill_value=fill)
            new.setncatts(
                {k: variable.getncattr(k) for k in variable.ncattrs() if k != "_FillValue"}
            )
            new[:] = variable[:]
    path = folder / "input.nc"

    def call(data: bytes) -> None:
        path.write_bytes(data)
        sources = find_sources((str(path),), (), (), None)
        scene = check_sources(sources, [*SELECTION.names, *SELECTION.needed])
        try:
            assert scene.shape[0] * scene.shape[1] < 10**9
            read_band(scene, 0, slice(0, scene.shape[0]), SELECTION)
        finally:
            scene.close()

    return [whole.read_bytes(), classic.read_bytes()], call


def band(folder: Path, _: Path) -> Made:
    write_synthetic(folder, 6, 8, 1)
    sources = find_sources((str(folder / "iceh.000.nc"),), (), (), None)
    [path] = keep_bands(sources, SELECTION, folder)

    def call(data: bytes) -> None:
        path.write_bytes(data)
        found = load_band(path, "counts", "values")
        assert all(np.array_equal(*pair) for pair in zip(found, whole, strict=True))

    whole = load_band(path, "counts", "values")
    return [path.read_bytes()], call


def event_rows() -> bytes:
    cost = StepCost(0.5, 1 << 20)
    events = [
        Predicted(step=0, by="plan.json", cost=cost),
        run_started(),
        joined(0, "n1"),
        step_done(1),
        step_done(2),
        evaluated(2, accuracy=0.5),
        Measured(step=2, measured=cost, predicted=cost, by="plan.json"),
        finished(2),
    ]
    return b"".join(dumps(row_of(event, 1.5)).encode() + b"\n" for event in events)


RESULT = {
    "status": "completed",
    "reason": "all steps done",
    "step": 9,
    "params_sha256": "ab" * 32,
    "metrics": {"val/loss": 0.5, "gap": "Infinity"},
    "world_size": 2,
    "wall_s": 1.5,
    "exit_code": 0,
    "error": None,
    "task": "digits",
    "config_hash": "0" * 16,
    "run_dir": "run",
    "checkpoint": None,
    "measured": {"step_s": 0.5, "peak_bytes": 1 << 20},
    "predicted": {"step_s": 0.25, "peak_bytes": 1 << 20, "by": "plan.json"},
    "predicted_reason": "",
}
IDENTITY = {"task": "t", "config_hash": "0" * 16, "target": "digits", "overrides": ["lr=1"]}
CSV = (
    b"step,epoch,split,loss,lr,grad_norm,samples_per_s,compute_efficiency,compute_s,"
    b"communication_s,data_s,checkpoint_s,accuracy\n"
    b"1,0,train,0.5,0.1,1.0,2.0,0.5,1.0,1.0,1.0,0.0,0.25\n2,0,val,0.5,,,,,,,,,nan\n"
)
STRUCK = dumps({"time": 1.5} | vars(PlannedFault(0, 1))).encode() + b"\n"
SESSION_TEXT = next(iter(Session("run", True, ("lr=0.5", "steps=3"), False, "x").to_env().values()))
FAULTS_TEXT = next(
    iter(to_env([PlannedFault(0, 3), PlannedFault(1, 2, "reduce", "slow", 0.5)]).values())
)
