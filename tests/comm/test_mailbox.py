"""Small all-gathers in memory that ranks share: real processes, under every launcher."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from lockstep.comm import mailbox, shared_memory
from lockstep.comm.calls import Traffic
from lockstep.comm.mailbox import Mailbox, open_mailbox
from lockstep.comm.transport import GroupBroken, LocalTransport

SCRIPT = Path(__file__).parent / "launched" / "mailbox.py"

Ranks = Callable[..., CompletedProcess[str]]


def told(done: CompletedProcess[str]) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr
    return sorted(found, key=lambda row: row["rank"])


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [
        ("mpi", 2),
        pytest.param("local", 3, marks=pytest.mark.slow),
        pytest.param("mpi", 5, marks=pytest.mark.slow),
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_everyone_gets_what_all_have_said(ranks: Ranks, launcher: str, num_ranks: int) -> None:
    rows = told(ranks(launcher, num_ranks, SCRIPT, -1))
    assert [row["rank"] for row in rows] == list(range(num_ranks))
    for row in rows:
        assert row["why"] == ""
        assert row["wrong"] == []
        assert row["told"] == [[1999, num_ranks]] * num_ranks


@pytest.mark.parametrize(
    ("launcher", "num_ranks"), [("mpi", 3), pytest.param("local", 3, marks=pytest.mark.slow)]
)
def test_those_who_wait_for_a_dead_rank_regroup(
    ranks: Ranks, launcher: str, num_ranks: int
) -> None:
    rows = told(ranks(launcher, num_ranks, SCRIPT, 1))
    assert len(rows) == num_ranks - 1
    for row in rows:
        assert row["why"] == ""
        assert row["wrong"] == []
        assert row["told"] == [[1234, num_ranks - 1]] * (num_ranks - 1)


def nothing() -> None:
    pass


@pytest.mark.parametrize(
    ("module", "name", "value", "told"),
    [
        (mailbox, "IS_THERE", False, "no futexes"),
        (shared_memory.os, "memfd_create", None, "memfd_create"),
        (mailbox, "Mailbox", None, "not implemented"),
    ],
)
def test_who_cannot_share_memory_says_why(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: object, told: str
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "not implemented: memfd_create")

    monkeypatch.setattr(module, name, value if value is not None else refuse)
    made = open_mailbox(LocalTransport(), nothing)
    assert isinstance(made, str)
    assert told in made


def test_a_rank_that_takes_too_long_is_an_error() -> None:
    own = shared_memory.SharedMemory(mailbox._NUM_BYTES)
    silent = shared_memory.SharedMemory(mailbox._NUM_BYTES)
    made = Mailbox(0, [own.tensor, silent.tensor], [os.getpid()] * 2, True, nothing, 0.05)
    said = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="rank 1 has sent nothing for"):
        made.all_gather(said[:1], said, [1, 1], Traffic())


def test_a_group_that_others_have_given_up_is_left() -> None:
    own = shared_memory.SharedMemory(mailbox._NUM_BYTES)
    silent = shared_memory.SharedMemory(mailbox._NUM_BYTES)

    def given_up() -> None:
        raise GroupBroken("given up")

    made = Mailbox(0, [own.tensor, silent.tensor], [os.getpid()] * 2, True, given_up, math.inf)
    said = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(GroupBroken, match="given up"):
        made.all_gather(said[:1], said, [1, 1], Traffic())


@pytest.mark.parametrize(("answered_after_us", "spin_us"), [(150, 200), (3_000, 5)])
def test_who_had_to_be_woken_for_what_came_soon_looks_for_it_longer(
    monkeypatch: pytest.MonkeyPatch, answered_after_us: int, spin_us: int
) -> None:
    memories = [shared_memory.SharedMemory(mailbox._NUM_BYTES).tensor for _ in range(2)]
    made = Mailbox(0, memories, [os.getpid()] * 2, True, nothing, math.inf)
    made._spin_ns = 20_000
    now_us = due_us = 0

    def pass_time(passed_us: int) -> int:
        nonlocal now_us
        now_us += passed_us
        if now_us >= due_us:
            made._words[1][0] = made._count
        return 1_000 * now_us

    monkeypatch.setattr(mailbox, "monotonic_ns", lambda: pass_time(1))
    monkeypatch.setattr(mailbox, "wait", lambda *_: pass_time(max(due_us - now_us, 20)))
    said = torch.zeros(2, dtype=torch.int32)
    for _ in range(10):
        due_us = now_us + answered_after_us
        made.all_gather(said[:1], said, [1, 1], Traffic())
    assert made._spin_ns == 1_000 * spin_us
