"""The wait for a message ends with the message, with its error, or when it is in vain."""

from __future__ import annotations

import threading
import time

import pytest

from lockstep.comm.torchdist.waiting import LeftBehind, finish_message


class Work:
    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.goes_on = threading.Event()

    def wait(self) -> None:
        self.goes_on.wait(self.seconds)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("seconds", [0.0, 0.5])
def test_it_ends_with_the_message(seconds: float) -> None:
    started = time.monotonic()
    finish_message(Work(seconds), lambda: False)
    assert time.monotonic() - started >= seconds


@pytest.mark.parametrize("error", [RuntimeError("closed"), ValueError("odd"), TimeoutError("late")])
def test_any_error_ends_it(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        finish_message(Work(0.3, error), lambda: False)


def test_a_wait_in_vain_is_given_up() -> None:
    work = Work(60)
    with pytest.raises(LeftBehind) as caught:
        finish_message(work, lambda: True)
    assert caught.value.is_stuck()
    work.goes_on.set()
    while caught.value.is_stuck():
        time.sleep(0.01)
