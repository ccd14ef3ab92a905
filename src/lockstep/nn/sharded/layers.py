"""Layers whose features can be cut into shards: linear ones by columns and rows, and vocabularies.

They are torch's own layers, with the same parameters and names, until `cut` is called. Then each
tensor is kept as one parameter for each shard: `weight_0`, `weight_1`, …; `state_dict` and
`load_state_dict` still speak of whole tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from lockstep.errors import ConfigError, TaskError
from lockstep.nn.holding import RemoteTensor, is_held
from lockstep.nn.sharded.logits import ShardedLogits, places
from lockstep.nn.sharded.regions import Region
from lockstep.nn.sharded.sharded_tensor import ShardedTensor
from lockstep.parallel.layout import Range, split


def check_layer(module: nn.Module, keys: Iterable[str], name: str, num_shards: int) -> None:
    """Refuse a layer whose parameters or gradients other code changes or looks at.

    Args:
        module: layer that is to be cut.
        keys: names of its parameters that are cut.
        name: name of the layer, for messages.
        num_shards: number of shards.

    Raises:
        ConfigError: naming the layer or its parameter.
    """
    begin = f"num_shards={num_shards}: {name}"
    if parametrize.is_parametrized(module):
        parametrized = ", ".join(module.parametrizations)  # type: ignore[arg-type]
        raise ConfigError(
            f"{begin}: {parametrized} is parametrized (torch.nn.utils.parametrize), which needs "
            "the whole parameter; leave the layer out of the plan of lockstep.nn.shard, or the "
            "parametrization out of the layer"
        )
    for key in keys:
        if key not in module._parameters:
            raise ConfigError(
                f"{begin}.{key} is no parameter but computed from others, as weight_norm, "
                "spectral_norm and pruning do; leave the layer out of the plan of "
                "lockstep.nn.shard, or that out of the layer"
            )
        parameter = module._parameters[key]
        if parameter is not None and has_gradient_hook(parameter):
            raise ConfigError(
                f"{begin}.{key} has a hook on its gradient (register_hook or "
                "register_post_accumulate_grad_hook), which would be lost when it is cut; remove "
                "the hook, or leave the layer out of the plan of lockstep.nn.shard"
            )
    if _has_backward_hooks(module):
        raise ConfigError(
            f"{begin} {_HAS_HOOK}, which would not see its gradients when it is cut; {_REMEDY}"
        )


_HAS_HOOK = "has a backward hook (register_full_backward_hook or register_full_backward_pre_hook)"
_REMEDY = "remove the hook, or leave the layer out of the plan of lockstep.nn.shard"


def watch_backward_hooks(model: nn.Module) -> None:
    """Have modules with backward hooks refuse tensors in shards, for which torch calls none."""
    for name, module in model.named_modules():
        if _has_backward_hooks(module):
            module.register_forward_hook(_Refusal(name), with_kwargs=True)


class _Refusal:
    """A forward hook that refuses inputs and outputs in shards."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        for value in pytree.tree_leaves((args, kwargs, output)):
            if isinstance(value, ShardedTensor):
                raise TaskError(
                    f"{self._name or type(module).__name__} {_HAS_HOOK}, and its input or output "
                    "is cut into shards (num_shards), which torch calls no backward hooks for; "
                    "remove the hook, or leave the layers that cut out of the plan of "
                    "lockstep.nn.shard"
                )


def has_gradient_hook(parameter: Any) -> bool:
    """Whether code of others sees the gradient of a parameter, and may change it."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


DIVIDED = "_divided_by_num_shards"
"""Attribute of a module: names of its attributes that are divided when the model is cut."""


class CutParameterError(TaskError, AttributeError):
    """A layer's whole parameter was asked for after it was cut."""


class ShardedModule(nn.Module):
    """A module with parameters that can be cut into shards; mixed into torch's layers.

    Attributes:
        cut_dims: dimension that each parameter is cut along, by name.
        kinds: words of a plan (`lockstep.nn.shard`) that make a layer one of this class.
        num_shards: number of shards it is cut into; 1 before `cut`.
        whole_shapes: shape of each parameter that was cut, by name.
        region: where its shards are computed; None before `cut`.
    """

    cut_dims: ClassVar[Mapping[str, int]] = MappingProxyType({})
    kinds: ClassVar[tuple[str, ...]] = ()
    may_be_uneven: ClassVar[bool] = False
    num_shards: int = 1
    region: Region | None = None

    def cut(self, num_shards: int, made: dict[int, list[nn.Parameter]], name: str) -> None:
        """Keep each parameter as one for each shard from now on.

        Args:
            num_shards: number of shards.
            made: shards of parameters that were cut already, by the parameter's id: a parameter
                that two modules share stays shared.
            name: name of the module, for messages.

        Raises:
            ConfigError: a width is not divisible by `num_shards`, or other code counts on whole
                parameters.
        """
        check_layer(self, self.cut_dims, name, num_shards)
        self.whole_shapes: dict[str, torch.Size] = {}
        for key, dim in self.cut_dims.items():
            whole = getattr(self, key)
            if whole is None:
                continue
            self._check_width(whole.shape[dim], num_shards, name)
            self.whole_shapes[key] = whole.shape
            pieces = made.get(id(whole))
            if pieces is None:
                pieces = made[id(whole)] = [
                    nn.Parameter(piece.detach().clone(), whole.requires_grad)
                    for piece in pieces_of(whole, dim, num_shards)
                ]
            delattr(self, key)
            for shard, piece in enumerate(pieces):
                self.register_parameter(f"{key}_{shard}", piece)
        self.num_shards, self._cut_name = num_shards, name

    def _check_width(self, width: int, num_shards: int, name: str) -> None:
        if width < num_shards or (width % num_shards and not self.may_be_uneven):
            raise ConfigError(
                f"num_shards={num_shards}: {name} has {width} features, which do not divide into "
                "so many shards of one width"
            )

    def own(self, key: str) -> list[Tensor]:
        """The parameters of this rank's shards; empty if the layer has none of that name."""
        if key not in self.whole_shapes:
            return []
        assert self.region is not None
        return [getattr(self, f"{key}_{shard}") for shard in self.region.shards]

    def __getattr__(self, name: str) -> Any:
        """Explain where a parameter is that was cut.

        Raises:
            CutParameterError: it is such a parameter.
        """
        if name in self.__dict__.get("whole_shapes", ()):
            raise CutParameterError(
                f"{self._cut_name}.{name}: is cut into {name}_0 to "
                f"{name}_{self.num_shards - 1} (num_shards), which may lie on several ranks; "
                "compute with what the layer gives rather than with its parameter, or leave the "
                "layer out of the plan of lockstep.nn.shard"
            )
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        """As that of torch's layer; once it is cut, the shapes of whole parameters."""
        shapes = getattr(self, "whole_shapes", None)
        if not shapes:
            return super().extra_repr()
        of = ", ".join(f"{key}={tuple(shape)}" for key, shape in shapes.items())
        return f"{of}, num_shards={self.num_shards}"

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key, shape in getattr(self, "whole_shapes", {}).items():
            pieces = [destination.pop(f"{prefix}{key}_{k}") for k in range(self.num_shards)]
            destination[prefix + key] = joined(pieces, self.cut_dims[key], shape, prefix + key)

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        for key, shape in getattr(self, "whole_shapes", {}).items():
            whole = state_dict.pop(prefix + key, None)
            if whole is not None and whole.shape == shape:
                pieces = pieces_of(whole, self.cut_dims[key], self.num_shards)
                for shard, piece in enumerate(pieces):
                    own = getattr(self, f"{key}_{shard}")
                    # What other ranks hold is left alone; it is loaded there.
                    state_dict[f"{prefix}{key}_{shard}"] = piece if is_held(own) else own
            elif whole is not None:
                state_dict[prefix + key] = whole  # to be reported as torch does
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


class ColumnLinear(ShardedModule, nn.Linear):
    """A linear layer that enters a region: each shard computes some of the output features."""

    kinds: ClassVar[tuple[str, ...]] = ("column", "heads")
    cut_dims = MappingProxyType({"weight": 0, "bias": 0})

    def forward(self, input: Any) -> Any:
        """[..., in_features] to [..., out_features], cut into shards once `cut` was called.

        Raises:
            TaskError: the input is cut already.
        """
        if self.region is None:
            return super().forward(input)
        if isinstance(input, ShardedTensor):
            raise TaskError(
                "a column layer's input is cut into shards already: only a row layer may follow a "
                "column layer before the features are whole again"
            )
        weights, spread = self.own("weight"), self.region.spread(input)
        biases: Sequence[Tensor | None] = self.own("bias") or [None] * len(weights)
        return self._result(
            [F.linear(x, w, b) for x, w, b in zip(spread, weights, biases, strict=True)]
        )

    def _result(self, parts: Sequence[Tensor]) -> ShardedTensor:
        assert self.region is not None
        return ShardedTensor(parts, self.region)


class RowLinear(ShardedModule, nn.Linear):
    """A linear layer that leaves a region: each shard takes some of the input features."""

    kinds = ("row",)
    cut_dims = MappingProxyType({"weight": 1})

    def forward(self, input: Any) -> Any:
        """[..., in_features], cut into shards once `cut` was called, to [..., out_features].

        Raises:
            TaskError: the input is not cut.
        """
        if self.region is None:
            return super().forward(input)
        if not isinstance(input, ShardedTensor):
            raise TaskError(
                "a row layer's input is not cut into shards: it must come from a column layer "
                "(`column` or `heads` in the plan)"
            )
        weights = self.own("weight")
        total = self.region.gather(
            [F.linear(x, w) for x, w in zip(input.parts, weights, strict=True)]
        )
        # Once, behind the sum: the bias belongs to no shard.
        return total if self.bias is None else total + self.bias


def pieces_of(whole: Tensor, dim: int, num_shards: int) -> list[Tensor]:
    """The shards of a whole tensor, as views."""
    return [whole.narrow(dim, r.first, len(r)) for r in split(whole.shape[dim], num_shards)]


def joined(pieces: Sequence[Tensor], dim: int, shape: torch.Size, name: str) -> Tensor:
    """The whole tensor of all shards; `RemoteTensor` if this rank lacks some of them."""
    if not all(map(is_held, pieces)):
        return RemoteTensor.of(name, shape, pieces[0].dtype)
    return torch.cat(list(pieces), dim)


class VocabularyEmbedding(ShardedModule, nn.Embedding):
    """An embedding of which each shard has some of the rows."""

    kinds = ("vocabulary",)
    cut_dims = MappingProxyType({"weight": 0})
    may_be_uneven = True

    def forward(self, input: Tensor) -> Tensor:
        """Numbers of tokens [...] to embeddings [..., embedding_dim]."""
        if self.region is None:
            return super().forward(input)
        ranges = split(self.num_embeddings, self.num_shards)
        parts = []
        for shard, weight in zip(self.region.shards, self.own("weight"), strict=True):
            place, is_here = places(input, ranges[shard])
            padding = self._padding(ranges[shard])
            rows = F.embedding(place, weight, padding)
            parts.append(rows.masked_fill(~is_here.unsqueeze(-1), 0.0))
        return self.region.gather(parts)

    def _padding(self, own: Range) -> int | None:
        if self.padding_idx is None or not own.first <= self.padding_idx < own.last:
            return None
        return self.padding_idx - own.first


class VocabularyLinear(ColumnLinear):
    """An output layer of which each shard computes the logits of some tokens."""

    kinds = ("vocabulary",)
    may_be_uneven = True

    def _result(self, parts: Sequence[Tensor]) -> ShardedTensor:
        assert self.region is not None
        return ShardedLogits(parts, self.region, self.out_features)
