from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator

import pytest

from lockstep.engine.run.loop import EXIT_CODES
from lockstep.engine.step.sums import OUT_OF_TIME, STOP_REASONS
from lockstep.launching.rank.process import StopRequest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    before = [signal.getsignal(signum) for signum in SIGNALS]
    yield
    assert [signal.getsignal(signum) for signum in SIGNALS] == before


@pytest.mark.parametrize(
    ("signum", "reason"),
    list(zip(SIGNALS, ("interrupted", "terminated", "preempted", "interrupted"), strict=True)),
)
def test_signals_are_requests(signum: signal.Signals, reason: str) -> None:
    with StopRequest() as stop:
        assert stop.reason() is None
        os.kill(os.getpid(), signum)
        assert stop.reason() == reason
    assert stop.reason() == reason


def test_the_first_reason_stays() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.reason() == "preempted"


def test_a_second_sigint_interrupts() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR2)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason() == "interrupted"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_does_nothing_in_another_thread() -> None:
    seen: list[str | None] = []

    def run() -> None:
        with StopRequest() as stop:
            seen.append(stop.reason())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [None]


def test_can_be_entered_again() -> None:
    for _ in range(2):
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reason() == "terminated"


def test_signals_that_the_caller_has_blocked_are_received_within_it_only():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.reason() == "terminated"
        assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_limit_on_processor_time_leaves_some_for_a_checkpoint() -> None:
    pid = os.fork()  # a hard limit cannot be raised again
    if pid == 0:
        is_kept = False
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (100, 100))
            with StopRequest() as stop:
                limits = resource.getrlimit(resource.RLIMIT_CPU)
                os.kill(os.getpid(), signal.SIGXCPU)
            after = resource.getrlimit(resource.RLIMIT_CPU)
            is_kept = (limits, after) == ((95, 100), (100, 100)) and stop.reason() == OUT_OF_TIME
        finally:
            os._exit(not is_kept)
    assert os.waitpid(pid, 0)[1] == 0
    assert EXIT_CODES[OUT_OF_TIME] == 75
    assert OUT_OF_TIME in STOP_REASONS
