"""The layer's values, derivatives of any kind, and what it refuses."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.systems.quantum.circuits import dense_state, some_parameters
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, vmap

from lockstep.errors import ConfigError
from lockstep.systems.quantum import layer as readout
from lockstep.systems.quantum.circuits.angles import parameter
from lockstep.systems.quantum.circuits.circuit import Circuit, gate
from lockstep.systems.quantum.layer import Layer, squared
from lockstep.systems.quantum.simulation.measure import PauliSum, probabilities

X, W = [parameter(i) for i in (0, 3)], [parameter(i) for i in (1, 2, 4, 5, 6, 7)]
CIRCUIT = Circuit(
    3,
    [
        gate("h", 0),
        gate("ry", 0, angle=X[0] * W[0]),
        gate("ry", 1, angle=X[1]),
        gate("cx", 0, 1),
        gate("rx", 2, angle=W[1]),
        gate("rzz", 0, 1, angle=(math.pi - X[0]) * (math.pi - X[1])),
        gate("crx", 1, 2, angle=W[2]),
        gate("ry", 1, angle=X[0] * W[3] + W[4]),
        gate("rz", 0, angle=W[5]),
        gate("cx", 2, 0),
        gate("ry", 0, angle=W[0]),
    ],
)
OBSERVABLES = [
    "ZII",
    PauliSum({"XIX": 0.5, "YIZ": -0.2, "IZI": 1.0, "YXI": 0.3, "III": 0.1}),
    "YYX",
]
ROWS = some_parameters(5, 2)
MATRICES = {
    "I": torch.eye(2, dtype=torch.complex128),
    "X": torch.tensor([[0, 1], [1, 0]], dtype=torch.complex128),
    "Y": torch.tensor([[0, -1j], [1j, 0]], dtype=torch.complex128),
    "Z": torch.tensor([[1, 0], [0, -1]], dtype=torch.complex128),
}


def layer(measure: str = "expectation", **keys: Any) -> Layer:
    torch.manual_seed(3)
    observables = () if measure == "probabilities" else OBSERVABLES
    keys = {"dtype": torch.float64, **keys}
    return Layer(CIRCUIT, observables, [0, 3], measure, **keys)  # type: ignore[arg-type]


def dense(observable: PauliSum | str) -> Tensor:
    if isinstance(observable, str):
        observable = PauliSum({observable: 1.0})
    total = torch.zeros(8, 8, dtype=torch.complex128)
    for string, factor in zip(observable.strings, observable.coefficients, strict=True):
        one, two, three = (MATRICES[letter] for letter in string)
        total += factor * torch.kron(torch.kron(one, two), three)
    return total


def by_definition(measure: str, weights: Tensor, row: Tensor) -> Tensor:
    """By a dense simulation of one sample, with parameters put together by hand."""
    theta = torch.stack([row[0], weights[0], weights[1], row[1], *weights[2:]])
    state = dense_state(CIRCUIT, theta)
    if measure == "probabilities":
        return state.abs().square()
    values = []
    for matrix in map(dense, OBSERVABLES):
        mean = (state.conj() @ matrix @ state).real
        square = (matrix @ state).abs().square().sum()
        values.append(mean if measure == "expectation" else square - mean**2)
    return torch.stack(values)


@pytest.mark.parametrize("measure", ["expectation", "variance", "probabilities"])
def test_values_and_all_derivatives_are_those_of_a_dense_simulation(measure: str) -> None:
    model = layer(measure)

    def ours(w: Tensor, x: Tensor) -> Tensor:
        return functional_call(model, {"weights": w}, (x,))

    def theirs(w: Tensor, x: Tensor) -> Tensor:
        return torch.stack([by_definition(measure, w, row) for row in x])

    def loss(function: Callable[..., Tensor], w: Tensor, x: Tensor) -> Tensor:
        return (function(w, x) * torch.arange(1.0, 1 + model.num_outputs)).square().sum()

    x = ROWS.clone().requires_grad_()
    expected = theirs(model.weights, x)
    assert (model(x) - expected).abs().max() < 1e-12
    total = [loss(function, model.weights, x) for function in (ours, theirs)]
    first, second = (torch.autograd.grad(t, (model.weights, x), create_graph=True) for t in total)
    for one, two in zip(first, second, strict=True):
        assert (one - two).abs().max() < 1e-10
    again = [torch.autograd.grad(g[0].sin().sum() + g[1].square().sum(), (model.weights, x))
             for g in (first, second)]  # fmt: skip
    for one, two in zip(*again, strict=True):
        assert (one - two).abs().max() < 1e-7


def test_transforms_of_torch_func_compose() -> None:
    model = layer()

    def loss(w: Tensor, x: Tensor) -> Tensor:
        return functional_call(model, {"weights": w}, (x,)).square().sum()

    weights, x = model.weights.detach(), ROWS[:2]
    expected = torch.autograd.functional.hessian(lambda w: loss(w, x), weights)
    for transform in (hessian, lambda f: jacrev(jacrev(f)), lambda f: jacfwd(jacfwd(f))):
        assert (transform(lambda w: loss(w, x))(weights) - expected).abs().max() < 1e-11
    each = vmap(grad(loss), (None, 0))(weights, x)
    assert (each[1] - grad(loss)(weights, x[1])).abs().max() < 1e-12
    with forward_ad.dual_level():
        tangent = torch.ones_like(weights)
        value = forward_ad.unpack_dual(loss(forward_ad.make_dual(weights, tangent), x))
    assert (value.tangent - grad(loss)(weights, x).sum()).abs() < 1e-11


def test_hessians_are_finite_differences() -> None:
    model = layer()

    def loss(w: Tensor) -> Tensor:
        return functional_call(model, {"weights": w}, (ROWS,)).square().sum()

    weights, step = model.weights.detach(), 1e-4
    shifts = step * torch.eye(len(weights), dtype=torch.float64)
    rows = [(grad(loss)(weights + s) - grad(loss)(weights - s)) / (2 * step) for s in shifts]
    assert (hessian(loss)(weights) - torch.stack(rows)).abs().max() < 1e-6


def test_shapes_and_dtypes() -> None:
    model = layer()
    expected = model(ROWS)
    assert model(ROWS[0]).shape == (3,)
    assert torch.allclose(model(ROWS.view(5, 1, 1, 2))[:, 0, 0], expected, atol=1e-14)
    empty = model(ROWS[:0].requires_grad_())
    assert empty.shape == (0, 3)
    empty.sum().backward()
    assert not model.weights.grad.any()
    single = copy.deepcopy(model).float()
    assert single(ROWS).dtype == torch.float32
    assert (single(ROWS.half()) - expected).abs().max() < 1e-2
    assert (single(ROWS) - expected).abs().max() < 1e-5
    assert torch.equal(single.double()(ROWS), copy.deepcopy(single)(ROWS))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(ROWS), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(ROWS), expected)
    assert "2 inputs, 6 weights, expectation of 3" in repr(model)
    assert torch.get_default_dtype() == Layer(CIRCUIT, ["ZZZ"], [0]).weights.dtype


def test_a_row_that_is_not_finite_is_nan_and_no_other_is() -> None:
    for bad in (math.nan, math.inf):
        rows = ROWS.clone()
        rows[1, 0] = bad
        found = layer()(rows)
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2, 3, 4]].isfinite(), torch.ones(4, 3, dtype=torch.bool))


def test_numbers_as_angles_do_not_depend_on_what_is_in_the_first_row() -> None:
    angles = (parameter(0), 0.3, 0.4)
    gates = [gate("ry", qubit, angle=angle) for qubit, angle in enumerate(angles)]
    model = Layer(Circuit(3, gates), "ZZZ", [0], dtype=torch.float64)
    found = model(torch.tensor([[math.nan], [0.1]], dtype=torch.float64))
    assert found[0].isnan()
    assert found[1].item() == pytest.approx(math.cos(0.1) * math.cos(0.3) * math.cos(0.4))


def test_formulas_of_weights_may_be_rounded_otherwise_in_some_rows() -> None:
    x, one, two = (parameter(i) for i in range(3))
    angles = (x, one**two, one / two)
    gates = [gate("ry", qubit, angle=angle) for qubit, angle in enumerate(angles)]
    model = Layer(Circuit(3, gates), "ZZZ", [0], dtype=torch.float64)
    rows = some_parameters(35, 1)  # more than a vector unit takes at once, and a rest
    for seed in range(50):
        torch.manual_seed(seed)
        model.reset_parameters()
        w = model.weights.detach()
        expected = rows.cos() * (w[0] ** w[1]).cos() * (w[0] / w[1]).cos()
        assert (model(rows) - expected).abs().max() < 1e-9


def test_initial_weights_follow_the_seed_and_the_rule() -> None:
    one, two = layer(), layer()
    assert torch.equal(one.weights, two.weights)
    assert ((one.weights >= 0) & (one.weights < 2 * math.pi)).all()
    one.reset_parameters()
    assert not torch.equal(one.weights, two.weights)
    assert not layer(init=nn.init.zeros_).weights.any()


def test_without_inputs_and_without_weights() -> None:
    circuit = Circuit(1, [gate("ry", 0, angle=parameter(0))])
    alone = Layer(circuit, "Z", dtype=torch.float64)
    assert alone().item() == pytest.approx(math.cos(alone.weights.item()), abs=1e-14)
    given = Layer(circuit, "Z", [0], dtype=torch.float64)
    assert (given(ROWS[:, :1]) - ROWS[:, :1].cos()).abs().max() < 1e-14


def test_probabilities_of_some_qubits() -> None:
    model = layer("probabilities", qubits=[2, 0])
    states = model.simulator.state(model.parameters_of(ROWS))
    assert model.num_outputs == 4
    assert torch.equal(model(ROWS), probabilities(states, [2, 0]))
    wide = Circuit(40, [gate("ry", 39, angle=parameter(0))])
    # Its state would not fit into memory, and is not needed yet.
    assert Layer(wide, measure="probabilities", qubits=[39, 0]).num_outputs == 4


def test_many_strings_are_measured_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = layer("variance")(ROWS)
    monkeypatch.setattr(readout, "_MAX_WEIGHTS", 0)
    assert (layer("variance")(ROWS) - expected).abs().max() < 1e-13


def test_squares_of_pauli_sums() -> None:
    for observable in [PauliSum({"XYZ": 0.7, "ZYX": -1.5, "YYI": 0.2, "ZIZ": 1.0}), OBSERVABLES[1]]:
        assert (
            dense(squared(observable)) - dense(observable) @ dense(observable)
        ).abs().max() < 1e-14


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layer(None, "Z"), "a layer needs a Circuit, not NoneType"),
        (lambda: Layer(CIRCUIT), "measure='expectation' needs at least one observable"),
        (lambda: Layer(CIRCUIT, ["ZZ"]), "letters for a state of 3 qubits"),
        (lambda: Layer(CIRCUIT, [3]), "observables: must be Pauli sums or strings, not int"),
        (lambda: Layer(CIRCUIT, 3), "observables: must be Pauli sums or strings, not int"),
        (lambda: Layer(CIRCUIT, "ZQZ"), "letters of I, X, Y, Z"),
        (lambda: Layer(CIRCUIT, "ZZZ", [8]), "there is no parameter 8 in a circuit of 8"),
        (lambda: Layer(CIRCUIT, "ZZZ", [-1]), "there is no parameter -1"),
        (lambda: Layer(CIRCUIT, "ZZZ", [0, 0]), r"inputs \[0, 0\]: must be different"),
        (lambda: Layer(CIRCUIT, "ZZZ", 2), "inputs: must be numbers of parameters, not int"),
        (lambda: Layer(CIRCUIT, "ZZZ", ["a"]), "inputs: must be an integer"),
        (lambda: Layer(CIRCUIT, "ZZZ", measure="mean"), "measure='mean': must be one of"),
        (lambda: Layer(CIRCUIT, "ZZZ", measure="probabilities"), "needs no observables"),
        (lambda: Layer(CIRCUIT, "ZZZ", qubits=[0]), "qubits: are for measure='probabilities'"),
        (lambda: Layer(CIRCUIT, measure="probabilities", qubits=[3]), "different ones of 3"),
        (lambda: Layer(CIRCUIT, measure="probabilities", qubits=0), "numbers of qubits, not 0"),
        (lambda: layer(init=torch.zeros_like), "init: must fill all weights in place with finite"),
        (lambda: layer(init=lambda w: w[1:].zero_()), "init: must fill all weights in place"),
        (lambda: layer(dtype=torch.float16), "must|torch.float16: a layer is of torch.float32"),
        (lambda: layer().bfloat16()(ROWS), "torch.bfloat16: a layer is of torch.float32"),
        (lambda: layer()(), r"must be a real floating-point tensor \[..., 2\], not NoneType"),
        (lambda: layer()(ROWS[:, :1]), r"inputs \[5, 1\]: the layer has 2 inputs, not 1"),
        (lambda: layer()(ROWS.long()), r"real floating-point tensor .* not one of torch.int64"),
        (lambda: layer()(ROWS.cfloat()), r"not one of torch.complex64 \[5, 2\]"),
        (lambda: layer()(ROWS[0, 0]), r"not one of torch.float64 \[\]"),
        (lambda: layer()(ROWS.tolist()), "not list"),
        (lambda: layer()(ROWS.to("meta")), "inputs are on meta, the layer on cpu"),
        (lambda: layer().frequencies(), "parameter 1 is used by 2 gates"),
        (lambda: layer().metric(ROWS, "none"), "approximation='none': must be one of full"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_one_clear_message(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
