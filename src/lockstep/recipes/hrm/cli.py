"""The subcommands of `lockstep hrm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launchers.rank.early import ending_at_interrupt

app = typer.Typer()


@app.callback()
def hrm() -> None:
    """Make the data of the hierarchical reasoning model."""


@app.command()
def data(
    kind: Annotated[str, typer.Argument(help="sudoku, maze or arc.")],
    folder: Annotated[Path, typer.Argument(help="Where to write; must not exist, or be empty.")],
    size: Annotated[
        int | None, typer.Option("--size", help="Rows: 4, 6 or 9 of a Sudoku; 30 of a maze.")
    ] = None,
    train: Annotated[
        int | None, typer.Option("--train", help="Training puzzles, or ARC's training tasks.")
    ] = None,
    test: Annotated[
        int | None, typer.Option("--test", help="Test puzzles, or ARC's evaluation tasks.")
    ] = None,
    augment: Annotated[
        int | None, typer.Option("--augment", help="Augmentations of each of them.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of all draws.")] = 0,
    csv: Annotated[
        Path | None,
        typer.Option("--csv", help="Choose from a public CSV, or train.csv and test.csv in it."),
    ] = None,
    rating: Annotated[
        int | None, typer.Option("--rating", help="Least rating: backtracks of a solver.")
    ] = None,
    clues: Annotated[
        int | None, typer.Option("--clues", help="Clues of a Sudoku; as few as can be by default.")
    ] = None,
    version: Annotated[int | None, typer.Option("--version", help="Of ARC-AGI: 1 or 2.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another dataset in the folder.")
    ] = False,
) -> None:
    """Write a dataset of puzzles, made from a seed or from public data."""
    with ending_at_interrupt():
        from lockstep.recipes.hrm.data.build import build
        from lockstep.recipes.hrm.data.request import Options
    options = Options(size, train, test, augment, seed, csv, rating, clues, version)
    built = build(kind, folder, options, overwrite=overwrite)
    print(f"wrote {built.folder}")
    for split, held in built.sizes.items():
        print(
            f"{split}: {held.num_groups:,} groups, {held.num_puzzles:,} puzzles, "
            f"{held.num_examples:,} examples"
        )
    print(
        f"{built.seq_len:,} tokens an example, {built.vocab_size} in the vocabulary, "
        f"{built.num_identifiers:,} puzzle identifiers"
    )
