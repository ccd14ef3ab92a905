"""Reads the files of `ufsemulator`: its configs, its networks and their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from lockstep.errors import DataError
from lockstep.launching.api.originals import fill
from lockstep.launching.foreign_files import ForeignFile
from lockstep.launching.systems import Original
from lockstep.systems.ufs.fields.rows import Scale
from lockstep.systems.ufs.model import SeaIceNet

_STATISTICS = ("input_mean", "input_std", "output_mean", "output_std")
_LEAST_DEVIATION = 1e-6
"""Deviations up to this count as 1, there and here."""
_PLAIN_KEYS = {
    "input_variables": "inputs", "output_variables": "outputs", "batch_size": "batch_size",
    "epochs": "epochs", "learning_rate": "lr", "validation_split": "val_fraction",
    "max_patterns": "max_patterns", "thin_fraction": "thin_fraction", "mask_mode": "mask_mode",
    "min_ice_concentration": "min_ice_concentration", "loss_function": "loss",
}  # fmt: skip
"""Keys of `ufsemulator`'s configs, in whatever section, and those of the recipe."""


def read_original(file: ForeignFile) -> Original | None:
    """A config, checkpoint, state dict or file of statistics of `ufsemulator`.

    Its networks are (Linear, GELU) and Linear like ours, in `network`, with the statistics of
    inputs and outputs as buffers; outputs have no bounds.

    Args:
        file: `.yaml`, `.pt` or `.npz`, or a folder with `best_model.pt`.

    Raises:
        DataError: it is damaged, or of a version with other networks.
    """
    if file.is_folder:
        file = file.beside("best_model.pt") or file
    if isinstance(file.keys.get("variables"), dict) and isinstance(file.keys.get("model"), dict):
        settings, left = _settings(file.keys)
        lines = [f"{key}={value}" for key, value in settings.items()]
        lines += [f"not taken over: {', '.join(left)}"] if left else []
        return Original("ufs", "config of the sea-ice emulator", lines, settings)
    if "input_mean" in file.arrays:
        lines = [
            f"{n}: {a.dtype} {[*a.shape]}" for n, a in file.arrays.items() if a.dtype.kind != "O"
        ]
        _statistics(file, file.arrays)
        hint = "statistics are those of the training rows here; give the checkpoint beside it"
        return Original("ufs", "statistics of the sea-ice emulator", lines, hints=[hint])
    names = {
        name.removeprefix("model_state_dict/").removeprefix("module."): name
        for name in file.tensors
        if not name.startswith(("optimizer_state_dict/", "scheduler_state_dict/"))
    }
    if "network.0.weight" not in names:
        return None
    return _of_network(file, {ours: file.tensors[name] for ours, name in names.items()})


def _of_network(file: ForeignFile, state: Mapping[str, Tensor]) -> Original:
    config = file.values.get("config")
    config = config if isinstance(config, dict) else {}
    settings, _ = _settings(config)
    widths: list[int] = []
    while (weight := state.get(f"network.{2 * len(widths)}.weight")) is not None:
        widths.append(len(weight))
    there = [name for name in _STATISTICS if name in state]
    kind = str((config.get("model") or {}).get("activation", "gelu")).lower()
    if there == ["input_mean", "input_std"] or kind != "gelu":
        raise DataError(
            f"{file.path}: is of a version whose networks are not of GELU and normalised outputs, "
            "as this recipe's are; train it again"
        )
    beside = None if there else file.beside("normalization.pt")
    found = _statistics(file, {**(beside.tensors if beside else {}), **state})
    weights = {
        name.replace("network.", "layers.", 1): tensor
        for name, tensor in state.items()
        if name not in _STATISTICS
    }

    def model(task: Any) -> SeaIceNet:
        config, where = task.config, str(file.path)
        for key, side in (("inputs", "input_mean"), ("outputs", "output_mean")):
            names, count = getattr(config, key), len(found[side])
            if len(names) != count:
                raise DataError(f"{where}: has {count} {key}, not {len(names)}: {', '.join(names)}")
        mean, deviation = (
            np.concatenate([found[f"{side}_{kind}"] for side in ("input", "output")])
            for kind in ("mean", "std")
        )
        scale = Scale(mean, np.where(deviation > _LEAST_DEVIATION, deviation, 1.0))
        net = SeaIceNet(config.inputs, config.outputs, config.hidden, scale, config.squash)
        fill(net, weights, where)
        return net

    named = [key for key in ("inputs", "outputs") if key in settings]
    losses = (file.values.get("history") or {}).get("val_loss") or []
    sizes = f"{len(found['input_mean'])} inputs, {len(found['output_mean'])} outputs"
    lines = [f"{sizes}, hidden layers {widths[:-1]}"]
    lines += [f"{key}: {', '.join(map(str, settings[key]))}" for key in named]
    if losses:
        best = min(range(len(losses)), key=losses.__getitem__)
        lines.append(f"{len(losses)} epochs; least loss on val {losses[best]:g}, after {best + 1}")
    return Original(
        "ufs",
        "network of the sea-ice emulator",
        lines,
        settings | {"hidden": widths[:-1], "squash": False},
        [key for key in ("inputs", "outputs") if key not in named],
        model,
        epoch=len(losses),
    )


def _statistics(file: ForeignFile, found: Mapping[str, Any]) -> dict[str, Any]:
    """The means and deviations of inputs and outputs, float64."""
    values = {}
    for name in _STATISTICS:
        if name not in found:
            raise DataError(f"{file.path}: has no {name}, nor has a file beside it")
        values[name] = np.asarray(found[name], np.float64)
        mean = values[name.replace("std", "mean")]
        if values[name].ndim != 1 or values[name].shape != mean.shape:
            raise DataError(f"{file.path}: {name} is {[*values[name].shape]}, not {[*mean.shape]}")
        if not np.isfinite(values[name]).all():
            raise DataError(f"{file.path}: {name} holds NaN or infinite numbers")
    return values


def _settings(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe's keys that a config of `ufsemulator` sets, and its keys that have none."""
    settings: dict[str, Any] = {}
    left: list[str] = []
    leaves = dict(_leaves(config, ""))
    for path, value in leaves.items():
        section, _, name = path.rpartition(".")
        is_file = isinstance(value, str) and value.endswith(".nc")
        if section.endswith("scheduler") or value is None:
            continue
        if name in _PLAIN_KEYS:
            settings[_PLAIN_KEYS[name]] = value
        elif is_file:
            kind = "atmosphere" if "atm" in name else "ocean" if "oc" in name else "history"
            settings[kind] = [value]
        elif section.endswith("optimizer"):
            key = "name" if name == "type" else name
            settings.setdefault("optimizer", {"weight_decay": 0.0})[key] = value
        elif name == "early_stopping_patience":
            settings |= {"early_stopping": {"patience": value}, "eval_every": 0}
        elif name not in (
            "hidden_size",
            "hidden_layers",
            "input_size",
            "output_size",
            "activation",
        ):
            left.append(path)
    model = config.get("model") or {}
    if "hidden_size" in model:
        settings["hidden"] = [model["hidden_size"]] * model.get("hidden_layers", 2)
        settings["squash"] = False
    if "training" in config:
        settings["schedule"] = _schedule((config["training"] or {}).get("scheduler") or {}, left)
    most = (config.get("variables") or {}).get("max_input_features")
    if isinstance(most, int) and most > 0 and "inputs" in settings:
        settings["inputs"] = settings["inputs"][:most]
    return settings, left


def _schedule(scheduler: Mapping[str, Any], left: list[str]) -> dict[str, Any]:
    kind = scheduler.get("type", "constant")
    if kind == "step":
        left.append("training.scheduler.step_size (epochs; schedule.step_size is in steps)")
    found = {"name": kind, "warmup_steps": 0}
    if kind in ("step", "plateau"):
        found["gamma"] = scheduler.get("gamma", scheduler.get("factor", 0.5))
    if kind == "plateau":
        found["patience"] = scheduler.get("patience", 10)
    return found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
