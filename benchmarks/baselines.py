"""Systems beside their simple models; writes `docs/benchmarks/baselines.md` and `.json`.

Runs `lockstep train` and `lockstep eval --baselines` for several seeds. `--mnist` names a folder
with MNIST's 10,000 test images: 8,000 are learnt, 2,000 tested. `--quick` shows that everything
runs, and prints instead. So does a run without some sections of the page that is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.observe.baselines import Beside, kept
from page import Section, command, publish
from run import DOCS, machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, help="folder with t10k-images-idx3-ubyte.gz, …")
    parser.add_argument("--only", choices=("ufs", "digits", "cifar"), help="just this system")
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    args = parser.parse_args()
    facts = {
        **machine(("torch", "scikit-learn")),
        "command": command("baselines").replace(f"{args.mnist}", "DIR"),
    }
    if args.only == "cifar" and args.mnist is None:
        parser.error("--only cifar: needs --mnist")
    cases: dict[str, Sequence[str]] = {
        "ufs, the exact world": ("ufs",),
        "digits, 1,797 images": ("digits",),
    }
    if args.mnist is not None:
        keys = (f"data_dir={args.mnist.resolve()}", "depth=8", "epochs=5", "test_fraction=0.2")
        cases["cifar, MNIST's test images"] = ("cifar", *keys, "val_fraction=0.1")
    seeds = range(1, 1 + (1 if args.quick else args.seeds))
    sections = []
    for title, words in cases.items():
        if args.only not in (None, words[0]):
            continue
        more = ("epochs=1",) if args.quick else ()
        found = [compared([*words, *more, f"seed={seed}"]) for seed in seeds]
        sections.append(section(title, found))
        print(sections[-1].markdown(), file=sys.stderr, flush=True)
    publish(
        None if args.quick or lacks_some(sections) else DOCS,
        "baselines",
        "Systems beside simple models",
        facts,
        sections,
        METHOD,
    )


METHOD = (
    "The best checkpoint by validation, on the test split, which is the same for all seeds: they "
    "are of weights and order. Median ± the greatest distance from it. One rank."
)


def lacks_some(sections: Sequence[Section]) -> bool:
    """Whether the page that is there has further sections, which would be lost."""
    numbers = DOCS / "baselines.json"
    there = json.loads(numbers.read_text(encoding="utf-8"))["sections"] if numbers.exists() else []
    return not {one["title"] for one in there} <= {section.title for section in sections}


def compared(words: Sequence[str]) -> Beside:
    """A run of the system, beside what its simple models reach."""
    with tempfile.TemporaryDirectory() as folder:
        run = f"{folder}/run"
        for argv in (["train", *words, "--run-dir", run, "-q"], ["eval", run, "--baselines"]):
            whole = [sys.executable, "-m", "lockstep", *argv]
            subprocess.run(whole, check=True, stdout=subprocess.DEVNULL)
        (found,) = kept(Path(run))
    return found


def section(title: str, found: Sequence[Beside]) -> Section:
    """A table of models and their metrics, and which are better than the trained one."""
    names = list(dict.fromkeys(n for row in rows_of(found[0]).values() for n in row))
    made = Section(title, f"Compared by {found[0].by}.", ("", *names))
    made.raw = {"seeds": [one._asdict() for one in found]}
    for model in found[0].rows:
        cells = []
        for name in names:
            values = [one.rows[model][name] for one in found if name in one.rows[model]]
            cells.append(around(values) if values else "")
        made.rows.append([model, *cells])
    for model in dict.fromkeys(name for one in found for name in one.better):
        wins = sum(model in one.better for one in found)
        seeds = "every seed" if wins == len(found) else f"{wins} of {len(found)} seeds"
        made.verdicts.append(f"- **{model}** better from {seeds}")
    return made


def around(values: Sequence[float]) -> str:
    """The median, ± the greatest distance from it, in digits that count."""
    middle = statistics.median(values)
    return f"{middle:.3g}±{max(abs(value - middle) for value in values):.1g}"


def rows_of(beside: Beside) -> Mapping[str, Mapping[str, float]]:
    """Of the simple models: no other metrics are compared."""
    return {name: row for name, row in beside.rows.items() if name != "the model"}


if __name__ == "__main__":
    main()
