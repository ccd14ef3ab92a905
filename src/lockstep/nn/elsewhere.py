"""A tensor that other ranks have, or a part of it: known by name and shape, not by content."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lockstep.errors import TaskError

_KNOWN = frozenset({"__get__", "__len__", "dim", "numel", "size"})


class Elsewhere(Tensor):
    """What a `state_dict` has for a parameter that this rank has not, or has some shards of."""

    _name = "a parameter"

    @staticmethod
    def of(name: str, shape: torch.Size, dtype: torch.dtype) -> Elsewhere:
        """Stand for a whole tensor.

        Args:
            name: its name in the module's `state_dict`.
            shape: shape of the whole tensor.
            dtype: its dtype.
        """
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(Elsewhere)
        made._name = name
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give shape, dtype and the like.

        Raises:
            TaskError: the content is asked for.
        """
        if getattr(func, "__name__", "") in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                known = func(*args, **(kwargs or {}))
            if not isinstance(known, Tensor):
                return known
        leaves = pytree.tree_leaves((args, kwargs))
        own = next((leaf for leaf in leaves if isinstance(leaf, Elsewhere)), cls)
        raise TaskError(
            f"state_dict: {own._name} lies on other ranks, or some of its shards or slices do "
            "(mesh.tp, mesh.pp, sharding=parameters); in a loss, compute with what the model gives "
            "rather than with its parameters; in a hook, set both to 1 and sharding=gradients; "
            "lockstep.load gives a run's whole model"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        """Its name and shape."""
        return f"Elsewhere({self._name}, {tuple(self.shape)})"
