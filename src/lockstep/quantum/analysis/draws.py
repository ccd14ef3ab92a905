"""Random angles, and the states of circuits at them, in batches that fit."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import Circuit, as_integer, kind_of
from lockstep.quantum.simulation.statevector import Simulator

_AMPLITUDES = 1 << 18
"""About how many amplitudes are simulated at a time."""


def random_angles(circuit: Circuit, samples: int, seed: int) -> Tensor:
    """Angles drawn uniformly from [0, 2π), float64 [samples, num_parameters].

    Args:
        circuit: circuit whose parameters they are for.
        samples: number of draws, at least 2.
        seed: seed of the draws, from 0 to 2^63 - 1.

    Raises:
        ConfigError: an argument is out of range or no such thing.
    """
    if not isinstance(circuit, Circuit):
        raise ConfigError(f"needs a Circuit, not {kind_of(circuit)}")
    if as_integer(samples, "samples") < 2:
        raise ConfigError(f"samples={samples}: a distribution needs at least 2")
    if not 0 <= as_integer(seed, "seed") < 1 << 63:
        raise ConfigError(f"seed={seed}: must be from 0 to 2^63 - 1")
    generator = torch.Generator().manual_seed(seed)
    shape = (samples, circuit.num_parameters)
    return 2 * math.pi * torch.rand(shape, dtype=torch.float64, generator=generator)


def chunks(angles: Tensor, circuit: Circuit) -> Iterator[Tensor]:
    """The rows of angles [samples, num_parameters], as many at a time as are quick to simulate."""
    rows = max(1, _AMPLITUDES >> circuit.num_qubits)
    for first in range(0, len(angles), rows):
        yield angles[first : first + rows]


def random_states(
    circuit: Circuit, samples: int, seed: int, device: torch.device | str = "cpu"
) -> Iterator[Tensor]:
    """States of a circuit at random angles, some at a time: complex128 [some, 2^n].

    Args:
        circuit: circuit to simulate.
        samples: number of states in all, at least 2.
        seed: seed of the angles, from 0 to 2^63 - 1.
        device: device on which they are computed.

    Raises:
        ConfigError: as `random_angles`, or a state does not fit into memory.
    """
    angles = random_angles(circuit, samples, seed).to(device)
    simulator = Simulator(circuit, device=device)
    with torch.no_grad():
        for own in chunks(angles, circuit):
            yield simulator.state(own)
