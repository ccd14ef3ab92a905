"""The subcommand `lockstep sketch`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launching.rank.early import ending_at_interrupt

app = typer.Typer(add_completion=False)


@app.command()
def sketch(
    run_dir: Annotated[Path, typer.Argument(help="The directory of a recipe's run.")],
    layers: Annotated[
        list[str] | None,
        typer.Option("--layers", help="Names of layers, with * and ?; may be repeated."),
    ] = None,
    low_rank: Annotated[
        int | None, typer.Option("--low-rank", help="Columns of a term's sketch, of every layer.")
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            "--max-error",
            help="The fastest way within this relative error of each layer's output; 0.1 where no "
            "limit is given.",
        ),
    ] = None,
    max_parameters: Annotated[
        int | None,
        typer.Option(
            "--max-parameters", help="The least error with so many parameters in these layers."
        ),
    ] = None,
    num_terms: Annotated[int, typer.Option("--num-terms", help="Terms of a sketched layer.")] = 1,
    method: Annotated[
        str, typer.Option("--method", help="range-finder, least-squares or copy.")
    ] = "range-finder",
    seed: Annotated[int, typer.Option("--seed", help="Of the signs.")] = 0,
    split: Annotated[str, typer.Option("--split", help="Where metrics are measured.")] = "test",
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="best, latest, or a step's number.")
    ] = "best",
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder to write to; by default `sketch` in the run's."),
    ] = None,
) -> None:
    """Convert a trained run's dense layers to sketched ones, and say what it costs."""
    with ending_at_interrupt():
        from lockstep.systems.sketched import conversion
    options = conversion.Options(
        tuple(layers or ["*"]), low_rank, max_error, max_parameters, num_terms, method, seed
    )
    print(*conversion.convert_run(run_dir, options, split, checkpoint, output), sep="\n")
