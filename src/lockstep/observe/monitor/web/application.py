"""What the page's server answers: the page's files and runs as JSON, to those who may ask."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from secrets import compare_digest
from typing import Any
from urllib.parse import urlencode

import orjson
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lockstep.comm.host import is_loopback
from lockstep.errors import ConfigError, LockstepError
from lockstep.observe.monitor.watch import Watched
from lockstep.observe.monitor.web import views
from lockstep.observe.monitor.web.hub import Hub
from lockstep.observe.reading.differences import config_differences
from lockstep.observe.reading.listing import chosen

_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """Lets requests through that name a known host and, if there is one, the token.

    A foreign page can point a host name of its own to this machine (DNS rebinding); its requests
    carry that name. The token comes in the address once, and as a cookie from then on.

    Args:
        app: the application that is guarded.
        host: address that the server listens on.
        token: token that requests must have; None if they need none.
        port: port of the server, which tells the cookies of one machine's servers apart.
    """

    # Starlette's `TrustedHostMiddleware` reads no IPv6 addresses, and knows no "any address".

    def __init__(self, app: ASGIApp, host: str, token: str | None, port: int) -> None:
        self._app = app
        self._hosts = {"localhost", "127.0.0.1", "::1", host.strip("[]").lower()}
        self._takes_addresses = not is_loopback(host)
        if self._takes_addresses:
            self._hosts |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._token = token
        self._cookie = f"lockstep_{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        answer = self._answer(Request(scope)) or self._app
        await answer(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """The answer to a request that does not get through."""
        if not self._is_known(request.headers.get("host", "")):
            return PlainTextResponse("This server does not answer under that name.\n", 421)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("This server can only be read.\n", 405)
        if self._token is None:
            return None
        if self._is_right(request.query_params.getlist("token")):
            return self._welcome(request)
        if not self._is_right([request.cookies.get(self._cookie, "")]):
            message = "Open the address that `lockstep monitor` has printed.\n"
            return PlainTextResponse(message, 403)
        return None

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

    def _welcome(self, request: Request) -> Response:
        """Keep the token in a cookie, and take it out of the address."""
        query = [(key, v) for key, v in request.query_params.multi_items() if key != "token"]
        # Without more than one slash at the beginning, which would name another host.
        path = "/" + request.scope["path"].lstrip("/\\")
        cookie = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        url = f"{path}?{urlencode(query)}" if query else path
        return RedirectResponse(url, 303, {"set-cookie": cookie})


_MEDIA_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml",
}  # fmt: skip
_MAX_POINTS = 4096
_MAX_CURVES = 256
_MAX_COMPARED = 20
_LAST_STEP = 1 << 62


def application(hub: Hub) -> Starlette:
    """The page of a hub's runs."""
    answers = Answers(hub)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        hub.start()
        yield
        hub.stop()

    return Starlette(
        lifespan=lifespan,
        exception_handlers={HTTPException: _error},
        routes=[
            Route("/api/runs", answers.runs),
            Route("/api/runs/{id}", answers.run),
            Route("/api/runs/{id}/curves", answers.curves),
            Route("/api/runs/{id}/config", answers.config),
            Route("/api/runs/{id}/log", answers.log),
            Route("/api/differences", answers.differences),
            Route("/api/changes", answers.changes),
            Route("/{path:path}", answers.page_file),
        ],
    )


class Answers:
    """The answers to requests; Starlette runs the methods that are not async in threads.

    Args:
        hub: the hub of the runs.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        root = Path(__file__).with_name("page")
        # All that is ever served of this folder.
        self._page = {
            path.relative_to(root).as_posix(): (path.read_bytes(), _MEDIA_TYPES[path.suffix])
            for path in root.rglob("*.*")
            if path.suffix in _MEDIA_TYPES
        }

    def page_file(self, request: Request) -> Response:
        """A file of the page."""
        found = self._page.get(request.path_params["path"] or "index.html")
        if found is None:
            raise HTTPException(404, "not found")
        return Response(found[0], media_type=found[1])

    def runs(self, request: Request) -> Response:
        """The runs that fulfil conditions, in an order."""
        conditions = [text for text in request.query_params.getlist("where") if text.strip()]
        order = request.query_params.get("sort", "")
        known = self._hub.runs()
        try:
            left = chosen([run.summary for run in known], conditions, order)
        except ConfigError as error:
            raise HTTPException(400, str(error).removeprefix("--where ")) from None
        rows = [views.in_list(summary) for summary in left]
        return _json({"boot": self._hub.boot, "total": len(known), "runs": rows})

    def run(self, request: Request) -> Response:
        """All of a run but its curves."""
        watched = self._watched(request)
        large = self._hub.open(watched.path)
        digests, calls = views.model_digests(watched.path), watched.newest_calls()
        with large.lock:
            shown = views.in_whole(watched.summary, large, digests, calls)
        shown["logs"] = views.log_names(watched.path)
        return _json(shown)

    def curves(self, request: Request) -> Response:
        """Parts of curves, by their numbers in the run's list of names."""
        watched = self._watched(request)
        query = request.query_params
        try:
            numbers = [int(text) for text in query.get("curves", "").split(",") if text]
            first, last = int(query.get("first", 0)), int(query.get("last", _LAST_STEP))
            most = min(_MAX_POINTS, max(2, int(query.get("most", 1000))))
        except ValueError:
            message = "curves, first, last and most must be whole numbers"
            raise HTTPException(400, message) from None
        large = self._hub.open(watched.path)
        span = max(-1, min(first, _LAST_STEP)), max(-1, min(last, _LAST_STEP))
        return _json(views.curves_of(large, numbers[:_MAX_CURVES], *span, most))

    def config(self, request: Request) -> Response:
        """The config of a run, by dotted keys."""
        config = self._watched(request).summary.config
        return _json({key: str(value) for key, value in config.items()})

    def differences(self, request: Request) -> Response:
        """The keys of the config in which some runs differ."""
        ids = request.query_params.getlist("run")[:_MAX_COMPARED]
        found = [run for run in map(self._hub.find, ids) if run is not None]
        differ = config_differences([run.summary.config for run in found])
        keys = {key: [str(value) for value in values] for key, values in differ.items()}
        return _json({"runs": [views.run_id(run.path) for run in found], "keys": keys})

    def log(self, request: Request) -> Response:
        """The end of a file that a run's processes have written."""
        path = self._watched(request).path
        try:
            return _json(views.read_log(path, request.query_params.get("name", "")))
        except LockstepError as error:
            raise HTTPException(404, str(error)) from None

    async def changes(self, request: Request) -> Response:
        """A stream of changes."""

        async def stream() -> AsyncIterator[bytes]:
            yield b"retry: 1000\n\n"
            async for change in self._hub.changes():
                yield b"data: " + orjson.dumps(change) + b"\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _watched(self, request: Request) -> Watched:
        watched = self._hub.find(request.path_params["id"])
        if watched is None:
            raise HTTPException(404, "this run is not there any more")
        return watched


def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json({"error": error.detail}, error.status_code)


def _json(value: Any, status: int = 200) -> Response:
    """A response of JSON; numbers that are not finite become null."""
    try:
        body = orjson.dumps(value)
    except TypeError:  # text that is not UTF-8, which the name of a folder may be
        body = json.dumps(_as_utf8(value), allow_nan=False).encode()
    return Response(body, status, media_type="application/json")


def _as_utf8(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _as_utf8(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_as_utf8(item) for item in value]
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
