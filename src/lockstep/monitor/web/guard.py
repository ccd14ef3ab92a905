"""Who may ask: hosts that a page may be read under, a token, and what browsers are told."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from secrets import compare_digest
from typing import Any
from urllib.parse import parse_qsl, urlencode

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = (
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
)
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach a server that listens on `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Guard:
    """Lets requests through that name a known host and, if there is one, the token.

    A page elsewhere can point a name of its own to this machine (DNS rebinding); such requests
    name that host. The token comes in the address once, and as a cookie from then on.

    Args:
        application: what is guarded.
        host: address that the server listens on.
        token: what requests must have; None if nothing.
        port: of the server, which tells cookies of servers of one machine apart.
    """

    def __init__(self, application: Application, host: str, token: str | None, port: int) -> None:
        self._application = application
        self._hosts = {*_LOOPBACK, host.strip("[]").lower()}
        if not is_loopback(host):
            self._hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._takes_addresses = not is_loopback(host)
        self._token = token
        self._cookie = f"lockstep_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or have it answered."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if not self._is_known(headers.get(b"host", "")):
            await _refuse(send, 421, "This server does not answer under that name.")
            return
        if scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, "This server can only be read.")
            return
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if self._token is not None and self._is_right(value for k, value in query if k == "token"):
            rest = urlencode([(key, value) for key, value in query if key != "token"])
            await self._welcome(send, scope["path"] + (f"?{rest}" if rest else ""))
            return
        if self._token is not None and not self._is_right(self._cookies(headers)):
            await _refuse(send, 403, "Open the address that `lockstep monitor` has printed.")
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        await self._application(scope, receive, send_with_headers)

    def _is_known(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        name = name.strip("[]").lower()
        if name in self._hosts:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._takes_addresses

    def _is_right(self, given: Iterable[str]) -> bool:
        token = (self._token or "").encode()
        return any(compare_digest(value.encode(errors="replace"), token) for value in given)

    def _cookies(self, headers: MutableMapping[bytes, str]) -> list[str]:
        # Not http.cookies, which drops all that comes after a cookie that it does not like.
        from starlette.requests import cookie_parser

        cookies = cookie_parser(headers.get(b"cookie", ""))
        return [cookies[self._cookie]] if self._cookie in cookies else []

    async def _welcome(self, send: Send, place: str) -> None:
        """Keep the token in a cookie, and take it out of the address."""
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        place = "/" + place.lstrip("/\\")
        headers = [(b"location", place.encode()), (b"set-cookie", cookie.encode()), *_HEADERS]
        await send({"type": "http.response.start", "status": 303, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


async def _refuse(send: Send, status: int, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8"), *_HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
