"""What the machine says of a process."""

import subprocess
import sys

import pytest

from lockstep.engine import timing as usage

CHILD = """
import time
from lockstep.engine.timing import UsageMeter

meter = UsageMeter()
print(meter.read().peak_bytes)
for megabytes in (100, 600):
    held = bytearray(megabytes << 20)
    time.sleep(0.3)
    print(meter.read().peak_bytes)
    del held
"""
STARTED_BY = f"""
import subprocess, sys

held = bytearray(400 << 20)
print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True).stdout)
"""
MIB = 1 << 20


@pytest.mark.slow
def test_a_peak_is_that_of_the_process_and_not_of_who_started_it():
    ended = subprocess.run(
        [sys.executable, "-c", STARTED_BY], capture_output=True, text=True, timeout=60, check=True
    )
    first, second, third = (int(text) / MIB for text in ended.stdout.split())
    assert 1 < first < 300  # torch, and not the 600 MiB of who started it
    assert 95 < second - first < 160
    assert 595 < third - first < 650


def test_counters_may_be_of_some_milliseconds_ago_where_nobody_reports_them(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(usage, "perf_counter", lambda: now[0])
    meter = usage.UsageMeter()
    first = meter.read()
    now[0] += 0.004
    assert meter.read(is_exact=False) is first
    assert meter.read() is not first
    now[0] += 0.02
    second = meter.read(is_exact=False)
    assert second is not first
    assert second.cpu_s >= first.cpu_s
