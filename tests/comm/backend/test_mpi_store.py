"""How ranks find the store of rank 0, without MPI running on several machines."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from tests.conftest import environment

# In a process of its own, because importing the module initialises MPI.
SCRIPT = """
import sys
from lockstep.comm.backend.world import first_reachable, own_addresses
port = int(sys.argv[1])
print(*own_addresses())
# 192.0.2.1 is reserved for documentation, so nothing answers there.
print(first_reachable(["127.0.0.1:bad", "localhost", "192.0.2.1"], port))
"""


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = run(port)
    assert done.returncode == 0, done.stdout + done.stderr
    addresses, host = done.stdout.splitlines()
    assert host == "localhost"
    assert addresses.split()[0] == socket.gethostname()
    assert not any(address.startswith("127.") for address in addresses.split())


@pytest.mark.timeout(60)
def test_no_address_that_answers_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = run(port)
    assert done.returncode != 0
    assert f"ConnectionError: nothing answers on port {port} of 127.0.0.1:bad" in done.stderr


def run(port: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(port)],
        env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
