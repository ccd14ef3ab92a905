"""Running operations: what `torch.distributed` calls a `Work`, and the thread that drives it.

MPI moves large messages only while it is called. Usually the thread in `wait` calls it; a future
has no such thread, so a `Progress` thread polls the operations that have one.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work
from torch.futures import Future

# Long enough to leave the core to the computation, short against a message of a megabyte.
_POLL_INTERVAL_S = 20e-6

# A small message arrives sooner than a core that was given away comes back.
_SPIN_S = 100e-6

_yield_core: Callable[[], None] = getattr(os, "sched_yield", partial(time.sleep, 0))


class MpiFuture(Future[Any]):
    """The future of an operation; its value is the operation's result."""

    def __init__(self, work: MpiWork, devices: list[torch.device]) -> None:
        super().__init__(devices=[*devices] or None)
        self._work = work

    def wait(self) -> Any:
        """Return the value as soon as the operation is done.

        The caller drives the operation itself: it may be a callback on the progress thread,
        which could not wait for its own thread.

        Raises:
            Exception: whatever `MpiWork.wait` raises.
        """
        self._work.wait()
        return super().wait()

    def fail(self, error: Exception) -> None:
        """Complete the future with an error: `wait` and `value` raise it."""
        self._set_unwrap_func(_Failure.unwrap)
        self.set_result(_Failure(error))


class _Failure:
    """The value of a failed future, which raises the error wherever it is used.

    torch's own `set_exception` would store the error as a value, in which DDP's C++ reducer
    looks for a tensor by pickling, finds none and crashes. This one makes the search raise.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def unwrap(self) -> Any:
        raise self.error

    def __reduce__(self) -> Any:
        raise self.error


class MpiWork(Work):
    """An operation that has been started.

    Args:
        test: function that returns, without blocking, whether the operation is done; raises if it
            failed.
        result: tensors of the result, nested as the operation got them.
        describe: function that returns the operation and its group, for messages.
        timeout_s: seconds that `wait` waits by default.
        progress: thread that drives the operation once its future has been asked for.
        finish: function to call once when the operation is done, before `wait` returns.
        keep: objects that must stay alive until then, since MPI reads and writes raw memory.
        on_done: function to call when the operation has ended, in success or not.
    """

    def __init__(
        self,
        test: Callable[[], bool],
        result: Sequence[Any],
        *,
        describe: Callable[[], str],
        timeout_s: float,
        progress: Progress,
        finish: Callable[[], None] | None = None,
        keep: Any = None,
        on_done: Callable[[MpiWork], None] | None = None,
    ) -> None:
        super().__init__()
        self._test = test
        self._result = result
        self._describe = describe
        self._timeout_s = timeout_s
        self._progress = progress
        self._finish = finish
        self._keep = keep
        self._on_done = on_done
        # MPI forbids testing one request in two threads at once.
        self._lock = threading.Lock()
        self._done = False
        self._error: Exception | None = None
        self._future: MpiFuture | None = None

    def is_completed(self) -> bool:
        """Whether the operation has ended, in success or not. Never blocks."""
        if self._done:
            return True
        with self._lock:
            if self._done:
                return True
            if not self._advance():
                return False
            future = self._future
        if self._on_done is not None:
            self._on_done(self)
        if future is not None:
            self._settle(future)
        return True

    def is_success(self) -> bool:
        """Whether the operation has ended without an error."""
        return self._done and self._error is None

    def exception(self) -> Exception | None:
        """The error the operation ended with, if any."""
        return self._error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return True as soon as the operation is done.

        Args:
            timeout: time to wait; None or zero for the operation's own limit.

        Raises:
            TimeoutError: it was not done in time. It goes on and may be waited for again.
            mpi4py.MPI.Exception: MPI reported an error.
            ValueError: a receive got fewer elements than its tensor has.
        """
        if not self.is_completed():
            limit_s = timeout.total_seconds() if timeout else self._timeout_s
            started = time.monotonic()
            while not self.is_completed():
                waited_s = time.monotonic() - started
                if waited_s > limit_s:
                    raise TimeoutError(f"{self._describe()} was not done within {limit_s:g} s")
                if waited_s > _SPIN_S:
                    _yield_core()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait: host staging leaves nothing that a GPU stream could wait for instead.

        Raises:
            Exception: whatever `wait` raises.
        """
        self.wait()

    def result(self) -> list[Any]:
        """The result, valid once the operation is done."""
        return list(self._result)

    def get_future(self) -> Future[Any]:
        """A future of the result, completed even if nobody ever calls `wait`.

        Its callbacks run on the thread that finds the operation done.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = MpiFuture(self, cuda_devices(self._result))
            done = self._done
        if done:
            self._settle(future)
        else:
            self._progress.watch(self)
        return future

    def _advance(self) -> bool:
        """Poll MPI once; on completion finish and release the memory. Needs the lock."""
        try:
            if not self._test():
                return False
            if self._finish is not None:
                self._finish()
        except Exception as error:  # belongs to whoever waits, not to whoever polls
            self._error = error
        self._finish = self._keep = None
        self._done = True
        return True

    def _settle(self, future: MpiFuture) -> None:
        """Complete the future. Without the lock, since its callbacks may use this work."""
        if self._error is not None:
            future.fail(self._error)
        else:
            future.set_result(self._result)


class SourcedWork(MpiWork):
    """A receive, which knows the rank its message came from."""

    def __init__(self, source: Callable[[], int], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = source

    def source_rank(self) -> int:
        """The group rank of the sender, valid once the receive is done."""
        return self._source()

    _source_rank = source_rank


class Progress:
    """A thread that polls the operations passed to `watch`; it runs from the first one on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: list[MpiWork] = []
        self._thread: threading.Thread | None = None
        self._stopping = False

    def watch(self, work: MpiWork) -> None:
        """Poll `work` until it is done."""
        with self._changed:
            self._watched.append(work)
            if self._thread is None:
                self._stopping = False
                self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self._thread.start()
                # The thread must not be inside MPI when MPI is finalized.
                atexit.register(self.stop)
            self._changed.notify()

    def stop(self) -> None:
        """End the thread, whatever it still watches; `watch` starts a new one."""
        with self._changed:
            thread, self._thread = self._thread, None
            self._stopping = True
            self._watched = []
            self._changed.notify()
        atexit.unregister(self.stop)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._watched or self._stopping)
                if self._stopping:
                    return
                watched = list(self._watched)
            done = [work for work in watched if work.is_completed()]
            if done:
                with self._changed:
                    self._watched = [work for work in self._watched if work not in done]
            else:
                time.sleep(_POLL_INTERVAL_S)


def cuda_devices(nested: Any) -> list[torch.device]:
    """The CUDA devices of the tensors in a nest of sequences, each once."""
    if isinstance(nested, Tensor):
        return [nested.device] if nested.is_cuda else []
    return list({device for item in nested for device in cuda_devices(item)})
