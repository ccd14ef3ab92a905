"""`lockstep quantum plateau` and `expressibility`: tables and pictures of ansätze."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lockstep.config.parsing import parse_int
from lockstep.errors import ConfigError
from lockstep.observe.figures import new_figure, picture_path, save
from lockstep.systems.quantum.analysis import (
    ANSAETZE,
    decay,
    entangling_capability,
    expressibility,
    gradient_variance,
    haar_entanglement,
    pauli_z,
    two_design_variance,
)

_MAX_QUBITS = 24
_MAX_LAYERS = 10_000


def plateau(
    qubits: str,
    layers: str,
    ansatz: str,
    observable: Literal["local", "global"],
    samples: int,
    circuits: int,
    seed: int,
    plot: Path | None,
) -> list[str]:
    """The variance of a gradient by qubits and layers: lines of a table.

    Raises:
        ConfigError: an argument is out of range, or matplotlib is not installed.
        DataError: the picture cannot be written.
    """
    if ansatz == "idle":
        raise ConfigError("--ansatz idle: has no parameter, so no gradient")
    make = ANSAETZE[_one_of(ansatz)]
    sizes = _numbers("--qubits", qubits, _MAX_QUBITS)
    depths = _numbers("--layers", layers, _MAX_LAYERS)
    figure = None if plot is None else _figure(plot, f"variance of gradients, {ansatz}", 6)

    def variance(n: int, depth: int) -> float:
        z = pauli_z(n, observable)
        return gradient_variance(make, n, depth, z, samples=samples, circuits=circuits, seed=seed)

    rows = {f"L = {depth}": [variance(n, depth) for n in sizes] for depth in depths}
    rows["2-designs"] = [two_design_variance(n) for n in sizes]
    lines = [f"variance of d<Z...>/dθ, {ansatz}, {observable} observable"]
    lines += _table([f"{n} qubits" for n in sizes] + ["decay"], rows, sizes)
    if figure is not None and plot is not None:
        axes = figure.subplots()
        for name, variances in rows.items():
            style = "k--" if name == "2-designs" else "o-"
            axes.semilogy(sizes, variances, style, ms=4, label=name)
        axes.set(xlabel="qubits", ylabel="variance of the derivative in the middle")
        axes.set_xticks(sizes)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        lines.append(str(save(figure, plot)))
    return lines


def express(
    ansaetze: str, qubits: int, layers: str, samples: int, seed: int, plot: Path | None
) -> list[str]:
    """Expressibility and entangling capability of ansätze by layers: lines of a table.

    Raises:
        ConfigError: an argument is out of range, or matplotlib is not installed.
        DataError: the picture cannot be written.
    """
    chosen = ANSAETZE if ansaetze == "all" else map(_one_of, ansaetze.split(","))
    names = list(dict.fromkeys(chosen))
    depths = _numbers("--layers", layers, _MAX_LAYERS)
    figure = None if plot is None else _figure(plot, f"ansätze on {qubits} qubits", 9)
    lines = [f"{qubits} qubits; KL: divergence from Haar (0 is most expressive); Q: entanglement"]
    width = max(map(len, names))
    found: dict[str, list[tuple[float, float]]] = {}
    lines.append(f"{'':{width}}  layers        KL       Q")
    for name in names:
        for depth in depths:
            circuit = ANSAETZE[name](qubits, depth, seed)
            divergence = expressibility(circuit, samples, seed)
            entanglement = entangling_capability(circuit, max(2, samples), seed)
            found.setdefault(name, []).append((divergence, entanglement))
            lines.append(f"{name:{width}}  {depth:6}  {divergence:8.4f}  {entanglement:6.4f}")
    lines.append(f"{'Haar':{width}}  {'':6}  {0:8.4f}  {haar_entanglement(qubits):6.4f}")
    if figure is not None and plot is not None:
        _draw_expressed(figure, found, depths, haar_entanglement(qubits))
        lines.append(str(save(figure, plot)))
    return lines


def _draw_expressed(
    figure: Any,
    found: Mapping[str, Sequence[tuple[float, float]]],
    depths: Sequence[int],
    haar: float,
) -> None:
    left, right = figure.subplots(1, 2)
    for name, values in found.items():
        divergences, entanglement = zip(*values, strict=True)
        left.semilogy(depths, divergences, "o-", ms=4, label=name)
        right.plot(depths, entanglement, "o-", ms=4, label=name)
    right.axhline(haar, color="black", ls="--", label="Haar")
    left.set(ylabel="KL divergence from Haar fidelities")
    right.set(ylabel="mean Meyer-Wallach Q")
    for axes in (left, right):
        axes.set(xlabel="layers")
        axes.set_xticks(depths)
        axes.grid(alpha=0.3)
    right.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))


def _figure(path: Path, title: str, width: float) -> Any:
    """A figure, made before anything is computed: a wrong path or no matplotlib is an error."""
    picture_path(path)
    return new_figure(width, 4, title, extra="quantum")


def _table(
    header: Sequence[str], rows: Mapping[str, Sequence[float]], sizes: Sequence[int]
) -> list[str]:
    width = max(map(len, rows))
    lines = ["  ".join([" " * width, *(f"{cell:>9}" for cell in header)])]
    for name, values in rows.items():
        has_slope = len(set(sizes)) > 1 and min(values) > 0
        slope = f"{decay(sizes, values):9.3f}" if has_slope else f"{'':9}"
        cells = [*(f"{value:9.2e}" for value in values), slope]
        lines.append("  ".join([f"{name:{width}}", *cells]).rstrip())
    return lines


def _one_of(name: str) -> str:
    if name not in ANSAETZE:
        raise ConfigError(f"ansatz {name!r}: there is none; choose from {', '.join(ANSAETZE)}")
    return name


def _numbers(option: str, text: str, most: int) -> list[int]:
    """The integers of a list with commas, sorted.

    Raises:
        ConfigError: it is not such a list, or one is not from 1 to `most`.
    """
    try:
        return sorted({parse_int(part, least=1, most=most) for part in text.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"{option} {text!r}: must be integers from 1 to {most:,} with commas between them: "
            f"{error}"
        ) from None
