"""What tests of the recipe `hrm` share."""

from collections.abc import Iterator
from functools import cache

import pytest

from lockstep.systems.hrm.data import arc


@pytest.fixture(autouse=True, scope="session")
def _tasks_read_once() -> Iterator[None]:
    """Reading the tasks of ARC takes longer than most tests; nothing changes them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arc, "load_tasks", cache(arc.load_tasks))
        yield
