"""A rank leaves in order with errors that all have, and ends the group with any other."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.utils.data import Dataset

from lockstep.comm.transport import LocalTransport
from lockstep.config import TrainConfig
from lockstep.engine.runtime import everywhere, on_first
from lockstep.engine.task import Loss, Task
from lockstep.errors import CheckpointError, LockstepError, RankFailure, shared
from lockstep.launching.api import Session, rank


class Aborted(BaseException):
    pass


class OneOfTwo(LocalTransport):
    size = 2
    closed = False

    def close(self) -> None:
        self.closed = True

    def abort(self, exit_code: int) -> None:
        raise Aborted(exit_code)


class Nothing(Task):
    def build_model(self) -> nn.Module:
        raise NotImplementedError

    def dataset(self, split: str) -> Dataset[Any] | None:
        return None

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        raise NotImplementedError


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    def call(error: LockstepError) -> OneOfTwo:
        transport = OneOfTwo()

        def fail(*_: Any) -> None:
            raise error

        monkeypatch.setattr(rank, "_steps", fail)
        monkeypatch.setattr(rank, "open_transport", lambda *_: transport)
        with pytest.raises((LockstepError, Aborted)) as caught:
            rank.run(Nothing(), TrainConfig(), Session())
        assert transport.closed == (caught.value is error)
        return caught.value  # type: ignore[return-value]

    return call


def test_an_error_that_one_rank_may_have_alone_ends_the_group(run: Any, capfd: Any) -> None:
    ended = run(CheckpointError("it cannot be read"))
    assert isinstance(ended, Aborted)
    assert ended.args == (2,)
    assert capfd.readouterr().err == "error: it cannot be read (on rank 0)\n"


@pytest.mark.parametrize("error", [shared(CheckpointError("bad")), RankFailure("dead")])
def test_ranks_leave_in_order_with_an_error_that_all_have(run: Any, error: Any, capfd: Any) -> None:
    assert run(error) is error
    assert not capfd.readouterr().err


def test_errors_that_were_sent_around_are_shared() -> None:
    def fail() -> None:
        raise CheckpointError("bad")

    for call in (on_first, everywhere):
        with pytest.raises(CheckpointError) as caught:
            call(LocalTransport(), fail)
        assert caught.value.is_shared
