"""Messages are kept everywhere, so none may be of any length."""

from lockstep.comm.transport import LocalTransport
from lockstep.engine.runtime import shared_error
from lockstep.errors import ConfigError, TaskFailure, shortened

LIMIT = 40_000


def test_the_beginning_and_the_end_are_kept() -> None:
    text = shortened("begin" + "x" * 50_000_000 + "end")
    assert len(text) < LIMIT
    assert text.startswith("begin")
    assert text.endswith("end")
    assert "characters left out" in text


def test_a_short_one_stays() -> None:
    assert shortened("x" * 30_000) == "x" * 30_000
    assert str(ConfigError("x")) == "x"


def test_errors_for_the_user_are_short() -> None:
    assert len(str(ConfigError("x" * 10**7))) < LIMIT


def test_a_tasks_exception_is_shortened_before_it_travels() -> None:
    found = shared_error(LocalTransport(), RuntimeError("x" * 50_000_000))
    assert isinstance(found, TaskFailure)
    assert len(str(found)) < LIMIT
    assert "RuntimeError" in str(found)
