"""Checks of arguments that both simulators of noise share."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.errors import ConfigError
from lockstep.quantum.circuits.circuit import kind_of
from lockstep.quantum.noise.circuit import DynamicCircuit


def checked_circuit(circuit: DynamicCircuit) -> DynamicCircuit:
    """The circuit.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(circuit, DynamicCircuit):
        raise ConfigError(f"noise needs a DynamicCircuit, not {kind_of(circuit)}")
    return circuit


def checked_parameters(
    circuit: DynamicCircuit, parameters: Tensor | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The parameters [..., P] in a dtype and on a device; none where the circuit has none.

    Raises:
        ConfigError: they are no real tensor of that shape, or there are no rows.
    """
    if parameters is None:
        if circuit.num_parameters:
            raise ConfigError(f"the circuit needs {circuit.num_parameters} parameters")
        parameters = torch.zeros(0)
    circuit.check_parameters(parameters)
    if not parameters.shape[:-1].numel():
        raise ConfigError(f"parameters {list(parameters.shape)}: there are no rows")
    return parameters.to(device, dtype)
