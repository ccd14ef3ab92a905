"""`lockstep agent` on three hosts: ranks, hosts, agents and cables that fail and come back."""

import json
import os
import shutil
import signal
import time

import pytest
from benchmarks.lab import Lab
from tests.campaigns.commits import missing
from tests.conftest import result
from tests.lab.agents import TIMEOUT_S, Agents, Etcd, sha_alone

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]


def test_ranks_hosts_and_cables_are_lost_and_come_back_and_the_bits_stay(tmp_path):
    sha = sha_alone(tmp_path)
    with Lab(3) as lab:
        run = Agents(lab, tmp_path / "on hosts", "--replace", "1")
        for host in range(3):
            run.start(host)
        run.wait_for(lambda: run.step() >= 5)
        took = {}
        run.kill_ranks(1)
        took["a rank killed"] = run.advance()
        run.wait_for(lambda: len(run.rows("Joined")) >= 4)
        run.kill(2)
        took["a host killed"] = run.advance()
        run.start(2)
        run.wait_for(lambda: len(run.rows("Joined")) >= 5)
        run.cable(1, "down")
        took["a cable pulled"] = run.advance()
        run.cable(1, "up")
        run.wait_for(lambda: len(run.rows("Joined")) >= 6)
        print(json.dumps(took))
        assert run.ended() == [0, 0, 0], run.said()
        assert not any(run.pids(host) for host in range(3))
    assert result(run.folder / "run")["params_sha256"] == sha
    assert took["a rank killed"] < 2
    assert took["a host killed"] < 2
    assert TIMEOUT_S * 0.5 < took["a cable pulled"] < TIMEOUT_S + 2


def test_a_silent_coordinator_ends_the_run_with_the_code_to_try_again(tmp_path):
    with Lab(3) as lab:
        run = Agents(lab, tmp_path / "run", "--wait", "3")
        for host in range(3):
            run.start(host)
        run.wait_for(lambda: run.step() >= 3)
        run.cable(0, "down")
        assert [run.agents[host].wait(30) for host in (1, 2)] == [75, 75], run.said()
        run.kill(0)


def test_a_signal_to_one_agent_stops_all_and_nothing_outlives_the_coordinator(tmp_path):
    with Lab(3) as lab:
        run = Agents(lab, tmp_path / "run")
        run.start(1)
        run.start(2)
        run.start(0)
        run.wait_for(lambda: run.step() >= 3)
        own = run.agents[0]
        run.start(0, "--id", "another")  # beside the coordinator, where its address is taken
        asked = time.monotonic()
        assert run.agents[0].wait(20) == 2
        assert time.monotonic() - asked < 10
        assert "the agent there has another run: id is  here, another there" in run.said()
        run.agents[0] = own
        run.agents[1].send_signal(signal.SIGTERM)
        assert run.ended() == [143, 143, 143]
        run.wait_for(lambda: not any(run.pids(host) for host in range(3)))
        stopped_at = run.step()
        again = Agents(lab, tmp_path / "run", train=("--resume",))
        for host in range(3):
            again.start(host)
        again.wait_for(lambda: again.step() > stopped_at)
        killed = time.monotonic()
        again.kill(0)
        assert again.ended() == [-9, 75, 75]
        assert time.monotonic() - killed < TIMEOUT_S + 3
        assert not any(again.pids(host) for host in range(3))


@pytest.mark.skipif(shutil.which("etcd") is None, reason="Debian's package etcd-server has it")
def test_with_etcd_no_host_has_to_stay(tmp_path):
    sha = sha_alone(tmp_path)
    with Lab(3) as lab, Etcd(lab, tmp_path) as etcd:
        run = Agents(lab, tmp_path / "on hosts", timeout_s=3.0, rendezvous=etcd.rendezvous)
        for host in range(3):
            run.start(host)
        run.wait_for(lambda: run.step() >= 5)
        lost = run.coordinator()
        run.cable(lost, "down")  # the server of etcd there, too
        took = run.advance()
        run.cable(lost, "up")
        run.wait_for(lambda: len(run.rows("Joined")) >= 4)
        print(json.dumps({"the coordinator's host cut off": took}))
        assert run.ended() == [0, 0, 0], run.said()
    assert result(run.folder / "run")["params_sha256"] == sha
    assert took < 30


@pytest.mark.skipif(shutil.which("etcd") is None, reason="Debian's package etcd-server has it")
def test_all_of_etcd_is_lost_and_comes_back_in_time_late_or_never(tmp_path):
    sha = sha_alone(tmp_path)
    options = ["--replace", "3", "--wait", "40"]
    with Lab(3) as lab, Etcd(lab, tmp_path) as etcd:
        run = Agents(
            lab, tmp_path / "on hosts", *options, train=["checkpoint.every=10"], timeout_s=2.0,
            rendezvous=etcd.rendezvous,
        )  # fmt: skip

        def ranks():
            return [run.ranks(host) for host in range(3)]

        for host in range(3):
            run.start(host)
        run.wait_for(lambda: all(run.holders(host) for host in range(3)))
        first = ranks()
        etcd.kill(1)
        run.advance(20)
        # All are gone for less than four timeouts: nobody stops.
        for host in (0, 2):
            etcd.kill(host)
        run.advance(60)
        for host in range(3):
            etcd.start(host)
        run.wait_for(lambda: "the coordinator is on h" in run.said())
        run.advance()
        os.kill(run.store(run.coordinator()), signal.SIGKILL)
        run.wait_for(lambda: len(run.rows("Recovered")) >= 2)
        assert ranks() == first
        # For longer: ranks end, and go on from a checkpoint, without --resume.
        for host in range(3):
            etcd.kill(host)
        run.wait_for(lambda: ranks() == [[], [], []])
        for host in range(3):
            etcd.start(host)
        run.wait_for(lambda: run.rows("Resumed"))
        assert run.ended() == [0, 0, 0], run.said()
    assert result(run.folder / "run")["params_sha256"] == sha
    assert missing(run.all_rows(), 1500) == []


@pytest.mark.skipif(shutil.which("etcd") is None, reason="Debian's package etcd-server has it")
def test_etcd_that_is_lost_for_good_ends_the_run_with_the_code_to_try_again(tmp_path):
    with Lab(3) as lab, Etcd(lab, tmp_path) as etcd:
        run = Agents(
            lab, tmp_path / "on hosts", "--wait", "5", timeout_s=2.0, rendezvous=etcd.rendezvous
        )
        for host in range(3):
            run.start(host)
        run.wait_for(lambda: run.step() >= 5)
        for host in range(3):
            etcd.kill(host)
        assert run.codes(60) == [75, 75, 75]
        run.check_gone()
        assert "no coordinator has answered for 5 s; start all agents again" in run.said()
