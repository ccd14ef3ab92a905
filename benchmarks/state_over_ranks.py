"""The gradient of <Z_0> of a state split over the ranks; started by `quantum.py`.

Prints one JSON line on rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch

from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.simulation.statevector import Simulator, expectation


def ring(num_qubits: int, num_layers: int) -> Circuit:
    """RX, RY, RZ on each qubit and a ring of CNOTs, in each layer."""
    gates, number = [], 0
    for _ in range(num_layers):
        for qubit in range(num_qubits):
            for name in ("rx", "ry", "rz"):
                gates.append(gate(name, qubit, angle=parameter(number)))
                number += 1
        gates += [gate("cx", q, (q + 1) % num_qubits) for q in range(num_qubits)]
    return Circuit(num_qubits, gates)


def kib(field: str) -> int:
    """A size in /proc: unlike `getrusage`, it does not remember the parent process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{field}:")))


def gradient(simulator: Simulator) -> torch.Tensor:
    """Of <Z_0>, in all parameters."""
    circuit = simulator.circuit
    parameters = torch.linspace(-1, 1, circuit.num_parameters, dtype=torch.float64)
    parameters.requires_grad_()
    state = simulator.state(parameters)
    expectation(simulator, state, {"I" * (circuit.num_qubits - 1) + "Z": 1.0}).backward()
    assert parameters.grad is not None
    return parameters.grad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--qubits", type=int, default=22)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = open_transport(detect(os.environ), torch.device("cpu"), 60)
    gradient(Simulator(ring(10, 1), transport=transport))  # whatever is only loaded once
    simulator = Simulator(ring(args.qubits, 4), transport=transport)
    empty = kib("VmRSS")
    times, first = [], 0.0
    for _ in range(args.repeats + 1):
        transport.barrier()
        started = time.perf_counter()
        first = float(gradient(simulator)[0])
        transport.barrier()
        times.append(time.perf_counter() - started)
    peak = kib("VmHWM")
    result = {
        "seconds": statistics.median(times[1:]),
        "state_bytes": 1024 * (peak - empty),
        "gradient_0": first,
        "exchanges": sum(move is None for b in simulator.from_zero.plan.blocks for move in b.moves),
    }
    if transport.rank == 0:
        print(json.dumps(result))
    transport.close()


if __name__ == "__main__":
    main()
