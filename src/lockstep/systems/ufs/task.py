"""The sea-ice emulator as a task: its rows, model, loss, metrics, report and export."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.config import load
from lockstep.engine.checkpoint.format import newest_valid, read, read_manifest
from lockstep.engine.checkpoint.listing import folders, read_hint
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.digests import model_digest
from lockstep.engine.snapshot.compatibility import check_fits
from lockstep.engine.task import Loss, Task
from lockstep.errors import CheckpointError, LockstepError
from lockstep.systems.ufs.config import UfsConfig
from lockstep.systems.ufs.export import TORCHSCRIPT, export_net, load_script, write_predictions
from lockstep.systems.ufs.fields import VARIABLES
from lockstep.systems.ufs.fields.bands import Selection, clipped, keep_bands
from lockstep.systems.ufs.fields.rows import (
    Rows,
    Scale,
    blocks,
    digest,
    first_spread,
    gather,
    joined,
    num_rows,
    scale_of,
    split,
)
from lockstep.systems.ufs.fields.scenes import Moment, are_dated, in_time
from lockstep.systems.ufs.fields.sources import Source, find_sources, moments_of
from lockstep.systems.ufs.model import SeaIceNet, metrics, simple_models
from lockstep.systems.ufs.report.report import Ground, Report
from lockstep.systems.ufs.report.scores import describe, normalised
from lockstep.systems.ufs.report.skill import Baseline, Period, climatology, persistence
from lockstep.systems.ufs.synthetic import LAWS, Law, embedded_files

_LOSSES: Mapping[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "mae": F.l1_loss,
    "huber": F.huber_loss,
}


class _Data(NamedTuple):
    """The rows, and facts about them.

    Attributes:
        splits: the rows of each split.
        digest: SHA-256 of all rows.
        num_chosen: number of chosen rows, of which at most `max_patterns` are kept.
        clipped: number of clipped values by variable.
    """

    splits: dict[str, Rows]
    digest: str
    num_chosen: int
    clipped: dict[str, int]


class Ufs(Task):
    """Sea ice from ocean and atmosphere: NetCDF in, concentration and its Jacobian out."""

    Config = UfsConfig
    config: UfsConfig
    data_buffers = ("*",)  # statistics of the rows, and the bounds of the outputs

    def build_model(self) -> SeaIceNet:
        """The network, with the statistics of the training rows.

        Raises:
            CheckpointError: `config.start_from` has no checkpoint, or one of another network.
        """
        config = self.config
        net = SeaIceNet(config.inputs, config.outputs, config.hidden, self.scale, config.squash)
        if config.start_from is not None:
            _start_from(config.start_from.expanduser(), net)
        return net

    def dataset(self, split: str) -> TensorDataset | None:
        """Normalised inputs [N, in] and outputs [N, out] as float32.

        Validation and test rows have a third tensor [N]: whether the row's Jacobian is tracked.

        Raises:
            ConfigError: the netCDF4 package is not installed.
            DataError: a file is invalid, or no row is left.
        """
        if split not in self.rows_by_split:
            return None
        rows = self.rows_by_split[split]
        values = torch.from_numpy((rows.values - self.scale.mean) / self.scale.deviation).float()
        cut = len(self.config.inputs)
        tensors = values[:, :cut].contiguous(), values[:, cut:].contiguous()
        if split == "train":
            return TensorDataset(*tensors)
        return TensorDataset(*tensors, torch.arange(len(rows)) < self.config.jacobian_samples)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        """Squared, absolute or Huber error of normalised outputs."""
        x, y = batch[:2]
        predicted: Tensor = model(x)
        return Loss(_LOSSES[self.config.loss](predicted, y, reduction="sum"), y.numel())

    def evaluate(self, model: nn.Module, batch: Any) -> Loss:
        """The loss, errors in physical units, and figures of the tracked rows' Jacobians."""
        assert isinstance(model, SeaIceNet)
        x, y = batch[:2]
        loss = self.loss(model, batch)
        metrics: dict[str, tuple[Any, Any]] = {}
        errors = (model(x) - y) * model.output_deviation
        for name, error in zip(model.outputs, errors.unbind(1), strict=True):
            metrics[f"mse_{name}"] = error.square().sum(), len(error)
            metrics[f"mae_{name}"] = error.abs().sum(), len(error)
            metrics[f"bias_{name}"] = error.sum(), len(error)
        if len(batch) > 2 and self.config.jacobian_samples:
            # All tracked rows are in the first batch; the others have no weight.
            tracked = bool(batch[2].any())
            figures = describe(normalised(model, x[batch[2]] if tracked else x[:1]))
            metrics |= {name: (value * tracked, int(tracked)) for name, value in figures.items()}
        return Loss(loss.sum, loss.weight, metrics)

    def baselines(self, model: nn.Module, split: str) -> dict[str, dict[str, float]]:
        """What simple models of the same rows reach; persistence and climatology where they can.

        These two have no value of some rows. They are measured on the others, so without a loss.
        """
        names, cut, rows = self.config.outputs, len(self.config.inputs), self.rows_by_split[split]
        train, there = (
            self.rows_by_split[name].values.astype(np.float64) for name in ("train", split)
        )
        y, deviation = there[:, cut:], self.scale.deviation[cut:]
        measured = partial(
            metrics, names=names, deviation=deviation, loss=_LOSSES[self.config.loss]
        )
        models = simple_models(train, cut, names)
        simple = {name: model(there[:, :cut]) for name, model in models.items()}
        if self.law is not None and self.config.synthetic == "noisy":
            columns = dict(zip(self.config.inputs, there.T, strict=False))
            expected = self.law.expected(*(columns[name] for name in self.law.inputs))
            simple["the law itself (limit)"] = expected.astype(np.float64)[:, None]
        found = {name: measured(predicted, y) for name, predicted in simple.items()}
        for name, baseline in self._of_other_times(rows, self._trained_period()).items():
            values = baseline.values
            has_value = np.isfinite(values).all(-1)
            if has_value.any():
                of_some = measured(values[has_value].astype(np.float64), y[has_value])
                del of_some["loss"]
                found[f"{name}, {has_value.mean():.0%} of the rows"] = of_some
        return found

    def report(self, model: nn.Module, split: str, folder: Path, run_dir: Path) -> list[str]:
        """Scores by region, sensitivities, maps and the training history of a trained model."""
        assert isinstance(model, SeaIceNet)
        rows = self.rows_by_split[split]
        months = np.array([moment.month or 0 for moment in self._moments])
        with closing(self._sources[rows.time[0]].open()) as scene:
            ground = Ground(scene.moment.shown, scene.land(), scene.areas(), months)
        baselines = self._of_other_times(rows, self._period_of(run_dir))
        report = Report(model.cpu(), self.rows_by_split, split, ground, baselines)
        return report.write(folder, run_dir, self.law)

    def _of_other_times(self, rows: Rows, trained: Period | str) -> dict[str, Baseline]:
        """What fields of other times say of rows, by name.

        Args:
            rows: the rows.
            trained: scenes that were trained on, or why they are not available.
        """
        names, period = self.config.outputs, Period(self._sources, self._moments)
        return {
            "persistence": persistence(rows, names, period),
            "climatology": climatology(rows, names, period, trained),
        }

    def _period_of(self, run_dir: Path) -> Period | str:
        """The scenes that a run was trained on, or why they are not available."""
        try:
            trained = type(self)(load(type(self).Config, run_dir / "config.yaml"))
            if trained.data_digest() != _rows_digest(run_dir):
                return "the files of the training have other rows now"
            return trained._trained_period()
        except LockstepError as error:
            return f"the rows of the training cannot be read: {error}"

    def _trained_period(self) -> Period:
        """The scenes that the training split has rows of."""
        times = np.unique(self.rows_by_split["train"].time)
        return Period([self._sources[t] for t in times], [self._moments[t] for t in times])

    def export(self, state: Mapping[str, Tensor], folder: Path) -> list[str]:
        """TorchScript, torch.export and a C++ program; needs no data."""
        config = self.config
        nothing = np.ones(len(config.inputs) + len(config.outputs))
        unscaled = Scale(nothing, nothing)
        net = SeaIceNet(config.inputs, config.outputs, config.hidden, unscaled, config.squash)
        net.load_state_dict(dict(state))
        about = {"config_hash": config.hash, "params_sha256": model_digest(net)}
        return [f"wrote {path}" for path in export_net(net, config.level, about, folder)]

    def apply(self, model: nn.Module, folder: Path) -> list[str]:
        """Write predictions of a folder's TorchScript for all rows, and the truth, as NetCDF."""
        assert isinstance(model, SeaIceNet)
        rows = joined([*self.rows_by_split.values()])
        path = folder / "predicted.nc"
        exported = load_script(folder / TORCHSCRIPT)
        write_predictions(path, model, exported, rows, self._sources, self._moments)
        remarks = [f"warning: {remark}" for remark in self.data_remarks()]
        return [*remarks, f"wrote {path}: {len(rows):,} cells at {len(set(rows.time))} times"]

    @property
    def rows_by_split(self) -> dict[str, Rows]:
        """The rows of each split; those whose Jacobians are tracked come first."""
        return self._data.splits

    def data_digest(self) -> str:
        """SHA-256 of all rows, whatever the split."""
        return self._data.digest

    def data_remarks(self) -> list[str]:
        """Remarks about clipped values, cells that are left out, and times without an order."""
        data = self._data
        remarks = [
            f"{count:,} values of {name} were up to {VARIABLES[name].slack:g} "
            f"{'' if VARIABLES[name].unit == '1' else VARIABLES[name].unit + ' '}outside "
            f"{VARIABLES[name].low:g} to {VARIABLES[name].high:g} and are clipped"
            for name, count in data.clipped.items()
        ]
        num_rows = sum(map(len, data.splits.values()))
        if num_rows < data.num_chosen:
            remarks.append(
                f"{num_rows:,} of {data.num_chosen:,} chosen cells are kept (max_patterns)"
            )
        is_held_out = self.config.split == "time" and len(data.splits) > 1
        if is_held_out and not are_dated(self._moments):
            remarks.append(
                "the files do not date all of their times, so split=time holds out the last ones "
                "in the order of the files' names"
            )
        return remarks

    def adopt(self, model: nn.Module) -> None:
        """Normalise with the statistics of a trained model, rather than those of the rows."""
        assert isinstance(model, SeaIceNet)
        # The model's statistics are float32. If they are those of these rows, the exact ones stay,
        # so that the rows are those of the training to the last bit.
        trained, own = model.scale(), self.scale
        rounded = (np.float32(array) for array in vars(own).values())
        if not all(map(np.array_equal, rounded, vars(trained).values())):
            self.scale = trained

    @cached_property
    def _data(self) -> _Data:
        """The rows, read and split."""
        config = self.config
        sources = self._sources
        selection = Selection(
            (*config.inputs, *config.outputs),
            config.mask_mode,
            config.min_ice_concentration,
            config.thin_fraction,
            config.region,
        )
        bands = keep_bands(sources, selection, self.cache)
        rows = gather(bands, config.max_patterns)
        if config.split == "time":
            group = in_time(self._moments)[rows.time]
        else:
            with closing(sources[0].open()) as first:
                group = blocks(rows, first.shape[1], config.split_block_cells)
        parts = split(rows, group, config.split, config.val_fraction, config.test_fraction)
        spread = {
            name: part if name == "train" else first_spread(part, config.jacobian_samples)
            for name, part in parts.items()
        }
        return _Data(spread, digest(rows), num_rows(bands), clipped(bands, selection.names))

    @cached_property
    def scale(self) -> Scale:
        """Statistics of the training rows, or of the model's: inputs, then outputs."""
        return scale_of([self.rows_by_split["train"]])

    @property
    def law(self) -> Law | None:
        """The law of the synthetic data, if these are the data and it has all of its inputs."""
        config, law = self.config, LAWS[self.config.synthetic]
        knows_all = config.outputs == ("aice",) and {*law.inputs} <= {*config.inputs}
        return law if self._is_synthetic and knows_all else None

    @property
    def _is_synthetic(self) -> bool:
        return not (self.config.history or self.config.atmosphere or self.config.ocean)

    @property
    def cache(self) -> Path:
        """The folder for the cache of rows."""
        if self.config.cache_dir is not None:
            return self.config.cache_dir.expanduser()
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(home).expanduser() / "lockstep" / "ufs"

    @cached_property
    def _sources(self) -> list[Source]:
        config = self.config
        history = config.history
        if self._is_synthetic:
            history = tuple(map(str, embedded_files(self.cache, self.config.synthetic)))
        return find_sources(history, config.atmosphere, config.ocean, config.level)

    @cached_property
    def _moments(self) -> list[Moment]:
        """The time of each scene."""
        return moments_of(self._sources)


def _rows_digest(run_dir: Path) -> str | None:
    """The SHA-256 of all rows in the newest checkpoint of a run."""
    root = RunDirectory(run_dir).checkpoints
    for folder in folders(root):
        known: str | None = read_manifest(folder)["sampler"].get("task_digest")
        return known
    raise CheckpointError(f"{root}: holds no checkpoint")


def _start_from(run_dir: Path, net: SeaIceNet) -> None:
    """Load another run's parameters; statistics stay those of this run's rows."""
    root = RunDirectory(run_dir).checkpoints
    best = read_hint(root, "best")
    snapshot = newest_valid(root)[0] if best is None else read(best)
    if snapshot is None:
        raise CheckpointError(f"start_from={run_dir}: holds no valid checkpoint")
    check_fits(snapshot, net, f"start_from={run_dir}")
    parameters = dict(net.named_parameters())
    chosen = {name: value for name, value in snapshot.model.items() if name in parameters}
    net.load_state_dict(chosen, strict=False)
