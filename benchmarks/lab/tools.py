"""The system's programs that make hosts, and what they need."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from lockstep.errors import EnvironError

PROGRAMS = ("ip", "tc", "nsenter", "unshare", "hostname", "umount")
_TIMEOUT_S = 30


def check_machine() -> None:
    """Make sure that hosts can be made here.

    Raises:
        EnvironError: this is no Linux, the user is not root, or a program is missing.
    """
    if sys.platform != "linux":
        raise EnvironError(f"lab: network namespaces are Linux's, and this is {sys.platform}")
    if os.geteuid() != 0:
        raise EnvironError("lab: making network namespaces needs root; start it with sudo")
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise EnvironError(
            f"lab: {', '.join(missing)} not found on the PATH; install the packages iproute2, "
            "util-linux and hostname"
        )


def call(argv: Sequence[str], text: str = "") -> str:
    """Run a program to its end, with `text` as its input; what it printed.

    Raises:
        EnvironError: it failed; the message is what it said.
    """
    try:
        done = subprocess.run(
            list(argv), input=text, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironError(f"lab: {' '.join(argv)}: {error}") from error
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())
        raise EnvironError(f"lab: {' '.join(argv)}: {said or f'exit code {done.returncode}'}")
    return done.stdout


def ip_batch(namespace: str, lines: Sequence[str]) -> None:
    """Run commands of `ip` in a network namespace, the first failure ending them.

    Raises:
        EnvironError: one failed.
    """
    call(["ip", "-n", namespace, "-batch", "-"], "".join(f"{line}\n" for line in lines))


def ip_json(namespace: str, *arguments: str) -> list[dict[str, Any]]:
    """What `ip` tells about a network namespace.

    Raises:
        EnvironError: it failed.
    """
    rows: list[dict[str, Any]] = json.loads(call(["ip", "-n", namespace, "-s", "-j", *arguments]))
    return rows


def has_netem() -> bool:
    """Whether this kernel delays and loses frames itself.

    In a namespace of its own, so that no real interface is touched.
    """
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    try:
        call(probe)
    except EnvironError:
        return False
    return True
