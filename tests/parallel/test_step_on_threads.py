"""The whole training step on ranks that are threads. Nothing here draws random numbers, since
threads share their generators."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.stepping import advance
from tests.thread_transport import ThreadTransport, on_ranks
from tests.whole_snapshot import whole_snapshot
from torch import Tensor, nn, optim
from torch.utils.data import Dataset, TensorDataset

from lockstep.comm.transport import LocalTransport, Transport
from lockstep.config import TrainConfig
from lockstep.engine.assembly import assemble
from lockstep.engine.checkpoint.format import Snapshot
from lockstep.engine.digests import model_digest
from lockstep.engine.recovery.replica_checks import check_replicas
from lockstep.engine.run.progress import Progress
from lockstep.engine.runtime import Runtime
from lockstep.engine.snapshot.capture import capture
from lockstep.engine.snapshot.restore import restore
from lockstep.engine.task import Loss, Task
from lockstep.errors import TaskError
from lockstep.parallel import reduction
from lockstep.parallel.layout import Range

STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 90, bias=False)
        self.norm, self.second = nn.BatchNorm1d(90), nn.Linear(90, 7)
        self.unused = nn.Parameter(torch.zeros(5))
        self.sometimes = nn.Parameter(torch.zeros(7))
        generator = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator) / 10

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.relu(self.norm(self.first(x))))
        return y + self.sometimes if x[0, 0] > 0 else y


class Classify(Task):
    """Its optimizer has groups that lie in different slices of the flat parameters."""

    def build_model(self) -> nn.Module:
        return Net()

    def dataset(self, split: str) -> Dataset[Any] | None:
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(59, 20, generator=generator) * 10.0 ** torch.arange(-3, 2).repeat(4)
        return TensorDataset(x, torch.arange(59) % 7) if split == "train" else None

    def build_optimizer(self, model: nn.Module) -> optim.Optimizer:
        weights = [p for p in model.parameters() if p.dim() == 2]
        rest = [p for p in model.parameters() if p.dim() != 2]
        return optim.AdamW([{"params": weights}, {"params": rest, "lr": 0.02}], lr=0.01)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        x, y = batch
        return Loss(nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y))


pytestmark = pytest.mark.usefixtures("generators_of_threads")


def config(sharded: bool, num_microbatches: int = 5) -> TrainConfig:
    return TrainConfig(
        batch_size=16,
        num_microbatches=num_microbatches,
        epochs=2,
        clip_norm=0.4,
        optimizer={"sharded": sharded},  # type: ignore[arg-type]
        bucket_bytes=4096,
    )


def trained(
    transport: Transport, sharded: bool, first: int, last: int, start: Snapshot | None = None
) -> tuple[str, Snapshot | None]:
    """Steps first <= step < last, from a snapshot (known to rank 0) if `first` is not 0."""
    runtime = Runtime(
        transport, torch.device("cpu"), transport.rank, "python", 0, lambda _: None, lambda: None
    )
    parts = assemble(Classify(), config(sharded), runtime)
    if first:
        snapshot = start if transport.rank == 0 else None
        assert restore(snapshot, parts.train_step, transport)["progress"]["step"] == first
    advance(parts, first, last)
    taken = whole_snapshot(parts.train_step, last, {})
    return model_digest(parts.model), taken if runtime.is_first else None


def digests(size: int, sharded: bool, first: int, last: int, start: Any = None) -> list[str]:
    found = on_ranks(size, lambda t: trained(t, sharded, first, last, start))
    return [digest for digest, _ in found]


def snapshot(size: int, sharded: bool, last: int) -> Snapshot:
    found = on_ranks(size, lambda t: trained(t, sharded, 0, last))[0][1]
    assert found is not None
    return found


def test_one_microbatch_is_plain_training() -> None:
    transport = LocalTransport()
    runtime = Runtime(transport, torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None)
    task = Classify()
    parts = assemble(task, config(sharded=False, num_microbatches=1), runtime)
    norms = [result.grad_norm for result in advance(parts, 0, STEPS)]

    model = task.build_model()
    optimizer = task.build_optimizer(model)
    assert optimizer is not None
    plain_norms = []
    for [(_, _, batch)] in (list(parts.loader.stream(Range(0, 1), i, i + 1)) for i in range(STEPS)):
        loss = task.loss(model, batch)
        (loss.sum / loss.weight).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        plain_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.4)))
        optimizer.step()
        optimizer.zero_grad()
    assert norms == pytest.approx(plain_norms, rel=1e-4)
    assert min(norms) < 0.4 < max(norms)
    plain_state = model.state_dict()
    assert "norm.running_var" in plain_state
    for name, value in parts.model.state_dict().items():
        torch.testing.assert_close(value, plain_state[name], rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def straight() -> str:
    [digest] = digests(1, False, 0, STEPS)
    return digest


@pytest.mark.parametrize("small_bytes", [0, 1 << 40], ids=["sliced", "whole"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4, 7))]
)
def test_training_gives_the_same_bits_on_any_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, straight: str, size: int, sharded: bool, small_bytes: int
) -> None:
    monkeypatch.setattr(reduction, "SMALL_BYTES", small_bytes)
    assert digests(size, sharded, 0, STEPS) == [straight] * size


@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_buddies_give_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, straight: str, size: int
) -> None:
    """Each rank steps two slices, as it does where survivors can go on."""
    monkeypatch.setattr(ThreadTransport, "can_regroup", True)
    assert digests(size, True, 0, STEPS) == [straight] * size


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1, False), (3, True)),
        ((2, True), (1, False)),
        pytest.param((3, True), (2, True), marks=pytest.mark.slow),
        pytest.param((2, True), (2, True), marks=pytest.mark.slow),
    ],
)
def test_a_snapshot_goes_on_to_the_same_bits_on_any_number_of_ranks(
    straight: str, before: tuple[int, bool], after: tuple[int, bool]
) -> None:
    taken = snapshot(*before, last=3)
    assert digests(*after, 3, STEPS, taken) == [straight] * after[0]


@pytest.mark.parametrize("step", [0, 2])
def test_a_task_state_that_one_rank_alone_cannot_give_is_an_error_on_all(step: int) -> None:
    failing = threading.local()

    class Failing(Classify):
        def state_dict(self) -> dict[str, Any]:
            if getattr(failing, "now", False):
                raise OSError("no such file")
            return {"count": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def body(transport: ThreadTransport) -> bool:
        runtime = Runtime(
            transport, torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None
        )
        task = Failing()
        failing.now = step == 0 and transport.rank == 1

        def go() -> None:
            parts = assemble(task, config(sharded=False), runtime)
            failing.now = transport.rank == 1
            check_replicas(parts.placement, parts.model, {}, parts.task_state, step)

        with pytest.raises(TaskError, match=r"Failing\.state_dict: raised an exc") as caught:
            go()
        return caught.value.is_shared

    assert on_ranks(2, body) == [True, True]


def test_snapshots_do_not_depend_on_the_number_of_ranks() -> None:
    one, other = snapshot(1, False, 3), snapshot(3, True, 3)
    assert one.meta == other.meta
    for mine, theirs in ((one.model, other.model), (one.optimizer, other.optimizer)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_snapshot_is_not_changed_by_later_steps() -> None:
    runtime_config = config(sharded=False)

    def body(transport: ThreadTransport) -> bool:
        runtime = Runtime(
            transport, torch.device("cpu"), 0, "python", 0, lambda _: None, lambda: None
        )
        parts = assemble(Classify(), runtime_config, runtime)
        advance(parts, 0, 1)
        arguments = (parts.train_step, Progress(step=1), {})
        now = capture(*arguments, parts.train_step.flat_optimizer.state())
        later = capture(*arguments, parts.train_step.flat_optimizer.state())
        before = now()
        advance(parts, 1, 4)
        after = later()
        pairs = [
            (mine[name], theirs[name])
            for mine, theirs in ((before.model, after.model), (before.optimizer, after.optimizer))
            for name in mine
        ]
        assert len(pairs) > 20
        return before.meta == after.meta and all(torch.equal(a, b) for a, b in pairs)

    assert on_ranks(1, body) == [True]
