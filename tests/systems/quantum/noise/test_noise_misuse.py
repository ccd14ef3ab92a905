"""Wrong channels, circuits and arguments: one clear message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp

from lockstep.errors import ConfigError
from lockstep.quantum import (
    Circuit,
    DensitySimulator,
    DynamicCircuit,
    If,
    Measure,
    PauliSum,
    Reset,
    TrajectorySimulator,
    channel,
    gate,
    misread,
    parameter,
    pauli_error,
    qubit_channel,
)
from lockstep.systems.quantum.circuits.circuit import MAX_QUBITS

NAN = float("nan")
EYE = torch.eye(2)


def thermal(**keys: float) -> Any:
    return channel("ThermalRelaxationError", 0, **{"pe": 0, "t1": 1, "t2": 1, "tg": 1, **keys})


def circuit(*operations: Any, qubits: int = 1, **keys: Any) -> DynamicCircuit:
    return DynamicCircuit(qubits, operations, **keys)


TRAINED = circuit(channel("BitFlip", 0, p=parameter(0)))
DAMPED = circuit(gate("h", 0), channel("AmplitudeDamping", 0, gamma=parameter(0)))
ONE = torch.ones(1, dtype=torch.float64)


def forward(run: Callable[[torch.Tensor], Any]) -> Any:
    """A run with a tangent, in forward mode."""
    with forward_ad.dual_level():
        return run(forward_ad.make_dual(ONE, ONE))


def of_trained(at: torch.Tensor) -> torch.Tensor:
    return TrajectorySimulator(TRAINED).run(at).expectation(PauliSum({"Z": 1})).sum()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: channel("Flip", 0, p=0.1), "channel 'Flip': there is BitFlip, PhaseFlip"),
        (lambda: channel("BitFlip", 0), "BitFlip: needs p, not nothing"),
        (lambda: channel("BitFlip", 0, q=0.1), "BitFlip: needs p, not q"),
        (lambda: channel("BitFlip", 0, p=1.5), "BitFlip: p=1.5 must be from 0 to 1"),
        (lambda: channel("BitFlip", 0, p=-0.1), "must be from 0 to 1"),
        (lambda: channel("BitFlip", 0, p=NAN), "must be a finite number or a `parameter`, not nan"),
        (
            lambda: channel("BitFlip", 0, p="a"),
            "p must be a finite number or a `parameter`, not 'a'",
        ),
        (lambda: channel("BitFlip", 0, p=True), "p must be a number or a `parameter`, not True"),
        (lambda: channel("BitFlip", 0.5, p=0.1), "must be an integer, not 0.5"),
        (lambda: channel("BitFlip", -1, p=0.1), "must be different, and not negative"),
        (lambda: channel("ResetError", 0, p0=0.6, p1=0.6), r"p0 \+ p1 must be at most 1"),
        (lambda: thermal(t2=2.5), "t2 must be at most 2 t1"),
        (lambda: thermal(t1=0), "t1=0 must be positive"),
        (lambda: thermal(t2=-1), "t2=-1 must be positive"),
        (lambda: thermal(tg=-1), "tg=-1 must be positive"),
        (lambda: thermal(pe=2), "pe=2 must be from 0 to 1"),
        (lambda: pauli_error("XA", 0, 1, p=0.1), "must have letters of I, X, Y, Z"),
        (lambda: pauli_error("X", 0, 1, p=0.1), "a letter for each qubit"),
        (lambda: pauli_error("", p=0.1), "a letter for each qubit"),
        (lambda: pauli_error("XX", 0, 0, p=0.1), "must be different"),
        (lambda: pauli_error("X", 0, p=2), "PauliError: p=2 must be from 0 to 1"),
        (lambda: qubit_channel([], 0), "needs a sequence of matrices"),
        (lambda: qubit_channel(3, 0), "needs a sequence of matrices"),
        (lambda: qubit_channel([EYE]), "from 1 to 4 qubits"),
        (lambda: qubit_channel([[1, 0]], 0), r"must be \[2, 2\], not list"),
        (lambda: qubit_channel([torch.eye(4)], 0), r"must be \[2, 2\], not \[4, 4\]"),
        (lambda: qubit_channel([EYE, EYE], 0), r"must be the identity \(it is off by 1.0e\+00\)"),
        (lambda: qubit_channel([EYE * NAN], 0), "must be the identity"),
        (lambda: Measure("0", 0), "measure: qubit: must be an integer, not '0'"),
        (lambda: Measure(0, 1.5), "measure: bit: must be an integer"),
        (lambda: Measure(0, 0, [1, 2]), r"confusion must be \[\[P\(0\|0\)"),
        (lambda: Measure(0, 0, [[0.9, 0.2], [0, 1]]), "must be two probabilities of sum 1"),
        (lambda: Measure(0, 0, [[1.1, -0.1], [0, 1]]), "must be two probabilities of sum 1"),
        (lambda: Measure(0, 0, [[1, 0, 0, 1], []]), "must be two probabilities"),
        (lambda: Measure(0, 0, [[NAN, 1], [0, 1]]), "must be two probabilities of sum 1"),
        (lambda: Measure(0, 0, [["a", 1], [0, 1]]), "must be two probabilities of sum 1"),
        (lambda: Reset(None), "reset: qubit: must be an integer, not None"),
        (lambda: If((), 0, ()), "must be different, and at least one"),
        (lambda: If((0, 0), 0, ()), "must be different, and at least one"),
        (lambda: If((0,), 2, ()), "value 2 is no value of 1 bits"),
        (lambda: circuit("h"), "operation 0: must be a Gate, Channel, .* not str"),
        (lambda: circuit(If((0,), 1, ("h",))), "operation 0: must be a Gate"),
        (lambda: circuit(gate("h", 1)), "Gate: qubit 1 in a circuit of 1 qubits"),
        (lambda: circuit(If((0,), 1, (Reset(3),))), "Reset: qubit 3 in a circuit of 1 qubits"),
        (lambda: circuit(Measure(0, 3), num_bits=2), "2 classical bits: .* highest used is 3"),
        (lambda: circuit(Measure(0, 62)), "63 classical bits: there can be 62"),
        (lambda: circuit(Measure(0, -1)), "classical bits"),
        (lambda: circuit(qubits=MAX_QUBITS + 1), "63 qubits"),
        (lambda: circuit(*TRAINED.operations, num_parameters=0), "parameter 0 in a circuit of 0"),
        (lambda: DensitySimulator(Circuit(1, [])), "noise needs a DynamicCircuit, not Circuit"),
        (lambda: DensitySimulator(circuit(), torch.float64), "must be torch.complex64 or"),
        (lambda: DensitySimulator(circuit(), device="nope"), "device 'nope': there is no such"),
        (lambda: DensitySimulator(TRAINED).run(), "the circuit needs 1 parameters"),
        (lambda: DensitySimulator(TRAINED).run(torch.ones(2)), "2 parameters for a circuit of 1"),
        (lambda: DensitySimulator(TRAINED).run(2 * ONE), "BitFlip: p=2 must be from 0 to 1"),
        (lambda: DensitySimulator(TRAINED).run(NAN * ONE), "p=nan must be from 0 to 1"),
        (lambda: DensitySimulator(circuit(qubits=30)).run(), "density matrices .* trajectories"),
        (lambda: DensitySimulator(circuit(num_bits=60)).run(), "needs .* bytes of memory"),
        (
            lambda: DensitySimulator(DAMPED).run(ONE.clone().requires_grad_()),
            "a trained gamma of 1 has no finite gradient",
        ),
        (lambda: forward(DensitySimulator(DAMPED).run), "a trained gamma of 1 has no finite"),
        (lambda: forward(of_trained), "torch.func and forward-mode tangents do not go through"),
        (lambda: jvp(of_trained, (ONE,), (ONE,)), "torch.func and forward-mode tangents"),
        (lambda: grad(of_trained)(ONE), "torch.func and forward-mode tangents do not go through"),
        (
            lambda: DensitySimulator(circuit()).run().expectation(PauliSum({"ZZ": 1})),
            "Pauli strings of 2 letters for a density matrix of 1 qubits",
        ),
        (lambda: TrajectorySimulator(Circuit(1, [])), "noise needs a DynamicCircuit"),
        (lambda: TrajectorySimulator(circuit(), torch.int8), "must be torch.complex64 or"),
        (lambda: TrajectorySimulator(circuit()).run(shots=0), "shots=0, first=0: must be at least"),
        (
            lambda: TrajectorySimulator(circuit()).run(first=-1),
            "must be at least 1, and at least 0",
        ),
        (lambda: TrajectorySimulator(circuit()).run(key=-1), "key=-1: must be from 0 to 2"),
        (lambda: TrajectorySimulator(circuit()).run(key=1 << 64), "must be from 0 to 2"),
        (lambda: TrajectorySimulator(circuit()).run(key="a"), "key: must be an integer"),
        (lambda: TrajectorySimulator(circuit(qubits=40)).run(shots=5), "need .* bytes"),
        (lambda: TrajectorySimulator(TRAINED).run(2 * ONE), "BitFlip: p=2 must be from 0 to 1"),
        (lambda: DensitySimulator(TRAINED).run(torch.ones(0, 1)), "there are no rows"),
        (lambda: TrajectorySimulator(TRAINED).run(torch.ones(0, 1)), "there are no rows"),
        (lambda: misread(torch.ones(4) / 4, [EYE]), "1 confusion matrices for 4 outcomes"),
        (lambda: misread([1.0], []), "must be a real tensor, not list"),
    ],
)
def test_wrong_arguments_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_circuit_of_nothing() -> None:
    assert DensitySimulator(circuit()).run().density.tolist() == [[1, 0], [0, 0]]
    found = TrajectorySimulator(circuit()).run(shots=2)
    assert found.states.tolist() == [[1, 0], [1, 0]]
    assert found.bits.tolist() == [0, 0]
