"""Mazes by models of equal CPU time; writes `docs/benchmarks/hrm-maze.md` and `.json`.

As `hrm_sudoku.py`, on mazes of 9x9. `--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from hrm_sudoku import MODELS, SIDE, compared, configured, section
from page import Section, command, publish
from run import DOCS, machine

COMPARED = {name: keys for name, keys in MODELS.items() if "identifier" not in name}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=24, help="of CPU time, all together")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch", "numpy")), "command": command("hrm_maze")}
    seeds = range(1, 1 + (1 if args.quick else args.seeds))
    share_s = 1.0 if args.quick else 60 * args.minutes / len(COMPARED) / len(seeds)
    config = partial(configured, quick=args.quick, puzzle="maze", eval_every=40)
    found, simple = compared(COMPARED, config, seeds, share_s)
    sections = [of_mazes(found, simple, share_s)]
    publish(None if args.quick else DOCS, "hrm-maze", "Mazes in minutes", facts, sections)


def of_mazes(found: Mapping[str, Any], simple: Mapping[str, Any], share_s: float) -> Section:
    """The table of Sudokus, of mazes."""
    num_seeds = len(next(iter(found.values())))
    seeds = f"The median of {num_seeds} seeds ± the greatest distance from it"
    seeds = "One seed" if num_seeds == 1 else seeds
    made = section(found, simple, share_s, 0)
    made.title = f"Solved {SIDE}x{SIDE} mazes by CPU time"
    made.text = (
        f"Percent of 256 unseen mazes whose whole answer, the shortest path and all else, is right "
        f"after parts of {share_s / 60:.1f} CPU minutes of training, on one thread; 4,000 mazes "
        f"with 4 symmetric ones each, width 96, batch 64. {seeds}. In a maze of corridors there is "
        "one path."
    )
    if num_seeds == 1:
        made.rows = [[cell.partition("±")[0] for cell in row] for row in made.rows]
    if not any(one["curve"][-1]["exact"] for of in found.values() for one in of):
        made.verdicts = ["- No model has solved a maze"]
    made.header = [*made.header[:-1], "cells, %"]
    return made


if __name__ == "__main__":
    main()
