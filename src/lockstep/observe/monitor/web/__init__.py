"""The page of `lockstep monitor --web`: runs in a browser, without anything from other servers.

It is served until a signal ends it.
"""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType

from lockstep.comm.host import is_loopback
from lockstep.errors import ConfigError
from lockstep.observe.monitor.watch import Watch

__all__ = ["serve"]


_NEEDED = ("starlette", "uvicorn", "orjson")
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,256}")
_SHUTDOWN_S = 2
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
        host: address to listen on; one that is not a loopback address needs a token.
        port: TCP port; 0 for any free one.
        token: token that requests must have; None for none on a loopback address, and for a new
            random one on others.
        announce: called once with the address to open.
        interval_s: seconds between two looks at the folders.
        failed: called with the exception that has ended the watching; the page is still served,
            but shows no more changes.

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
    import uvicorn

    from lockstep.observe.monitor.web.application import Guard, application
    from lockstep.observe.monitor.web.hub import Hub

    hub = Hub(watch, orjson.loads, interval_s, failed)

    class Server(uvicorn.Server):
        """Says where it serves once it does, and ends the streams of changes at a signal."""

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            shown = f"[{host}]" if ":" in host else host
            query = f"?token={token}" if token is not None else ""
            announce(f"http://{shown}:{port}/{query}")

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            self.should_exit = True  # without uvicorn's own: the signal is not raised again
            hub.stop()

    with _listener(host, port) as listener:
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            Guard(application(hub), host, token, port), log_config=None, access_log=False,
            server_header=False, date_header=False, timeout_graceful_shutdown=_SHUTDOWN_S,
            ws="none", lifespan="on",
        )  # fmt: skip
        Server(config).run(sockets=[listener])


def _listener(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{host}:{port}: cannot be listened on: {reason}; choose another host or port"
        ) from None
