"""The subcommands of `lockstep quantum`, and `lockstep import` of angles from elsewhere."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lockstep.config import load
from lockstep.config.files import replacing, replacing_binary
from lockstep.config.parsing import option_numbers
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.checkpoint.run_directory import RunDirectory
from lockstep.engine.events import RunStarted, StepDone
from lockstep.engine.snapshot.restore import find_snapshot
from lockstep.errors import ConfigError, DataError, file_errors
from lockstep.launching.api.originals import fill
from lockstep.launching.api.trained import restored
from lockstep.launching.foreign_files import ForeignFile
from lockstep.launching.systems import Original
from lockstep.observe import event_from_row, read_events
from lockstep.observe.figures import check_picture, new_figure, save
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
from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.interop.qasm import FORMATS, bound, drawing
from lockstep.systems.quantum.simulation.statevector import statevector
from lockstep.systems.quantum.task import Quantum
from lockstep.systems.quantum.transformer.model import QuantumTransformer

_READ_BACK, _READ_BACK_SINGLE = 1e-9, 1e-4
"""Greatest relative difference of |A|² between a model and a circuit, by the model's precision."""
_CSV_COLUMNS = ("epoch", "loss", "grad_norm", "seconds")


def predict(run_dir: Path, prefix: str, which: str, top: int) -> list[str]:
    """The training vocabulary ranked as next word, with the model's and a bigram's probabilities.

    Raises:
        LockstepError: there is no such run or checkpoint, or a word has no vector.
    """
    task, model, _ = _trained(run_dir, which)
    ranked = task.predict(model, prefix, task.best_restart(model))
    width = max(len(each.word) for each in ranked[:top])
    return [f"{'':{width}}   model  bigram"] + [
        f"{each.word:{width}}  {each.probability:.4f}  {each.bigram:.4f}" for each in ranked[:top]
    ]


def export(
    run_dir: Path, output: Path | None, which: str, sentence: str | None = None,
    format: str | None = None,
) -> list[str]:  # fmt: skip
    """Write a sentence's circuit if one is given, else parameters and the log.

    Raises:
        LockstepError: as `export_circuit` and `export_parameters`.
    """
    if sentence is not None:
        return export_circuit(run_dir, sentence, format or "qasm3", output, which)
    if format is not None:
        raise ConfigError(f"--format {format}: is of a circuit; give --sentence")
    return export_parameters(run_dir, output, which)


def export_parameters(run_dir: Path, output: Path | None, which: str) -> list[str]:
    """Write `params`, `epoch`, `lr` and `seed` of a checkpoint as .npz, and the log as CSV.

    The .npz also has `embeddings`, `words` and the angles of all restarts as `restarts`; `params`
    are those of the best restart, flat, V before W.

    Returns:
        Lines that say what was written.

    Raises:
        LockstepError: there is no such run or checkpoint, or a file cannot be written.
    """
    task, model, snapshot = _trained(run_dir, which)
    path = output or run_dir / f"quantum_epoch{snapshot.meta['sampler']['epoch']}.npz"
    if path.suffix != ".npz":
        raise ConfigError(f"--output {path}: must end in .npz")
    angles = model.angles.detach().flatten(1).numpy()
    log = path.with_suffix(".csv")
    with file_errors(ConfigError, f"--output {path}"):
        with replacing_binary(path) as file:
            np.savez(
                file, params=angles[task.best_restart(model)], restarts=angles,
                epoch=snapshot.meta["sampler"]["epoch"], lr=task.config.lr, seed=task.config.seed,
                embeddings=model.embeddings.detach().numpy(), words=np.array(model.words),
            )  # fmt: skip
        events = run_dir / "events.jsonl"  # an imported run has none
        rows = training_log(read_events(events) if events.exists() else [])
        with replacing(log) as text:
            text.write(rows)
    return [str(path), str(log), *_without_row(rows, snapshot.meta["sampler"]["epoch"])]


def _without_row(log: str, num_epochs: int) -> list[str]:
    """A line that says which epochs up to this one a log lacks; none if it has all."""
    known = {int(row["epoch"]) for row in csv.DictReader(io.StringIO(log))}
    missing = sorted({*range(1, num_epochs + 1)} - known)
    rows = [[e for _, e in of] for _, of in groupby(enumerate(missing), lambda x: x[1] - x[0])]
    ranges = ", ".join(f"{of[0]}-{of[-1]}" if len(of) > 1 else f"{of[0]}" for of in rows)
    return [f"epochs without a row: {ranges} (log_every=1 reports all)"] if ranges else []


_CHECKPOINT = r"qtransformer_ckpt_epoch(\d+)\.npz"


def read_original(file: ForeignFile) -> Original | None:
    """The angles in a checkpoint of the MPI script, or in a file of `lockstep quantum export`.

    The script's `params` are flat, V before W; its registers have two qubits each. `epoch` is the
    last one that is done, and `random_state`, or `seed`, is that of rank 0.

    Args:
        file: `qtransformer_ckpt_epoch*.npz`, or a folder of such.

    Raises:
        DataError: it is damaged, or its numbers fit no ansatz.
    """
    file = file.newest(_CHECKPOINT) or file
    arrays = file.arrays
    if "params" not in arrays:
        return None
    params, words = arrays["params"], arrays.get("embeddings")
    dim = 4 if words is None else words.shape[-1]
    num_qubits = dim.bit_length() - 1
    size, rest = divmod(params.size, 24 * num_qubits) if num_qubits else (0, 1)
    if params.ndim != 1 or params.dtype.kind != "f" or rest or not size or dim != 1 << num_qubits:
        raise DataError(
            f"{file.path}: params is {params.dtype} {[*params.shape]}: must be 24 numbers for "
            f"each layer and qubit of a register, of which d={dim} has {num_qubits}"
        )
    names = ("seed" if "seed" in arrays else "random_state", "lr", "epoch")
    seed, lr, last = (_number(file, name) for name in names)
    epoch = int(last) + (words is None)
    settings = {"embedding_dim": dim, "num_layers": size, "seed": int(seed), "lr": lr}

    def model(task: Quantum) -> QuantumTransformer:
        made = task.build_model()
        state = {"angles": torch.tensor(params).view_as(made.angles)}
        if words is not None:
            if made.words != arrays["words"].tolist():
                raise DataError(f"{file.path}: words: are not those of the corpus; set corpus=FILE")
            state["embeddings"] = torch.tensor(words)
        fill(made, state, str(file.path))
        return made

    vectors = "not in the file, drawn from the seed" if words is None else str(len(words))
    lines = [
        f"two registers of {num_qubits} qubits, {size} layers: {params.size} angles",
        f"{epoch} epochs, lr {lr:g}, seed {seed:.0f}",
        f"vectors of words: {vectors}",
    ]
    about = "angles of the quantum transformer"
    return Original("quantum", about, lines, settings, (), model, step=epoch, epoch=epoch)


def _number(file: ForeignFile, name: str) -> float:
    found = file.arrays.get(name)
    if found is None or found.size != 1 or found.dtype.kind not in "iuf":
        raise DataError(f"{file.path}: {name}: must be one number; is it of another version?")
    return float(found.reshape(()))


def draw(run_dir: Path, sentence: str, which: str) -> list[str]:
    """The superposition circuit of a sentence, as Qiskit draws it.

    Raises:
        LockstepError: there is no such run or checkpoint, a word has no vector, there are fewer
            than two, or Qiskit is not installed.
    """
    task, model, _ = _trained(run_dir, which)
    return drawing(_circuit(task, model, sentence), fold=100).split("\n")


def export_circuit(
    run_dir: Path, sentence: str, format: str, output: Path | None, which: str
) -> list[str]:
    """Write the superposition circuit of a sentence, with the trained angles.

    What was written is read back, and must have the probability |A|² of the model's closed form.

    Args:
        run_dir: path of the run directory.
        sentence: words, separated by white space.
        format: a key of `FORMATS`.
        output: path of the file; `circuit` in the run directory, with the format's suffix, if left
            out.
        which: checkpoint: `best`, `latest`, or a step's number.

    Returns:
        Lines that say what was written.

    Raises:
        LockstepError: as `draw`, or the file cannot be written.
    """
    task, model, _ = _trained(run_dir, which)
    kind = FORMATS[format]
    circuit = _circuit(task, model, sentence)
    restart = task.best_restart(model)
    circuit = bound(circuit, model.angles.detach()[restart].flatten())
    content = kind.write(circuit)
    batch = task.collate([(torch.tensor(task.rows(model, sentence)), 0)])
    wanted = float(model(batch).detach()[restart, 0])
    found = float(statevector(kind.read(content))[0].abs().square())
    close = _READ_BACK if model.angles.dtype == torch.float64 else _READ_BACK_SINGLE
    if not math.isclose(wanted, found, rel_tol=close, abs_tol=close**2):
        raise ConfigError(
            f"--format {format}: the circuit that was read back has |A|² {found}, the model has "
            f"{wanted}; nothing was written"
        )
    path = output or run_dir / f"circuit{kind.suffix}"
    with file_errors(ConfigError, f"--output {path}"), replacing_binary(path) as file:
        file.write(content)
    return [f"{path}: {circuit.num_qubits} qubits, |A|² {wanted:.9g}, read back {found:.9g}"]


def _circuit(task: Quantum, model: QuantumTransformer, sentence: str) -> Circuit:
    rows = task.rows(model, sentence)
    if len(rows) < 2:
        raise ConfigError(f"{sentence!r}: a sentence needs at least two words")
    return model.circuit(rows)


def training_log(events: list[dict[str, Any]]) -> str:
    """A CSV of epoch (from 1), mean loss, gradient norm and seconds, one row for each epoch.

    Steps that were computed again after a resume count once. The gradient norm is that of the
    epoch's last step.
    """
    steps: list[StepDone] = []
    for event in map(event_from_row, events):
        if isinstance(event, RunStarted) and not event.continued:
            steps = [step for step in steps if step.step <= event.step]
        elif isinstance(event, StepDone):
            steps.append(event)
    epochs: dict[int, list[StepDone]] = {}
    for step in steps:
        epochs.setdefault(step.epoch, []).append(step)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for epoch, of_epoch in epochs.items():
        samples = sum(step.samples for step in of_epoch)
        mean = sum(step.loss * step.samples for step in of_epoch) / samples if samples else math.nan
        seconds = sum(step.seconds for step in of_epoch)
        writer.writerow([epoch + 1, repr(mean), repr(of_epoch[-1].grad_norm), f"{seconds:.6f}"])
    return text.getvalue()


def _trained(run_dir: Path, which: str) -> tuple[Quantum, QuantumTransformer, Snapshot]:
    directory = RunDirectory(run_dir)
    target = directory.identity().target
    if target != "quantum":
        raise ConfigError(f"{run_dir}: is a run of {target or 'a script'}, not of quantum")
    task = Quantum(load(QuantumConfig, run_dir / "config.yaml"))
    snapshot = find_snapshot(directory.checkpoints, which)
    where = str(directory.checkpoints)
    model = restored(task, task.config, snapshot, torch.device("cpu"), where)
    assert isinstance(model, QuantumTransformer)
    return task, model, snapshot


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
    sizes = option_numbers("--qubits", qubits, _MAX_QUBITS)
    depths = option_numbers("--layers", layers, _MAX_LAYERS)
    figure = None if plot is None else _figure(plot, f"variance of gradients, {ansatz}", 6)

    def variance(n: int, depth: int) -> float:
        z = pauli_z(n, observable)
        return gradient_variance(make, n, depth, z, samples=samples, circuits=circuits, seed=seed)

    rows = {f"L = {depth}": [variance(n, depth) for n in sizes] for depth in depths}
    rows["2-designs"] = [two_design_variance(n) for n in sizes]
    lines = [f"variance of d<Z...>/dθ, {ansatz}, {observable} observable"]
    lines += _rows([f"{n} qubits" for n in sizes] + ["decay"], rows, sizes)
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
    depths = option_numbers("--layers", layers, _MAX_LAYERS)
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
    check_picture(path)
    return new_figure(width, 4, title, extra="quantum")


def _rows(
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
