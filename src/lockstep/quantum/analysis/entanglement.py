"""How entangled states are: the measure of Meyer and Wallach."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.quantum.analysis.draws import random_states
from lockstep.quantum.circuits.circuit import Circuit
from lockstep.quantum.simulation.measure import qubits_of


def meyer_wallach(states: Tensor) -> Tensor:
    """Q = 2 (1 - mean over qubits k of Tr ρ_k²), from 0 (a product) to 1 (Meyer, Wallach 2002).

    In the form of Brennen, Quantum Information and Computation 3, 619 (2003).

    Args:
        states: complex tensor [..., 2^n] of norm 1.

    Returns:
        Values [...], real; differentiable.

    Raises:
        ConfigError: `states` is no such tensor.
    """
    num_qubits = qubits_of(states)
    purities = []
    for qubit in range(num_qubits):
        split = states.reshape(*states.shape[:-1], -1, 2, 1 << qubit)
        low, high = split.unbind(-2)
        likely = [torch.view_as_real(part).square().sum((-3, -2, -1)) for part in (low, high)]
        coherence = torch.view_as_real((low.conj() * high).sum((-2, -1))).square().sum(-1)
        purities.append(likely[0].square() + likely[1].square() + 2 * coherence)
    total: Tensor = 2 * (1 - torch.stack(purities).mean(0))
    return total


def entangling_capability(
    circuit: Circuit, samples: int = 1000, seed: int = 0, device: torch.device | str = "cpu"
) -> float:
    """The mean of `meyer_wallach` over random angles (Sim et al. 2019, equation 13).

    Args:
        circuit: circuit to judge.
        samples: number of states, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    found = [meyer_wallach(states) for states in random_states(circuit, samples, seed, device)]
    return max(0.0, float(torch.cat(found).mean()))  # rounding may lead below


def haar_entanglement(num_qubits: int) -> float:
    """The mean of `meyer_wallach` over all states of n qubits: (2^n - 2) / (2^n + 1)."""
    return ((1 << num_qubits) - 2) / ((1 << num_qubits) + 1)
