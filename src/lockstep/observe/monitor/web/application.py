"""What can be asked for: the page's files and runs as JSON; and who may ask."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from contextlib import asynccontextmanager
from importlib.resources import files
from secrets import compare_digest
from typing import Any
from urllib.parse import parse_qsl, urlencode

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.monitor.watch import Watched
from lockstep.observe.monitor.web.hub import Hub, number_of
from lockstep.observe.monitor.web.shown import (
    curves_of,
    in_list,
    in_whole,
    log_names,
    model_digests,
    read_log,
)
from lockstep.observe.reading.differences import config_differences
from lockstep.observe.reading.runs import chosen

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


_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FOLDERS = ("", "uplot")
_MOST_POINTS = 4096
_MOST_CURVES = 256
_MOST_COMPARED = 20
_LAST_STEP = 1 << 62


def application(hub: Hub) -> Starlette:
    """The page of a hub's runs."""
    answers = Answers(hub)
    page = _page_files()

    async def page_file(request: Request) -> Response:
        found = page.get(request.url.path)
        if found is None:
            return Response("not found\n", 404, media_type="text/plain")
        return Response(found[0], media_type=found[1])

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hub.start()
        yield
        hub.stop()

    return Starlette(
        lifespan=lifespan,
        routes=[
            Route("/api/runs", answers.runs),
            Route("/api/runs/{number}", answers.run),
            Route("/api/runs/{number}/curves", answers.curves),
            Route("/api/runs/{number}/config", answers.config),
            Route("/api/runs/{number}/log", answers.log),
            Route("/api/differences", answers.differences),
            Route("/api/changes", answers.changes),
            Route("/{path:path}", page_file),
        ],
    )


class Answers:
    """What is answered to requests; sync methods run in threads of their own.

    Args:
        hub: whose runs they are about.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def runs(self, request: Request) -> Response:
        """The runs that fulfil conditions, in an order."""
        conditions = [text for text in request.query_params.getlist("where") if text.strip()]
        order = request.query_params.get("sort", "")
        known = self._hub.runs()
        try:
            left = chosen([run.summary for run in known], conditions, order)
        except ConfigError as error:
            return _json({"error": str(error).removeprefix("--where ")}, 400)
        rows = [in_list(number_of(summary.path), summary) for summary in left]
        return _json({"boot": self._hub.boot, "total": len(known), "runs": rows})

    def run(self, request: Request) -> Response:
        """All of a run but its curves."""
        watched = self._watched(request)
        if watched is None:
            return _gone()
        large = self._hub.open(watched.path)
        digests, calls = model_digests(watched.path), watched.newest_calls()
        with large.lock:
            shown = in_whole(number_of(watched.path), watched.summary, large, digests, calls)
        shown["logs"] = log_names(watched.path)
        return _json(shown)

    def curves(self, request: Request) -> Response:
        """Parts of curves, by their numbers in the run's list of names."""
        watched = self._watched(request)
        if watched is None:
            return _gone()
        query = request.query_params
        try:
            numbers = [int(text) for text in query.get("curves", "").split(",") if text]
            first, last = int(query.get("first", 0)), int(query.get("last", _LAST_STEP))
            most = min(_MOST_POINTS, max(2, int(query.get("most", 1000))))
        except ValueError:
            return _json({"error": "curves, first, last and most must be whole numbers"}, 400)
        large = self._hub.open(watched.path)
        span = max(-1, min(first, _LAST_STEP)), max(-1, min(last, _LAST_STEP))
        return _json(curves_of(large, numbers[:_MOST_CURVES], *span, most))

    def config(self, request: Request) -> Response:
        """The config of a run, by dotted keys."""
        watched = self._watched(request)
        if watched is None:
            return _gone()
        return _json({key: str(value) for key, value in watched.summary.config.items()})

    def differences(self, request: Request) -> Response:
        """The keys of the config in which some runs differ."""
        numbers = request.query_params.getlist("run")[:_MOST_COMPARED]
        found = [run for run in map(self._hub.find, numbers) if run is not None]
        differ = config_differences([run.summary.config for run in found])
        keys = {key: [str(value) for value in values] for key, values in differ.items()}
        return _json({"runs": [number_of(run.path) for run in found], "keys": keys})

    def log(self, request: Request) -> Response:
        """The end of a file that a run's processes have written, by its number in the list."""
        watched = self._watched(request)
        if watched is None:
            return _gone()
        try:
            return _json(read_log(watched.path, request.query_params.get("name", "")))
        except LockstepError as error:
            return _json({"error": str(error)}, 404)

    async def changes(self, request: Request) -> Response:
        """A stream of what has changed."""

        async def stream() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            async for change in self._hub.changes():
                yield b"data: " + orjson.dumps(change) + b"\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _watched(self, request: Request) -> Watched | None:
        return self._hub.find(request.path_params["number"])


def _gone() -> Response:
    return _json({"error": "this run is not there any more"}, 404)


def _json(value: Any, status: int = 200) -> Response:
    """As JSON; numbers that are not finite become null."""
    try:
        body = orjson.dumps(value)
    except TypeError:  # text that is no UTF-8, such as a folder's name may be
        body = json.dumps(_plain(value), allow_nan=False).encode()
    return Response(body, status, media_type="application/json")


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _page_files() -> dict[str, tuple[bytes, str]]:
    """The page's files by their addresses: nothing else is ever read from this folder."""
    root = files("lockstep.observe.monitor.web").joinpath("page")
    found: dict[str, tuple[bytes, str]] = {}
    for folder in _FOLDERS:
        for file in (root.joinpath(folder) if folder else root).iterdir():
            suffix = file.name[file.name.rfind(".") :]
            if suffix in _KINDS:
                address = "/".join(part for part in ("", folder, file.name) if part or not folder)
                found["/" + address.lstrip("/")] = file.read_bytes(), _KINDS[suffix]
    found["/"] = found["/index.html"]
    return found
