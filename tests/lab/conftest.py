"""Whether hosts can be made on this machine."""

import pytest
from benchmarks.lab import Lab

from lockstep.errors import EnvironError


@pytest.fixture(scope="session")
def machine_has_what_hosts_need():
    try:
        with Lab(2, "rate=100mbit,delay=1ms"):
            pass
    except EnvironError as error:
        pytest.skip(str(error))
