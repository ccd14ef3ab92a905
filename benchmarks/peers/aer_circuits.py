"""Circuits in Qiskit Aer's statevector simulator, on one thread.

Prints nothing: `simulators.py` imports it, for all are measured in one process. Aer has no adjoint
differentiation, so there is no gradient of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from qiskit import transpile
from qiskit_aer import AerSimulator

from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.interop.qasm import bound, to_qiskit

_ONE_THREAD = {
    "max_parallel_threads": 1,
    "max_parallel_experiments": 1,
    "max_parallel_shots": 1,
}


def state(circuit: Circuit, parameters: torch.Tensor) -> Callable[[], Any]:
    """A function that computes the state, as a NumPy array of complex128.

    Args:
        circuit: circuit to simulate.
        parameters: [num_parameters].
    """
    made = to_qiskit(bound(circuit, parameters))
    made.save_statevector()
    backend = AerSimulator(method="statevector", **_ONE_THREAD)
    ready = transpile(made, backend, optimization_level=0)
    return lambda: backend.run(ready, shots=1).result().get_statevector(ready).data


def counts(circuit: Circuit, parameters: torch.Tensor, shots: int) -> Callable[[], dict[str, int]]:
    """A function that measures all qubits so often; outcomes have qubit 0 last.

    Args:
        circuit: circuit to simulate.
        parameters: [num_parameters].
        shots: number of measurements.
    """
    made = to_qiskit(bound(circuit, parameters))
    made.measure_all()
    backend = AerSimulator(method="statevector", **_ONE_THREAD)
    ready = transpile(made, backend, optimization_level=0)

    def found() -> dict[str, int]:
        counts: dict[str, int] = backend.run(ready, shots=shots).result().get_counts(ready)
        return counts

    return found
