"""Measurements in the middle, reset, conditions and channels, from and to Qiskit and OpenQASM."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.systems.quantum.circuits import some_parameters
from tests.systems.quantum.noise.reference import NUM_PARAMETERS, random_dynamic

from lockstep.errors import ConfigError
from lockstep.quantum import (
    Channel,
    Circuit,
    DensitySimulator,
    DynamicCircuit,
    If,
    Measure,
    Reset,
    channel,
    dynamic_from_qasm,
    dynamic_from_qiskit,
    dynamic_to_qasm,
    dynamic_to_qiskit,
    gate,
    parameter,
)
from lockstep.systems.quantum.noise.circuit import Operation

qiskit = pytest.importorskip("qiskit")
pytestmark = pytest.mark.filterwarnings("ignore")  # of Qiskit about itself

THETA = some_parameters(NUM_PARAMETERS).sigmoid()


def writable(operations: tuple[Operation, ...], noise: bool) -> tuple[Operation, ...]:
    """Operations without readout errors, and without channels if there is to be no noise."""
    kept: list[Operation] = []
    for each in operations:
        if isinstance(each, Measure):
            kept.append(Measure(each.qubit, each.bit))
        elif isinstance(each, If):
            sides = (writable(side, noise) for side in (each.then, each.otherwise))
            kept.append(If(each.bits, each.value, *sides))
        elif noise or not isinstance(each, Channel):
            kept.append(each)
    return tuple(kept)


def used(circuit: DynamicCircuit) -> torch.Tensor:
    angles = [g.angle for g in circuit.every if getattr(g, "angle", None) is not None]
    return THETA[sorted({a.index for a in angles if a.index is not None})]


def check(seed: int) -> None:
    source = random.Random(seed)
    noisy = random_dynamic(source, 2 + seed % 2, 9, classical=True)
    for noise in (True, False):
        operations = writable(noisy.operations, noise)
        circuit = DynamicCircuit(noisy.num_qubits, operations, 2, NUM_PARAMETERS)
        expected = DensitySimulator(circuit).run(THETA).branches
        again = dynamic_from_qiskit(dynamic_to_qiskit(circuit))
        found = DensitySimulator(again).run(used(circuit)).branches
        assert (found - expected).abs().max() < 1e-10, f"seed {seed}"
        if not noise:
            text = dynamic_to_qasm(circuit)
            found = DensitySimulator(dynamic_from_qasm(text)).run(THETA).branches
            assert (found - expected).abs().max() < 1e-10, f"seed {seed}"


def test_what_is_written_is_read() -> None:
    for seed in range(4):
        check(seed)


@pytest.mark.slow
def test_what_is_written_is_read_of_many() -> None:
    for seed in range(100, 200):
        check(seed)


def test_qiskits_conditions_are_read() -> None:
    from qiskit.circuit import ClassicalRegister, QuantumCircuit, QuantumRegister
    from qiskit.circuit.classical import expr

    low, high = ClassicalRegister(1, "low"), ClassicalRegister(2, "high")
    circuit = QuantumCircuit(QuantumRegister(3), low, high)
    circuit.h([0, 1])
    circuit.measure(0, low[0])
    circuit.measure(1, high[1])
    with circuit.if_test((high, 2)) as otherwise:
        circuit.x(2)
        with circuit.if_test((low[0], 0)):
            circuit.ry(0.3, 1)
    with otherwise:
        circuit.reset(0)
    with circuit.if_test(expr.logic_not(low[0])):
        circuit.h(2)
    with circuit.if_test(expr.equal(high, 0)):
        circuit.sx(2)
    found = dynamic_from_qiskit(circuit)
    own = (
        gate("h", 0), gate("h", 1), Measure(0, 0), Measure(1, 2),
        If((1, 2), 2, (gate("x", 2), If((0,), 0, (gate("ry", 1, angle=0.3),))), (Reset(0),)),
        If((0,), 0, (gate("h", 2),)), If((1, 2), 0, (gate("sx", 2),)),
    )  # fmt: skip
    expected = DensitySimulator(DynamicCircuit(3, own)).run().branches
    assert (DensitySimulator(found).run().branches - expected).abs().max() < 1e-12


def test_conditions_of_single_instructions_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Qiskit has them before version 2: in an attribute."""
    circuit = qiskit.QuantumCircuit(1, 2)
    circuit.measure(0, 1)
    circuit.reset(0)
    circuit.x(0)
    for kind, value in ((qiskit.circuit.Measure, 0), (qiskit.circuit.Reset, 1)):
        condition = (circuit.clbits[0], value)
        monkeypatch.setattr(kind, "condition", condition, raising=False)
    register = (circuit.cregs[0], 2)
    monkeypatch.setattr(qiskit.circuit.library.XGate, "condition", register, raising=False)
    measure, reset, flip = dynamic_from_qiskit(circuit).operations
    assert measure == If((0,), 0, (Measure(0, 1),))
    assert reset == If((0,), 1, (Reset(0),))
    assert (flip.bits, flip.value, flip.then[0].name) == ((0, 1), 2, "x")


def test_weights_that_are_0_but_for_rounding_are_written() -> None:
    circuit = DynamicCircuit(
        1, [gate("ry", 0, angle=0.4), channel("ResetError", 0, p0=0.9, p1=0.1)]
    )
    expected = DensitySimulator(circuit).run().density
    again = dynamic_from_qiskit(dynamic_to_qiskit(circuit))
    assert (DensitySimulator(again).run().density - expected).abs().max() < 1e-12


def test_an_instruction_with_measurements_is_taken_apart() -> None:
    from qiskit.circuit import QuantumCircuit

    inner = QuantumCircuit(1, 1)
    inner.h(0)
    inner.measure(0, 0)
    outer = QuantumCircuit(2, 2)
    outer.append(inner.to_instruction(), [1], [1])
    outer.initialize([0, 1], [0])
    found = DensitySimulator(dynamic_from_qiskit(outer)).run()
    assert (found.bits - torch.tensor([0.5, 0, 0.5, 0])).abs().max() < 1e-12


def test_openqasm() -> None:
    text = """
        OPENQASM 3.0; include "stdgates.inc"; input float[64] b; input float[64] a;
        qubit[2] q; bit[2] c;
        ry(a) q[0]; c[0] = measure q[0];
        if (c[0]) { rx(b) q[1]; } else { reset q[1]; }
        if (c == 1) { x q[0]; }
    """
    at = torch.tensor([0.4, 1.1], dtype=torch.float64)
    found = DensitySimulator(dynamic_from_qasm(text)).run(at)
    assert found.bits[1].item() == pytest.approx(np.sin(0.55) ** 2)
    excited = found.density[2, 2].real.item()
    assert excited == pytest.approx(np.sin(0.55) ** 2 * np.sin(0.2) ** 2)
    older = 'OPENQASM 2.0; include "qelib1.inc"; qreg q[2]; creg c[1]; x q[0]; '
    older += "measure q[0] -> c[0]; if(c==1) x q[1]; reset q[0];"
    assert DensitySimulator(dynamic_from_qasm(older)).run().density[2, 2].real == 1


def looping() -> Any:
    circuit = qiskit.QuantumCircuit(1, 1)
    with circuit.for_loop(range(2)):
        circuit.h(0)
    return circuit


def compared() -> Any:
    from qiskit.circuit.classical import expr

    circuit = qiskit.QuantumCircuit(1, 2)
    with circuit.if_test(expr.less(circuit.cregs[0], 2)):
        circuit.h(0)
    return circuit


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dynamic_from_qiskit(3), "must be a qiskit.QuantumCircuit, not int"),
        (lambda: dynamic_from_qiskit(qiskit.QuantumCircuit(0)), "0 qubits"),
        (lambda: dynamic_from_qiskit(looping()), "for_loop: loops and switches are not supported"),
        (lambda: dynamic_from_qiskit(compared()), "a condition must compare a bit or a register"),
        (lambda: dynamic_from_qasm("OPENQASM 3.0; qubit q; while (true) { U(0,0,0) q; }"), "QASM"),
        (lambda: dynamic_from_qasm(3), "must be a string, not int"),
        (lambda: dynamic_to_qasm(Circuit(1, [])), "must be a DynamicCircuit, not Circuit"),
        (lambda: dynamic_to_qiskit(None), "must be a DynamicCircuit, not NoneType"),
        (
            lambda: dynamic_to_qasm(DynamicCircuit(1, [channel("BitFlip", 0, p=0.1)])),
            "BitFlip: OpenQASM has no noise",
        ),
        (
            lambda: dynamic_to_qiskit(DynamicCircuit(1, [channel("BitFlip", 0, p=parameter(0))])),
            "BitFlip: its values must be numbers",
        ),
        (
            lambda: dynamic_to_qiskit(DynamicCircuit(1, [Measure(0, 0, ((0.9, 0.1), (0, 1)))])),
            "a readout error cannot be written",
        ),
    ],
)
def test_what_cannot_be_read_or_written_is_one_clear_message(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
