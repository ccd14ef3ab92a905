"""The fuzzer (`make test-fuzz`) still runs, and a few of its inputs break nothing."""

import sys

from tests.conftest import run

FEW, SEED = 200, 381527437


def test_a_few_bad_inputs_break_nothing(tmp_path):
    argv = [sys.executable, "-m", "tests.fuzz", "--inputs", FEW, "--seed", SEED]
    done = run(argv, __file__.rpartition("/tests/")[0])
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout.splitlines()[-1]
