"""What the machine says of a process."""

import subprocess
import sys

CHILD = """
import time
from lockstep.engine.usage import UsageMeter

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


def test_a_peak_is_that_of_the_process_and_not_of_who_started_it():
    ended = subprocess.run(
        [sys.executable, "-c", STARTED_BY], capture_output=True, text=True, timeout=60, check=True
    )
    first, second, third = (int(text) / MIB for text in ended.stdout.split())
    assert 1 < first < 90
    assert second - first > 95
    assert second < 250
    assert 600 < third < 750
