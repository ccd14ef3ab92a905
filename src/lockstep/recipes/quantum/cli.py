"""The subcommands of `lockstep quantum`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launchers.rank.early import ending_at_interrupt

app = typer.Typer()

RunDir = Annotated[Path, typer.Argument(help="The directory of the run.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a step's number.")]


@app.command()
def predict(
    run_dir: RunDir,
    prefix: Annotated[str, typer.Argument(help="The words so far.")],
    checkpoint: Checkpoint = "latest",
    top: Annotated[int, typer.Option("--top", min=1, help="How many words to show.")] = 5,
) -> None:
    """Rank the vocabulary as next word."""
    with ending_at_interrupt():
        from lockstep.recipes.quantum import commands
    for line in commands.predict(run_dir, prefix, checkpoint, top):
        print(line)


@app.command()
def compare(run_dir: RunDir, checkpoint: Checkpoint = "latest") -> None:
    """Compare predictions of held-out words with n-grams."""
    with ending_at_interrupt():
        from lockstep.recipes.quantum import commands
    for line in commands.compare(run_dir, checkpoint):
        print(line)


@app.command()
def draw(
    run_dir: RunDir,
    sentence: Annotated[str, typer.Argument(help="Two words or more.")],
    checkpoint: Checkpoint = "latest",
) -> None:
    """Draw the circuit of a sentence."""
    with ending_at_interrupt():
        from lockstep.recipes.quantum import commands
    for line in commands.draw(run_dir, sentence, checkpoint):
        print(line)


@app.command()
def export(
    run_dir: RunDir,
    output: Annotated[Path | None, typer.Option("--output", help="The .npz to write.")] = None,
    checkpoint: Checkpoint = "latest",
) -> None:
    """Write parameters as .npz and the training log as CSV."""
    with ending_at_interrupt():
        from lockstep.recipes.quantum import commands
    for line in commands.export(run_dir, output, checkpoint):
        print(line)
