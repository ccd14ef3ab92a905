"""The manifest of a run's checkpoints, and starts from the weights of another run."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from lockstep.comm.transport import Transport
from lockstep.config import TrainConfig, WeightsConfig, build
from lockstep.config.files import read_text
from lockstep.config.parsing import parse_yaml, shown
from lockstep.engine.assembly import Parts
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint import listing
from lockstep.engine.snapshot.resumable import SamplerMeta
from lockstep.engine.tables.files import check_described, described
from lockstep.engine.tables.run_tables import tables_of
from lockstep.engine.task_config import LengthReads
from lockstep.errors import CheckpointError, ConfigError

Config = TypeVar("Config", bound=TrainConfig)

_MOST_NAMES = 5
"""Number of tensors that a message lists."""


def manifest_of(
    config: TrainConfig, transport: Transport, parts: Parts, reads: LengthReads | None, step: int
) -> dict[str, Any]:
    """The manifest of a checkpoint, except the state.

    Args:
        config: config of the run.
        transport: the group of ranks.
        parts: parts of the run.
        reads: what the task's code has read of the run's length, if that is noted.
        step: committed optimizer steps.
    """
    sampler, has_places = parts.sampler, parts.loader.has_places
    return {
        "config": config.model_dump(mode="json"),
        "config_hash": config.hash,
        "sampler": {
            "num_samples": sampler.num_samples,
            "data_digest": parts.data_digest,
            "task_digest": parts.task_digest,
            "epoch": sampler.epoch(step),
            "pass_starts": list(parts.loader.pass_starts),
            **({"places": parts.loader.places(step, all_known=True)} if has_places else {}),
        },
        "optimizer": parts.train_step.optimizer_description,
        "tables": described(parts.compute.lookups.tables),
        **({} if reads is None else {"asked": sorted(reads.names)}),
        "saved_at": time.time(),
        "layout": {
            "world_size": transport.size,
            "pp": parts.placement.mesh.pp,
            "tp": parts.placement.mesh.tp,
            "transport": transport.name,
        },
        "rounding": parts.rounding._asdict(),
        "versions": {
            "lockstep": version("lockstep-train"),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def check_data(there: SamplerMeta, parts: Parts, where: str) -> None:
    """Refuse a checkpoint that was trained on other data.

    Args:
        there: the part of its manifest about the data.
        parts: parts of this run.
        where: path of the checkpoint, for errors.

    Raises:
        CheckpointError: naming what differs.
    """
    here = parts.sampler.num_samples
    if there.num_samples != here:
        raise CheckpointError(
            f"{where}: was trained on {there.num_samples} samples, the dataset has {here} "
            "now; resume with the same data or start a new run"
        )
    if there.data_digest != parts.data_digest:
        raise CheckpointError(
            f"{where}: was trained on other data: the first microbatch of the dataset has "
            "changed; resume with the same data or start a new run"
        )
    if there.task_digest not in (None, parts.task_digest):
        raise CheckpointError(
            f"{where}: was trained on other data: some samples have changed; resume with the "
            "same data or start a new run"
        )
    problem = next(filter(None, map(parts.loader.problem, there.places)), "")
    if problem:
        raise CheckpointError(f"{where}: is damaged: sampler.places: {problem}")


def settled(config: Config, run_dir: Path | None = None) -> Config:
    """A config that names exactly the weights that its run starts from, if from another run's.

    Args:
        config: config of the run.
        run_dir: the run directory, if an existing run there is resumed: it keeps the weights that
            it was started with, even if the other run has changed since.

    Raises:
        ConfigError: there is a pattern, and no other run.
        CheckpointError: there is no such checkpoint, or its manifest is damaged.
    """
    start = config.weights_from
    if not start.path:
        if start.only or start.sha256:
            raise ConfigError(
                "weights_from: only and sha256 are of weights that weights_from.path names; set "
                "that too (--from), or leave them out"
            )
        return config
    if start.sha256:
        return config
    known = _started_from(run_dir, start) if run_dir is not None else None
    if known is not None:
        return config.model_copy(update={"weights_from": known})
    # Resolved once, for all ranks and for a resume: `best` may soon be another checkpoint.
    folder = _folder(Path(start.path)).resolve()
    found: dict[str, Any] = {"path": str(folder)}
    if _is_of_torch(folder):
        found |= {"step": None, "sha256": _dcp().digest(folder)}
    else:
        manifest = checkpoint.read_manifest(folder)
        found |= {"step": manifest["step"], "sha256": _digest(manifest)}
    return config.model_copy(update={"weights_from": start.model_copy(update=found)})


def _started_from(run_dir: Path, start: WeightsConfig) -> WeightsConfig | None:
    """The weights that a run was started from, if `start` may mean them."""
    try:
        there = parse_yaml(read_text(run_dir / "config.yaml"))["weights_from"]
        known = build(WeightsConfig, there, str(run_dir))
        is_meant = bool(known.sha256) and _may_mean(Path(start.path), Path(known.path))
    except (OSError, ValueError, LookupError, TypeError, ConfigError):
        return None
    return known if is_meant and known.only == start.only else None


def _may_mean(path: Path, folder: Path) -> bool:
    """Whether `_folder` may have returned a folder for a path; the folder may be deleted since."""
    path, run = path.resolve(), folder.parent.parent
    which = listing.folder_name(int(path.name)) if path.name.isdecimal() else path.name
    of_run = path.parent == run and which in ("best", "latest", folder.name)
    return path == folder or (folder.parent.name == "checkpoints" and (path == run or of_run))


def items(start: WeightsConfig) -> list[str]:
    """The `key=value` items by which every process finds the same weights to start from."""
    if not start.path:
        return []
    values = start.model_dump(mode="json")
    return [f"weights_from.{k}={json.dumps(v, ensure_ascii=False)}" for k, v in values.items()]


def asked_items(path: Path, only: Sequence[str], run_dir: Path | None = None) -> list[str]:
    """The `key=value` items for `--from` and `--from-only`.

    Args:
        path: value of `--from`.
        only: values of `--from-only`.
        run_dir: see `settled`.

    Raises:
        LockstepError: see `settled`.
    """
    start = WeightsConfig(path=str(path), only=tuple(only))
    return items(settled(TrainConfig(weights_from=start), run_dir).weights_from)


def weights(
    start: WeightsConfig, model: nn.Module, own: Collection[str], is_known: bool = False
) -> checkpoint.Snapshot:
    """The tensors that a model is to start with, by name, mapped into memory.

    Args:
        start: which weights.
        model: the model, as the task has built it.
        own: names of buffers that keep their values.
        is_known: whether another rank has verified the files.

    Raises:
        CheckpointError: they do not exist, are damaged, have changed since the run was started, or
            do not fit the model.
    """
    folder = Path(start.path)
    where = f"weights_from.path={shown(start.path)[1:-1]}"
    # The other run may have gone on, and replaced this checkpoint.
    is_of_torch = _is_of_torch(folder)
    if not is_of_torch:
        digest = _digest(checkpoint.read_manifest(folder))
    else:
        digest = start.sha256 if is_known else _dcp().digest(folder)
    if digest != start.sha256:
        raise CheckpointError(
            f"{where}: holds other weights now than those that this run is to start from (SHA-256 "
            f"{digest[:16]}…, not {start.sha256[:16]}…); put them back, or start a new run"
        )
    tables = tables_of(model)
    if tables and (is_of_torch or start.only):
        raise ConfigError(
            f"{where}: the model has tables (SparseEmbedding), whose rows come from a run's whole "
            "checkpoint only; name such a one, and leave weights_from.only out"
        )
    if tables:
        check_described(tables, checkpoint.read_manifest(folder).get("tables", {}), where)
    # Buffers set from the data belong to this run's data, not to the other run's.
    here = {name: tensor for name, tensor in model.state_dict().items() if name not in own}
    if is_of_torch:
        stored = _dcp().Folder(folder)
        stored.take(here)
        stored.likes = _chosen(stored.likes, here, start.only, where)
        return checkpoint.Snapshot(0, stored, {})
    snapshot = checkpoint.read_model(folder, is_known)
    there = {name: tensor for name, tensor in snapshot.model.items() if name not in own}
    snapshot.model = _chosen(there, here, start.only, where)
    return snapshot


def _chosen(
    there: Mapping[str, Tensor], here: Mapping[str, Tensor], only: Sequence[str], where: str
) -> dict[str, Tensor]:
    """Those tensors of a checkpoint that are loaded into a model."""
    for pattern in only:
        if not any(fnmatchcase(name, pattern) for name in here):
            raise CheckpointError(
                f"{where}: weights_from.only={shown(pattern)} is the name of nothing in the model; "
                f"it has {_listed(here)}"
            )

    def is_meant(name: str) -> bool:
        return not only or any(fnmatchcase(name, pattern) for pattern in only)

    missing = [name for name in here if is_meant(name) and name not in there]
    unexpected = [name for name in sorted(there) if is_meant(name) and name not in here]
    others = [
        f"{name} is {there[name].dtype} {tuple(there[name].shape)} there, {here[name].dtype} "
        f"{tuple(here[name].shape)} here"
        for name in here
        if is_meant(name)
        and name in there
        and (here[name].shape, here[name].dtype) != (there[name].shape, there[name].dtype)
    ]
    problems = {
        "it has no": missing,
        "the model has no": unexpected,
        "of another shape or dtype:": others,
    }
    lines = [f"{text} {_listed(names)}" for text, names in problems.items() if names]
    if lines:
        raise CheckpointError(
            f"{where}: does not fit the model: {'; '.join(lines)}; take over a part of the weights "
            "with weights_from.only (--from-only 'encoder.*')"
        )
    return {name: there[name] for name in here if is_meant(name)}


def _listed(names: Sequence[str] | Mapping[str, Any]) -> str:
    known = [*names]
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return ", ".join(known[:_MOST_NAMES]) + more


def _folder(path: Path) -> Path:
    """The folder of the checkpoint that a path means: itself, or a checkpoint of a run.

    `RUN` is the best checkpoint of a run, or its latest where there was no evaluation;
    `RUN/best`, `RUN/latest` and `RUN/500` name one. A folder of torch.distributed.checkpoint is
    itself.
    """
    try:
        if (path / listing.MANIFEST).exists() or _is_of_torch(path):
            return path
        run, which = path, ""
        if not (path / "checkpoints").is_dir():
            run, which = path.parent, path.name
        root = run / "checkpoints"
        if not root.is_dir():
            raise CheckpointError(f"{path}: is no run directory and no checkpoint of one")
        if which in ("", "best"):
            best = listing.read_hint(root, "best")
            if best is not None:
                return best
            if which:
                raise CheckpointError(f"{root}: holds no best checkpoint; take {run}/latest")
        if which in ("", "latest"):
            there = listing.folders(root)
            if there:
                return there[0]
            raise CheckpointError(f"{root}: holds no checkpoint")
        folder = root / (listing.folder_name(int(which)) if which.isdecimal() else which)
        if not folder.is_dir():
            raise CheckpointError(f"{root}: holds no checkpoint {which}; take best or latest")
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:  # the path is too long, or has a NUL
        raise CheckpointError(f"{shown(str(path))[1:-1]}: cannot be read: {error}") from None
    return folder


def _is_of_torch(folder: Path) -> bool:
    return os.path.exists(folder / listing.INDEX)  # that of a path raises some errors


def _dcp() -> Any:
    """The module for folders of torch.distributed.checkpoint, which takes a while to import."""
    from lockstep.engine.checkpoint import dcp

    return dcp


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the weights in a checkpoint: of the digests of their files."""
    files: Mapping[str, Mapping[str, Any]] = manifest["files"]
    named = [f"{n} {files[n]['sha256']}\n" for n in checkpoint.model_files(files)]
    return hashlib.sha256("".join(named).encode()).hexdigest()
