"""The lines between agents and their coordinator, where they meet, and what they agree on.

A line is JSON over TCP, a message a line of text. Who connects has to know what the run is, and its
token, if it has one. Lines are not encrypted: use a network of your own, as for the ranks.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.comm.host import is_loopback
from lockstep.errors import LaunchError

TOKEN = "LOCKSTEP_AGENTS_TOKEN"
"""Environment variable with the secret that all agents of a run share; empty for none."""

_MAX_BYTES = 1 << 20
"""Of what has come on a line without an end of a message, and of output that waits to be sent."""


class Line:
    """One end of a connection; never waits.

    Args:
        connection: the connection, closed by `close`.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self._unsent = b""
        self._unread = b""

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that output should wait, too."""
        return len(self._unsent) > _MAX_BYTES

    def send(self, **message: Any) -> None:
        """Send a message, now or by `flush`."""
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Send what could not be sent before; a broken line is noticed by `read`."""
        try:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent = b""

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """The messages that have come, and whether the line is at its end.

        It is at its end, too, where something comes that is no message. What is more than a bound
        is left for the next call.
        """
        is_over = False
        try:
            while not is_over and len(self._unread) < _MAX_BYTES:
                data = self.connection.recv(1 << 16)
                self._unread += data
                is_over = not data
        except BlockingIOError:
            pass
        except OSError:
            is_over = True
        *texts, self._unread = self._unread.split(b"\n")
        messages: list[dict[str, Any]] = []
        for text in texts:
            try:
                message = json.loads(text)
            except (ValueError, RecursionError):
                message = None
            if not isinstance(message, dict):
                return messages, True
            messages.append(message)
        return messages, is_over or len(self._unread) >= _MAX_BYTES

    @property
    def peer(self) -> tuple[str, int] | None:
        """Address and port of the other end; None once the line is broken."""
        try:
            host, port = self.connection.getpeername()
        except OSError:
            return None
        return host, port

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class Output:
    """What ranks print, on its way over a line to a coordinator in another program.

    Attributes:
        writers: file descriptors for the ranks' standard output and standard error.
        readers: those that get what was printed.
    """

    def __init__(self) -> None:
        (out, to_out), (err, to_err) = os.pipe(), os.pipe()
        self.readers, self.writers = (out, err), (to_out, to_err)
        for reader in self.readers:
            os.set_blocking(reader, False)

    def carry(self, line: Line | None) -> None:
        """Send what was printed by now; drop it where there is no line."""
        for reader, stream in zip(self.readers, ("stdout", "stderr"), strict=True):
            with contextlib.suppress(BlockingIOError):
                data = os.read(reader, _MAX_BYTES)  # more than a pipe holds
                if line is not None:
                    # A byte is a character: a piece may end in the middle of one of UTF-8.
                    line.send(printed=data.decode("latin-1"), stream=stream)


@dataclass(frozen=True)
class Terms:
    """What all agents of a run have to agree on.

    Attributes:
        version: of Lockstep.
        id: name of the run.
        hosts: number of hosts that it starts on.
        ranks: number of ranks on each.
        replace: greatest number of processes to start in the place of killed ones.
        host_timeout_s: seconds after which a silent host is lost.
        command: what each rank runs.
    """

    version: str
    id: str
    hosts: int
    ranks: int
    replace: int
    host_timeout_s: float
    command: tuple[str, ...]

    def refusal(self, hello: dict[str, Any], token: str) -> str:
        """Why another agent may not take part, in words; empty if it may.

        One without the token learns nothing else of the run.
        """
        # An environment variable may have bytes that are no text: Python reads them as surrogates.
        known = [text.encode(errors="surrogatepass") for text in (hello.get("token", ""), token)]
        if not hmac.compare_digest(*known):
            return f"{TOKEN} differs between here and there; set the same one for all agents"
        other = hello["terms"]
        own = json.loads(json.dumps(asdict(self)))
        different = [name for name, value in own.items() if other.get(name) != value]
        shown = (f"{name} is {own[name]} here, {other.get(name)} there" for name in different)
        return "; ".join(shown)


@dataclass(frozen=True)
class Rendezvous:
    """Where agents meet: at an address, or where servers of etcd say.

    Attributes:
        text: as it was given.
        host: IPv4 address; empty with etcd.
        port: TCP port; 0 with etcd.
        servers: host and port of each server of etcd.
        name: name of the run there.
    """

    text: str
    host: str
    port: int
    servers: tuple[tuple[str, int], ...] = ()
    name: str = ""

    @property
    def is_loopback(self) -> bool:
        """Whether its user has asked for an address that no other host reaches."""
        return is_loopback(self.text.rpartition(":")[0])

    @classmethod
    def parse(cls, text: str) -> Rendezvous:
        """Read `HOST:PORT` or `etcd://HOST:PORT,…/NAME`.

        Raises:
            LaunchError: it is something else, or this host does not know the name.
        """
        if text.startswith("etcd://"):
            places, _, name = text.removeprefix("etcd://").partition("/")
            servers = tuple(_address(text, place) for place in places.split(","))
            if not name:
                raise LaunchError(f"--rendezvous {text}: a name of the run is missing at the end")
            return cls(text, "", 0, servers, name)
        return cls(text, *_address(text, text))


def _address(text: str, place: str) -> tuple[str, int]:
    """The IPv4 address and port of `HOST:PORT`."""
    name, _, port = place.rpartition(":")
    if not name or not port.isdecimal() or not 0 < int(port[:6]) < 65_536:
        raise LaunchError(
            f"--rendezvous {text}: must be HOST:PORT, such as node1:29500, or etcd://HOST:PORT/NAME"
        )
    try:
        found = socket.getaddrinfo(name, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise LaunchError(
            f"--rendezvous {text}: {socket.gethostname()} does not know the host {name}; give "
            "a name or an IPv4 address that all hosts know"
        ) from None
    return str(found[0][4][0]), int(port)
