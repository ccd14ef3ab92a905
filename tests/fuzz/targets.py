"""Everything that reads what comes from outside: valid samples, mutations, and a call for each.

A call must return or raise a `LockstepError`; it asserts what must hold of what is accepted.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import os
import random
import shutil
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lockstep.recipes.ufs.task  # noqa: F401 - imported before memory is limited
from lockstep.comm.transport import LocalTransport
from lockstep.commands.quantum import training_log
from lockstep.commands.slurm import job_file
from lockstep.commands.target import trusted_target
from lockstep.config import load, override
from lockstep.data.idx import read_idx, read_labelled, write_idx
from lockstep.data.sentences import read_sentences
from lockstep.front import SITTING, Sitting, run
from lockstep.launch.environment import detect
from lockstep.launch.nodelist import expand, first_host
from lockstep.observe import EventsJsonl, MetricsCsv, event_from_row, read_events, read_result
from lockstep.observe.rows import dumps, row_of
from lockstep.quantum.interop import from_qasm
from lockstep.recipes.ufs.bands import Selection, keep_bands, read_band
from lockstep.recipes.ufs.bands import load as load_band
from lockstep.recipes.ufs.history import read_curves
from lockstep.recipes.ufs.sources import check_sources, find_sources
from lockstep.recipes.ufs.write import write_synthetic
from lockstep.train import checkpoint
from lockstep.train.faults import FAULTS, Fault, injector, to_env
from lockstep.train.flat import model_digest
from lockstep.train.keeper import Keeper
from lockstep.train.rundir import RunDirectory
from lockstep.train.runtime import Runtime
from lockstep.train.setup import assemble
from tests.distributed.tasks import Everything, EverythingConfig
from tests.fuzz.mutate import (
    json_mutator,
    lines_mutator,
    mutate_bytes,
    mutate_json,
    text_mutator,
    written,
)
from tests.observe.sample_events import evaluated, finished, joined, run_started, step_done

Call = Callable[[bytes], None]
CONFIG = EverythingConfig(steps=4, eval_every=2, batch_size=12, num_microbatches=2, threads=1)
SELECTION = Selection(("tair", "sst", "aice"))


@dataclass(frozen=True)
class Target:
    """Something that reads.

    Attributes:
        name: of it.
        weight: its share of all inputs.
        make: from a folder of its own and the run's, its samples and the call.
        mutate: makes an input of a sample.
    """

    name: str
    weight: int
    make: Callable[[Path, Path], tuple[list[bytes], Call]]
    mutate: Callable[[random.Random, bytes], bytes]


def prepare(root: Path) -> None:
    """What takes long to make, once: a run that was stopped in the middle."""
    torch.set_num_threads(1)
    run(Everything(CONFIG), CONFIG.model_copy(update={"stop_at_step": 3}), _sitting(root / "run"))
    shutil.rmtree(root / "run" / "checkpoints" / "step_00000002")


def _sitting(path: Path) -> Sitting:
    return Sitting(str(path), False, (), False, "digits")


def _file(
    name: str, read: Callable[[Path], object], *samples: bytes
) -> Callable[[Path, Path], tuple[list[bytes], Call]]:
    """A target that reads one file."""

    def make(folder: Path, _: Path) -> tuple[list[bytes], Call]:
        def call(data: bytes) -> None:
            (folder / name).write_bytes(data)
            read(folder / name)

        return list(samples), call

    return make


def _checkpoint_file(name: str) -> Callable[[Path, Path], tuple[list[bytes], Call]]:
    """A file of a checkpoint that is damaged: refused, or nothing of it has changed."""

    def make(folder: Path, run_dir: Path) -> tuple[list[bytes], Call]:
        there = folder / "step_00000003"
        shutil.copytree(run_dir / "checkpoints" / there.name, there)
        whole = checkpoint.read(there)

        def call(data: bytes) -> None:
            (there / name).write_bytes(data)
            found = checkpoint.read(there)
            assert (found.step, found.meta) == (whole.step, whole.meta)
            for one, other in ((found.model, whole.model), (found.optimizer, whole.optimizer)):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[key], other[key]) for key in one)

        return [(there / name).read_bytes()], call

    return make


def _signed(name: str) -> Callable[[Path, Path], tuple[list[bytes], Call]]:
    """A file of a checkpoint that is changed and signed anew: refused, or it trains on alike."""

    def make(folder: Path, run_dir: Path) -> tuple[list[bytes], Call]:
        shutil.copytree(run_dir, folder / "run")
        directory = RunDirectory(folder / "run")
        there = directory.checkpoints / "step_00000003"
        runtime = Runtime(
            LocalTransport(), torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None
        )
        parts = assemble(Everything(CONFIG), CONFIG, runtime)
        keeper = Keeper(CONFIG, runtime, parts, directory)
        manifest = json.loads((there / "manifest.json").read_bytes())
        del manifest["sha256"]
        sample = json.dumps(manifest).encode() if name == "manifest.json" else b""
        digests: list[str] = []

        def call(data: bytes) -> None:
            body = data
            if name != "manifest.json":
                (there / name).write_bytes(data)
                entry = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
                files = manifest["files"] | {name: entry}
                body = json.dumps(manifest | {"files": files}).encode()
            (there / "manifest.json").write_bytes(sign(body))
            progress = keeper.resume()
            assert progress.step == 3
            assert 0 <= progress.best_step <= progress.evaluated <= 3
            digests.append(model_digest(parts.model))
            batches = parts.loader.stream(range_of(CONFIG.num_microbatches), 3, parts.total_steps)
            parts.step.run(progress.step, progress.decays, batches)
            digests.append(model_digest(parts.model))
            # Nobody can tell which state of the task's own is right.
            is_known = json.loads(body).get("task") == manifest["task"]
            if name == "manifest.json" and is_known:
                assert digests[-2:] == digests[:2], "goes on to other parameters"

        return [sample or (there / name).read_bytes()], call

    return make


def range_of(count: int) -> Any:
    """All microbatches."""
    from lockstep.parallel.layout import Range

    return Range(0, count)


def sign(body: bytes) -> bytes:
    """A manifest with its own digest, if it can be parsed at all."""
    try:
        values = json.loads(body)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    except (ValueError, RecursionError):
        return body
    if not isinstance(values, dict):
        return body
    return b'{"sha256": "%s", ' % digest.encode() + body.lstrip()[1:]


def _identity(path: Path) -> None:
    identity = RunDirectory(path.parent).identity()
    assert isinstance(identity.task, str)
    assert all(isinstance(item, str) for item in identity.overrides)
    trusted_target(RunDirectory(path.parent))


def _config(path: Path) -> None:
    config = load(EverythingConfig, path)
    path.write_text(config.to_yaml(), encoding="utf-8")
    assert load(EverythingConfig, path).hash == config.hash
    assert math.isfinite(config.lr)


def _override(data: bytes) -> None:
    items = data.decode("utf-8", "replace").split("\x02")
    config = override(EverythingConfig(), items)
    assert math.isfinite(config.lr)
    assert len(config.hash) == 16


def _events(path: Path) -> None:
    rows = read_events(path)
    events = [event_from_row(row) for row in rows]
    training_log(rows)
    sink = EventsJsonl(path)
    sink(run_started(step=1, continued=True))
    sink(step_done(9))
    sink.close()
    assert len(read_events(path)) >= len(events)


def _metrics(path: Path) -> None:
    sink = MetricsCsv(path)
    sink(run_started(step=1))
    sink(step_done(2))
    sink.close()
    curves = read_curves(path)
    assert all(step <= 2 for steps, _ in curves.values() for step in steps)


def _result(path: Path) -> None:
    result = read_result(path)
    assert result["status"] in ("completed", "stopped", "failed")
    assert all(isinstance(value, float) for value in result["metrics"].values())


def _hint(path: Path) -> None:
    found = checkpoint.read_hint(path.parent, path.name)
    assert found is None or found.parent == path.parent


def _hang(path: Path) -> None:
    assert isinstance(RunDirectory(path.parent).hang_reason(0), str)


def _job(path: Path) -> None:
    job_file(path, {})


def _struck(path: Path) -> None:
    injector(to_env([Fault(0, 1)], path), 0)


def _labelled(folder: Path, _: Path) -> tuple[list[bytes], Call]:
    write_idx(folder / "t10k-images-idx3-ubyte", torch.zeros(3, 4, 4, dtype=torch.uint8))
    labels = folder / "t10k-labels-idx1-ubyte"
    write_idx(labels, torch.arange(3, dtype=torch.uint8))

    def call(data: bytes) -> None:
        labels.write_bytes(data)
        images, found = read_labelled(folder, "t10k")
        assert len(images) == len(found)

    return [labels.read_bytes()], call


def _idx_samples() -> list[bytes]:
    header = bytes([0, 0, 0x0D, 2, 0, 0, 0, 3, 0, 0, 0, 4])
    plain = header + np.arange(12, dtype=">f4").tobytes()
    return [plain, gzip.compress(plain), bytes([0, 0, 8, 1, 0, 0, 0, 5]) + b"\1\2\3\4\5"]


@contextmanager
def _set(values: dict[str, str]):
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _text(data: bytes) -> str:
    """What an environment variable can hold."""
    return data.replace(b"\0", b"").decode("utf-8", "surrogateescape")[:100_000]


def _sitting_variable(data: bytes) -> None:
    with _set({SITTING: _text(data)}):
        found = Sitting.from_env()
    assert found is not None
    assert isinstance(found.resume, bool)
    assert isinstance(found.console, bool)
    override(EverythingConfig(), found.overrides)


def _faults_variable(data: bytes) -> None:
    injector({FAULTS: _text(data)}, 0)


def _environment(data: bytes) -> None:
    pairs = [line.partition("=") for line in _text(data).split("\n")]
    place = detect({name: value for name, _, value in pairs if name})
    assert place.rank >= 0
    assert place.world_size >= 1
    assert place.local_rank >= 0
    assert place.rank < place.world_size or place.joins


def _nodes(data: bytes) -> None:
    text = _text(data)
    first = first_host(text)
    hosts = expand(text)
    assert next(hosts) == first
    for _ in range(50):
        next(hosts, None)


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


def _qasm(data: bytes) -> None:
    from_qasm(data.decode("utf-8", "replace"))


def _netcdf(folder: Path, _: Path) -> tuple[list[bytes], Call]:
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


def _band(folder: Path, _: Path) -> tuple[list[bytes], Call]:
    write_synthetic(folder, 6, 8, 1)
    sources = find_sources((str(folder / "iceh.000.nc"),), (), (), None)
    [path] = keep_bands(sources, SELECTION, folder)

    def call(data: bytes) -> None:
        path.write_bytes(data)
        found = load_band(path, "counts", "values")
        assert all(np.array_equal(*pair) for pair in zip(found, whole, strict=True))

    whole = load_band(path, "counts", "values")
    return [path.read_bytes()], call


def manifest_mutator(rng: random.Random, data: bytes) -> bytes:
    """Only such as can be signed, most of them in what training goes on from."""
    whole = json.loads(data)
    keys = [k for k in whole if k not in ("config", "versions", "layout", "config_hash")]
    part = rng.choice(keys)
    value, raw = mutate_json(rng, {part: whole[part]})
    changed = {k: v for k, v in whole.items() if k != part} | (
        value if isinstance(value, dict) else {part: value}
    )
    return written(changed, raw, rng).encode("utf-8", "surrogatepass")


def _rows() -> bytes:
    events = [
        run_started(),
        joined(0, "n1"),
        step_done(1),
        step_done(2),
        evaluated(2, accuracy=0.5),
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
}
IDENTITY = {"task": "t", "config_hash": "0" * 16, "target": "digits", "overrides": ["lr=1"]}
CSV = (
    b"step,epoch,split,loss,lr,grad_norm,samples_per_s,compute_efficiency,compute_s,"
    b"communication_s,data_s,checkpoint_s,accuracy\n"
    b"1,0,train,0.5,0.1,1.0,2.0,0.5,1.0,1.0,1.0,0.0,0.25\n2,0,val,0.5,,,,,,,,,nan\n"
)
STRUCK = dumps({"time": 1.5} | vars(Fault(0, 1))).encode() + b"\n"
SITTING_TEXT = next(iter(Sitting("run", True, ("lr=0.5", "steps=3"), False, "x").to_env().values()))
FAULTS_TEXT = next(iter(to_env([Fault(0, 3), Fault(1, 2, "reduce", "slow", 0.5)]).values()))
WORDS = text_mutator("lr", "steps", "seed", "optimizer.name", "betas", "[0.9, 0.99]", "1e-3", "sgd")

TARGETS = {
    target.name: target
    for target in (
        Target("manifest", 60, _checkpoint_file("manifest.json"), json_mutator),
        Target("signed manifest", 100, _signed("manifest.json"), manifest_mutator),
        Target("model", 30, _checkpoint_file("model.safetensors"), mutate_bytes),
        Target("signed model", 30, _signed("model.safetensors"), mutate_bytes),
        Target("signed optimizer", 30, _signed("optimizer.safetensors"), mutate_bytes),
        Target(
            "run.json",
            60,
            _file("run.json", _identity, json.dumps(IDENTITY).encode()),
            json_mutator,
        ),
        Target(
            "config.yaml",
            60,
            _file(
                "config.yaml",
                _config,
                CONFIG.to_yaml().encode(),
                b"lr: 0.1\noptimizer: {name: sgd}\n",
            ),
            WORDS,
        ),
        Target(
            "key=value",
            60,
            lambda *_: (
                [b"lr=0.5\x02optimizer.betas=[0.9, 0.99]", b"optimizer={name: sgd}\x02steps=3"],
                _override,
            ),
            WORDS,
        ),
        Target("events.jsonl", 60, _file("events.jsonl", _events, _rows()), lines_mutator),
        Target(
            "metrics.csv",
            60,
            _file("metrics.csv", _metrics, CSV),
            text_mutator("step", "split", "train", "loss"),
        ),
        Target(
            "result.json",
            60,
            _file("result.json", _result, json.dumps(RESULT).encode()),
            json_mutator,
        ),
        Target(
            "hint", 20, _file("best", _hint, b"step_00000003\n"), text_mutator("step_", "00000003")
        ),
        Target(
            "hang report",
            20,
            _file("hang_of_slot_0.json", _hang, b'{"reason": "did nothing"}'),
            json_mutator,
        ),
        Target("faults log", 20, _file("chaos.faults", _struck, STRUCK), lines_mutator),
        Target(
            "job file",
            20,
            _file("job.yaml", _job, b"nodes: 2\ntime: '1:00:00'\nreplace: 1\n"),
            WORDS,
        ),
        Target("IDX", 40, _file("x-idx", read_idx, *_idx_samples()), mutate_bytes),
        Target("IDX labels", 20, _labelled, mutate_bytes),
        Target(
            "sentences",
            20,
            _file("corpus.txt", read_sentences, "The cat flies\nthe dög barks\n".encode()),
            text_mutator(),
        ),
        Target(
            "node list",
            40,
            lambda *_: ([b"rack[1-2]node[01-03,07],login", b"a,b-1"], _nodes),
            text_mutator("[", "]", "-", ",", "[1-99999999]", "a[1]"),
        ),
        Target(
            "LOCKSTEP_SITTING",
            40,
            lambda *_: ([SITTING_TEXT.encode()], _sitting_variable),
            json_mutator,
        ),
        Target(
            "LOCKSTEP_FAULTS",
            40,
            lambda *_: ([FAULTS_TEXT.encode()], _faults_variable),
            json_mutator,
        ),
        Target(
            "environment",
            60,
            lambda *_: ([e.encode() for e in ENVIRONMENTS], _environment),
            text_mutator("RANK", "SIZE", "2(x2)", "n[1-2]", "4294967290"),
        ),
        Target("NetCDF", 30, _netcdf, mutate_bytes),
        Target("band", 20, _band, mutate_bytes),
        Target(
            "OpenQASM",
            30,
            lambda *_: ([QASM_2.encode(), QASM_3.encode()], _qasm),
            text_mutator("q", "qreg", "[1000000]", "gate", "if", "U", "barrier", "inv @", "for"),
        ),
    )
}
