from __future__ import annotations

import struct

import pytest
import torch
from sums import wild
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor

from lockstep.parallel.fold import BLOCK
from lockstep.parallel.layout import Range, split
from lockstep.parallel.norm import (
    block_norms,
    combined,
    global_norm,
    in_blocks,
    sharded_block_norms,
)


def segments(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        wild([7 * BLOCK], torch.float32, generator),
        wild([3 * BLOCK], torch.float64, generator),
        wild([BLOCK], torch.float32, generator),
    ]


def many_blocks() -> list[Tensor]:
    """So many that their norms are combined by blocks too."""
    generator = torch.Generator().manual_seed(9)
    blocks = torch.randn(1200, BLOCK, generator=generator) * torch.rand(
        1200, 1, generator=generator
    )
    return [blocks.view(-1), torch.randn(3 * BLOCK, generator=generator, dtype=torch.float64)]


def norm_of(whole: list[Tensor]) -> float:
    return global_norm([in_blocks(segment) for segment in whole])


def sharded(whole: list[Tensor], size: int) -> list[float]:
    """The norm on every rank, each of which has nothing but its slices."""
    slices = [
        [Range(r.first * BLOCK, r.last * BLOCK) for r in split(len(s) // BLOCK, size)]
        for s in whole
    ]

    def body(transport: ThreadTransport) -> float:
        mine = [s[slice(*parts[transport.rank])] for s, parts in zip(whole, slices, strict=True)]
        return combined(sharded_block_norms(transport, mine, slices))

    return on_ranks(size, body)


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("seed", range(5))
def test_slices_give_the_same_bits_as_the_whole(size: int, seed: int) -> None:
    whole = segments(seed)
    expected = struct.pack("d", norm_of(whole))
    assert [struct.pack("d", norm) for norm in sharded(whole, size)] == [expected] * size


@pytest.mark.parametrize("size", [2, 3, 7])
def test_slices_of_many_blocks_give_the_same_bits_as_the_whole(size: int) -> None:
    whole = many_blocks()
    assert sharded(whole, size) == [norm_of(whole)] * size
    exact = float(torch.linalg.vector_norm(torch.cat([s.double() for s in whole])))
    assert norm_of(whole) == pytest.approx(exact, rel=1e-7)


def test_norms_of_many_blocks_do_not_overflow() -> None:
    huge = torch.zeros(300 * BLOCK, dtype=torch.float64)
    huge[::BLOCK] = 1e150
    assert norm_of([huge]) == pytest.approx(300**0.5 * 1e150)
    assert norm_of([huge.clamp_max(1e18).float()]) == pytest.approx(300**0.5 * 1e18)


@pytest.mark.parametrize("seed", range(5))
def test_norm_is_close_to_torchs(seed: int) -> None:
    whole = segments(seed)
    exact = float(torch.linalg.vector_norm(torch.cat([s.double() for s in whole])))
    assert norm_of(whole) == pytest.approx(exact, rel=1e-6)
    assert norm_of(whole) == pytest.approx(float(torch.nn.utils.get_total_norm(whole)), rel=1e-5)


def test_norm_of_known_values() -> None:
    three, four = torch.zeros(2 * BLOCK), torch.zeros(BLOCK, dtype=torch.float64)
    three[-1], four[0] = 3.0, -4.0
    assert norm_of([three, four]) == 5.0
    assert block_norms(in_blocks(three)).tolist() == [0.0, 3.0]
    assert block_norms(in_blocks(three)).dtype == torch.float32


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_one_value_that_is_not_finite_shows_on_every_rank(bad: float) -> None:
    whole = segments(0)
    whole[0][5 * BLOCK + 17] = bad
    assert all(not torch.tensor(norm).isfinite() for norm in [norm_of(whole), *sharded(whole, 3)])
