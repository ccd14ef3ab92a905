"""Checkpoints that were damaged, or changed and signed again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from pathlib import Path

import torch

from lockstep.comm.transport import LocalTransport
from lockstep.engine.assembly import assemble
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.checkpointer import Checkpointer
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.digests import model_digest
from lockstep.engine.runtime import Runtime
from lockstep.engine.task import Task
from lockstep.launching.api import Session, run
from tests.distributed.tasks import Everything, EverythingConfig
from tests.fuzz.base import Made, Make
from tests.fuzz.mutate import (
    mutate_json,
    written,
)
from tests.stepping import advance

CONFIG = EverythingConfig(steps=4, eval_every=2, batch_size=12, num_microbatches=2, threads=1)


def prepare(root: Path) -> None:
    """What takes long to make, once: a run that was stopped in the middle."""
    torch.set_num_threads(1)
    run(Everything(CONFIG), CONFIG.model_copy(update={"stop_at_step": 3}), _session(root / "run"))
    shutil.rmtree(root / "run" / "checkpoints" / "step_00000002")


def _session(path: Path) -> Session:
    return Session(str(path), False, (), False, "digits")


def checkpoint_file(name: str) -> Make:
    """A file of a checkpoint that is damaged: refused, or nothing of it has changed."""

    def make(folder: Path, run_dir: Path) -> Made:
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


class _NothingAfterSteps(Everything):
    """A task that could do anything after a step could also have an optimizer count again."""

    after_step = Task.after_step


def signed(name: str) -> Make:
    """A file of a checkpoint that is changed and signed again: refused, or it trains on alike."""

    def make(folder: Path, run_dir: Path) -> Made:
        shutil.copytree(run_dir, folder / "run")
        directory = RunDirectory(folder / "run")
        there = directory.checkpoints / "step_00000003"
        runtime = Runtime(
            LocalTransport(), torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None
        )
        parts = assemble(_NothingAfterSteps(CONFIG), CONFIG, runtime)
        keeper = Checkpointer(CONFIG, runtime, parts, directory, lambda _: None)
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
            advance(parts, 3, 4, decays=progress.decays)
            digests.append(model_digest(parts.model))
            # Nobody can tell which state of the task's own is right.
            is_known = json.loads(body).get("task") == manifest["task"]
            if name == "manifest.json" and is_known:
                assert digests[-2:] == digests[:2], "goes on to other parameters"

        return [sample or (there / name).read_bytes()], call

    return make


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
