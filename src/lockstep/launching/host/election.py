"""Who is the coordinator of a run, decided in etcd: whoever holds a key there, with a lease.

Only the holder may number the generations of the group: a number is written on the condition that
the key is still its own. It takes itself to be the holder until, on its own clock, three quarters
of the lease have passed since it last asked for more; so it has stopped before another is elected.
"""

from __future__ import annotations

import base64
import json
import math
import time
from collections.abc import Sequence
from typing import Any

from lockstep.errors import needing

SHARE = 0.75
"""The share of a lease for which its holder trusts it."""
_LEAST_S = 2
"""The shortest lease that etcd grants."""
_ENDED_S = 600
"""Seconds for which etcd keeps the exit code of a run, for agents that come back late."""


class Unreachable(Exception):
    """No server of etcd answers, or there is no majority of them."""


class Election:
    """The keys of a run in etcd; for one thread.

    Args:
        endpoints: host and port of each server.
        name: name of the run.
        lease_s: seconds after which a coordinator that falls silent is none any more.
    """

    def __init__(self, endpoints: Sequence[tuple[str, int]], name: str, lease_s: float) -> None:
        with needing("etcd", "--rendezvous etcd://… needs etcd3gw"):
            import etcd3gw
        self.lease_s = max(_LEAST_S, math.ceil(lease_s))
        timeout_s = self.lease_s / 8
        self._clients = [
            etcd3gw.Etcd3Client(host, port, timeout=timeout_s, api_path="/v3/")
            for host, port in endpoints
        ]
        # Errors of requests are OSErrors.
        self._failures = (etcd3gw.exceptions.Etcd3Exception, OSError, ValueError, KeyError)
        self._name = name
        self._lease, self._revision = "0", "-1"
        self.valid_until = 0.0

    def holder(self) -> dict[str, Any] | None:
        """What the present coordinator has said of itself; None if there is none."""
        found: dict[str, Any] | None = self._value(self._key("coordinator"))
        return found

    def campaign(self, value: dict[str, Any]) -> bool:
        """Become the coordinator, if there is none.

        Args:
            value: what others need to know of this one; no two candidates say the same.
        """
        asked_at = time.monotonic()
        self._lease = self._post("lease/grant", {"TTL": self.lease_s, "ID": 0})["ID"]
        key = self._key("coordinator")
        put = {"key": key, "value": _encoded(value), "lease": self._lease}
        is_free = {"key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0"}
        # Who is elected forgets how an earlier run of this name has ended.
        forget = {"requestDeleteRange": {"key": self._key("ended")}}
        self._transaction([is_free], [{"requestPut": put}, forget])
        # Looked at, since a request that has got no answer may have been carried out.
        found = self._post("kv/range", {"key": key}).get("kvs", [])
        if not found or _decoded(found[0]["value"]) != value:
            return False
        self._revision = found[0]["create_revision"]
        self.valid_until = asked_at + SHARE * self.lease_s
        return True

    def keep(self) -> None:
        """Ask for more time, which `valid_until` tells; nothing changes if there is none."""
        asked_at = time.monotonic()
        answer = self._post("lease/keepalive", {"ID": self._lease}).get("result", {})
        if int(answer.get("TTL", 0)) > 0:
            self.valid_until = asked_at + SHARE * self.lease_s

    def allocate(self, generation: int, num_slots: int) -> bool:
        """Write down the number of a new generation, and how many slots there are by now.

        Returns:
            False if another is the coordinator.
        """
        return self._put_as_holder("generation", [generation, num_slots])

    def newest(self) -> tuple[int, int]:
        """What was last given to `allocate`, by any coordinator; zeros if nothing was."""
        generation, num_slots = self._value(self._key("generation")) or (0, 0)
        return generation, num_slots

    def end(self, exit_code: int) -> None:
        """Write down that the run has ended, and be the coordinator no longer.

        The newest generation is forgotten, or a later run of this name would be taken for this one.
        """
        lease = self._post("lease/grant", {"TTL": _ENDED_S, "ID": 0})["ID"]
        forget = {"requestDeleteRange": {"key": self._key("generation")}}
        self._put_as_holder("ended", exit_code, lease, forget)
        self._post("lease/revoke", {"ID": self._lease})

    def ended(self) -> int | None:
        """The exit code of the run, if it has ended."""
        code = self._value(self._key("ended"))
        return None if code is None else int(code)

    def begin(self) -> bool:
        """Have a run begin; false if another is the coordinator.

        The generation of one that has lost its ranks stays until this one has its first: if the
        coordinator is lost before, the next one begins in the same way.
        """
        forget = {"requestDeleteRange": {"key": self._key("ended")}}
        return self._transaction([self._is_holder()], [forget])

    def _put_as_holder(self, name: str, value: Any, lease: str = "0", *others: Any) -> bool:
        put = {"key": self._key(name), "value": _encoded(value), "lease": lease}
        return self._transaction([self._is_holder()], [{"requestPut": put}, *others])

    def _is_holder(self) -> dict[str, Any]:
        key = self._key("coordinator")
        number = {"create_revision": self._revision}
        return {"key": key, "target": "CREATE", "result": "EQUAL", **number}

    def _transaction(self, conditions: list[Any], actions: list[Any]) -> bool:
        answer = self._post("kv/txn", {"compare": conditions, "success": actions, "failure": []})
        return bool(answer.get("succeeded", False))

    def _value(self, key: str) -> Any:
        found = self._post("kv/range", {"key": key}).get("kvs", [])
        return _decoded(found[0]["value"]) if found else None

    def _key(self, name: str) -> str:
        return base64.b64encode(f"lockstep/{self._name}/{name}".encode()).decode()

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """An answer of the first server that gives one; it is asked first from then on.

        Raises:
            Unreachable: there is none.
        """
        problem = ""
        for _ in range(len(self._clients)):
            client = self._clients[0]
            try:
                answer = client.post(client.get_url(path), json=body)
                if "error" in answer:
                    raise ValueError(str(answer["error"]))
                return answer
            except self._failures as error:
                problem = str(error) or repr(error)
                self._clients.append(self._clients.pop(0))
        raise Unreachable(problem)


def _encoded(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def _decoded(text: str) -> Any:
    return json.loads(base64.b64decode(text))
