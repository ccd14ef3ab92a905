"""Naming units and rows of blocks: what is found, and what is refused with what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.nn.unit_models import Block, Decoder
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep as ls
from lockstep.data.random import kept_generators, seed_all
from lockstep.errors import TaskError
from lockstep.nn.module_row import ModuleRow
from lockstep.nn.row import row_of
from lockstep.nn.units import rows_in


class Stem(nn.Module):
    """Rows in rows, a row of unlike modules, and one module in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
        self.deep = nn.Sequential(*(nn.ModuleList([Block(), Block()]) for _ in range(2)))
        self.plain = nn.ModuleList([nn.ReLU(), nn.ReLU()])
        self.one = nn.ModuleList([Block()])
        shared = Block()
        self.first, self.second = nn.Sequential(shared), nn.Sequential(shared)


def test_rows_are_the_outermost_lists_of_like_modules() -> None:
    assert rows_in(Stem()) == ["deep"]
    assert rows_in(Decoder()) == ["blocks"]
    assert rows_in(nn.Sequential(Block(), Block())) == [""]


def test_items_of_named_rows_and_other_modules_are_units() -> None:
    row = row_of(ls.nn.units(Stem(), ["deep", "mixed.*", "one"]))
    assert isinstance(row, ModuleRow)
    assert row.units == ["deep.0", "deep.1", "mixed.0", "mixed.1", "mixed.2", "one"]
    assert not row.has_stages


def test_a_marked_model_is_the_model_it_was() -> None:
    model = Decoder()
    names, tokens = list(model.state_dict()), torch.arange(5)[None]
    before = model(tokens)["logits"]
    assert ls.nn.stages(model, "blocks") is model
    assert list(model.state_dict()) == names
    assert torch.equal(model(tokens)["logits"], before)


class Dropping(nn.Module):
    """Calls blocks with dropout in any order, and may keep no activations of so many of them."""

    def __init__(self, recomputes: bool, together: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.5)) for _ in range(3)
        )
        self.recomputes, self.together = recomputes, together

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for first in range(0, len(order), self.together):
            part = order[first : first + self.together]
            if self.recomputes:
                x = checkpoint(self.through, x, part, use_reentrant=False)
            else:
                x = self.through(x, part)
        return x

    def through(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for number in order:
            x = nn.functional.dropout(x + self.blocks[number](x), 0.3)
        return x


@pytest.mark.parametrize("together", [1, 2])
def test_activations_are_computed_again_with_the_same_random_numbers(together: int) -> None:
    """In passes that are traced, in those after, and in ones that go another way."""
    gradients: dict[bool, list[Tensor]] = {}
    for recomputes in (False, True):
        with kept_generators():
            seed_all(1)
            model = ls.nn.stages(Dropping(recomputes, together), "blocks")
            row = row_of(model)
            assert isinstance(row, ModuleRow)
            row.install()
            for order in ([2, 1, 0], [2, 1, 0], [0, 1, 2], [2, 1, 1, 0]):
                seed_all(2)
                model(torch.ones(8, 4, requires_grad=True), order).square().sum().backward()
                row.settle()
            gradients[recomputes] = [p.grad for p in model.parameters() if p.grad is not None]
    for kept, again in zip(gradients[False], gradients[True], strict=True):
        torch.testing.assert_close(kept, again)


@pytest.mark.parametrize(
    ("mark", "words"),
    [
        (lambda m: ls.nn.units(m, ["layers"]), "units: 'layers': no module has such a name; there"),
        (lambda m: ls.nn.units(m, "deep"), "units: names must be a list, such as ['deep']"),
        (lambda m: ls.nn.units(m, ["mixed"]), "mixed is a row of unlike modules (Linear, ReLU)"),
        (lambda m: ls.nn.units(m, ["deep", "deep.0.1"]), "deep.0.1 is in the unit deep.0;"),
        (lambda m: ls.nn.units(m, ["first", "second"]), "first.0 and second.0 are one module"),
        (lambda m: ls.nn.units(m, ["first"]), "first.0 and second.0 are one module in two units"),
        (lambda m: ls.nn.units(m, [""]), "units: the whole model cannot be a unit"),
        (lambda m: ls.nn.units(m.mixed[0]), "units: the Linear has no ModuleList or Sequential of"),
        (lambda m: ls.nn.stages(m, "layers"), "stages: 'layers': no module has such a name; there"),
        (lambda m: ls.nn.stages(m, "d*p"), "'d*p' is a pattern; name one of the rows deep"),
        (lambda m: ls.nn.stages(m, "one"), "stages: one is no ModuleList or Sequential of"),
        (lambda m: ls.nn.stages(m, "mixed"), "for stages write a lockstep.nn.Pipeline"),
        (lambda m: ls.nn.stages(ls.nn.units(m), "deep"), "is a row of blocks already"),
    ],
)  # fmt: skip
def test_names_that_cannot_be_units(mark: Callable[[Stem], nn.Module], words: str) -> None:
    with pytest.raises(TaskError) as refused:
        mark(Stem())
    assert words in str(refused.value)
