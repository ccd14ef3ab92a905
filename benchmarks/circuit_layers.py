"""Circuits as layers, beside PennyLane's: a section of `quantum.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.layer import Layer
from page import Section, duration, ratio
from peers.pennylane_layers import layer as pennylanes
from processes import Spread

NUM_LAYERS = 3
BATCH = 32
PEERS = ("default.qubit", "lightning.qubit")
Work = Callable[[], tuple[Tensor, ...]]
Timed = Callable[[Mapping[str, Work], int], dict[str, list[float]]]


def uploads(num_qubits: int) -> Circuit:
    """All inputs, then rotations by weights and a ring of CNOTs, in each layer."""
    gates, number = [], num_qubits
    for _ in range(NUM_LAYERS):
        gates += [gate("ry", q, angle=parameter(q)) for q in range(num_qubits)]
        for qubit in range(num_qubits):
            for name in ("rx", "ry", "rz"):
                gates.append(gate(name, qubit, angle=parameter(number)))
                number += 1
        gates += [gate("cx", q, (q + 1) % num_qubits) for q in range(num_qubits)]
    return Circuit(num_qubits, gates)


def section(sizes: Sequence[int], rounds: int, timed: Timed) -> Section:
    """Forward and backward passes of one batch."""
    made = Section(
        f"A circuit as a layer: a batch of {BATCH}, {NUM_LAYERS} layers",
        "Forward and backward pass of `ls.quantum.Layer` and PennyLane's `TorchLayer`, float32, "
        "one thread: RY inputs, RX, RY, RZ weights and a ring of CNOTs in each layer; <Z> of each "
        "qubit. default.qubit simulates the batch at once, lightning.qubit (adjoint) each sample. "
        "Targets: beside the faster one.",
        ("qubits", "Lockstep", *PEERS, *(f"{peer} / Lockstep" for peer in PEERS)),
    )
    for num_qubits in sizes:
        torch.manual_seed(0)
        strings = ["I" * (num_qubits - 1 - q) + "Z" + "I" * q for q in range(num_qubits)]
        own = Layer(uploads(num_qubits), strings, range(num_qubits))
        weights = own.weights.detach()
        inputs = torch.randn(BATCH, num_qubits)
        works = {"Lockstep": work(own, inputs)}
        for peer in PEERS:
            works[peer] = work(pennylanes(num_qubits, NUM_LAYERS, peer, weights), inputs)
            for one, two in zip(works["Lockstep"](), works[peer](), strict=True):
                gap = (one.flatten() - two.flatten()).abs().max().item()
                assert gap < 1e-3, (peer, gap)
        times = timed(works, rounds)
        made.raw[str(num_qubits)] = times
        spreads = [duration(Spread.of(found)) for found in times.values()]
        faster = [Spread.of_ratios(times[peer], times["Lockstep"]) for peer in PEERS]
        made.rows.append([str(num_qubits), *spreads, *map(ratio, faster)])
        made.at_least(f"{num_qubits} qubits", min(
            faster, key=lambda spread: spread.median), 2)  # fmt: skip
    return made


def work(model: nn.Module, inputs: Tensor) -> Work:
    """A function that finds outputs, and gradients in inputs and weights."""

    def passes() -> tuple[Tensor, ...]:
        x = inputs.clone().requires_grad_()
        found = model(x)
        (weights,) = model.parameters()
        return found.detach(), *torch.autograd.grad(found.square().sum(), (x, weights))

    return passes
