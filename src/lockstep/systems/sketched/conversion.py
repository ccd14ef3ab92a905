"""`lockstep sketch`: a trained run's layers as sketched ones, and what that costs."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from lockstep.comm.transport import LocalTransport
from lockstep.config import TrainConfig
from lockstep.config.files import replacing, replacing_binary
from lockstep.data.random import kept_generators
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.evaluation.batches import evaluated_splits
from lockstep.engine.evaluation.evaluation import evaluations
from lockstep.engine.passes.compute import Compute
from lockstep.engine.task import Task
from lockstep.errors import ConfigError, DataError, file_errors
from lockstep.launching.api.trained import load
from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.process import num_threads
from lockstep.launching.systems import recipe_names
from lockstep.observe.figures import new_figure
from lockstep.observe.figures import save as save_figure
from lockstep.systems.sketched.decompositions import Method
from lockstep.systems.sketched.tuner import (
    Candidate,
    Choice,
    Dense,
    apply,
    choose,
    dense_layers,
    measure,
)

_HEADER = ("layer", "weight", "k", "L", "error", "trained", "kept", "speed")


def table(report: dict[str, Any]) -> list[str]:
    """A line for each layer, one for all together, and the metrics before and after.

    `trained` are parameters, `kept` is the part of the dense layer's numbers that a checkpoint has.
    """
    layers = report["layers"]

    def total(key: str) -> Any:
        return sum(layer[key] for layer in layers)

    together = (
        f"{total('dense_parameters'):,} → {total('parameters'):,}",
        f"{total('kept') / total('dense_kept'):.0%}",
        f"{total('dense_seconds') / total('seconds'):.2f}x",
    )
    rows = [_HEADER, *map(_row, layers), ("together", "", "", "", "", *together)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = [
        "  ".join(
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    for name, value in report["before"].items():
        lines.append(f"{report['split']}/{name}: {value:.6g} → {report['after'][name]:.6g}")
    return lines


def _row(layer: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(map(str, layer["shape"]))
    if not layer["low_rank"]:
        count = f"{layer['parameters']:,}"
        return (layer["name"], shape, "-", "-", "0", count, "100%", "dense")
    counts = f"{layer['dense_parameters']:,} → {layer['parameters']:,}"
    return (
        layer["name"],
        shape,
        str(layer["low_rank"]),
        str(layer["num_terms"]),
        f"{layer['error']:.3f}",
        counts,
        f"{layer['kept'] / layer['dense_kept']:.0%}",
        f"{layer['dense_seconds'] / layer['seconds']:.2f}x",
    )


def draw(report: dict[str, Any], path: Path) -> None:
    """Error and speed of each layer over its parameters, with the choice marked, as PNG.

    Raises:
        ConfigError: matplotlib is not installed.
        DataError: the picture cannot be written.
    """
    figure = new_figure(11, 4.5, f"sketched layers, by {report['method']}", extra="sketch")
    errors, speeds = figure.subplots(1, 2)
    for layer in report["layers"]:
        dense, *ways = sorted(
            layer["measured"], key=lambda way: (way["low_rank"] > 0, way["parameters"])
        )
        part = [way["parameters"] / dense["parameters"] for way in ways]
        (line,) = errors.plot(part, [way["error"] for way in ways], "o-", ms=3, label=layer["name"])
        speedup = [dense["seconds"] / way["seconds"] for way in ways]
        speeds.plot(part, speedup, "o-", ms=3, color=line.get_color())
        if layer["low_rank"]:
            at = layer["parameters"] / dense["parameters"]
            errors.plot(at, layer["error"], "*", ms=13, color=line.get_color())
            speeds.plot(at, dense["seconds"] / layer["seconds"], "*", ms=13, color=line.get_color())
    for axes, label in (
        (errors, "relative error of the output"),
        (speeds, "speed-up over dense, forward + backward"),
    ):
        axes.set(xlabel="parameters / dense parameters", ylabel=label)
        axes.set_xscale("log", base=2)
        axes.axvline(1, color="grey", lw=0.8, ls=":")
        axes.grid(alpha=0.3)
    speeds.set_yscale("log", base=2)
    speeds.axhline(1, color="grey", lw=0.8, ls=":")
    errors.legend(fontsize="small")
    save_figure(figure, path)


SAMPLES = 256
"""Training samples whose way through the model is the sample of each layer's input."""
DEFAULT_ERROR = 0.1


@dataclass(frozen=True)
class Options:
    """Which layers are converted, and how. At most one of the three limits is given.

    Attributes:
        patterns: names of layers, with `*` and `?`.
        low_rank: columns of a term's sketch, of every layer.
        max_error: greatest relative error of a layer's output; `DEFAULT_ERROR` without a limit.
        max_parameters: greatest number of parameters of the layers together.
        num_terms: number of terms.
        method: see `SKLinear.from_dense`.
        seed: seed of the signs.
    """

    patterns: tuple[str, ...]
    low_rank: int | None
    max_error: float | None
    max_parameters: int | None
    num_terms: int
    method: str
    seed: int


def convert_run(
    run_dir: Path, options: Options, split: str, which: str, output: Path | None
) -> list[str]:
    """Convert a run's model and write `sketch.json`, `sketch.png` and `model.safetensors`.

    The run itself is left as it is.

    Args:
        run_dir: directory of a run of a recipe.
        options: what is to be converted.
        split: name of the split whose metrics are compared.
        which: checkpoint: `best`, `latest`, or a step's number.
        output: folder to write to; `sketch` in the run directory if it is None.

    Returns:
        Lines for people.

    Raises:
        LockstepError: there is no such run, checkpoint, split or layer, a size does not fit, or
            something cannot be written.
    """
    _check(options)
    task, config, model = _trained(run_dir, which)
    if split not in ("train", *evaluated_splits(task)):
        raise ConfigError(
            f"--split {split}: must be one of train, {', '.join(evaluated_splits(task))}"
        )
    with kept_generators(), num_threads(config.threads, detect(os.environ)):
        layers = dense_layers(model, options.patterns)
        before = _metrics(task, config, model, split)
        measured = _measured(layers, _inputs(task, model, layers), options)
        plan = _plan(measured, options)
        apply(model, plan, _method(options), options.seed)
        after = _metrics(task, config, model, split)
    folder = output or run_dir / "sketch"
    report = _report(options, plan, measured, layers, split, before, after)
    return [*table(report), *_write(folder, report, model)]


def _check(options: Options) -> None:
    """Refuse options that contradict each other, before anything is loaded."""
    limits = [name for name, value in _limits(options).items() if value is not None]
    if len(limits) > 1:
        names = " and ".join("--" + name.replace("_", "-") for name in limits)
        raise ConfigError(f"{names}: give one of them only")
    for option, value in (("--low-rank", options.low_rank), ("--num-terms", options.num_terms)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: must be at least 1")
    error = options.max_error
    if error is not None and not error >= 0:
        raise ConfigError(f"--max-error {error:g}: must not be negative")
    _method(options)


def _limits(options: Options) -> dict[str, float | None]:
    return {name: getattr(options, name) for name in ("low_rank", "max_error", "max_parameters")}


def _method(options: Options) -> Method:
    for method in get_args(Method):
        if method == options.method:
            return method  # type: ignore[no-any-return]
    raise ConfigError(f"--method {options.method}: must be one of {', '.join(get_args(Method))}")


def _trained(run_dir: Path, which: str) -> tuple[Task, TrainConfig, nn.Module]:
    target = RunDirectory(run_dir).identity().target
    if target not in recipe_names():
        raise ConfigError(
            f"{run_dir}: is a run of {target or 'a script'}, and this command converts those of "
            "recipes; in Python, lockstep.sketch.replace_layers converts any model"
        )
    loaded = load(run_dir, which)
    return loaded.task, loaded.config, loaded.model


def _metrics(task: Task, config: TrainConfig, model: nn.Module, split: str) -> dict[str, float]:
    device = torch.device("cpu")
    splits = evaluations(task, config, device, (split,))
    if split not in splits:
        raise DataError(f"--split {split}: the task has no such dataset")
    compute = Compute(task, model, config, device)
    return splits[split].run(LocalTransport(), model.eval(), compute).metrics


def _inputs(task: Task, model: nn.Module, layers: dict[str, Dense]) -> dict[str, Tensor]:
    """What comes to each layer when the model sees training samples."""
    dataset: Any = task.dataset("train")
    count = min(SAMPLES, len(dataset))
    spread = [i * len(dataset) // count for i in range(count)]
    batch = task.collate([dataset[i] for i in spread])
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, inputs: found.setdefault(name, inputs[0].detach())

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            task.evaluate(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    for name in layers:
        if name not in found:
            raise ConfigError(f"layer {name}: is not used in an evaluation; leave it out, --layers")
    return found


def _measured(
    layers: dict[str, Dense], inputs: dict[str, Tensor], options: Options
) -> dict[str, list[Candidate]]:
    measured, method, terms = {}, _method(options), (options.num_terms,)
    for name, layer in layers.items():
        weight = layer.weight.flatten(1)
        most, rank = max(weight.shape), options.low_rank
        if rank is not None and rank > most:
            raise ConfigError(
                f"layer {name}: --low-rank {rank}: larger than the layer; at most {most}"
            )
        # Two sketches of half the rank are the whole weight.
        half = -(-min(weight.shape) // 2)
        powers = [1 << i for i in range(half.bit_length()) if 1 << i < half]
        ranks = [rank] if rank is not None else [*powers, half]
        measured[name] = measure(layer, inputs[name], ranks, terms, method, options.seed, name=name)
    return measured


def _plan(measured: dict[str, list[Candidate]], options: Options) -> dict[str, Choice]:
    if options.low_rank is not None:
        return {name: Choice(ways[1], ways[0]) for name, ways in measured.items()}
    if options.max_parameters is not None:
        return choose(measured, max_parameters=options.max_parameters)
    error = DEFAULT_ERROR if options.max_error is None else options.max_error
    return choose(measured, max_error=error)


def _report(
    options: Options,
    plan: dict[str, Choice],
    measured: dict[str, list[Candidate]],
    layers: dict[str, Dense],
    split: str,
    before: dict[str, float],
    after: dict[str, float],
) -> dict[str, Any]:
    return {
        "method": options.method,
        "seed": options.seed,
        "limits": _limits(options),
        "layers": [
            {
                "name": name,
                "kind": type(layers[name]).__name__,
                "shape": list(layers[name].weight.shape),
                **asdict(choice.chosen),
                "dense_parameters": choice.dense.parameters,
                "dense_seconds": choice.dense.seconds,
                "dense_kept": choice.dense.kept,
                "measured": [asdict(way) for way in measured[name]],
            }
            for name, choice in plan.items()
        ],
        "split": split,
        "before": before,
        "after": after,
    }


def _write(folder: Path, report: dict[str, Any], model: nn.Module) -> list[str]:
    paths = [folder / name for name in ("sketch.json", "sketch.png", "model.safetensors")]
    with file_errors(ConfigError, f"--output {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(paths[0]) as text:
            text.write(json.dumps(report, indent=1) + "\n")
        with replacing_binary(paths[2]) as file:
            state = {name: t.contiguous().clone() for name, t in model.state_dict().items()}
            file.write(save(state))
    draw(report, paths[1])
    return [f"wrote {path}" for path in paths]
