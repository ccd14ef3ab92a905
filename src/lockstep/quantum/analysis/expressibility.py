"""How much of the space of states a circuit reaches (Sim, Johnson, Aspuru-Guzik 2019).

Advanced Quantum Technologies 2, 1900070, equations 8 to 11: the distribution of fidelities of pairs
of its states at random angles, beside that of pairs of Haar random states.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.analysis.draws import random_states
from lockstep.quantum.circuits.circuit import Circuit, as_integer

BINS = 75
"""Bins of the histogram of fidelities, as in the paper."""
_LEAST_DIGITS = 1e-300


def fidelities(
    circuit: Circuit, samples: int, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """F = |<ψ(θ)|ψ(φ)>|² of pairs of random angles.

    Args:
        circuit: circuit to judge.
        samples: number of pairs, at least 1.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which states are computed.

    Returns:
        Fidelities [samples], float64, from 0 to 1.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    if as_integer(samples, "samples") < 1:
        raise ConfigError(f"samples={samples}: must be at least 1")
    found, rest = [], None
    for states in random_states(circuit, 2 * samples, seed, device):
        both = states if rest is None else torch.cat([rest, states])
        paired = len(both) // 2 * 2
        overlaps = (both[0:paired:2].conj() * both[1:paired:2]).sum(-1)
        found.append(torch.view_as_real(overlaps).square().sum(-1))
        rest = both[paired:]
    return torch.cat(found).clamp(max=1)  # rounding may lead beyond


def expressibility(
    circuit: Circuit,
    samples: int = 5000,
    seed: int = 0,
    bins: int = BINS,
    device: torch.device | str = "cpu",
) -> float:
    """The Kullback-Leibler divergence of the circuit's fidelities from the Haar distribution.

    0 is as expressive as can be. Of a finite number of pairs, it is too great by about
    (occupied bins - 1) / (2 · samples).

    Args:
        circuit: circuit to judge.
        samples: number of pairs of states, at least 1.
        seed: seed of the angles, from 0 to 2^63 - 1.
        bins: number of equal bins of the fidelity, at least 2.
        device: device on which states are computed.

    Returns:
        Divergence in nats.

    Raises:
        ConfigError: an argument is out of range, or a state does not fit into memory.
    """
    if as_integer(bins, "bins") < 2:
        raise ConfigError(f"bins={bins}: must be at least 2")
    found = fidelities(circuit, samples, seed, device).cpu()
    return divergence(torch.histc(found, bins, 0, 1) / len(found), circuit.num_qubits)


def divergence(frequencies: Tensor, num_qubits: int) -> float:
    """Σ f ln(f / h) with the probabilities h of the same bins for Haar random states.

    Their fidelities F have the density (N - 1) (1 - F)^(N - 2), N = 2^n (Życzkowski, Sommers 2005).

    Args:
        frequencies: relative frequency of each of equal bins, float64 [bins], of sum 1.
        num_qubits: number n of qubits.
    """
    bins = len(frequencies)
    power = (1 << num_qubits) - 1
    lower = torch.arange(bins, dtype=torch.float64) / bins
    # ln((1 - l)^p - (1 - u)^p): far bins are too improbable for a float of 64 bits.
    ratio = ((1 - lower - 1 / bins) / (1 - lower)).clamp(min=0)
    logarithms = power * torch.log1p(-lower) + torch.log1p(-(ratio**power))
    terms = torch.where(
        frequencies > 0, frequencies * (frequencies.clamp(min=_LEAST_DIGITS).log() - logarithms), 0
    )
    total = float(terms.sum())
    return total if not math.isclose(total, 0, abs_tol=1e-15) else 0.0
