"""Backward passes without what torch does around them: the same bits, seen by all who watch."""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lockstep.engine.passes import backward as bare_backward


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)  # imports the compiler the first time that a process calls it
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Notes each backward pass that is left to torch."""
    seen: list[str] = []
    plain = Tensor.backward

    def backward(loss: Tensor, **keys: Any) -> None:
        seen.append("torch")
        plain(loss, **keys)  # type: ignore[no-untyped-call]

    monkeypatch.setattr(Tensor, "backward", backward)
    monkeypatch.setattr(bare_backward, "_TENSORS_OWN", backward)
    return seen


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 1))


def loss_of(network: nn.Module) -> Tensor:
    value: Tensor = network(torch.linspace(-1, 1, 12).view(4, 3)).square().sum()
    return value


def test_gradients_have_the_bits_of_torchs_own(watched: list[str]) -> None:
    ours, theirs = model(), model()
    for _ in range(2):  # the second adds to the first
        bare_backward.backward(loss_of(ours))
        torch.autograd.backward(loss_of(theirs))
    assert not watched
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)


def test_only_what_is_asked_for_gets_a_gradient(watched: list[str]) -> None:
    network = model()
    first, *others = network.parameters()
    bare_backward.backward(loss_of(network), [first])
    assert not watched
    assert first.grad is not None
    assert [other.grad for other in others] == [None] * len(others)
    with pytest.raises(RuntimeError, match="cannot be empty"):
        bare_backward.backward(loss_of(network), [])


def test_a_hook_that_changes_the_first_gradient_changes_no_other_pass(watched: list[str]) -> None:
    network = model()
    expected = loss_of(network)
    expected.backward()  # type: ignore[no-untyped-call]
    alone = [p.grad for p in network.parameters()]
    watched.clear()
    for factor in (3.0, 1.0):
        network.zero_grad()
        loss = loss_of(network)
        loss.register_hook(lambda gradient, factor=factor: gradient.mul_(factor))
        bare_backward.backward(loss)
    assert not watched
    for p, before in zip(network.parameters(), alone, strict=True):
        assert p.grad is not None
        assert before is not None
        assert torch.equal(p.grad, before)


class Own(Tensor):
    """A user's kind of tensor."""


def test_whoever_watches_sees_the_pass(watched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    network = model()
    bare_backward.backward(loss_of(network).as_subclass(Own))
    assert watched  # once more by what subclasses do
    watched[1:] = []
    monkeypatch.setitem(sys.modules, "torch._dynamo", types.ModuleType("torch._dynamo"))
    bare_backward.backward(loss_of(network))
    monkeypatch.delitem(sys.modules, "torch._dynamo")
    assert len(watched) == 2
    logger = logging.getLogger("torch.autograd.graph")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    bare_backward.backward(loss_of(network))
    logger.setLevel(level)
    assert len(watched) == 3
    seen, plain = [], torch.autograd.backward

    def counted(*arguments: Any, **keys: Any) -> None:
        seen.append("patched")
        plain(*arguments, **keys)

    monkeypatch.setattr(torch.autograd, "backward", counted)
    bare_backward.backward(loss_of(network))
    assert (len(watched), seen) == (4, ["patched"])
    monkeypatch.setattr(bare_backward, "_TENSORS_OWN", None)  # as if it had been patched
    bare_backward.backward(loss_of(network))
    assert len(watched) == 5


@pytest.mark.parametrize(("owner", "name"), [(Tensor, "Tensor"), (torch.autograd, "autograd")])
def test_who_watched_before_the_import_is_called(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, plain = [], owner.backward

    @functools.wraps(plain)
    def counted(*arguments: Any, **keys: Any) -> None:
        seen.append(name)
        plain(*arguments, **keys)

    monkeypatch.setattr(owner, "backward", counted)
    spec = importlib.util.find_spec(bare_backward.__name__)
    assert spec is not None
    assert spec.loader is not None
    imported_again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(imported_again)
    imported_again.backward(loss_of(model()))
    assert seen == [name]
