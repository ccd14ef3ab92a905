"""The subcommands of `lockstep quantum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from lockstep.launching.rank.early import ending_at_interrupt

app = typer.Typer()

RunDir = Annotated[Path, typer.Argument(help="The directory of the run.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a step's number.")]

Seed = Annotated[int, typer.Option("--seed", min=0, max=2**63 - 10**6, help="Of all draws.")]
Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="A picture: FILE.svg or FILE.png.")
]


@app.command()
def predict(
    run_dir: RunDir,
    prefix: Annotated[str, typer.Argument(help="The words so far.")],
    checkpoint: Checkpoint = "latest",
    top: Annotated[int, typer.Option("--top", min=1, help="How many words to show.")] = 5,
) -> None:
    """Rank the vocabulary as next word."""
    with ending_at_interrupt():
        from lockstep.systems.quantum import commands
    print(*commands.predict(run_dir, prefix, checkpoint, top), sep="\n")


@app.command()
def draw(
    run_dir: RunDir,
    sentence: Annotated[str, typer.Argument(help="Two words or more.")],
    checkpoint: Checkpoint = "latest",
) -> None:
    """Draw the circuit of a sentence."""
    with ending_at_interrupt():
        from lockstep.systems.quantum import commands
    print(*commands.draw(run_dir, sentence, checkpoint), sep="\n")


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[Path | None, typer.Option("--output", help="The file to write.")] = None,
    checkpoint: Checkpoint = "latest",
    sentence: Annotated[
        str | None, typer.Option("--sentence", help="Write the circuit of a sentence instead.")
    ] = None,
    format: Annotated[
        Literal["qasm2", "qasm3", "qiskit", "csv"] | None,
        typer.Option("--format", help="Of the circuit; qasm3 if left out, qiskit is QPY."),
    ] = None,
) -> None:
    """Write parameters as .npz and the training log as CSV, or a circuit."""
    with ending_at_interrupt():
        from lockstep.systems.quantum import commands
    print(*commands.export(run_dir, output, checkpoint, sentence, format), sep="\n")


@app.command()
def plateau(
    qubits: Annotated[str, typer.Option("--qubits", help="Numbers of qubits.")] = "2,4,6,8",
    layers: Annotated[str, typer.Option("--layers", help="Numbers of layers.")] = "2,10,50",
    ansatz: Annotated[str, typer.Option("--ansatz", help="A family of circuits.")] = "random",
    observable: Annotated[
        Literal["local", "global"],
        typer.Option("--observable", help="Z on two qubits, or on all."),
    ] = "local",
    samples: Annotated[int, typer.Option("--samples", min=2, help="Angles for each circuit.")] = 25,
    circuits: Annotated[int, typer.Option("--circuits", min=1, help="Seeds of circuits.")] = 8,
    seed: Seed = 0,
    plot: Plot = None,
) -> None:
    """Measure how gradients vanish with qubits and layers."""
    with ending_at_interrupt():
        from lockstep.systems.quantum import commands
    lines = commands.plateau(qubits, layers, ansatz, observable, samples, circuits, seed, plot)
    print(*lines, sep="\n")


@app.command()
def expressibility(
    ansatz: Annotated[
        str, typer.Option("--ansatz", help="Families of circuits, with commas; or all.")
    ] = "all",
    qubits: Annotated[int, typer.Option("--qubits", min=1, max=24, help="Number of qubits.")] = 4,
    layers: Annotated[str, typer.Option("--layers", help="Numbers of layers.")] = "1,2,3",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Pairs of states.")] = 2000,
    seed: Seed = 0,
    plot: Plot = None,
) -> None:
    """Measure what states an ansatz reaches, and their entanglement."""
    with ending_at_interrupt():
        from lockstep.systems.quantum import commands
    print(*commands.express(ansatz, qubits, layers, samples, seed, plot), sep="\n")
