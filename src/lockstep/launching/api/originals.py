"""What other programs have trained or configured, brought over for the recipes: `lockstep import`.

A system reads the files of the program that it follows (`System.originals`). A model becomes a run
directory with one checkpoint, which `eval`, `export` and `train --from` read; settings alone become
a config; layers that fit no recipe become a file of weights. A result is written beside its place
and renamed: it is whole or not there.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lockstep.config import TrainConfig, build, override
from lockstep.config.files import open_to_read, replacing, replacing_binary, temporary_beside
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint import format as checkpoint
from lockstep.engine.checkpoint.listing import write_hint
from lockstep.engine.checkpoint.run_directory import Identity, RunDirectory
from lockstep.engine.checkpoint.tensor_files import in_memory
from lockstep.engine.run.progress import Progress
from lockstep.engine.tables.files import cuts, described, file_name
from lockstep.engine.tables.run_tables import tables_of
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError, LockstepError, file_errors
from lockstep.launching.api.session import new_run_dir
from lockstep.launching.foreign_files import ForeignFile
from lockstep.launching.systems import Original, load_recipe, readers_of_originals


def import_original(path: Path, to: Path | None, overrides: Sequence[str] = ()) -> list[str]:
    """Say what a file or folder of another program has, and convert it.

    Args:
        path: its path.
        to: path of the run directory, config or file of weights to write; by default a new one.
        overrides: `key=value` items for the config of the run, such as where its data is.

    Returns:
        Lines for people.

    Raises:
        LockstepError: nobody knows it, it is damaged, or it does not fit the recipe; then nothing
            is written.
    """
    found = read_original(path)
    lines = [f"{path}: {found.about}", *(f"  {line}" for line in found.lines)]
    if found.model is not None:
        to = to or new_run_dir(found.recipe)
        splits = _write_run(found, to, overrides, path)
        split = "" if "test" in splits else f" --split {splits[0]}"
        lines += [
            f"wrote {to}: step {found.step}",
            f"  lockstep eval {to}{split}",
            f"  lockstep train {found.recipe} --config {to}/config.yaml --from {to}",
        ]
    elif found.settings:
        to = to or Path(f"{path.stem}-{found.recipe}.yaml")
        config = _configured(found, overrides, path)
        with _new(to), replacing(to) as text:
            text.write(config.to_yaml())
        lines += [f"wrote {to}", f"  lockstep train {found.recipe} --config {to}"]
    elif found.tensors:
        to = to or Path(f"{path.stem}-{found.recipe}.safetensors")
        with _new(to), replacing_binary(to) as file:
            file.write(save(dict(found.tensors), {"format": "pt"}))
        lines.append(f"wrote {to}: tensors by name, for load_state_dict")
    return lines + [f"  {line}" for line in found.hints]


def read_original(path: Path) -> Original:
    """What the system that knows a file or folder finds in it.

    Raises:
        DataError: no system knows it, or it is damaged.
    """
    file = ForeignFile(path)
    for reader in readers_of_originals():
        with _damaged(path):
            found = reader(file)
        if found is not None:
            return found
    raise DataError(
        f"{path}: is no file that a recipe can take over ({file.described()}); the pages of the "
        "systems say which ones are. A model of your own: read its weights in build_model, and "
        "train it as file.py:Task"
    )


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    """Turns errors of a reader that trusts a file too much into one message."""
    try:
        yield
    except LockstepError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as e:
        raise DataError(
            f"{path}: is damaged or of another version ({type(e).__name__}: {e}); copy it "
            "again, or save it again by the program that made it"
        ) from None


def imported_for(recipe: str, path: Path, overrides: Sequence[str]) -> tuple[Path, list[str]]:
    """The run directory that `train --from FILE` starts from; written unless it is there.

    Args:
        recipe: what is trained.
        path: file of another program.
        overrides: `key=value` items of the new run.

    Returns:
        Path of the run directory below `runs/`, and `key=value` items for what the file sets,
        which go before the user's.

    Raises:
        LockstepError: as `import_original`, or the file is of another recipe or has no model.
    """
    found = read_original(path)
    if found.recipe != recipe or found.model is None:
        what, then = "has no model", f"lockstep import {path} writes what it has"
        if found.recipe != recipe:
            what = f"is of the recipe {found.recipe}"
            then = f"lockstep train {found.recipe} --from {path} goes on with it"
        raise ConfigError(f"--from {path}: {what}; it is {found.about}. {then}")
    items = [f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in found.settings.items()]
    sha = hashlib.sha256("\0".join([*items, *overrides]).encode())
    with open_to_read(path, follow_links=True) as file:
        while block := file.read(1 << 20):
            sha.update(block)
    to = Path("runs") / f"{recipe}-import-{sha.hexdigest()[:12]}"
    if not (to / "run.json").exists():
        try:
            _write_run(found, to, overrides, path)
        except DataError:  # another rank may have been quicker
            if not (to / "run.json").exists():
                raise
    return to, items


def fill(model: nn.Module, state: Mapping[str, Tensor], where: str) -> None:
    """Load tensors into a model; names and shapes must be the model's, and values finite.

    Args:
        model: the model.
        state: all of its parameters, and any of its buffers, by name.
        where: what errors begin with.

    Raises:
        DataError: one does not fit.
    """
    own = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    own = {name: tensor for name, tensor in own.items() if name in model.state_dict()}
    for name in dict.fromkeys([*dict(model.named_parameters()), *state]):
        if name not in state or name not in own:
            who = "has no" if name not in state else "has more than the model: "
            raise DataError(f"{where}: {who} {name}; is it of another version?")
        if own[name].shape != state[name].shape:
            raise DataError(
                f"{where}: {name} is {[*state[name].shape]}, must be {[*own[name].shape]}"
            )
        if state[name].is_floating_point() and not bool(state[name].isfinite().all()):
            raise DataError(f"{where}: {name} holds NaN or infinite numbers")
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)


def _configured(found: Original, overrides: Sequence[str], path: Path) -> TrainConfig:
    given = {item.partition("=")[0] for item in overrides}
    missing = [key for key in found.needs if key not in given]
    if missing:
        raise ConfigError(
            f"{path}: does not say what {missing[0]} is; add {missing[0]}=… to the command"
        )
    config = build(load_recipe(found.recipe).Config, found.settings, str(path))
    return override(config, overrides)


def _write_run(found: Original, to: Path, overrides: Sequence[str], path: Path) -> Sequence[str]:
    """Write a run directory with one checkpoint: the model, and nothing of its training.

    Returns:
        The splits on which the recipe evaluates.
    """
    assert found.model is not None
    kind: type[Task] = load_recipe(found.recipe)
    config = _configured(found, overrides, path)
    task = kind(config)
    with kept_generators():
        torch.manual_seed(config.seed)
        with _damaged(path):
            model = found.model(task)
    tables = tables_of(model)
    rows = {n: table.weight for n, table in tables.items() if table.weight is not None}
    for table in tables.values():
        table.weight = None  # its rows are in files of their own
    meta = {
        "config": config.model_dump(mode="json"),
        "config_hash": config.hash,
        "imported": found.about,
        "progress": Progress(step=found.step).state_dict(),
        "sampler": {"num_samples": None, "epoch": found.epoch, "data_digest": ""},
        "tables": described(tables),
    }
    files = {
        file_name(number, part): in_memory({"weight": rows[name][some.first : some.last].clone()})
        for number, (name, table) in enumerate(tables.items())
        for part, some in enumerate(cuts(table))
    }
    snapshot = checkpoint.Snapshot(found.step, model.state_dict(), {}, meta)
    identity = Identity(task.name, config.hash, found.recipe, (), config.epochs, config.steps)
    with _new(to):
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_beside(to)
        temporary.mkdir()
        directory = RunDirectory(temporary)
        try:
            directory.open(config, identity, resume=False)
            folder, _ = checkpoint.write(directory.checkpoints, snapshot, tables=files)
            write_hint(directory.checkpoints, "best", folder.name)
            directory.close()
            temporary.rename(to)
        finally:
            directory.close()
            shutil.rmtree(temporary, ignore_errors=True)
    return task.splits


def _new(to: Path) -> AbstractContextManager[None]:
    """A context that writes to a path where nothing may be yet.

    Raises:
        DataError: there is something, or it cannot be written.
    """
    if to.is_file() or to.is_symlink() or (to.is_dir() and any(to.iterdir())):
        raise DataError(f"{to}: is there already; choose another place with --to")
    return file_errors(DataError, to, advice="choose another place with --to")
