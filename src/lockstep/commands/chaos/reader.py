"""The reader of a run's standard output, such as a pager, which stands still now and then."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from lockstep.engine.faults import PRINTED


@contextmanager
def stalling_reader(stall_s: float) -> Iterator[None]:
    """Have `sys.stdout` be a pipe in here, whose reader stands still where a fault prints.

    Args:
        stall_s: seconds that it reads nothing each time, while the fault goes on printing.
    """
    source, sink = os.pipe()
    reader = threading.Thread(target=_read, args=(source, stall_s), name="reader", daemon=True)
    reader.start()
    try:
        with open(sink, "w", encoding="utf-8") as stream, redirect_stdout(stream):
            yield
    finally:
        reader.join()


def _read(source: int, stall_s: float) -> None:
    with os.fdopen(source, encoding="utf-8", errors="replace") as stream:
        for line in stream:
            if PRINTED in line:
                time.sleep(stall_s)
