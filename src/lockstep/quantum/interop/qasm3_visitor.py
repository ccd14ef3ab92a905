"""Qiskit's reader of OpenQASM 3, corrected where it confuses parameters or takes too long.

It also reads functions and powers in angles.
"""

from __future__ import annotations

from typing import Any

from openqasm3.ast import GateModifierName
from qiskit_qasm3_import.converter import ConvertVisitor, GateBuilder

from lockstep.errors import ConfigError
from lockstep.quantum.interop.qasm3_values import Values

_MOST_OF_A_GATE = 6_000
"""Most instructions of a gate's definition, with all definitions in it expanded: each use is a
copy."""


class Visitor(ConvertVisitor):
    """Reads a program once.

    Attributes:
        inputs: names of the program's parameters, in the order of their declarations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[str] = []
        self._sizes: dict[str, int] = {}

    def visit_IODeclaration(self, node: Any, context: Any) -> Any:  # noqa: D102
        self.inputs.append(node.identifier.name)
        return super().visit_IODeclaration(node, context)

    def _define_gate(
        self, name: str, definition: Any, n_parameters: int, n_qubits: int, definer: Any,
        context: Any,
    ) -> Any:  # fmt: skip
        """Keep a gate's parameters in the order of its definition, not in that of their names."""
        if isinstance(definition, GateBuilder):
            body = definition._definition
            self._check_size(name, body)
            by_name = {parameter.name: parameter for parameter in body.parameters}
            order = [by_name[argument.name] for argument in definer.arguments]
            definition = GateBuilder(name, body, order)
        return super()._define_gate(name, definition, n_parameters, n_qubits, definer, context)

    def _check_size(self, name: str, body: Any) -> None:
        inner = (getattr(i.operation, "base_op", i.operation).name for i in body.data)
        self._sizes[name] = 1 + sum(self._sizes.get(each, 1) for each in inner)
        if self._sizes[name] > _MOST_OF_A_GATE:
            raise ConfigError(
                f"gate {name}: its definition has more than {_MOST_OF_A_GATE:,} instructions when "
                "all definitions in it are taken apart"
            )

    def _resolve_generic(self, node: Any, context: Any, strict: bool) -> Any:
        return Values(context, strict).resolve(node)

    def _apply_gate_modifier(self, modifier: Any, gate: Any, context: Any) -> Any:
        """Keep modifiers as annotations: applied at once, controls take exponential time."""
        if modifier.modifier in (GateModifierName.inv, GateModifierName.pow):
            if not gate.num_qubits:
                return super()._apply_gate_modifier(modifier, gate, context)
            if modifier.modifier is GateModifierName.inv:
                return gate.inverse(annotated=True)
            power = self._resolve_constant_float(modifier.argument, context)
            return gate.power(power, annotated=True)
        count = 1
        if modifier.argument is not None:
            count = self._resolve_constant_int(modifier.argument, context)
        state = 0 if modifier.modifier is GateModifierName.negctrl else (1 << count) - 1
        return gate.control(count, ctrl_state=state, annotated=True)
