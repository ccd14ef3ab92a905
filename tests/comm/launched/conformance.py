"""Every collective on every dtype and operation, against gloo and a local reference.

Arguments: how to make the default group (`helper` or `url`), and who destroys it at the end
(`destroy`: all, `leave`: nobody, `mixed`: rank 0). All values are small integers, so that sums
are exact in any order and results can be compared bit by bit. Prints one JSON line on rank 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from lockstep.comm.backend import init_process_group, register

Op = dist.ReduceOp
TIMEOUT = timedelta(seconds=60)

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]
# Moving depends on an element's size only: one dtype of each is enough for all shapes.
MOVED_IN_FULL = {torch.bool, torch.bfloat16, torch.float32, torch.int64, torch.complex128}
HALF = {torch.float16, torch.bfloat16}
ARITHMETIC = [Op.SUM, Op.AVG, Op.PRODUCT, Op.MIN, Op.MAX]
BITWISE = [Op.BAND, Op.BOR, Op.BXOR]
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    Op.SUM: torch.add,
    Op.AVG: torch.add,
    Op.PRODUCT: torch.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: torch.bitwise_and,
    Op.BOR: torch.bitwise_or,
    Op.BXOR: torch.bitwise_xor,
}
SHAPES = [(), (0,), (7,), (3, 0), (300, 5)]
REDUCED_SHAPES = [(), (0,), (300, 5)]
LAYOUTS = ["plain", "strided", "transposed"]


def values(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank contributes; every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)

    def draw() -> Tensor:
        choice = torch.tensor([1, 2, 3, 1] if dtype == torch.uint8 else [-2, -1, 1, 3])
        return choice[torch.randint(0, 4, shape, generator=generator)]

    if dtype == torch.bool:
        return draw() > 0
    return (
        torch.complex(draw().double(), draw().double()).to(dtype)
        if dtype.is_complex
        else (draw().to(dtype))
    )


def lay(tensor: Tensor, layout: str) -> Tensor:
    """The same values with other strides."""
    if layout == "strided" and tensor.dim():
        wide = tensor.new_zeros((*tensor.shape, 2))
        wide[..., 1] = tensor
        return wide[..., 1]
    if layout == "transposed" and tensor.dim() == 2:
        return tensor.t().contiguous().t()
    return tensor.clone()


def reduced(op: Any, parts: list[Tensor]) -> Tensor:
    """The reference: fold in the dtype that travels, round once."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        logical = {Op.SUM: Op.BOR, Op.PRODUCT: Op.BAND, Op.MIN: Op.BAND, Op.MAX: Op.BOR}
        return reduce(FOLDS[logical.get(op, op)], parts)
    wide = [part.float() if dtype in HALF else part for part in parts]
    total = reduce(FOLDS[op], wide).to(wide[0].dtype)
    if op == Op.AVG:
        if dtype.is_complex:
            return torch.view_as_complex(torch.view_as_real(total) / len(parts))
        exact = dtype.is_floating_point
        total = total.div(len(parts), rounding_mode=None if exact else "trunc")
    return total.to(dtype)


def defined(op: Any, dtype: torch.dtype) -> bool:
    """Whether `dist` lets the operation through and it has a meaning for the dtype."""
    if op in BITWISE:
        return not (dtype.is_floating_point or dtype.is_complex)
    if dtype.is_complex:
        return op in (Op.SUM, Op.AVG)
    return not (dtype == torch.bool and op == Op.AVG)


class Comparison:
    """Runs cases on both groups, counts them and collects what differs."""

    def __init__(self, gloo: dist.ProcessGroup) -> None:
        self.gloo = gloo
        self.cases = self.with_gloo = 0
        self.differences: list[str] = []

    def check(
        self, name: str, case: Callable[[Any], list[Tensor]], expected: list[Tensor], gloo: bool
    ) -> None:
        """`case(group)` runs one collective and returns what this rank got."""
        self.cases += 1
        try:
            self._compare(f"{name} with reference", case(None), expected)
        except Exception as error:
            self.differences.append(f"{name}: {error!r}")
        if not gloo:
            return
        try:
            theirs = case(self.gloo)
        except (RuntimeError, ValueError):
            return  # gloo does not serve this dtype or operation
        self.with_gloo += 1
        self._compare(f"gloo {name} with reference", theirs, expected)

    def _compare(self, name: str, got: list[Tensor], expected: list[Tensor]) -> None:
        for a, b in zip(got, expected, strict=True):
            same = a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
            if not same:
                self.differences.append(f"{name}: got {a.flatten()[:8]}, not {b.flatten()[:8]}")


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bytes, so that NaN equals NaN and 0 does not equal -0."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)  # copying a bool would make 1 of any other byte
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def reductions(rank: int, size: int) -> Iterator[tuple[str, Any, list[Tensor], bool]]:
    """All reducing cases: name, case, what this rank must get, whether gloo is a judge."""
    seed = 0
    for dtype in DTYPES:
        # gloo adds bools as bytes, which makes values that are neither 0 nor 1.
        judge = dtype != torch.bool
        for op in [*ARITHMETIC, *BITWISE]:
            if not defined(op, dtype):
                continue
            for shape in REDUCED_SHAPES:
                for layout in LAYOUTS if len(shape) == 2 else LAYOUTS[:2]:
                    seed += 1
                    parts = [values(seed, r, shape, dtype) for r in range(size)]
                    name = f"{op} {dtype} {shape} {layout}"
                    total = reduced(op, parts)
                    mine = partial(lay, parts[rank], layout)
                    # gloo divides complex numbers by complex numbers, an ulp apart from real.
                    inexact = dtype.is_complex and op == Op.AVG
                    strict = judge and layout == "plain" and 0 not in shape and not inexact
                    yield f"all_reduce {name}", all_reduce(mine, op), [total], strict
                    root = seed % size
                    want = [total] if rank == root else []
                    yield f"reduce {name}", to_root(mine, op, root, rank), want, strict
            seed += 1
            parts = [values(seed, r, (size, 3, 2), dtype) for r in range(size)]
            total = reduced(op, parts)
            for layout in LAYOUTS[:2]:
                name = f"{op} {dtype} {layout}"
                mine = partial(lay, parts[rank], layout)
                want = [total[rank]]
                strict = judge and layout == "plain" and not (dtype.is_complex and op == Op.AVG)
                yield f"reduce_scatter {name}", scatter_list(mine, op, rank), want, strict
                yield f"reduce_scatter_tensor {name}", scatter_one(mine, op, layout), want, strict


def all_reduce(mine: Callable[[], Tensor], op: Any) -> Callable[[Any], list[Tensor]]:
    def case(group: Any) -> list[Tensor]:
        tensor = mine()
        dist.all_reduce(tensor, op, group)
        return [tensor]

    return case


def to_root(
    mine: Callable[[], Tensor], op: Any, root: int, rank: int
) -> Callable[[Any], list[Tensor]]:
    def case(group: Any) -> list[Tensor]:
        tensor = mine()
        dist.reduce(tensor, root, op, group)
        return [tensor] if rank == root else []

    return case


def scatter_list(mine: Callable[[], Tensor], op: Any, rank: int) -> Callable[[Any], list[Tensor]]:
    def case(group: Any) -> list[Tensor]:
        parts = list(mine())
        output = torch.empty_like(parts[rank])
        dist.reduce_scatter(output, parts, op, group)
        return [output]

    return case


def scatter_one(mine: Callable[[], Tensor], op: Any, layout: str) -> Callable[[Any], list[Tensor]]:
    def case(group: Any) -> list[Tensor]:
        whole = mine()
        output = lay(torch.zeros_like(whole[0]), layout)
        whole = whole.flatten(0, 1)
        dist.reduce_scatter_tensor(output, whole, op, group)
        return [output]

    return case


def movements(rank: int, size: int) -> Iterator[tuple[str, Any, list[Tensor], bool]]:
    """All moving cases, in the same form."""
    seed = 50_000
    for dtype in DTYPES:
        for shape in SHAPES if dtype in MOVED_IN_FULL else SHAPES[2:3]:
            for layout in LAYOUTS if len(shape) == 2 else LAYOUTS[:2]:
                seed += 1
                root = seed % size
                parts = [values(seed, r, shape, dtype) for r in range(size)]
                mine = partial(lay, parts[rank], layout)
                blank = partial(lay, torch.zeros(shape, dtype=dtype), layout)
                name = f"{dtype} {shape} {layout}"
                judge = layout == "plain" and 0 not in shape
                here = rank == root

                def broadcast(group: Any, mine: Any = mine, root: int = root) -> list[Tensor]:
                    tensor = mine()
                    dist.broadcast(tensor, root, group)
                    return [tensor]

                def all_gather(group: Any, mine: Any = mine, blank: Any = blank) -> list[Tensor]:
                    out = [blank() for _ in range(size)]
                    dist.all_gather(out, mine(), group)
                    return out

                def gather(
                    group: Any, mine: Any = mine, blank: Any = blank, root: int = root
                ) -> list[Tensor]:
                    out = [blank() for _ in range(size)] if rank == root else None
                    dist.gather(mine(), out, root, group)
                    return out or []

                def scatter(
                    group: Any,
                    parts: Any = parts,
                    blank: Any = blank,
                    root: int = root,
                    layout: str = layout,
                ) -> list[Tensor]:
                    out = blank()
                    sent = [lay(part, layout) for part in parts] if rank == root else None
                    dist.scatter(out, sent, root, group)
                    return [out]

                def ring(group: Any, mine: Any = mine, blank: Any = blank) -> list[Tensor]:
                    out = blank()
                    work = dist.isend(mine(), (rank + 1) % size, group, tag=3)
                    dist.irecv(out, (rank - 1) % size, group, tag=3).wait()
                    work.wait()
                    return [out]

                yield f"broadcast {name}", broadcast, [parts[root]], judge
                yield f"all_gather {name}", all_gather, parts, judge
                yield f"gather {name}", gather, parts if here else [], judge
                yield f"scatter {name}", scatter, [parts[rank]], judge
                yield f"isend irecv {name}", ring, [parts[rank - 1]], judge and size > 1
                yield from whole_tensors(seed, rank, size, shape, dtype, layout)
        yield from uneven(seed, rank, size, dtype)


def whole_tensors(
    seed: int, rank: int, size: int, shape: tuple[int, ...], dtype: torch.dtype, layout: str
) -> Iterator[tuple[str, Any, list[Tensor], bool]]:
    """All-gather and all-to-all of one tensor, cut along dim 0."""
    parts = [values(seed, r, (size, *shape), dtype) for r in range(size)]
    name = f"{dtype} {shape} {layout}"
    judge = layout == "plain" and 0 not in shape

    def all_gather(group: Any) -> list[Tensor]:
        out = lay(torch.zeros((size, *shape), dtype=dtype), layout)
        dist.all_gather_into_tensor(out, lay(parts[rank][0], layout), group)
        return [out]

    def all_to_all(group: Any) -> list[Tensor]:
        out = lay(torch.zeros((size, *shape), dtype=dtype), layout)
        dist.all_to_all_single(out, lay(parts[rank], layout), group=group)
        return [out]

    gathered = torch.stack([part[0] for part in parts])
    exchanged = torch.stack([part[rank] for part in parts])
    yield f"all_gather_into_tensor {name}", all_gather, [gathered], judge
    yield f"all_to_all_single {name}", all_to_all, [exchanged], judge


def uneven(
    seed: int, rank: int, size: int, dtype: torch.dtype
) -> Iterator[tuple[str, Any, list[Tensor], bool]]:
    """Parts of different sizes: rank s sends (s + 2 d) % 3 rows to rank d."""

    def rows(source: int, target: int) -> int:
        return (source + 2 * target) % 3

    sent = [rows(rank, r) for r in range(size)]
    received = [rows(r, rank) for r in range(size)]
    blocks = [
        [values(seed + 7 * s + d, s, (rows(s, d), 2), dtype) for d in range(size)]
        for s in range(size)
    ]
    want = [blocks[s][rank] for s in range(size)]

    def single(group: Any) -> list[Tensor]:
        out = torch.zeros((sum(received), 2), dtype=dtype)
        dist.all_to_all_single(out, torch.cat(blocks[rank]), received, sent, group)
        return list(out.split(received))

    def lists(group: Any) -> list[Tensor]:
        out = [torch.zeros((n, 2), dtype=dtype) for n in received]
        dist.all_to_all(out, blocks[rank], group)
        return out

    own = [values(seed, r, (r + 1, 2), dtype) for r in range(size)]

    def all_gather(group: Any) -> list[Tensor]:
        out = [torch.zeros_like(part) for part in own]
        dist.all_gather(out, own[rank], group)
        return out

    summands = [
        [values(seed + 11 * s, d, (d + 1,), dtype) for d in range(size)] for s in range(size)
    ]

    def reduce_scatter(group: Any) -> list[Tensor]:
        out = torch.empty(rank + 1, dtype=dtype)
        dist.reduce_scatter(out, summands[rank], group=group)
        return [out]

    total = reduced(Op.SUM, [summands[s][rank] for s in range(size)])
    yield f"uneven all_to_all_single {dtype}", single, want, size > 1
    yield f"uneven all_to_all {dtype}", lists, want, False
    yield f"uneven all_gather {dtype}", all_gather, own, False
    yield f"uneven reduce_scatter {dtype}", reduce_scatter, [total], False


def main() -> None:
    how, ending = sys.argv[1:]
    if how == "helper":
        init_process_group(timeout=TIMEOUT)
    else:
        register()
        register()
        dist.init_process_group("mpi4py", init_method="mpi4py://", timeout=TIMEOUT)
    comparison = Comparison(dist.new_group(backend="gloo", timeout=TIMEOUT))
    rank, size = dist.get_rank(), dist.get_world_size()
    for cases in (reductions, movements):
        for name, case, expected, judged in cases(rank, size):
            comparison.check(name, case, expected, judged)
    everywhere = MPI.COMM_WORLD.gather(comparison.differences)
    if everywhere is not None:
        summary = {
            "library": MPI.Get_library_version().split()[0],
            "cases": comparison.cases,
            "with_gloo": comparison.with_gloo,
            "differences": [f"rank {r}: {d}" for r, all_ in enumerate(everywhere) for d in all_],
        }
        print(json.dumps(summary), flush=True)
    if ending != "destroy":
        # Nobody sends this: it is running, and watched by a thread, when the process ends.
        dist.irecv(torch.zeros(1), tag=99).get_future()
    if ending != "leave" and (ending == "destroy" or rank == 0):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
