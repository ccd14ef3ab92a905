"""What the quantum transformer learns; writes `docs/benchmarks/quantum-words.md` and `.json`.

Trains with several embeddings and objectives on sentences of the recipe's grammar, from several
seeds, and ranks the next words of held-out sentences. `--quick` shows that everything runs, and
prints instead.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml

import lockstep as ls
from lockstep.observe.baselines import MODEL
from lockstep.systems.quantum.baselines import NETWORKS, Score
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.task import Quantum
from page import Section, command, publish
from processes import HERE, Spread
from run import DOCS, machine

LEARNS = yaml.safe_load((HERE.parent / "examples" / "quantum_words.yaml").read_text())
"""The keys of the model that learns; the others differ from it in what their names say."""
FAITHFUL = {"embedding": "fixed", "objective": "fidelity", "word_scale": 0.1, "position_scale": 1.0}
BEST = "scaled, trainable, likelihood"
VARIANTS: dict[str, dict[str, Any]] = {
    BEST: {},
    "as specified": {**FAITHFUL, "embedding_dim": 4, "num_layers": 1},
    "scaled, trainable": {"objective": "fidelity"},
    "scaled, likelihood": {"embedding": "fixed"},
    "scaled": {"embedding": "fixed", "objective": "fidelity"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {**machine(("torch", "numpy")), "command": command("quantum_words")}
    changed: dict[str, Any] = {"grammar": 40, "epochs": 1, "batch_size": 40} if args.quick else {}
    found: dict[str, list[Score]] = {}
    seconds: dict[str, list[float]] = {}
    for seed in range(1, 1 + (1 if args.quick else args.seeds)):
        for name, keys in VARIANTS.items():
            started = time.process_time()
            for row, score in scores({**LEARNS, **keys, **changed, "seed": seed}, name).items():
                if len(found.setdefault(row, [])) < seed:
                    found[row].append(score)
            seconds.setdefault(name, []).append(time.process_time() - started)
            print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    sections = [section(found, seconds)]
    publish(
        None if args.quick else DOCS,
        "quantum-words",
        "What the quantum transformer learns",
        facts,
        sections,
        METHOD,
    )


def scores(keys: dict[str, Any], name: str) -> dict[str, Score]:
    """Trains one model, and gives its score; with that of the best, those of simple models."""
    task = Quantum(QuantumConfig(**{**keys, "eval_every": 0}))
    with tempfile.TemporaryDirectory() as folder:
        model = ls.train(task, task.config, run_dir=Path(folder) / "run", quiet=True).model
    if name != BEST:
        return {name: task.score(model, "test")}
    found = {n: Score(**row) for n, row in task.baselines(model, "test").items()}
    found[name] = found.pop(MODEL)
    return found


METHOD = (
    "A cell shows the median of the seeds and in brackets the least and the greatest. The seed "
    "determines the sentences, the vectors of words, the first angles and the order of sentences."
)


def section(found: dict[str, list[Score]], seconds: dict[str, list[float]]) -> Section:
    made = Section(
        "Next words of held-out sentences",
        "4,000 training sentences and 500 others of the grammar of `systems/quantum/language.py`, "
        "64 words. 40 epochs of Adam for each model, with `examples/quantum_words.yaml` but for "
        "what the row says. `as specified` is the default model: d = 4, L = 1, word_scale=0.1, "
        "position_scale=1. The others have d = 32, L = 3, word_scale=1, position_scale=0.3; their "
        "embeddings are fixed unless trainable, their objective is fidelity unless likelihood. "
        "Unigrams and bigrams have the best add-k smoothing. GRU and attention (one layer, one "
        "head) have at most as many parameters as the first of these models, and stop by "
        "validation sentences. `the grammar itself` knows what may follow: no model can expect "
        "more.",
        ("", "accuracy", "mean rank of 64", "-ln P a word", "CPU seconds"),
        raw={"scores": found, "cpu_seconds": seconds},
    )
    for name, values in sorted(found.items(), key=lambda row: row[0] in VARIANTS):
        cells = [Spread.of([getattr(score, field) for score in values]) for field in Score._fields]
        shown = [f"{c.median:.3f} ({c.low:.3f}–{c.high:.3f})" for c in cells]
        cpu = f"{Spread.of(seconds[name]).median:.0f}" if name in seconds else ""
        made.rows.append([name, *shown, cpu])
    for other in (name for name in found if name.startswith(("bigrams", "trigrams", *NETWORKS))):
        gaps = [b.loss - a.loss for a, b in zip(found[BEST], found[other], strict=True)]
        shown = f"-ln P is {min(gaps):+.3f} to {max(gaps):+.3f} greater"
        made.at_most(f"better than {other} from every seed", shown, min(gaps) > 0)
    return made


if __name__ == "__main__":
    main()
