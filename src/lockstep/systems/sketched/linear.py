"""A linear layer whose weight is a sum of sketched terms: `SKLinear`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.decompositions import Method, check_dense, fit
from lockstep.systems.sketched.module import (
    Sketched,
    check_floats,
    check_positive,
    check_rank,
    part_of,
)
from lockstep.systems.sketched.products import (
    Fused,
    FusedProduct,
    SignKey,
    expanded_rows,
    packed_signs,
    plain,
    sign_matrix,
    sketched_rows,
    unpacked,
)

if TYPE_CHECKING:
    from lockstep.nn.sharded.layers import ShardedModule

Sketch = Literal["signs", "fold", "data"]
"""What U is: dense random signs; random signs and a fold, with half the work; or numbers that were
made from a trained weight."""


class SKLinear(Sketched):
    """y = b + c (x A) B, with A = [S1ᵀ | U2ᵀ] and B = [U1 ; S2]: two skinny products.

    The weight W of a dense layer, [in, out], is replaced by L terms
    (W U1_iᵀ U1_i + U2_iᵀ U2_i W) / 2L, where the entries of U1_i and U2_i are ±1/√k. The bias,
    S1 = W U1ᵀ and S2 = U2 W are trained. All terms are one product of r = L k columns.

    U is a function of seed and layer (`lockstep.systems.sketched.products`), so every rank makes
    it, or the part of it that it needs, and nothing of it is sent or saved: a checkpoint has the
    buffer `sketch_key`, two integers. With `sketch="data"` U is a buffer like any other.

    Attributes:
        S1: parameter, [r, in].
        S2: parameter, [r, out].
        bias: parameter, [out], or None.
        scale: the factor c, with the 1/√k of the signs in it.
        in_range: input features of this module.
        out_range: output features of this module.
    """

    U1: Tensor
    U2: Tensor
    bias: nn.Parameter | None

    @staticmethod
    def sharded_classes() -> tuple[type[ShardedModule], ...]:
        """What `lockstep.nn.shard` can make of a layer of this class."""
        from lockstep.systems.sketched.sharded import SketchedColumn, SketchedRow

        return SketchedColumn, SketchedRow

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_terms: int = 1,
        low_rank: int = 16,
        bias: bool = True,
        *,
        seed: int | None = None,
        layer: int = 0,
        sketch: Sketch = "signs",
        packed: bool = False,
        in_range: range | None = None,
        out_range: range | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random start values, whose outputs vary as those of `nn.Linear`.

        Args:
            in_features: size of the input's last dim, of the whole layer.
            out_features: size of the output's last dim, of the whole layer.
            num_terms: number L of terms.
            low_rank: number k of columns of a term's sketch.
            bias: whether there is a bias.
            seed: seed of the signs; None draws one from torch's global generator.
            layer: number of the layer among those of the same seed.
            sketch: what U is; see `Sketch`.
            packed: whether U is kept as bits and unpacked in each pass, a 32nd of the memory for
                a few percent of the time. For `sketch="signs"` only.
            in_range: input features of this module, for a shard of the layer; all by default.
            out_range: the same for output features.
            dtype: of the parameters.
            device: of the parameters.

        Raises:
            ConfigError: a size is not positive, `low_rank` is larger than the layer, or a range
                is not one of the layer.
        """
        super().__init__()
        check_positive(
            in_features=in_features,
            out_features=out_features,
            num_terms=num_terms,
            low_rank=low_rank,
        )
        check_rank(low_rank, {"in_features": in_features, "out_features": out_features})
        if sketch not in get_args(Sketch):
            raise ConfigError(f"sketch={sketch!r}: must be one of {', '.join(get_args(Sketch))}")
        if packed and sketch != "signs":
            raise ConfigError(f"packed=True: needs sketch='signs', not {sketch!r}")
        self.in_features, self.out_features = in_features, out_features
        self.num_terms, self.low_rank = num_terms, low_rank
        self.sketch_kind: Sketch = sketch
        self.packed = packed
        self.in_range = part_of("in_range", in_range, in_features)
        self.out_range = part_of("out_range", out_range, out_features)
        self.S1 = nn.Parameter(
            torch.empty(self.rank, len(self.in_range), dtype=dtype, device=device)
        )
        self.S2 = nn.Parameter(
            torch.empty(self.rank, len(self.out_range), dtype=dtype, device=device)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(len(self.out_range), dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        if sketch == "data":
            self.register_buffer("U1", torch.zeros_like(self.S2.detach()))
            self.register_buffer("U2", torch.zeros_like(self.S1.detach()))
        self.keep_key(seed, layer, device)
        self.reset_parameters()

    @property
    def rank(self) -> int:
        """Columns of all terms' sketches together: r = L k."""
        return self.num_terms * self.low_rank

    @property
    def scale(self) -> float:
        """The factor c of the product, for signs of size 1."""
        return self._unit / (2 * self._terms)

    def reset_parameters(self) -> None:
        """Draw the parameters again, from the global generator.

        Entries of the dense weight that the terms stand for have the variance that those of
        `nn.Linear` have, 1 / (3 in).
        """
        bound = math.sqrt(2 * self._terms / self.in_features)
        nn.init.uniform_(self.S1, -bound, bound)
        nn.init.uniform_(self.S2, -bound, bound)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output.

        Args:
            x: [..., in], the input features of this module.

        Returns:
            [..., out], the output features of this module. Where these are not all input features,
            add up `sketch` of all shards, and then call `expand`.

        Raises:
            TaskError: x is of integers.
        """
        check_floats("the input of SKLinear", x)
        parts = self._parts()
        rows = x.reshape(-1, x.shape[-1])
        # Autocast chooses dtypes for each operation, so it has to see them.
        if torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type):
            y = FusedProduct.apply(rows, *parts)  # type: ignore[no-untyped-call]
        else:
            y = plain(rows, parts)
        return y.view(*x.shape[:-1], y.shape[-1])  # type: ignore[no-any-return]

    def sketch(self, x: Tensor) -> Tensor:
        """The first product, x A: [..., in] to [..., 2 r]. The results of shards add up.

        Raises:
            TaskError: x is of integers.
        """
        check_floats("the input of SKLinear", x)
        return sketched_rows(x, self._parts())

    def expand(self, h: Tensor) -> Tensor:
        """The second product, b + c H B: [..., 2 r] to the output features, [..., out]."""
        return expanded_rows(h, self._parts())

    def shard(self, in_range: range, out_range: range) -> SKLinear:
        """The part of the layer that has some of its features, with copies of the parameters.

        `expand` of the sum of the `sketch` of all parts of the input gives the output's part.

        Args:
            in_range: input features of the whole layer, of step 1, within those of this module.
            out_range: the same for output features.

        Raises:
            ConfigError: a range is not within those of this module.
        """
        slices = []
        for name, part, owned in (
            ("in_range", in_range, self.in_range),
            ("out_range", out_range, self.out_range),
        ):
            if not (owned.start <= part.start and part.stop <= owned.stop):
                raise ConfigError(f"{name}={part}: this layer has {owned}")
            slices.append(slice(part.start - owned.start, part.stop - owned.start))
        rows, columns = slices
        seed, layer = self.key()
        shard = SKLinear(
            self.in_features,
            self.out_features,
            self.num_terms,
            self.low_rank,
            self.bias is not None,
            seed=seed,
            layer=layer,
            sketch=self.sketch_kind,
            packed=self.packed,
            in_range=in_range,
            out_range=out_range,
            dtype=self.S1.dtype,
            device=self.S1.device,
        )
        with torch.no_grad():
            shard.S1.copy_(self.S1[:, rows])
            shard.S2.copy_(self.S2[:, columns])
            if self.bias is not None and shard.bias is not None:
                shard.bias.copy_(self.bias[columns])
            if self.sketch_kind == "data":
                shard.U2.copy_(self.U2[:, rows])
                shard.U1.copy_(self.U1[:, columns])
        return shard.train(self.training)

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """U1 and U2 as the module keeps them; nothing where they come from data."""
        if self.sketch_kind == "data":
            return {}
        made = {}
        for name, columns in (("U1", self.out_range), ("U2", self.in_range)):
            key = SignKey(seed, layer, name)
            if self.packed:
                made[name] = packed_signs(key, self.rank, columns, self.S1.device)
            else:
                made[name] = self.signs(key, columns, self.S1)
        return made

    def signs(self, key: SignKey, columns: range, like: Tensor) -> Tensor:
        """The signs ±1 of some features, of a dense or a folded sketch, by its key."""
        if self.sketch_kind == "fold":
            return sign_matrix(key, 1, columns, like.dtype, like.device)[0]
        return sign_matrix(key, self.rank, columns, like.dtype, like.device)

    def weight(self) -> Tensor:
        """The dense weight that the layer stands for, [out, in] as in `nn.Linear`."""
        parts = self._parts()
        eye = torch.eye(len(self.in_range), dtype=self.S1.dtype, device=self.S1.device)
        return plain(eye, parts._replace(bias=None)).t()

    @classmethod
    def from_dense(
        cls,
        linear: nn.Linear,
        low_rank: int,
        num_terms: int = 1,
        method: Method = "range-finder",
        *,
        seed: int = 0,
        layer: int = 0,
        sketch: Literal["signs", "fold"] = "signs",
    ) -> SKLinear:
        """A sketched layer in place of a trained one.

        Args:
            linear: the layer; it is left as it is.
            low_rank: number k of columns of a term's sketch.
            num_terms: number L of terms.
            method: `range-finder` makes U from the weight (within a few percent of the best weight
                of rank 2 L k), `least-squares` the best S for random U, and `copy` the unbiased
                start S1 = W U1ᵀ, S2 = U2 W, whose error is larger than that of zeros.
            seed: seed of the signs, and of the range finder.
            layer: number of the layer among those of the same seed.
            sketch: kind of random U, for the other methods than `range-finder`.

        Raises:
            ConfigError: a size is not positive, `low_rank` is larger than the layer, or there is
                no such method.
        """
        check_dense(linear.weight, method)
        made = cls(
            linear.in_features,
            linear.out_features,
            num_terms,
            low_rank,
            linear.bias is not None,
            seed=seed,
            layer=layer,
            sketch="data" if method == "range-finder" else sketch,
            dtype=linear.weight.dtype,
            device=linear.weight.device,
        )
        parts = made._parts()
        fitted = fit(linear.weight.detach().t(), parts, method, made._unit, seed)
        with torch.no_grad():
            for name, value in fitted.items():
                getattr(made, name).copy_(value)
            if made.bias is not None:
                made.bias.copy_(linear.bias)
        return made.train(linear.training)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"num_terms={self.num_terms}, low_rank={self.low_rank}, "
            f"bias={self.bias is not None}, sketch={self.sketch_kind}"
        )

    @property
    def _terms(self) -> int:
        """L as it is in the factors: a fold of L k columns is one sketch."""
        return 1 if self.sketch_kind == "fold" else self.num_terms

    @property
    def _unit(self) -> float:
        """Size of an entry of U, of which the buffers hold the sign: it is exact in any dtype."""
        return 1.0 if self.sketch_kind == "fold" else 1 / math.sqrt(self.low_rank)

    def _parts(self) -> Fused:
        U1, U2 = self.U1, self.U2
        if self.packed:
            U1 = unpacked(U1, len(self.out_range), self.S2.dtype)
            U2 = unpacked(U2, len(self.in_range), self.S1.dtype)
        first = (self.in_range.start, self.out_range.start)
        return Fused(self.S1, self.S2, U1, U2, self.bias, self.scale, *first)
