"""Campaigns still run, and a few of their runs show nothing wrong."""

import contextlib
import csv
import errno
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest
from benchmarks.lab import Lab

from lockstep.launching.host.processes import is_alive
from tests.campaigns.blows import draw as draw_kills
from tests.campaigns.commits import commits, contradictions, missing
from tests.campaigns.hosts import COMPILER, Machines, compile_clock
from tests.campaigns.poisons import draw as draw_surroundings
from tests.conftest import environment, result, run
from tests.lab.agents import Etcd, sha_alone

ROOT = __file__.rpartition("/tests/")[0]


def campaign(name, *arguments):
    argv = [sys.executable, "-m", f"tests.campaigns.{name}", "--seed", "5", *arguments]
    return run(argv, ROOT, timeout=540, cold=True)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.getuid() != 0, reason="needs namespaces")
def test_a_few_faults_of_hosts_change_nothing():
    ended = campaign("hosts", "--faults", "6")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "6 faults in 1 runs, 0 things wrong" in ended.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("slurm", "--etcd"), marks=pytest.mark.slurm),
        pytest.param(
            ("ray",), marks=pytest.mark.skipif(not find_spec("ray"), reason="needs the extra ray")
        ),
    ],
)
def test_a_few_faults_of_clusters_change_nothing(arguments):
    ended = campaign("clusters", *arguments, "--faults", "4")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "4 faults in 1 runs, 0 things wrong" in ended.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="needs namespaces")
def test_no_row_is_lost_when_ranks_0_are_killed_while_their_disk_is_full(tmp_path):
    with Lab(3) as lab, contextlib.ExitStack() as stack:
        run = Machines(
            lab, tmp_path / "hosts", "--replace", "9", train=["steps=900", "checkpoint.every=90"]
        )
        stack.callback(run.close)
        for host in range(3):
            run.start(host)
        run.wait_for(lambda: all(run.holders(host) for host in range(3)))
        run.advance()
        before, make_room = run.step(), run.fill("share")

        def go_on():
            newest = commits(run.folder / "commits")[-1]
            run.wait_for(
                lambda: (
                    (now := commits(run.folder / "commits")[-1])["step"] > newest["step"] + 10
                    and len(now["members"]) == 3
                )
            )

        for host in (0, 1):
            go_on()
            run.kill_ranks(host)
        go_on()
        assert run.step() < before + 5
        make_room()
        run.advance()
        run.kill_ranks(2)
        assert run.ended() == [0, 0, 0], run.said()
        assert missing(run.all_rows(), 900) == []
        assert {len(run.rows("RankLost")), len(run.rows("Joined")) - 3} == {3}
        with (run.run_dir / "metrics.csv").open(newline="") as file:
            assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 901))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.getuid() != 0, reason="needs namespaces")
@pytest.mark.skipif(shutil.which("etcd") is None, reason="Debian's package etcd-server has it")
def test_ranks_whose_agent_stands_still_are_left_behind_and_commit_nothing(tmp_path):
    sha = sha_alone(tmp_path, "steps=900")
    with Lab(3) as lab, Etcd(lab, tmp_path) as etcd, contextlib.ExitStack() as stack:
        run = Machines(
            lab, tmp_path / "hosts", train=["steps=900"], timeout_s=3.0, rendezvous=etcd.rendezvous
        )
        stack.callback(run.close)
        for host in range(3):
            run.start(host)
            run.set_clock(host, 3600)
        for _ in range(3):
            run.wait_for(lambda: all(run.holders(host) for host in range(3)))
            stopped = (run.coordinator() + 1) % 3
            (left_behind,) = run.ranks(stopped)
            num_lost = len(run.rows("RankLost"))
            run.agents[stopped].send_signal(signal.SIGSTOP)
            run.wait_for(lambda before=num_lost: len(run.rows("RankLost")) > before)
            run.advance(10)
            assert is_alive(left_behind)
            run.agents[stopped].send_signal(signal.SIGCONT)
            run.wait_for(lambda pid=left_behind: not is_alive(pid))
        run.wait_for(lambda: all(run.holders(host) for host in range(3)))
        assert run.ended() == [0, 0, 0], run.said()
        assert contradictions(commits(run.folder / "commits")) == []
        assert missing(run.all_rows(), 900) == []
        assert result(run.run_dir)["params_sha256"] == sha


WAIT = """
import ctypes, time
libc = ctypes.CDLL(None)
lock, changed = (ctypes.create_string_buffer(64) for _ in range(2))
libc.pthread_mutex_lock(lock)
until = time.time() + 0.2
date = (ctypes.c_long * 2)(int(until), int(until % 1 * 1e9))
print(until, libc.pthread_cond_timedwait(changed, lock, date))
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a compiler")
@pytest.mark.parametrize("ahead_s", [3600, -3600])
def test_waits_go_by_the_clock_of_their_host(tmp_path, ahead_s):
    clock = tmp_path / "clock"
    clock.write_bytes(struct.pack("q", ahead_s))
    own = environment(cold=True, LD_PRELOAD=str(compile_clock(tmp_path)), CLOCK=str(clock))
    argv, began, date = [sys.executable, "-c", WAIT], time.monotonic(), time.time()
    done = subprocess.run(argv, env=own, capture_output=True, text=True, timeout=60, check=True)
    until, code = done.stdout.split()
    assert abs(float(until) - date - ahead_s) < 60
    assert int(code) == errno.ETIMEDOUT
    assert time.monotonic() - began > 0.2


def noted(*steps):
    """Commits of steps, each by a process in a generation, with the members of this."""
    return [
        {"session": 0, "process": process, "generation": generation, "members": members,
         "step": step, "digest": step, "at": float(at)}
        for at, (process, generation, members, step) in enumerate(steps)
    ]  # fmt: skip


def test_two_sides_that_go_on_are_found_and_the_end_of_one_step_is_not():
    both, one = [0, 1], [1]
    before = [("a", 1, both, 1), ("b", 1, both, 1), ("b", 2, one, 2)]
    assert contradictions(noted(*before, ("b", 2, one, 3))) == []
    assert contradictions(noted(*before, ("a", 1, both, 2))) == []
    found = contradictions(noted(*before, ("a", 1, both, 2), ("a", 1, both, 3)))
    assert found == ["step 3 of generation 1 on a: 2.000 s after the next one began"]
    assert "two groups" in contradictions(noted(*before, ("a", 2, [0], 2)))[0]
    rows = noted(*before, ("a", 1, both, 2))
    rows[-1]["digest"] = 0
    assert "other bits" in contradictions(rows)[0]


def test_steps_that_are_missing_or_twice_are_found_and_those_after_a_resume_are_not():
    def rows(*steps):
        return [{"event": "StepDone", "step": step} for step in steps]

    resumed = {"event": "Resumed", "step": 2}
    assert missing([*rows(1, 2, 3), resumed, *rows(3, 4)], 4) == []
    assert missing(rows(1, 3, 3), 3) == ["step 2: 0 events", "step 3: 2 events"]


def test_a_run_of_a_campaign_follows_from_seed_and_number():
    assert draw_kills(1, 7) == draw_kills(1, 7) != draw_kills(2, 7)
    assert draw_surroundings(1, 7) == draw_surroundings(1, 7) != draw_surroundings(1, 8)
