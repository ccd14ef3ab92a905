"""Surroundings of a training process: its rank, device, events, heartbeat, stop requests.

Passed explicitly; nothing in the library keeps it in a global.
"""

from __future__ import annotations

import mmap
import os
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from lockstep import errors
from lockstep.comm.transport import GroupBroken, Transport
from lockstep.engine.events import Backlog, Emit, Event
from lockstep.engine.faults import At, nothing
from lockstep.errors import EnvironError, LockstepError, RankFailure, TaskFailure, shared, shortened

NUM_BYTES = 24
ON_DISK = 2


class Heartbeat:
    """Counts the progress of this process, and tells whether it waits for other ranks.

    Three integers of 64 bits: beats, what it waits for (0 nothing, 1 other ranks, `ON_DISK`),
    whether it is armed.

    The memory becomes a file at the first use of `fd`: most processes are not watched.
    """

    def __init__(self) -> None:
        self._memory = memoryview(bytearray(NUM_BYTES)).cast("q")
        self._fd: int | None = None
        self._within = 0
        """What it waits for between its calls of other ranks."""

    @property
    def fd(self) -> int:
        """File descriptor of the memory, for a child process; -1 where there is no such memory.

        It is closed with this object.
        """
        if self._fd is None:
            self._fd = os.memfd_create("lockstep-heartbeat") if hasattr(os, "memfd_create") else -1
            if self._fd >= 0:
                weakref.finalize(self, os.close, self._fd)
                os.ftruncate(self._fd, NUM_BYTES)
                shared = memoryview(mmap.mmap(self._fd, NUM_BYTES)).cast("q")
                shared[:] = self._memory
                self._memory = shared
        return self._fd

    def beat(self) -> None:
        """Note progress."""
        self._memory[0] += 1

    def wait(self) -> None:
        """Note that from now on this process may wait for other ranks."""
        self._memory[1] = 1

    def go(self) -> None:
        """Note that it no longer waits for them."""
        self._memory[0] += 1
        self._memory[1] = self._within

    def on_disk(self) -> AbstractContextManager[None]:
        """Within it, this process reads and writes files, and does not count as hanging.

        To end it would not make the disk faster, and the next rank 0 would wait for the same one.
        """
        return self._waiting_for(ON_DISK)

    def in_user_code(self) -> AbstractContextManager[None]:
        """Within it, code of users runs, which may hang, also within `on_disk`."""
        return self._waiting_for(0)

    @contextmanager
    def _waiting_for(self, state: int) -> Iterator[None]:
        before, self._within = self._within, state
        self._memory[1] = state
        try:
            yield
        finally:
            self._within = before
            self.go()

    def arm(self) -> None:
        """Note that from now on, a long time without a beat is a hang."""
        self._memory[2] = 1

    def disarm(self) -> None:
        """Note that the session is over: no beats follow, and nothing is waited for."""
        self._memory[1] = self._memory[2] = 0


T = TypeVar("T")

Raised = Exception | SystemExit
"""Exceptions of user code that are caught: `sys.exit` on one rank would hang the others."""


def nothing_after_step(step: int) -> None:
    """Do nothing after a committed step."""


@dataclass(frozen=True)
class Runtime:
    """One process's surroundings.

    Attributes:
        transport: the group of ranks.
        device: device that this rank computes on.
        slot: lifelong number of the process: the first rank it had.
        launcher: name of the launcher: `python`, `local`, `mpi`, `torchrun` or `slurm`.
        local_rank: number of this process on its host.
        cores: cores that all ranks of its host may use; 0 if that is not known.
        is_one_host: whether all ranks were started on one host.
        listen: function that takes events, on every rank; on rank 0 it shows and stores them.
        stop_reason: function that returns why the run should end after this step, if it should.
        take_over: collective that makes rank 0, and the first rank of each host that has a run
            directory of its own, the ones that show and store; returns what users should know.
        at: function that is called at each moment of a step, see `faults.Moment`.
        heartbeat: heartbeat of this process, for its watchdog.
        backlog: events that rank 0 may not have stored yet.
        on_step: function that is called with the number of committed steps, after each of them.
    """

    transport: Transport
    device: torch.device
    slot: int
    launcher: str
    local_rank: int
    listen: Emit
    stop_reason: Callable[[], str | None]
    take_over: Callable[[], Sequence[str]] = tuple
    at: At = nothing
    on_step: Callable[[int], None] = nothing_after_step
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    backlog: Backlog = field(default_factory=Backlog)
    cores: int = 0
    is_one_host: bool = True

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes checkpoints and shows events."""
        return self.transport.rank == 0

    @property
    def is_on_cpu(self) -> bool:
        """Whether this rank computes on the CPU, and nothing goes on without it."""
        return self.device.type == "cpu"

    def emit(self, event: Event) -> None:
        """Pass an event to the listener; on every rank, for any of them may become rank 0."""
        self.listen(event)


def on_first(transport: Transport, action: Callable[[], Any]) -> Any:
    """The JSON-able result of `action`, which only rank 0 runs: it reads or writes files.

    Raises:
        LockstepError: on every rank, if it was raised on rank 0.
    """
    outcome: dict[str, Any] = {}
    if transport.rank == 0:
        try:
            with transport.observer.on_disk():
                outcome = {"value": action()}
        except LockstepError as error:
            outcome = {"error": type(error).__name__, "message": str(error)}
    outcome = transport.gather_json(outcome)[0]
    if "error" in outcome:
        raise _error(outcome["error"], outcome["message"])
    return outcome["value"]


def everywhere(transport: Transport, action: Callable[[], T]) -> T:
    """The result of `action`, which every rank runs without communication.

    Raises:
        LockstepError: on every rank, if any raised an exception.
    """
    result: T | None = None
    error: Raised | None = None
    try:
        result = action()
    except (Exception, SystemExit) as caught:
        error = caught
    failure = shared_error(transport, error)
    if failure is not None:
        raise failure
    return result  # type: ignore[return-value]


def shared_error(
    transport: Transport, error: Exception | SystemExit | None
) -> LockstepError | None:
    """The error of the first rank that has one, the same on every rank; a collective.

    Raises:
        GroupBroken: the only error on all ranks is that a subgroup was given up.
    """
    return shared_texts(transport, error, "")[0]


def shared_texts(
    transport: Transport, error: Exception | SystemExit | None, text: str
) -> tuple[LockstepError | None, list[str]]:
    """As `shared_error`, with a text of each rank, by rank; a collective."""
    mine = [] if error is None else _kind_and_text(transport.rank, error)
    everyone = transport.gather_json([mine, text])
    errors_of_ranks = [e for e, _ in everyone if e]
    # The error of a rank that has failed explains those of the ranks that waited for it.
    first = next((e for e in errors_of_ranks if e[0] != GroupBroken.__name__), None)
    if errors_of_ranks and first is None:
        raise GroupBroken(errors_of_ranks[0][1])
    return _error(*first) if first else None, [theirs for _, theirs in everyone]


def own_failure(transport: Transport, error: Raised) -> GroupBroken | LockstepError:
    """What to raise for an error on this rank alone, where the others cannot learn of it."""
    if isinstance(error, (GroupBroken, LockstepError)):
        return error
    kind, text = _kind_and_text(transport.rank, error)
    return EnvironError(text) if kind == EnvironError.__name__ else TaskFailure(text)


def on_its_own(transport: Transport, action: Callable[[], T]) -> T:
    """The result of `action`, in which others wait for this rank until that is done, or ends.

    Raises:
        GroupBroken: a rank was lost.
        LockstepError: `action` raised an exception; on this rank alone.
    """
    try:
        return action()
    except (Exception, SystemExit) as error:
        raise own_failure(transport, error) from None


def _kind_and_text(rank: int, error: Raised) -> list[str]:
    if isinstance(error, (GroupBroken, LockstepError)):
        return [type(error).__name__, str(error)]
    kind, text = EnvironError.__name__, ""
    if is_out_of_memory(error):
        text = out_of_memory(rank, error)
    else:
        trace = shortened("".join(traceback.format_exception(error)).rstrip())
        kind, text = TaskFailure.__name__, f"rank {rank} raised an exception\n{trace}"
    _release(error)
    return [kind, text]


def out_of_memory(rank: int, error: BaseException) -> str:
    """What to say of an error that `is_out_of_memory`, whose notes say what holds memory."""
    first = str(error).partition(chr(10))[0].partition(". GPU ")[0]
    return "; ".join([
        f"rank {rank} is out of memory: {first}",
        *getattr(error, "__notes__", []),
        "more microbatches (num_microbatches; with a Task.batch_loss, batch_loss.recompute=true) "
        "or activation_checkpointing lower what activations take, and sharding what parameters, "
        "gradients and optimizer state take",
    ])  # fmt: skip


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory, of the host or a device, does not suffice."""
    is_of_host = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return is_of_host or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def _release(error: BaseException | None) -> None:
    """Free the local variables in the frames of an exception's traceback.

    Activations and data loaders are among them. Workers of a loader that only the garbage collector
    frees would live on; and it might free it in a process that is forked later, which is an error.
    """
    seen: set[int] = set()  # an exception may be its own cause
    waiting = [error]
    while waiting:
        raised = waiting.pop()
        if raised is not None and id(raised) not in seen:
            seen.add(id(raised))
            traceback.clear_frames(raised.__traceback__)
            waiting += [raised.__cause__, raised.__context__]


def check_can_regroup(transport: Transport, loss: GroupBroken) -> None:
    """Refuse to go on after a loss if the transport cannot.

    Raises:
        RankFailure: it cannot.
    """
    if not transport.can_regroup:
        # On all ranks, without a collective: the group is broken for all of them.
        raise shared(
            RankFailure(
                f"a rank has died or does not answer ({loss}); go on from the newest checkpoint "
                "with `lockstep resume` or --resume"
            )
        ) from None


def agreed(transport: Transport, ask: Callable[[Transport], T]) -> T:
    """The result of a collective of all ranks; of those that are left, if some die meanwhile.

    Raises:
        RankFailure: a rank was lost, and the transport cannot go on with the others.
    """
    while True:
        try:
            return ask(transport)
        except GroupBroken as loss:
            check_can_regroup(transport, loss)
            transport.regroup()


def _error(kind: str, message: str) -> LockstepError:
    """The error of a class, by its name, that all ranks raise."""
    error_class: type[LockstepError] = getattr(errors, kind, LockstepError)
    return shared(error_class(message))
