"""Accuracy by parameters and time; writes `docs/benchmarks/sketched-accuracy.md` and `.json`.

Beside sketched networks are dense ones: whole, and with as many parameters narrower, of low rank
or of one hidden layer.
`--mnist` names a folder with MNIST's 10,000 test images: 8,000 are learnt, 2,000 tested. `--quick`
shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.data.images import embedded_digits, read_labelled
from lockstep.sketch import SKLinear
from lockstep.systems.sketched.networks import largest, mlp, narrower, of_low_rank
from lockstep.systems.sketched.task import SketchedConfig
from page import Section, around, publish
from run import DOCS, machine
from sketched_layers import fastest

BATCH = 64
PARTS = (64, 16, 8, 4, 2)
"""The k of layers that are timed are the width over these."""
KINDS = ("sketched, signs", "sketched, fold", "low rank", "narrower", "one hidden layer")
Split = tuple[Tensor, Tensor, Tensor, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mnist", type=Path, help="folder with t10k-images-idx3-ubyte.gz, …")
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 1 on")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = {
        **machine(("torch", "numpy", "scikit-learn")),
        "command": "`python benchmarks/sketched_accuracy.py --mnist DIR`",
    }
    quick, seeds = args.quick, range(1, 1 + (1 if args.quick else args.seeds))
    guide, wide = (512, 256, 128), (2048, 2048)
    cases = [("Digits, 1,437 images, 64 → 512 → 256 → 128 → 10", digits, guide, (4, 16, 64), 40)]
    if args.mnist is not None:
        data = partial(mnist, args.mnist)
        cases += [
            ("MNIST, 8,000 images, 784 → 512 → 256 → 128 → 10", data, guide, (4, 16, 64), 10),
            ("MNIST, 8,000 images, 784 → 2048 → 2048 → 10", data, wide, (16, 64), 4),
        ]  # fmt: skip
    sections = [
        trained(title, data, hidden, ranks[:1] if quick else ranks, seeds, 1 if quick else epochs)
        for title, data, hidden, ranks, epochs in cases
    ]
    sections.append(crossover((256,) if quick else (256, 1024, 4096), 1 if quick else 3))
    publish(
        None if quick else DOCS,
        "sketched-accuracy",
        "Sketched networks: accuracy, parameters, time",
        facts,
        sections,
        METHOD,
    )


METHOD = (
    "A sketch of k columns a term (L = 1) and a product of rank k have the same parameters; "
    "narrower networks and those of one hidden layer (of at most 1,000) have as many at most; "
    "the classifier is dense. The seed is that of the "
    "split, the weights, the signs and the order: median ± the greatest distance from it. One "
    "thread; Adam, 1e-3, batch 64."
)


def digits(seed: int) -> Split:
    images, labels = embedded_digits()
    return parted(images.float() / 16, labels, len(labels) // 5, seed)


def mnist(folder: Path, seed: int) -> Split:
    images, labels = read_labelled(folder, "t10k")
    return parted(images.float() / 255, labels, 2000, seed)


def parted(images: Tensor, labels: Tensor, held_out: int, seed: int) -> Split:
    """Images and labels to learn and to test, shuffled by the seed."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    train, test = order[held_out:], order[:held_out]
    mean, deviation = images[train].mean(), images[train].std()
    normal = ((images - mean) / deviation).flatten(1)
    return normal[train], labels[train].long(), normal[test], labels[test].long()


def trained(
    title: str, data: Any, hidden: tuple[int, ...], ranks: Sequence[int], seeds: range, epochs: int
) -> Section:
    """Every kind of network, at every size."""
    names = ["dense", *(f"{kind}, k = {k}" for k in ranks for kind in KINDS)]
    found: dict[str, dict[str, list[float]]] = {
        name: {"accuracy": [], "step_s": [], "parameters": []} for name in names
    }
    for seed in seeds:
        split = data(seed)
        for name in names:
            torch.manual_seed(seed)
            net = network(name, split[0].shape[1], hidden, seed)
            accuracy, seconds = learnt(net, split, epochs, seed)
            found[name]["accuracy"].append(accuracy)
            found[name]["step_s"].append(seconds)
            found[name]["parameters"].append(float(sum(p.numel() for p in net.parameters())))
            print(f"{title}, seed {seed}, {name}: {accuracy:.4f}", file=sys.stderr, flush=True)
    return compared(title, epochs, found)


def compared(title: str, epochs: int, found: dict[str, dict[str, list[float]]]) -> Section:
    """A table of networks, and who is best at each size."""
    ks = list(dict.fromkeys(name.partition(", k = ")[2] for name in found if ", k" in name))
    made = Section(
        title,
        f"{epochs} epochs.",
        ("accuracy, %; CPU ms a step", *(f"k = {k}" for k in ks)),
        raw={"epochs": epochs, "found": found},
    )

    def shown(name: str) -> str:
        parts = (
            around([scale * value for value in found[name][key]], 1)
            for key, scale in (("accuracy", 100), ("step_s", 1e3))
        )
        return "; ".join(parts)

    size = {name: f"{values['parameters'][0]:,.0f}" for name, values in found.items()}
    made.rows.append(["parameters", *(size[f"{KINDS[0]}, k = {k}"] for k in ks)])
    made.rows += [[kind, *(shown(f"{kind}, k = {k}") for k in ks)] for kind in KINDS]
    made.rows.append([f"dense, {size['dense']}", shown("dense"), *[""] * (len(ks) - 1)])
    for k in ks:
        medians = {kind: statistics.median(found[f"{kind}, k = {k}"]["accuracy"]) for kind in KINDS}
        made.verdicts.append(f"- k = {k}: the best is {max(KINDS, key=lambda kind: medians[kind])}")
    return made


def network(name: str, features: int, hidden: tuple[int, ...], seed: int) -> nn.Module:
    """A network by its row's name; all but the first sketch's are as large as that at most."""
    kind, _, k = name.partition(", k = ")
    if kind == "dense":
        return mlp(SketchedConfig(layers="dense", hidden=hidden), features, 10)
    rank, sizes = int(k), (features, *hidden, 10)
    sketch = "fold" if kind.endswith("fold") else "signs"
    # All layers are sketched but the classifier.
    config = SketchedConfig(hidden=hidden, low_rank=rank, layers="mixed", sketch=sketch, seed=seed)
    sketched = mlp(config, features, 10)
    if kind.startswith("sketched"):
        return sketched
    most = sum(p.numel() for p in sketched.parameters())
    if kind == "one hidden layer":
        return largest(partial(narrower, (features, 1000, 10)), most)
    return largest(partial(of_low_rank if kind == "low rank" else narrower, sizes), most)


def learnt(net: nn.Module, split: Split, epochs: int, seed: int) -> tuple[float, float]:
    """Test accuracy, and CPU seconds of a step."""
    x, y, test_x, test_y = split
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    order = torch.Generator().manual_seed(seed)
    started, steps = time.process_time(), 0
    for _ in range(epochs):
        for rows in torch.randperm(len(y), generator=order).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()
            steps += 1
    seconds = (time.process_time() - started) / steps
    with torch.no_grad():
        return float((net.eval()(test_x).argmax(1) == test_y).float().mean()), seconds


def crossover(widths: Sequence[int], rounds: int) -> Section:
    """The greatest k at which a square layer is faster sketched than dense."""
    return beside_dense({str(width): layer_times(width, rounds) for width in widths})


def layer_times(width: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of a forward and backward pass of each kind of layer."""
    x, grad = torch.randn(256, width, requires_grad=True), torch.randn(256, width)

    def passes(layer: nn.Module) -> Any:
        inputs = [x, *layer.parameters()]
        return lambda: torch.autograd.grad(layer(x), inputs, grad)

    works = {"dense": passes(nn.Linear(width, width))}
    for k in (width // part for part in PARTS):
        works[f"signs {k}"] = passes(SKLinear(width, width, 1, k, seed=0))
        works[f"fold {k}"] = passes(SKLinear(width, width, 1, k, seed=0, sketch="fold"))
        low_rank = nn.Sequential(nn.Linear(width, k, bias=False), nn.Linear(k, width))
        works[f"low rank {k}"] = passes(low_rank)
    return fastest(works, rounds)


def beside_dense(found: dict[str, dict[str, list[float]]]) -> Section:
    """A table of speeds, and the k at which each is 1."""
    made = Section(
        "Where a layer becomes faster",
        "Square layers of width d, batch 256, forward and backward: time of dense / this. The "
        "crossover is the k below which a layer is faster than dense, between measured ones on a "
        "logarithmic scale; below d/2 it has fewer parameters.",
        ("d", "kind", *(f"k = d/{part}" for part in PARTS), "crossover k", "of d"),
        raw=dict(found),
    )
    for width, times in found.items():
        ks = [int(width) // part for part in PARTS]
        for kind in ("signs", "fold", "low rank"):
            gains = [min(times["dense"]) / min(times[f"{kind} {k}"]) for k in ks]
            edge = crossing(ks, gains)
            shown = (
                (edge, "") if isinstance(edge, str) else (f"{edge:.0f}", f"{edge / int(width):.2f}")
            )
            made.rows.append([width, kind, *(f"{gain:.2f}" for gain in gains), *shown])
    return made


def crossing(ks: Sequence[int], gains: Sequence[float]) -> float | str:
    """The k at which the gain is 1."""
    for (low, above), (high, below) in pairwise(zip(ks, gains, strict=True)):
        if above >= 1 > below:
            part = math.log(above) / (math.log(above) - math.log(below))
            return math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    return f"< {ks[0]}" if gains[0] < 1 else f"> {ks[-1]}"


if __name__ == "__main__":
    main()
