"""A training whose ranks are started by agents, one of which is killed and comes back."""

import subprocess
import sys
import time

import pytest
from tests.accelerator import surroundings
from tests.conftest import environment, result
from tests.lab.agents import TASK
from tests.launching.host.test_agents import free_port

from lockstep.observe import read_events

STEPS = "steps=400"


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "accelerator"])
def test_a_training_survives_an_agent_and_takes_it_in_again(tmp_path, lockstep, device):
    variables = environment() if device == "cpu" else surroundings(environment(cold=True))
    (tmp_path / "slow.py").write_text(TASK)
    train = ["train", "slow.py:Slow", STEPS, "--run-dir"]
    assert lockstep(*train, "alone").returncode == 0
    (tmp_path / "slowly").touch()
    argv = [sys.executable, "-m", "lockstep", "agent", "--rendezvous", f"127.0.0.1:{free_port()}"]
    argv += ["--hosts", "2", "--", *train, "run", f"device={device}"]

    def start():
        with (tmp_path / "said").open("ab") as said:
            return subprocess.Popen(argv, cwd=tmp_path, env=variables, stdout=said, stderr=said)

    def wait_for(kind, number):
        deadline = time.monotonic() + 60
        events = tmp_path / "run" / "events.jsonl"
        while not events.exists() or sum(r["event"] == kind for r in read_events(events)) < number:
            assert time.monotonic() < deadline, (tmp_path / "said").read_text()
            time.sleep(0.02)

    first = start()
    time.sleep(0.5)
    second = start()
    wait_for("StepDone", 3)
    second.kill()
    wait_for("Recovered", 1)
    third = start()
    wait_for("Joined", 3)
    (tmp_path / "slowly").unlink()
    assert second.wait(60) == -9
    assert (first.wait(60), third.wait(60)) == (0, 0), (tmp_path / "said").read_text()
    run, alone = result(tmp_path / "run"), result(tmp_path / "alone")
    assert run["params_sha256"] == alone["params_sha256"]
    assert run["world_size"] == 2
