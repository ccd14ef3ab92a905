"""The quantum simulator and recipe; writes `docs/benchmarks/quantum.md` and `.json`.

`--quick` shows that everything runs, and prints instead.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import circuit_layers
from lockstep.launching.api import Session
from lockstep.launching.start import rank_command, start
from lockstep.systems.quantum.config import QuantumConfig
from lockstep.systems.quantum.simulation.measure import PauliSum
from lockstep.systems.quantum.simulation.statevector import Simulator
from lockstep.systems.quantum.task import Quantum
from lockstep.systems.quantum.transformer.amplitudes import loss
from page import Section, command, duration, publish, ratio
from peers.lightning_circuits import gradient as lightning
from processes import HERE, Program, Spread, alternate
from run import DOCS, machine
from simulators import simulators
from state_over_ranks import ring
from timing import Work, add_rows, timed

CASES = ("sentences", "rings", "simulators", "layers", "ranks", "split")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="just see that everything runs")
    parser.add_argument("--largest", type=int, default=20, help="qubits of the largest circuit")
    parser.add_argument("--split", type=int, default=22, help="qubits of the state over ranks")
    parser.add_argument("--only", choices=CASES, action="append", help="may be repeated; prints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    facts = machine(("torch", "numpy"))
    for name in ("pennylane", "pennylane-lightning", "qiskit", "qiskit-aer"):
        facts[name] = version(name)
    facts["command"] = command("quantum")
    rounds = 1 if args.quick else 7
    largest = 10 if args.quick else args.largest
    works: dict[str, Callable[[], Section]] = {
        "sentences": lambda: sentences(rounds),
        "rings": lambda: rings([n for n in (10, 16, 18, 20, 22, 24) if n <= largest], rounds),
        "simulators": lambda: simulators([n for n in (4, 8, 12, 16, 20) if n <= largest], rounds),
        "layers": lambda: circuit_layers.section(
            (4,) if args.quick else (4, 6, 8, 10, 12), rounds, timed
        ),
        "ranks": lambda: ranks(args.quick),
        "split": lambda: split_state(12 if args.quick else args.split, rounds),
    }
    assert tuple(works) == CASES
    sections = [works[name]() for name in args.only or CASES]
    folder = None if args.quick or args.only else DOCS
    publish(folder, "quantum", "Benchmarks of the quantum simulator", facts, sections, METHOD)


METHOD = "All in one process with one thread."


def sentences(rounds: int) -> Section:
    """Loss and gradient of the eight sentences."""
    task = Quantum(QuantumConfig())
    torch.manual_seed(0)
    model = task.build_model()
    dataset = task.dataset("val")
    assert dataset is not None
    batch = task.collate([dataset[i] for i in range(8)])

    def ours(**keys: Any) -> Work:
        def work() -> None:
            found = model.by_circuits(batch, **keys) if keys else model(batch)
            loss(found).sum().backward()
            model.angles.grad = None

        return work

    angles = model.angles.detach().flatten()
    theirs = [
        lightning(model.circuit(words[: count + 1]), angles)
        for words, count in zip(batch.words.tolist(), batch.transitions.tolist(), strict=True)
    ]
    times = timed(
        {
            "closed form": ours(),
            "circuit, adjoint": ours(shift=False),
            "circuit, parameter shift": ours(shift=True),
            "lightning.qubit, adjoint": lambda: [f() for f in theirs],
        },
        rounds,
    )
    section = Section(
        "The eight sentences, L = 1, d = 4",
        "Mean loss and its gradient in 48 angles, one thread. Theirs is a little less: "
        "the gradient of <Z_0> after the same eight circuits, from prepared states on; it has no "
        "adjoint of P(0…0).",
        ("", "time", "lightning.qubit / this"),
        raw=dict(times),
    )
    add_rows(section, times, "lightning.qubit, adjoint")
    closed = Spread.of(times["closed form"])
    section.at_most("closed form < 1.5 ms", duration(closed), closed.median < 1.5e-3)
    faster = Spread.of_ratios(times["lightning.qubit, adjoint"], times["closed form"])
    section.at_least("closed form against lightning.qubit", faster, 50)
    return section


def rings(sizes: list[int], rounds: int) -> Section:
    """The gradient of one expectation value."""
    section = Section(
        "One circuit, 4 layers, gradient of <Z_0>",
        "RX, RY, RZ on each qubit and a ring of CNOTs in each layer, complex128, one thread. "
        "`unfused`: the same simulator with blocks of one target.",
        ("qubits", "Lockstep", "unfused", "lightning.qubit", "lightning.qubit / Lockstep"),
    )
    for num_qubits in sizes:
        circuit = ring(num_qubits, 4)
        parameters = torch.randn(circuit.num_parameters, dtype=torch.float64)
        works = {
            "Lockstep": expectation(Simulator(circuit), parameters),
            "unfused": expectation(Simulator(circuit, max_targets=1), parameters),
            "lightning.qubit": lightning(circuit, parameters),
        }
        gap = abs(works["Lockstep"]() - torch.tensor(works["lightning.qubit"]())).max()
        assert gap < 1e-12, gap
        times = timed(works, max(1, min(rounds, 24 >> max(0, num_qubits - 17))))
        section.raw[str(num_qubits)] = times
        spreads = [duration(Spread.of(found)) for found in times.values()]
        faster = Spread.of_ratios(times["lightning.qubit"], times["Lockstep"])
        section.rows.append([str(num_qubits), *spreads, ratio(faster)])
        if num_qubits >= 16:
            section.at_least(f"{num_qubits} qubits against lightning.qubit", faster, 2)
    return section


def expectation(simulator: Simulator, parameters: torch.Tensor) -> Work:
    observable = PauliSum({"I" * (simulator.circuit.num_qubits - 1) + "Z": 1.0})

    def work() -> torch.Tensor:
        own = parameters.clone().requires_grad_()
        observable.expectation(simulator.state(own)).backward()
        assert own.grad is not None
        return own.grad

    return work


def ranks(quick: bool) -> Section:
    """Trainings on one rank and on two."""
    section = Section(
        "From 1 to 2 ranks",
        "Seconds of a step in `lockstep train`, medians without the first steps, of runs on 1 and "
        "2 ranks in turn. `corpus`: 4,000 sentences of 4 to 11 words. The ring is the circuit from "
        "above, in `examples/ising.py`, with 392 evaluations of 16 qubits a step.",
        ("what", "1 rank", "2 ranks", "1 rank / 2 ranks"),
    )
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        lines = (" ".join(f"w{i * j % 997}" for j in range(1, 5 + i % 8)) for i in range(4000))
        corpus.write_text("\n".join(lines))
        (Path(folder) / "one.txt").write_text("Every morning birds sing songs\n")
        cases = {
            "eight sentences, closed form": ("quantum",),
            "eight sentences, parameter shift": ("quantum", "backend=circuit", "grad=shift"),
            "one sentence, parameter shift, 2 parts": (
                "quantum", "backend=circuit", "grad=shift", "deal=shifts", "parts=2",
                "num_microbatches=2", "val_fraction=0", f"corpus={Path(folder) / 'one.txt'}",
            ),
            "ring of 16 qubits, 4 layers, parameter shift": (
                str(HERE.parent / "examples" / "ising.py"), "num_layers=4", "field=0",
                f"num_qubits={8 if quick else 16}",
            ),
            "corpus, d = 4": ("quantum", "val_fraction=0", f"corpus={corpus}"),
            "corpus, d = 16": ("quantum", "val_fraction=0", f"corpus={corpus}", "embedding_dim=16"),
        }  # fmt: skip
        for name, (target, *keys) in cases.items():
            steps = 4 if quick or "ring" in name else 14
            times: dict[int, list[float]] = {1: [], 2: []}
            for _ in range(1 if quick else 3):
                for n, found in times.items():
                    found.append(step_s(n, target, keys, steps, Path(folder)))
            section.raw[name] = times
            faster = Spread.of_ratios(times[1], times[2])
            row = [duration(Spread.of(found)) for found in times.values()]
            section.rows.append([name, *row, ratio(faster)])
            if "ring" in name:
                section.at_least(name, faster, 1.9)
    return section


def split_state(num_qubits: int, rounds: int) -> Section:
    """One state over two ranks."""
    args = ("--qubits", str(num_qubits))
    script = "state_over_ranks.py"
    programs = [
        Program("1 rank", script, args),
        Program("2 ranks", script, args, "mpirun", 2),
    ]
    results = alternate(programs, min(rounds, 3))
    section = Section(
        f"One state of {num_qubits} qubits over ranks, 4 layers, gradient of <Z_0>",
        "The ring from above. `memory`: what the process's peak grew by on rank 0.",
        ("", "time", "memory", "exchanges of a forward pass"),
        raw=results,
    )
    for name, found in results.items():
        memory = f"{found[0]['state_bytes'] / (1 << 20):,.0f} MiB"
        spread = duration(Spread.of([r["seconds"] for r in found]))
        section.rows.append([name, spread, memory, str(found[0]["exchanges"])])
    seconds = [[r["seconds"] for r in found] for found in results.values()]
    section.at_least("1 rank / 2 ranks", Spread.of_ratios(*seconds), 1.6)
    part = results["2 ranks"][0]["state_bytes"] / results["1 rank"][0]["state_bytes"]
    section.at_most("half the memory a rank", f"{part:.2f}", part < 0.6)
    return section


def step_s(num_ranks: int, target: str, keys: Sequence[str], steps: int, folder: Path) -> float:
    """Seconds of a step of a training, the median without the first two."""
    run_dir = Path(tempfile.mkdtemp(dir=folder))
    config = (*keys, f"steps={steps}", "eval_every=1000", "checkpoint.every=1000", "log_every=1")
    command = rank_command("mpi", num_ranks, target, config)
    session = Session(str(run_dir), False, config if target.endswith(".py") else (), False, target)
    ended = start(command, session, 1, on_row=lambda _: None, on_line=lambda _: None)
    assert not ended.exit_code, ended.message
    with (run_dir / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == "train"]
    busy = ("compute_s", "communication_s", "data_s", "checkpoint_s")
    return statistics.median(sum(float(row[key]) for key in busy) / num_ranks for row in rows[2:])


if __name__ == "__main__":
    main()
