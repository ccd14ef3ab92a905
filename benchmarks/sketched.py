"""Sketched layers: speed, conversion, training; writes `docs/benchmarks/sketched.md` and `.json`.

`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from scipy.linalg import qr
from torch import nn

from lockstep.config import override
from lockstep.sketch import SKLinear, cqrrpt, rsvd
from lockstep.systems.sketched.task import Sketched, SketchedConfig
from page import Section, command, publish
from run import DOCS, machine
from sketched_layers import attention_works, fastest, linear_works

CASES = ("speed", "attention", "conversion", "factorisations", "gradients", "training")
SIZES = ((16, 1), (64, 1), (64, 3), (256, 1), (256, 3))
TARGETS = {4096: (59, 18, 6.7, 5.1, 1.8), 8192: (104, 35, 13, 9.5, 3.3)}
"""Speed-ups over dense to reach, for each of `SIZES`."""
BATCH = 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated; prints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    facts = machine(("lockstep-train", "torch", "numpy", "scipy"))
    facts["command"] = command("sketched")
    quick = args.quick
    works: dict[str, Callable[[], Section]] = {
        "speed": lambda: speed((256,) if quick else (4096, 8192), 1 if quick else 9),
        "attention": lambda: attention((64,) if quick else (256, 1024, 4096), 1 if quick else 5),
        "conversion": lambda: conversion(128 if quick else 1024),
        "factorisations": lambda: factorisations(128 if quick else 1024, 1 if quick else 3),
        "gradients": gradients,
        "training": lambda: training(1 if quick else 5, 1 if quick else 5),
    }
    assert tuple(works) == CASES
    sections = []
    for name in args.only or CASES:
        print(name, file=sys.stderr)
        sections.append(works[name]())
    folder = None if quick or args.only else DOCS
    publish(folder, "sketched", "Benchmarks of sketched layers", facts, sections, METHOD)


METHOD = "All in one process with one thread. A time is the least CPU time of all rounds."


def speed(widths: tuple[int, ...], rounds: int) -> Section:
    """Square layers, forward and backward."""
    section = Section(
        "One layer, forward and backward",
        f"Square layers of width d, batch {BATCH}, float32, one thread; gradients of the "
        "input, S1, S2 and the bias. `term by term` is the formula as it is written: batched "
        "products over the terms and their mean, by autograd. `as bits`: U is unpacked in each "
        "pass. `fold`: U is signs and a fold (CountSketch).",
        (
            "d", "k, L", "dense, ms", "term by term, ms", "fused, ms", "as bits, ms", "fold, ms",
            "dense / fused", "term by term / fused", "dense / fold",
        ),
    )  # fmt: skip
    gains, folds, missed = [], [], []
    for width in widths:
        for place, (k, terms) in enumerate(SIZES):
            if k > width:
                continue
            times = fastest(linear_works(width, BATCH, k, terms), rounds)
            best = {name: min(found) for name, found in times.items()}
            section.raw[f"{width} {k} {terms}"] = times
            over = {name: best["dense"] / value for name, value in best.items()}
            gains.append(best["term by term"] / best["fused"])
            folds.append(best["term by term"] / best["fold"])
            section.rows.append(
                [
                    str(width), f"{k}, {terms}",
                    *(shown(seconds).removesuffix(" ms") for seconds in best.values()),
                    f"{over['fused']:.1f}", f"{gains[-1]:.2f}", f"{over['fold']:.1f}",
                ]
            )  # fmt: skip
            target = TARGETS.get(width, (0,) * 5)[place]
            if over["fused"] < target:
                missed.append(f"{width} ({k}, {terms}): {over['fused']:.1f} < {target}")
    section.at_most(
        "dense / fused as in the table of the design", "; ".join(missed) or "all", not missed
    )
    for name, ratios in (("fused", gains), ("fold", folds)):
        mean = statistics.geometric_mean(ratios)
        section.at_most(f"{name} over term by term ≥ 1.4", f"{mean:.2f}", mean >= 1.4)
    return section


def attention(lengths: tuple[int, ...], rounds: int) -> Section:
    """Exact and random-feature attention."""
    section = Section(
        "Attention, forward and backward",
        "One sample, 8 heads of 64, with its linear layers; 128 random features a head. `exact` is "
        "torch's fused kernel.",
        ("tokens", "exact", "exact, causal", "random features", "random features, causal"),
    )
    for tokens in lengths:
        times = fastest(attention_works(tokens, 128), rounds)
        section.raw[str(tokens)] = times
        section.rows.append([str(tokens), *(shown(min(found)) for found in times.values())])
    return section


def conversion(width: int) -> Section:
    """Errors of converted weights."""
    section = Section(
        "Conversion of a trained layer",
        f"Relative error of the weight, {width} x {width} with singular values 1/i, for r = L k "
        "columns; a weight of zeros has 1. The optimum is the truncated SVD of rank 2 r. `copy` is "
        "the reference's initialisation, S1 = W U1ᵀ and S2 = U2 W.",
        ("r", "optimum", "range finder", "least squares", "copy", "range finder / optimum"),
    )
    dense = nn.Linear(width, width)
    left, right = (torch.linalg.qr(torch.randn(width, width)).Q for _ in range(2))
    values = 1 / torch.arange(1, width + 1)
    with torch.no_grad():
        dense.weight.copy_(left * values @ right.t())
    worst = 0.0
    for r in (16, 64, 256):
        if 2 * r >= width:
            continue
        errors = {"optimum": float(values[2 * r :].norm() / values.norm())}
        for method in ("range-finder", "least-squares", "copy"):
            made = SKLinear.from_dense(dense, r, method=method)
            gap = (made.weight() - dense.weight).detach().norm()
            errors[method] = float(gap / dense.weight.detach().norm())
        worst = max(worst, errors["range-finder"] / errors["optimum"])
        section.raw[str(r)] = errors
        part = f"{errors['range-finder'] / errors['optimum']:.3f}"
        section.rows.append([str(r), *(f"{e:.3f}" for e in errors.values()), part])
    section.at_most("within 10 % of the optimum", f"{worst - 1:.1%} above", worst <= 1.1)
    return section


def factorisations(width: int, rounds: int) -> Section:
    """Against LAPACK."""
    section = Section(
        "Factorisations",
        f"RSVD of rank 64 of a {2 * width} x {2 * width} matrix against LAPACK's whole SVD; QR "
        f"with pivoting of {16 * width} x {width // 2} against LAPACK's, which SciPy calls. "
        "float64, one thread.",
        ("", "LAPACK", "here", "LAPACK / here", "error here", "error of the optimum or LAPACK"),
    )
    size = 2 * width
    values = 1 / torch.arange(1, size + 1, dtype=torch.float64)
    turned = torch.linalg.qr(torch.randn(size, size, dtype=torch.float64)).Q
    matrix = turned * values @ turned.flip(1).t()
    tall = torch.randn(16 * width, width // 2, dtype=torch.float64)
    cases: dict[str, tuple[Any, Any]] = {
        "RSVD": (
            lambda: torch.linalg.svd(matrix, full_matrices=False),
            lambda: rsvd(matrix, 64),
        ),
        "CQRRPT": (
            lambda: qr(tall.numpy(), mode="economic", pivoting=True),
            lambda: cqrrpt(tall),
        ),
    }
    found = rsvd(matrix, 64)
    own = cqrrpt(tall)
    Q, R, pivots = cases["CQRRPT"][0]()
    errors = {
        "RSVD": (
            float((matrix - found.U * found.S @ found.V.t()).norm() / matrix.norm()),
            float(values[64:].norm() / values.norm()),
        ),
        "CQRRPT": (
            float((tall[:, own.pivots] - own.Q @ own.R).norm() / tall.norm()),
            float((tall[:, pivots] - torch.from_numpy(Q @ R)).norm() / tall.norm()),
        ),
    }
    for name, (theirs, ours) in cases.items():
        times = fastest({"LAPACK": theirs, "here": ours}, rounds)
        best = [min(of) for of in times.values()]
        section.raw[name] = times
        row = [name, *map(shown, best), f"{best[0] / best[1]:.1f}"]
        section.rows.append([*row, *(f"{error:.2g}" for error in errors[name])])
    return section


def gradients() -> Section:
    """What data parallelism has to add up."""
    section = Section(
        "Gradients of the guide's network",
        "1024 → 512 → 256 → 128 → 10. Bytes of float32 that a step sums over ranks. DDP sums the "
        "same, and with `broadcast_buffers`, its default, also sends U in every forward pass.",
        ("layers", "gradients", "U, sent with DDP's default", "here over dense"),
    )
    for name, keys in NETWORKS.items():
        _, model = network(keys)
        trained = 4 * sum(p.numel() for p in model.parameters())
        sketches = [m for m in model.modules() if isinstance(m, SKLinear)]
        kept = 4 * sum(b.numel() for m in sketches for n, b in m.named_buffers() if n[0] == "U")
        section.raw[name] = {"gradients": trained, "U": kept}
        dense = section.raw["dense"]["gradients"]
        row = [name, f"{trained:,}", f"{kept:,}", f"{trained / dense:.2f}"]
        section.rows.append(row)
    return section


NETWORKS: dict[str, tuple[str, ...]] = {
    "dense": ("layers=dense",),
    "sketched, ratios of the guide": (),
    "sketched, k = 64": ("low_rank=64",),
    "sketched, k = 64, fold": ("low_rank=64", "sketch=fold"),
    "mixed, k = 64": ("layers=mixed", "low_rank=64"),
    "mixed, k = 16": ("layers=mixed", "low_rank=16"),
}


def network(keys: tuple[str, ...], seed: int = 0) -> tuple[Sketched, nn.Module]:
    task = Sketched(override(SketchedConfig(), [*keys, f"seed={seed}"]))
    torch.manual_seed(seed)
    return task, task.build_model()


def training(seeds: int, epochs: int) -> Section:
    """Accuracy of the recipe's networks, and what a step takes."""
    section = Section(
        "Training the guide's network",
        f"The system's defaults (Adam, 1e-3, batch 32) on the embedded digits, {epochs} epochs, "
        f"{seeds} seeds: accuracy on the 180 test images, mean and standard deviation, and seconds "
        "of a step in one process.",
        ("layers", "parameters", "test accuracy", "step", "dense / this"),
    )
    for name, keys in NETWORKS.items():
        scores, steps = [], []
        for seed in range(seeds):
            task, model = network(keys, seed)
            train, test = task.dataset("train"), task.dataset("test")
            assert train is not None
            assert test is not None
            optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            order = torch.Generator().manual_seed(seed)
            for _ in range(epochs):
                for rows in torch.randperm(len(train), generator=order).split(32):
                    loss = task.loss(model, train[rows])
                    optimizer.zero_grad()
                    (loss.sum / loss.weight).backward()
                    optimizer.step()
            with torch.no_grad():
                correct, count = task.loss(model.eval(), test[:]).metrics["accuracy"]
            scores.append(float(correct / count))
            batch = train[:32]

            def work(task=task, model=model, batch=batch) -> None:
                task.loss(model, batch).sum.backward()

            steps.append(min(fastest({"": work}, 2)[""]))
        deviation = statistics.stdev(scores) if len(scores) > 1 else math.nan
        section.raw[name] = {"accuracy": scores, "step_s": steps}
        count = sum(p.numel() for p in model.parameters())
        mean = f"{statistics.mean(scores):.3f} ± {deviation:.3f}"
        faster = min(section.raw["dense"]["step_s"]) / min(steps)
        section.rows.append([name, f"{count:,}", mean, shown(min(steps)), f"{faster:.2f}"])
    return section


def shown(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


if __name__ == "__main__":
    main()
