"""A circuit as a layer of a neural network."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.quantum.circuits.angles import as_integer, kind_of
from lockstep.systems.quantum.circuits.circuit import Circuit
from lockstep.systems.quantum.hamiltonian import (
    bits_of,
    masks_of,
    multiplied,
    pauli_phases,
    string_of,
)
from lockstep.systems.quantum.simulation.gradients import Approximation, frequencies, metric_tensor
from lockstep.systems.quantum.simulation.measure import PauliSum, checked_qubits, probabilities
from lockstep.systems.quantum.simulation.statevector import Simulator

_MAX_WEIGHTS = 1 << 24
"""Most numbers in the matrices of the strings; with more, observables are measured one by one."""

Measure = Literal["expectation", "variance", "probabilities"]


def uniform_angles(weights: Tensor) -> Tensor:
    """Fill a tensor in place with angles of U(0, 2π), by torch's global generator."""
    return nn.init.uniform_(weights, 0, 2 * math.pi)


class Layer(nn.Module):
    """Measurements of a circuit, some of whose parameters are inputs and the others weights.

    An input may be used in any number of gates at any depth, and multiplied by weights: angles are
    formulas of the circuit's parameters. The gradient is exact, in weights and inputs, by adjoint
    differentiation; `torch.func` and derivatives of higher order work, too. A batch is simulated
    as a whole, and gates that depend on no input have one matrix for all of it.

    Args:
        circuit: circuit of P parameters.
        observables: what is measured: Pauli sums or strings such as "IZ", whose last letter is for
            qubit 0. Needed for expectation values and variances; none for probabilities.
        inputs: numbers of the circuit's parameters that are inputs, in the order of the input's
            columns. The others are weights, in ascending order.
        measure: `expectation`: the observables' expectation values; `variance`: their variances,
            <H²> - <H>²; `probabilities`: those of all outcomes of `qubits`.
        qubits: qubits that are measured, the first being the low bit of an outcome; all by default.
            For probabilities only.
        init: function that fills the weights in place; by default U(0, 2π), drawn from torch's
            global generator.
        dtype: dtype of weights and outputs, torch.float32 or torch.float64; torch's default one
            by default. Amplitudes are complex64 or complex128 with it.
        device: device of the weights, and of the simulation.

    Attributes:
        circuit: the circuit.
        weights: parameter [P - num_inputs], angles (or factors) in the order of their numbers.
        num_inputs: number of columns of the input.
        num_outputs: number of columns of the output.

    Raises:
        ConfigError: an argument has the wrong type or does not fit the circuit, or `init` leaves a
            weight that is not finite, or does not fill one.
    """

    def __init__(
        self,
        circuit: Circuit,
        observables: PauliSum | str | Iterable[PauliSum | str] = (),
        inputs: Iterable[int] = (),
        measure: Measure = "expectation",
        qubits: Sequence[int] | None = None,
        init: Callable[[Tensor], object] = uniform_angles,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(circuit, Circuit):
            raise ConfigError(f"a layer needs a Circuit, not {kind_of(circuit)}")
        if measure not in get_args(Measure):
            raise ConfigError(f"measure={measure!r}: must be one of {', '.join(get_args(Measure))}")
        self.circuit = circuit
        self._measure = measure
        self._inputs = _numbers(inputs, circuit.num_parameters)
        self._observables = _observables(observables, circuit.num_qubits, measure)
        self._qubits = _qubits(qubits, circuit.num_qubits, measure)
        self._weights = sorted({*range(circuit.num_parameters)} - {*self._inputs})
        self.num_inputs = len(self._inputs)
        self.num_outputs = len(self._observables) or 1 << len(self._qubits)
        order = [*self._inputs, *self._weights]
        self._columns = sorted(range(len(order)), key=order.__getitem__)
        self.weights = nn.Parameter(torch.empty(len(self._weights), dtype=dtype, device=device))
        self._init = init
        self.reset_parameters()
        self._prepared = self._prepare()

    def reset_parameters(self) -> None:
        """Fill the weights by `init` again.

        Raises:
            ConfigError: `init` leaves a weight that is not finite, or does not fill one.
        """
        with torch.no_grad():
            self.weights.fill_(math.nan)
            self._init(self.weights)
        if not self.weights.is_meta and not self.weights.isfinite().all():
            raise ConfigError(
                "init: must fill all weights in place with finite numbers, as torch.nn.init does"
            )

    def forward(self, inputs: Tensor | None = None) -> Tensor:
        """Measure the circuit.

        Args:
            inputs: real tensor [..., num_inputs]; optional if there are none.

        Returns:
            Values [..., num_outputs], in the dtype of the weights. Inputs that are not finite give
            NaN, in their own rows only.

        Raises:
            ConfigError: the inputs are not such a tensor, or not on the device of the weights.
        """
        with torch.autocast(self.weights.device.type, enabled=False):
            states = self.simulator.state(self.parameters_of(inputs))
            if self._readout is None:
                return probabilities(states, self._qubits)
            values = self._readout(states)
        if self._measure == "expectation":
            return values
        means, squares = values.chunk(2, -1)
        return (squares - means.square()).clamp(min=0)

    def parameters_of(self, inputs: Tensor | None = None) -> Tensor:
        """The circuit's parameters [..., P], from inputs as for `forward`.

        Raises:
            ConfigError: the inputs are not such a tensor, or not on the device of the weights.
        """
        weights = self.weights
        if inputs is None and not self.num_inputs:
            return weights
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not inputs.dim():
            raise ConfigError(
                f"inputs must be a real floating-point tensor [..., {self.num_inputs}], not "
                f"{kind_of(inputs)}"
            )
        if inputs.shape[-1] != self.num_inputs:
            raise ConfigError(
                f"inputs {list(inputs.shape)}: the layer has {self.num_inputs} inputs, not "
                f"{inputs.shape[-1]}"
            )
        if inputs.device != weights.device:
            raise ConfigError(f"inputs are on {inputs.device}, the layer on {weights.device}")
        both = torch.cat([inputs.to(weights.dtype), weights.expand(*inputs.shape[:-1], -1)], -1)
        return both.index_select(-1, torch.tensor(self._columns, device=both.device))

    @property
    def simulator(self) -> Simulator:
        """The simulator of the circuit, for the weights' dtype and device."""
        wanted = (self.weights.dtype, self.weights.device)
        if (self._prepared[0].dtype.to_real(), self._prepared[0].device) != wanted:
            self._prepared = self._prepare()
        return self._prepared[0]

    @property
    def _readout(self) -> _Readout | None:
        return self._prepared[1]

    def _prepare(self) -> tuple[Simulator, _Readout | None]:
        dtype, device = self.weights.dtype, self.weights.device
        if dtype not in (torch.float32, torch.float64):
            raise ConfigError(f"dtype {dtype}: a layer is of torch.float32 or torch.float64")
        simulator = Simulator(self.circuit, dtype.to_complex(), device, varying=self._inputs)
        if not self._observables:
            return simulator, None
        measured = [*self._observables]
        if self._measure == "variance":
            measured += [squared(observable) for observable in self._observables]
        return simulator, _Readout(measured, dtype, device)

    def metric(self, inputs: Tensor | None = None, approximation: Approximation = "full") -> Tensor:
        """The Fubini-Study metric of the weights, its mean over the inputs; see `metric_tensor`.

        Args:
            inputs: inputs as for `forward`.
            approximation: which of its entries are kept.

        Returns:
            Metric [W, W] of W weights, without gradient.

        Raises:
            ConfigError: as `forward`, or it does not fit into memory.
        """
        parameters = self.parameters_of(inputs)
        metrics = metric_tensor(self.simulator, parameters, self._weights, approximation)
        return metrics.flatten(0, -3).mean(0) if metrics.dim() > 2 else metrics

    def frequencies(self) -> Tensor:
        """The frequency of each weight [W], float64, for `Rotosolve`; see `frequencies`.

        Raises:
            ConfigError: expectation values are not a sinusoid of one frequency in a weight.
        """
        return frequencies(self.circuit, self._weights)

    def extra_repr(self) -> str:  # noqa: D102
        measured = self._measure + (f" of {len(self._observables)}" if self._observables else "")
        return (
            f"{self.circuit.num_qubits} qubits, {self.num_inputs} inputs, "
            f"{len(self._weights)} weights, {measured}"
        )


def _numbers(inputs: Iterable[int], count: int) -> tuple[int, ...]:
    if not isinstance(inputs, Iterable) or isinstance(inputs, (str, Tensor)):
        raise ConfigError(f"inputs: must be numbers of parameters, not {kind_of(inputs)}")
    numbers = tuple(as_integer(number, "inputs") for number in inputs)
    wrong = next((n for n in numbers if not 0 <= n < count), None)
    if wrong is not None:
        raise ConfigError(f"inputs: there is no parameter {wrong} in a circuit of {count}")
    if len(set(numbers)) < len(numbers):
        raise ConfigError(f"inputs {list(numbers)}: must be different")
    return numbers


def _observables(
    given: PauliSum | str | Iterable[PauliSum | str], num_qubits: int, measure: str
) -> tuple[PauliSum, ...]:
    each = [given] if isinstance(given, (PauliSum, str)) else given
    if not isinstance(each, Iterable):
        raise ConfigError(f"observables: must be Pauli sums or strings, not {kind_of(given)}")
    observables = []
    for one in each:
        if not isinstance(one, (PauliSum, str)):
            raise ConfigError(f"observables: must be Pauli sums or strings, not {kind_of(one)}")
        observables.append(PauliSum({one: 1.0}) if isinstance(one, str) else one)
        observables[-1].check(num_qubits)
    if bool(observables) == (measure == "probabilities"):
        needed = "no observables" if observables else "at least one observable"
        raise ConfigError(f"measure={measure!r} needs {needed}")
    return tuple(observables)


def _qubits(given: Sequence[int] | None, num_qubits: int, measure: str) -> tuple[int, ...]:
    if given is None:
        return tuple(range(num_qubits))
    if measure != "probabilities":
        raise ConfigError(f"qubits: are for measure='probabilities', not {measure!r}")
    return checked_qubits(given, num_qubits)


class _Readout:
    """Measures M observables of the same number of qubits.

    A Pauli string flips some bits of an amplitude's index and multiplies it by a power of i. All
    strings that flip the same bits need the same products of amplitudes, so they are measured by
    one matrix product.
    """

    def __init__(
        self, observables: Sequence[PauliSum], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._observables = observables
        self._num_qubits = num_qubits = observables[0].num_qubits
        self._weights: dict[int, Tensor] | None = None
        flips = dict.fromkeys(masks_of(s)[0] for o in observables for s in o.strings)
        size = 2 << num_qubits
        if len(flips) * size * len(observables) > _MAX_WEIGHTS:
            return
        weights = {x: torch.zeros(size, len(observables), dtype=torch.float64) for x in flips}
        index = torch.arange(1 << num_qubits)
        for column, observable in enumerate(observables):
            for string, coefficient in observable.pairs:
                weight = weights[masks_of(string)[0]][:, column]
                phases = pauli_phases(string, index).conj_physical()
                weight += coefficient * torch.view_as_real(phases).flatten()
        # Without flips the products are squares, which have no imaginary part.
        self._weights = {
            x: (weight if x else weight[::2]).to(device, dtype).contiguous()
            for x, weight in weights.items()
        }

    def __call__(self, states: Tensor) -> Tensor:
        """The expectation values [..., M], real, of states [..., 2^n]."""
        if self._weights is None:
            return torch.stack([o.expectation(states) for o in self._observables], -1)
        axes = states.reshape(*states.shape[:-1], *(2,) * self._num_qubits)
        values = []
        for x, weights in self._weights.items():
            if x:
                flipped = axes.flip([-1 - q for q in bits_of(x)]).reshape(states.shape)
                products = torch.view_as_real(states * flipped.conj()).flatten(-2)
            else:
                products = torch.view_as_real(states).square().sum(-1)
            values.append(products @ weights)
        return reduce(torch.add, values)


def squared(observable: PauliSum) -> PauliSum:
    """The square of a Pauli sum, as a Pauli sum: strings that anticommute cancel."""
    terms: dict[str, float] = {}
    pairs = [(masks_of(string), coefficient) for string, coefficient in observable.pairs]
    for number, (one, factor) in enumerate(pairs):
        for two, other in pairs[number:]:
            masks, phase = multiplied(one, two)
            if not phase.imag:
                string = string_of(masks, observable.num_qubits)
                value = (1 if one == two else 2) * factor * other * phase.real
                terms[string] = terms.get(string, 0.0) + value
    return PauliSum(terms)
