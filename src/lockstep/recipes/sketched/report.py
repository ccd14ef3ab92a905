"""What a conversion has found, as a table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lockstep.recipes.pictures import new_figure, save

_HEADER = ("layer", "weight", "k", "L", "error", "trained", "kept", "speed")


def table(report: dict[str, Any]) -> list[str]:
    """A line for each layer, one for all together, and the metrics before and after.

    `trained` are parameters, `kept` is the part of the dense layer's numbers that a checkpoint has.
    """
    rows = [_HEADER, *(_row(layer) for layer in report["layers"])]
    before = sum(layer["dense_parameters"] for layer in report["layers"])
    after = sum(layer["parameters"] for layer in report["layers"])
    seconds = [
        sum(layer[key] for layer in report["layers"]) for key in ("dense_seconds", "seconds")
    ]
    kept = [sum(layer[key] for layer in report["layers"]) for key in ("dense_kept", "kept")]
    counts = (f"{before:,} → {after:,}", f"{kept[1] / kept[0]:.0%}")
    total = ("together", "", "", "", "", *counts)
    rows.append((*total, f"{seconds[0] / seconds[1]:.2f}x"))
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
    save(figure, path)
