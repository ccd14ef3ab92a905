"""A sketched convolution: few channels first, then 1x1."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.systems.sketched.decompositions import Method, check_dense, rsvd
from lockstep.systems.sketched.module import Sketched, check_floats, check_positive, check_rank
from lockstep.systems.sketched.products import SignKey, sign_matrix

Pair = int | tuple[int, int]
ConvSketch = Literal["signs", "data"]


class SKConv2d(Sketched):
    """A convolution whose kernel is a sum of one-sided terms, W U_iᵀ U_i / L.

    The input is convolved with S = W Uᵀ into r = L k channels, which U mixes into the output's by a
    1x1 convolution. Only S and the bias are trained. U is made from seed and layer, as in
    `SKLinear`.

    Attributes:
        S: parameter, [r, in_channels, height, width].
        bias: parameter, [out_channels], or None.
    """

    U: Tensor
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Pair,
        stride: Pair = 1,
        padding: Pair | Literal["same", "valid"] = 0,
        dilation: Pair = 1,
        num_terms: int = 1,
        low_rank: int = 16,
        bias: bool = True,
        *,
        seed: int | None = None,
        layer: int = 0,
        sketch: ConvSketch = "signs",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """A layer with random start values, whose outputs vary as those of `nn.Conv2d`.

        Args:
            in_channels: channels of the input.
            out_channels: channels of the output.
            kernel_size: height and width of the kernel.
            stride: as in `nn.Conv2d`.
            padding: as in `nn.Conv2d`; with zeros.
            dilation: as in `nn.Conv2d`.
            num_terms: number L of terms.
            low_rank: number k of channels of a term's sketch.
            bias: whether there is a bias.
            seed: seed of the signs; None draws one from torch's global generator.
            layer: number of the layer among those of the same seed.
            sketch: random signs, or numbers made from a trained kernel.
            dtype: of the parameters.
            device: of the parameters.

        Raises:
            ConfigError: a size is not positive, or `low_rank` is larger than the layer.
        """
        super().__init__()
        self.kernel_size = _pair(kernel_size)
        check_positive(
            in_channels=in_channels,
            out_channels=out_channels,
            num_terms=num_terms,
            low_rank=low_rank,
            kernel_height=self.kernel_size[0],
            kernel_width=self.kernel_size[1],
        )
        fan_in = in_channels * math.prod(self.kernel_size)
        check_rank(low_rank, {"fan_in": fan_in, "out_channels": out_channels})
        if sketch not in get_args(ConvSketch):
            raise ConfigError(f"sketch={sketch!r}: must be signs or data")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.stride, self.dilation = _pair(stride), _pair(dilation)
        self.padding = padding if isinstance(padding, str) else _pair(padding)
        self.num_terms, self.low_rank = num_terms, low_rank
        self.sketch_kind: ConvSketch = sketch
        rank = num_terms * low_rank
        self.S = nn.Parameter(
            torch.empty(rank, in_channels, *self.kernel_size, dtype=dtype, device=device)
        )
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, dtype=dtype, device=device))
        else:
            self.register_parameter("bias", None)
        if sketch == "data":
            self.register_buffer("U", self.S.detach().new_zeros(rank, out_channels))
        self.keep_key(seed, layer, device)
        self.reset_parameters()

    @property
    def scale(self) -> float:
        """The factor of the product, for signs of size 1."""
        return 1 / (self.num_terms * math.sqrt(self.low_rank))

    def reset_parameters(self) -> None:
        """Draw the parameters again, from the global generator."""
        fan_in = self.S[0].numel()
        bound = math.sqrt(self.num_terms / fan_in)
        nn.init.uniform_(self.S, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in))

    def forward(self, x: Tensor) -> Tensor:
        """The layer's output.

        Args:
            x: [N, in_channels, H, W].

        Returns:
            [N, out_channels, H', W'].

        Raises:
            TaskError: x is of integers.
        """
        check_floats("the input of SKConv2d", x)
        # The factor goes to the smallest of the three tensors.
        h = F.conv2d(x, self.S * self.scale, None, self.stride, self.padding, self.dilation)
        return F.conv2d(h, self.U.t()[..., None, None], self.bias)

    def made(self, seed: int, layer: int) -> dict[str, Tensor]:
        """U, [r, out_channels]; nothing where it comes from data."""
        if self.sketch_kind == "data":
            return {}
        key, S = SignKey(seed, layer, "U"), self.S
        return {"U": sign_matrix(key, len(S), range(self.out_channels), S.dtype, S.device)}

    def weight(self) -> Tensor:
        """The dense kernel that the layer stands for, as in `nn.Conv2d`."""
        return torch.einsum("ro,rihw->oihw", self.U, self.S * self.scale)

    @classmethod
    def from_dense(
        cls,
        conv: nn.Conv2d,
        low_rank: int,
        num_terms: int = 1,
        method: Method = "range-finder",
        *,
        seed: int = 0,
        layer: int = 0,
    ) -> SKConv2d:
        """A sketched layer in place of a trained one; see `SKLinear.from_dense`.

        Raises:
            ConfigError: the layer has groups or pads with something else than zeros, a size does
                not fit, or there is no such method.
        """
        if conv.groups != 1 or conv.padding_mode != "zeros":
            raise ConfigError(
                f"groups={conv.groups}, padding_mode={conv.padding_mode!r}: only convolutions with "
                "groups=1 that pad with zeros can be sketched"
            )
        check_dense(conv.weight, method)
        padding = conv.padding
        made = cls(
            conv.in_channels,
            conv.out_channels,
            _pair(conv.kernel_size),
            _pair(conv.stride),
            padding if isinstance(padding, str) else _pair(padding),  # type: ignore[arg-type]
            _pair(conv.dilation),
            num_terms,
            low_rank,
            conv.bias is not None,
            seed=seed,
            layer=layer,
            sketch="data" if method == "range-finder" else "signs",
            dtype=conv.weight.dtype,
            device=conv.weight.device,
        )
        weight = conv.weight.detach().double().flatten(1)  # [out, fan_in]
        U = made.U.double()
        if method == "range-finder":
            found = rsvd(weight, min(len(U), *weight.shape), seed=seed)
            U[: len(found.S)] = found.U.t() * math.sqrt(conv.out_channels)
            S = torch.zeros(len(U), weight.shape[1], dtype=torch.float64, device=U.device)
            S[: len(found.S)] = found.S[:, None] * found.V.t()
            S /= made.scale * math.sqrt(conv.out_channels)
        elif method == "least-squares":
            S = torch.linalg.pinv(U.t()) @ weight / made.scale
        else:
            S = U @ weight / math.sqrt(low_rank)
        with torch.no_grad():
            made.S.copy_(S.view_as(made.S))
            made.U.copy_(U)
            if made.bias is not None:
                made.bias.copy_(conv.bias)  # type: ignore[arg-type]
        return made.train(conv.training)

    def extra_repr(self) -> str:
        """Sizes, for `print(model)`."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, "
            f"stride={self.stride}, padding={self.padding}, dilation={self.dilation}, "
            f"num_terms={self.num_terms}, low_rank={self.low_rank}, "
            f"bias={self.bias is not None}, sketch={self.sketch_kind}"
        )


def _pair(size: int | tuple[int, ...]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
