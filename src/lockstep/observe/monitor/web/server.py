"""Serving the page until somebody ends it."""

from __future__ import annotations

import re
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lockstep.errors import ConfigError
from lockstep.observe.monitor.watch import Watch
from lockstep.observe.monitor.web.application import Guard, is_loopback

if TYPE_CHECKING:
    from lockstep.observe.monitor.web.hub import Hub

_NEEDED = ("starlette", "uvicorn", "orjson")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}")
_LAST_WORDS_S = 2
"""Seconds that open requests have at the end."""


def serve(
    watch: Watch,
    host: str,
    port: int,
    token: str | None,
    announce: Callable[[str], None],
    interval_s: float,
    failed: Callable[[BaseException], None],
) -> None:
    """Serve the page of some runs until Ctrl-C or SIGTERM.

    Args:
        watch: the runs.
        host: address to listen on; others than those of the loopback need a token.
        port: TCP port; 0 for any that is free.
        token: what the address must end with; None for none on the loopback, and for one that is
            made up elsewhere.
        announce: is called once with the address to open.
        interval_s: seconds between two looks at the folders.
        failed: is called with what has ended the looking; the page is served further, but no
            change is told any more.

    Raises:
        ConfigError: the extra `monitor` is not installed, the address cannot be used, or the token
            has characters that an address cannot have.
    """
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"the page needs {' and '.join(missing)}: pip install 'lockstep-train[monitor]'"
        )
    if token is None and not is_loopback(host):
        token = secrets.token_urlsafe(24)
    if token is not None and not _TOKEN.fullmatch(token):
        raise ConfigError("token: must be made of letters, digits, - and _")
    import orjson

    from lockstep.observe.monitor.web.hub import Hub

    listener = _listening(host, port)
    try:
        _run(Hub(watch, orjson.loads, interval_s, failed), listener, host, token, announce)
    finally:
        listener.close()


def _run(
    hub: Hub,
    listener: socket.socket,
    host: str,
    token: str | None,
    announce: Callable[[str], None],
) -> None:
    import uvicorn

    from lockstep.observe.monitor.web.application import application

    port = listener.getsockname()[1]
    guarded = Guard(application(hub), host, token, port)
    config = uvicorn.Config(
        guarded, log_config=None, access_log=False, server_header=False, date_header=False,
        timeout_graceful_shutdown=_LAST_WORDS_S, ws="none", lifespan="on",
    )  # fmt: skip

    class Server(uvicorn.Server):
        """Leaves signals to the caller."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Take none."""
            yield

    server = Server(config)

    def end(*_: Any) -> None:
        server.should_exit = True
        hub.stop()

    shown = f"[{host}]" if ":" in host else host
    query = f"?token={token}" if token is not None else ""
    with _ended_by_signals(end):
        announce(f"http://{shown}:{port}/{query}")
        server.run(sockets=[listener])
    hub.stop()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{host}:{port}: cannot be listened on: {reason}; choose another host or port"
        ) from None


@contextmanager
def _ended_by_signals(end: Callable[..., None]) -> Iterator[None]:
    """Call `end` at Ctrl-C and SIGTERM, while in here and in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
