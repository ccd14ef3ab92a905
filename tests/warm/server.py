"""Forks processes that have torch and Lockstep imported; see the package's docstring."""

from __future__ import annotations

import importlib
import os
import socket
import sys
import warnings
from typing import Any

from lockstep.launching.warm import Forked
from lockstep.launching.warm.rank import run
from lockstep.launching.warm.server import Server
from lockstep.launching.warm.starting import is_simple

_PRELOADED = (
    "torch.distributed.run", "pydantic.type_adapter", "lockstep.cli.main",
    "lockstep.cli.start.train", "lockstep.cli.start.evaluate", "lockstep.cli.prove.verify",
    "lockstep.cli.prove.chaos", "lockstep.cli.clusters.doctor",
    "lockstep.systems.digits.task", "lockstep.systems.quantum.commands",
    "lockstep.systems.ufs.task",
    "lockstep.systems.ufs.cli", "lockstep.systems.sketched.conversion",
    "lockstep.comm.torchdist.elastic_transport", "lockstep.hooks", "rich._emoji_codes",
    "encodings.idna", "pydantic.dataclasses", "torch._subclasses.schema_check_mode",
    "pytest", "hypothesis",  # scripts have tasks from modules of tests
)  # fmt: skip
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SITE = os.path.join(os.path.dirname(__file__), "site")


def _fits(order: dict[str, Any]) -> bool:
    """Whether what an interpreter takes from its environment at the start is as here."""
    environment: dict[str, str] = order["environment"]
    names = {name for name in {**environment, **os.environ} if name.startswith("PYTHON")}
    names = (names | set(_THREADS)) - {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONWARNINGS"}
    return is_simple(order["argv"][1:]) and all(
        environment.get(name) == os.environ.get(name) for name in names
    )


def _take_options(environment: dict[str, str]) -> None:
    """Do with the variables that may differ what an interpreter does at its start."""
    sys.path[:0] = [
        p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p and p != _SITE
    ]
    options = environment.get("PYTHONWARNINGS", "").split(",")
    warnings._processoptions([o for o in options if o])  # type: ignore[attr-defined]


if __name__ == "__main__":
    del sys.path[0]
    for _name in _PRELOADED:
        importlib.import_module(_name)
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would not be forked along"
    try:
        Server(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], _fits).serve()
    except Forked as _raised:
        _forked = _raised.with_traceback(None)
    _take_options(_forked.order["environment"])
    run(_forked)
