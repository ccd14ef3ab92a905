"""Campaigns still run, and a few of their runs show nothing wrong."""

import os
import re
import sys

import pytest

from tests.campaigns.blows import draw as draw_kills
from tests.campaigns.poisons import draw as draw_surroundings
from tests.conftest import run

ROOT = __file__.rpartition("/tests/")[0]


def campaign(name, *arguments):
    argv = [sys.executable, "-m", f"tests.campaigns.{name}", "--seed", "5", *arguments]
    return run(argv, ROOT, cold=True)


@pytest.mark.slow
def test_a_few_kills_change_nothing():
    ended = campaign("kills", "--kills", "6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " 0 runs wrong" in ended.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="needs namespaces")
def test_a_few_surroundings_are_survived_or_refused():
    ended = campaign("surroundings", "--count", "6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(r"6 surroundings: .* 0 wrong", ended.stdout.splitlines()[-1])


def test_a_run_of_a_campaign_follows_from_seed_and_number():
    assert draw_kills(1, 7) == draw_kills(1, 7) != draw_kills(2, 7)
    assert draw_surroundings(1, 7) == draw_surroundings(1, 7) != draw_surroundings(1, 8)
