"""Tasks on ranks that take themselves for such of the hosts in `LOCKSTEP_TEST_HOSTS`."""

import os
import sys
from pathlib import Path

from lockstep.comm import shared_memory
from lockstep.launching.rank.environment import detect

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
import models
import tasks

NAMES = os.environ.get("LOCKSTEP_TEST_HOSTS", "h0").split()
HOST = NAMES[detect(os.environ).rank % len(NAMES)]

# What tells hosts apart. The transports stay those of one machine.
shared_memory._host = lambda: HOST


class Hosted(tasks.Everything):
    """`Everything`."""


class HostedDeep(models.Deep):
    """`Deep`, which can be cut into shards."""
