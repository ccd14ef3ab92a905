"""Trials with parameters that are drawn block by block: the usual bits, and what is refused."""

from __future__ import annotations

from functools import cache
from threading import Lock
from typing import Any

import pytest
import torch
from tests.nn import unit_models as models
from tests.nn.test_units_on_threads import begun, trained
from tests.thread_transport import ThreadTransport, on_ranks
from torch import Tensor, nn

import lockstep as ls
from lockstep.engine.flat_tensors import FlatTensors
from lockstep.engine.step import model as step_model
from lockstep.errors import LockstepError, TaskError
from lockstep.nn.holding import is_released
from lockstep.nn.tape import Tape

pytestmark = pytest.mark.usefixtures("generators_of_threads")


@pytest.fixture(autouse=True)
def one_model_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads see each other's tensors, which processes do not."""
    lock, usual = Lock(), step_model._model

    def made(*args: Any) -> Any:
        with lock:
            return usual(*args)

    monkeypatch.setattr(step_model, "_model", made)


class Words(models.Words):
    """Draws from the global generator."""

    def begun(self) -> nn.Module:
        return self.kind()


class InUnits(Words):
    def build_model(self) -> nn.Module:
        return ls.nn.units(self.begun())


class AsItIs(Words):
    def build_model(self) -> nn.Module:
        return self.begun()


@cache
def alone(task: type[Words], kind: type[nn.Module], clip_norm: float | None) -> str:
    return trained(task, kind, 1, init="by_name", clip_norm=clip_norm)


@pytest.mark.parametrize(
    ("task", "kind", "size", "keys"),
    [
        (Words, models.Decoder, 2, {"pp": 2}),
        pytest.param(
            Words, models.Normed, 4, {"pp": 2, "sharding": "parameters"}, marks=pytest.mark.slow
        ),
        (Words, models.Turned, 2, {"pp": 2, "sharding": "optimizer"}),
        pytest.param(
            InUnits, models.Functional, 3, {"sharding": "parameters"}, marks=pytest.mark.slow
        ),
        (InUnits, models.Turned, 2, {"sharding": "parameters"}),
        # Units that are called twice are none.
        (AsItIs, models.Twin, 2, {"sharding": "parameters", "clip_norm": None}),
        pytest.param(Words, models.Decoder, 4, {"pp": 4}, marks=pytest.mark.slow),
        pytest.param(Words, models.Decoder, 2, {"pp": 2, "interleave": 2}, marks=pytest.mark.slow),
    ],
)
def test_blocks_give_the_bits_of_one_rank(
    task: type[Words], kind: type[nn.Module], size: int, keys: dict[str, Any]
) -> None:
    whole = alone(task, kind, keys.get("clip_norm", 0.4))
    assert trained(task, kind, size, init="by_name", **keys) == whole


def test_no_more_than_two_blocks_are_there_until_a_rank_keeps_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most: list[int] = []
    usual = FlatTensors.draw

    def drawn(flat: FlatTensors, segment: int) -> None:
        usual(flat, segment)
        most.append(sum(memory.untyped_storage().nbytes() for memory in flat.flats))

    monkeypatch.setattr(FlatTensors, "draw", drawn)

    def body(transport: ThreadTransport) -> tuple[int, int]:
        parts = begun(InUnits, models.Long, transport, init="by_name", sharding="parameters")
        sizes = [s.numel * s.dtype.itemsize for s in parts.train_step.flat.segments]
        return sum(sizes), max(sizes)

    for every, largest in on_ranks(2, body):
        assert 0 < max(most) <= 3 * largest < every / 2


class Penalised(InUnits):
    """A penalty on a weight of a block."""

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        penalty = model.blocks[0].up.weight.square().sum()
        return ls.Loss(loss.sum + penalty, loss.weight)


class Counting(InUnits):
    """A metric of a weight."""

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        return ls.Loss(loss.sum, loss.weight, {"above": ((model.blocks[0].up.bias > 0).sum(), 1)})


class Measuring(InUnits):
    """The shape of a weight, which is there always."""

    def loss(self, model: Any, batch: Any) -> ls.Loss:
        loss = super().loss(model, batch)
        zero = torch.zeros_like(model.blocks[0].up.weight).sum()
        return ls.Loss(loss.sum + zero * model.blocks[0].up.weight.shape[0], loss.weight)


class Keeping(models.Decoder):
    """Reads a view of a weight of the block before."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        x, kept = self.start(tokens), torch.zeros(())
        mask = torch.eye(tokens.shape[1])
        for block in self.blocks:
            x, _ = block(x, mask=mask)
            x = x + kept
            kept = block.norm.weight.detach()[0]  # type: ignore[union-attr,index]
        return {"logits": self.head(self.norm(x))}


class Caching(models.Decoder):
    """Keeps a view that nothing reads so far."""

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        if "kept" not in vars(self):
            self.blocks[1].register_forward_pre_hook(self.keep)
        return super().forward(tokens)

    def keep(self, block: Any, inputs: Any) -> None:
        if "kept" not in vars(self):
            self.__dict__["kept"] = block.norm.weight.detach()[:3]


class Shrinking(models.Block):
    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Any:
        self.up.weight.data.mul_(0.5)
        return super().forward(x, mask=mask, scale=scale)


class Changing(models.Decoder):
    """Changes a weight in passes, unseen by version counters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Shrinking() for _ in range(3))


@pytest.mark.parametrize(
    ("task", "kind", "keys", "words"),
    [
        (Penalised, models.Decoder, {}, "blocks.0.up.weight is read while its block is not"),
        (Counting, models.Decoder, {}, "blocks.0.up.bias is read while its block is not computed"),
        (InUnits, Keeping, {}, "is read while its block is not computed"),
        (InUnits, Changing, {}, "blocks.0.up.weight"),
        (InUnits, Caching, {}, "model.kept: keeps a view of a parameter"),
        (Words, models.Around, {"pp": 2}, "differs when blocks are computed by stages"),
        (Words, models.Remembering, {"pp": 2}, "differs when blocks are computed by stages"),
        (Words, models.Decoder, {"pp": 5}, "can be cut into 4; set mesh.pp to at most 4"),
        (AsItIs, models.Bare, {}, "name its units in build_model"),
        (models.InUnits, models.Decoder, {}, "draws from a generator of its own"),
    ],
)
def test_what_reads_other_blocks_is_refused(
    task: type[Words], kind: type[nn.Module], keys: dict[str, Any], words: str
) -> None:
    keys = keys if "pp" in keys else {"sharding": "parameters", "clip_norm": None}
    with pytest.raises(LockstepError) as refused:
        trained(task, kind, 1, init="by_name", **keys)
    assert words in str(refused.value)


def test_shapes_are_there_always() -> None:
    keys: dict[str, Any] = {"init": "by_name", "sharding": "parameters"}
    assert trained(Measuring, models.Decoder, 2, **keys) == alone(Measuring, models.Decoder, 0.4)


class Untrained(InUnits):
    """An optimizer without the embedding, and with a bias that is frozen."""

    def build_optimizer(self, model: Any) -> Any:
        model.blocks[0].up.bias.requires_grad_(False)
        return torch.optim.SGD(model.blocks.parameters(), lr=0.1)


def test_what_no_optimizer_has_is_drawn_at_once() -> None:
    def body(transport: ThreadTransport) -> list[bool]:
        parts = begun(Untrained, models.Decoder, transport, init="by_name", sharding="parameters")
        return [is_released(p) for p in (parts.model.words.weight, parts.model.blocks[0].up.bias)]  # type: ignore[union-attr,arg-type]

    assert on_ranks(2, body) == [[False, False]] * 2


def test_operations_without_values_are_named_with_the_module_that_calls_them() -> None:
    with (
        pytest.raises(TaskError, match="calls resize_ of a tensor; make one of the right size"),
        Tape(0),
    ):
        torch.empty(3, device="meta").resize_(5)
