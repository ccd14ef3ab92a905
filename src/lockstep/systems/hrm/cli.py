"""The subcommands of `lockstep hrm`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lockstep.launching.rank.early import ending_at_interrupt

app = typer.Typer()

RunDir = Annotated[Path, typer.Argument(help="The directory of the run.")]
Checkpoint = Annotated[str, typer.Option("--checkpoint", help="best, latest, or a step's number.")]
Segments = Annotated[
    int | None,
    typer.Option("--segments", help="How many; those of the run's evaluations by default."),
]


@app.callback()
def hrm() -> None:
    """Puzzles: their data, and what to do with a trained model."""


@app.command()
def data(
    kind: Annotated[str, typer.Argument(help="sudoku, maze or arc.")],
    folder: Annotated[
        Path,
        typer.Argument(
            help="Where to write; must not exist, be empty, or hold the same dataset already."
        ),
    ],
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
        from lockstep.systems.hrm.data.build import build
        from lockstep.systems.hrm.data.sources import Options
    options = Options(size, train, test, augment, seed, csv, rating, clues, version)
    built = build(kind, folder, options, overwrite=overwrite)
    print(f"wrote {built.folder}")
    for split, counts in built.sizes.items():
        print(
            f"{split}: {counts.num_groups:,} groups, {counts.num_puzzles:,} puzzles, "
            f"{counts.num_examples:,} examples"
        )
    print(
        f"{built.seq_len:,} tokens an example, {built.vocab_size} in the vocabulary, "
        f"{built.num_identifiers:,} puzzle identifiers"
    )


@app.command()
def solve(
    run_dir: RunDir,
    puzzle: Annotated[
        str,
        typer.Argument(
            help="A Sudoku's digits, 0 or '.' for blanks; val:17 of the run's data; or a text file."
        ),
    ],
    checkpoint: Checkpoint = "latest",
    segments: Segments = None,
    early: Annotated[
        bool | None,
        typer.Option("--early/--no-early", help="Whether to end where the puzzle halts by itself."),
    ] = None,
) -> None:
    """Solve a puzzle, and print the grid after each segment.

    A text file has a Sudoku's digits, or the lines of a maze. The exit code is 1 if the answer is
    no solution.
    """
    with ending_at_interrupt():
        from lockstep.systems.hrm.reports import commands
    code = commands.solve(run_dir, puzzle, checkpoint, segments, early)
    if code:
        raise typer.Exit(code)


@app.command()
def view(
    run_dir: RunDir,
    output: Annotated[
        Path | None, typer.Option("--output", help="Where to write; RUN_DIR/view by default.")
    ] = None,
    num: Annotated[int, typer.Option("--num", min=0, help="Puzzles to show, at most.")] = 24,
    split: Annotated[str, typer.Option("--split", help="val or train.")] = "val",
    checkpoint: Checkpoint = "latest",
    segments: Segments = None,
) -> None:
    """Write a page about a trained model, index.html, and predictions.npz.

    The page needs no other file. The arrays are inputs, labels, predictions (tokens [N, cells]),
    segments (until a puzzle halts by itself) and q_halt (logits of halting, after the segment that
    a prediction is of).
    """
    with ending_at_interrupt():
        from lockstep.systems.hrm.reports import commands
    for line in commands.view(run_dir, output, num, split, checkpoint, segments):
        print(line)


@app.command("eval")
def evaluate(
    run_dir: RunDir,
    segments: Annotated[
        str, typer.Option("--segments", help="Numbers of segments, from 1 to 64.")
    ] = "1,2,4,8,16,32,64",
    early: Annotated[
        bool, typer.Option("--early", help="Let puzzles halt by themselves before.")
    ] = False,
    subset: Annotated[
        int | None,
        typer.Option(
            "--subset", min=1, help="Solve so many puzzles, of ARC tasks, from the first."
        ),
    ] = None,
    attempts: Annotated[
        int | None,
        typer.Option("--attempts", min=1, help="Answers to a question of ARC; 2 by default."),
    ] = None,
    without_ids: Annotated[
        bool, typer.Option("--no-id", help="Also score answers without the puzzles' identifiers.")
    ] = False,
    save: Annotated[
        Path | None, typer.Option("--save", help="Write the answers to a file, .npz.")
    ] = None,
    checkpoint: Checkpoint = "latest",
) -> None:
    """Evaluate on validation puzzles, by number of segments.

    Of ARC, the answers to all augmentations of a task's question are turned back and counted;
    pass@2 is the part of the tasks whose right answer is among the two most frequent. The file has
    segments [K], inputs and labels [N, cells], predictions (tokens [K, N, cells]) and q_halt
    [K, N], those without identifiers as predictions_no_id and q_halt_no_id; identifiers [N], and of
    ARC their names [N].
    """
    with ending_at_interrupt():
        from lockstep.systems.hrm.reports import commands
    for line in commands.evaluate(
        run_dir, segments, early, subset, attempts, without_ids, save, checkpoint
    ):
        print(line)
