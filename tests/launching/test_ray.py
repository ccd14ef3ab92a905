"""Ranks on the nodes of a Ray cluster, and in workers of Ray Train.

Tests that start a cluster need the extra `ray`: `pip install -e '.[ray]'`, then
`pytest -m slow tests/launching/test_ray.py`.
"""

import http.server
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from tests.conftest import environment, result, run
from tests.lab.agents import TASK
from tests.launching.ray_nodes import Nodes

from lockstep.errors import LaunchError
from lockstep.launching.host.line import Terms
from lockstep.launching.host.processes import children, is_alive
from lockstep.launching.job import ray_node
from lockstep.launching.job.ray_cluster import layout
from lockstep.launching.job.ray_node import Node, Work, check_ray, variables_of_ranks
from lockstep.launching.start import (
    TRAIN_LAUNCHERS,
    RayCluster,
    check_ray_address,
    choose_launcher,
)
from lockstep.observe import read_events

STEPS = "steps=1500"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)


@pytest.mark.parametrize(
    ("num_ranks", "cores", "expected"),
    [
        (8, [4, 4, 4], (2, 4)),
        (8, [8] * 8, (8, 1)),
        (6, [2, 2, 9], (3, 2)),
        (8, [3, 3, 3], (8, 1)),
        (4, [16], (1, 4)),
        (8, [0, 16], (1, 8)),
        (5, [2, 2], None),
        (1, [], None),
    ],
)
def test_ranks_are_spread_over_the_nodes_that_have_room(num_ranks, cores, expected):
    assert layout(num_ranks, [{"CPU": n} for n in cores], {"CPU": 1}) == expected


def test_ranks_with_gpus_and_threads_need_nodes_that_have_both():
    nodes = [{"CPU": 8, "GPU": 1}, {"CPU": 8, "GPU": 2}, {"CPU": 64}]
    assert layout(3, nodes, {"CPU": 4, "GPU": 1}) == (3, 1)
    assert layout(4, nodes, {"CPU": 4, "GPU": 1}) is None
    assert RayCluster.of_script(None, ["lr=1", "threads=4"]) == RayCluster(None, 4)
    assert RayCluster.of_script("h:1", ["threads=four"]) == RayCluster("h:1", 1)


@pytest.mark.parametrize("installed", ["2.39.9", "3.0.0", "1.13"])
def test_another_version_of_ray_is_refused(installed, monkeypatch):
    monkeypatch.setattr(ray_node, "version", lambda _: installed)
    with pytest.raises(LaunchError, match=rf"Ray {installed} is installed, and must be at least"):
        check_ray("auto")


def test_the_agent_on_a_node_knows_the_secret_of_the_run_which_no_command_line_shows(tmp_path):
    (tmp_path / "run").mkdir()
    terms = Terms("1", "", 1, 1, 0, 5.0, ("-c", "pass"))
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        work = Work(address, terms, str(tmp_path), "run", {}, 1, "sesame")
        ran = pool.submit(Node().run, work)
        with listener.accept()[0] as line:
            assert json.loads(line.makefile().readline())["token"] == "sesame"
            for pid in children(os.getpid()):
                for name in ("cmdline", "environ"):
                    assert b"sesame" not in Path(f"/proc/{pid}/{name}").read_bytes()
            line.sendall(b'{"refused": "no"}\n')
            code, text = ran.result(20)
    assert (code, "the agent there has another run: no" in text) == (2, True)


def test_ranks_on_a_cluster_do_not_get_the_secret_of_agents(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_AGENTS_TOKEN", "sesame")
    monkeypatch.setenv("LOCKSTEP_OTHER", "1")
    assert variables_of_ranks("LOCKSTEP_STOP").items() >= {("LOCKSTEP_OTHER", "1")}
    assert "sesame" not in variables_of_ranks("LOCKSTEP_STOP").values()


def test_without_ray_the_message_says_what_to_install(monkeypatch):
    def missing(_):
        raise PackageNotFoundError

    monkeypatch.setattr(ray_node, "version", missing)
    with pytest.raises(LaunchError, match=r"Ray is not installed; `pip install 'lockstep-train"):
        check_ray("auto")


def answer(head, status):
    """What Ray's own head answers."""
    connection, _ = head.accept()
    with connection:
        assert connection.recv(4096).startswith(b"PRI * HTTP/2.0")
        connection.sendall(b"\x40\x0ccontent-type\x10application/grpc@\x0bgrpc-status")
        connection.sendall(bytes([len(status)]) + status.encode())


def test_addresses_of_no_cluster_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(ray_node, "version", lambda _: "2.60.0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    with pytest.raises(LaunchError, match=rf"--ray-address 127.0.0.1:{port}: no Ray cluster"):
        check_ray(f"127.0.0.1:{port}")
    for address in ("ray://head:10001", "head", "http://head:8265"):
        with pytest.raises(LaunchError, match=f"{address}: must be HOST:PORT"):
            check_ray(address)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with monkeypatch.context() as patch:
            patch.setattr(ray_node, "_CONNECT_S", 0.1)
            with pytest.raises(LaunchError, match=r"no answer for 0\.1 s"):
                check_ray(f"127.0.0.1:{port}")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as web:
        threading.Thread(target=web.handle_request, daemon=True).start()
        with pytest.raises(LaunchError, match="no Ray cluster answers there"):
            check_ray(f"127.0.0.1:{web.server_port}")
    for status, refused in (("16", True), ("0", False)):
        with socket.create_server(("127.0.0.1", 0)) as head:
            threading.Thread(target=answer, args=(head, status), daemon=True).start()
            address = "127.0.0.1:{1}".format(*head.getsockname())
            with pytest.raises(LaunchError, match="wants a token") if refused else nullcontext():
                check_ray(address)
    monkeypatch.setattr(ray_node, "_known_here", set)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(LaunchError, match=r"--ray-address auto: .* \(Ray does not run on this"):
        check_ray_address("ray", None)
    with pytest.raises(LaunchError, match="--ray-address auto: belongs to --launcher ray"):
        check_ray_address("local", "auto")


def test_a_node_without_the_folders_says_so(tmp_path):
    terms = Terms("1", "", 1, 1, 0, 5.0, ("-c", "0"))
    work = Work("127.0.0.1:1", terms, str(tmp_path), "run", {}, 1, "")
    with pytest.raises(LaunchError, match=f"the run directory {tmp_path}/run is not there; choose"):
        Node().run(work)
    gone = replace(work, folder=str(tmp_path / "gone"))
    with pytest.raises(LaunchError, match=r"the working directory .*/gone is not there; choose"):
        Node().run(gone)


def test_commands_that_measure_this_host_do_not_take_ray():
    assert choose_launcher("ray", 8, TRAIN_LAUNCHERS) == "ray"
    with pytest.raises(LaunchError, match="--launcher ray: must be one of python, local, mpi"):
        choose_launcher("ray", 8)


BESIDE = """
import os
import torch, torch.distributed as dist
import lockstep as ls
from slow import Slow
dist.init_process_group("gloo")
for part in ("", "again"):
    ls.train(Slow(), run_dir="run" + part, quiet=True, steps=20)
own = torch.ones(1)
dist.all_reduce(own)
assert own.item() == 2
os.environ["RANK"], os.environ["WORLD_SIZE"] = str(dist.get_rank() + 1), "3"
try:
    ls.train(Slow(), run_dir="more", quiet=True)
except ls.LockstepError as error:
    print(error)
dist.destroy_process_group()
"""


def test_a_program_with_a_process_group_of_its_own_trains_beside_it(ranks, lockstep, tmp_path):
    (tmp_path / "slow.py").write_text(TASK)
    (tmp_path / "beside.py").write_text(BESIDE)
    done = ranks("torchrun", 2, tmp_path / "beside.py")
    assert done.returncode == 0, done.stderr
    assert "torch.distributed was initialised as rank 0 of 2; set both" in done.stdout
    assert lockstep("train", "slow.py:Slow", "steps=20", "--run-dir", "alone").returncode == 0
    shas = {result(tmp_path / name)["params_sha256"] for name in ("alone", "run", "runagain")}
    assert len(shas) == 1


@pytest.fixture(scope="module")
def nodes():
    """Two nodes, which each test leaves as they were."""
    cluster = Nodes(2)
    yield cluster
    cluster.close()


@pytest.fixture
def alone(tmp_path, lockstep):
    """The SHA-256 of the run on one rank."""
    (tmp_path / "slow.py").write_text(TASK)
    assert lockstep("train", "slow.py:Slow", STEPS, "--run-dir", "alone").returncode == 0
    return result(tmp_path / "alone")["params_sha256"]


class Training:
    """`lockstep train --launcher ray`, slowed down while it is watched."""

    def __init__(self, folder, address, *options, num_ranks=2):
        (folder / "slow.py").write_text(TASK)
        (folder / "slowly").touch()
        self.folder = folder
        argv = [sys.executable, "-m", "lockstep", "train", "slow.py:Slow", STEPS]
        argv += ["--launcher", "ray", "-n", str(num_ranks), "--ray-address", address, *options]
        with (folder / "said").open("ab") as said:
            self.process = subprocess.Popen(
                [*argv, "--run-dir", "run"], cwd=folder, env=environment(cold=True),
                stdout=said, stderr=said,
            )  # fmt: skip

    def rows(self, kind):
        path = self.folder / "run" / "events.jsonl"
        return [row for row in read_events(path) if row["event"] == kind] if path.exists() else []

    def wait_for(self, kind, number):
        deadline = time.monotonic() + 90
        while len(self.rows(kind)) < number:
            assert time.monotonic() < deadline, self.said()
            assert self.process.poll() is None, self.said()
            time.sleep(0.02)

    def end(self):
        (self.folder / "slowly").unlink(missing_ok=True)
        return self.process.wait(90)

    def said(self):
        log = self.folder / "run" / "ranks.log"
        return (self.folder / "said").read_text() + (log.read_text() if log.exists() else "")


@pytest.fixture
def train(tmp_path, nodes):
    started = []

    def start(*options, **more):
        started.append(Training(tmp_path, nodes.address, *options, **more))
        return started[-1]

    yield start
    for training in started:
        if training.process.poll() is None:
            training.process.kill()
            training.process.wait()


def nothing_left(nodes, seconds=20):
    """Whether Ray has taken everything back, within some seconds."""
    deadline = time.monotonic() + seconds
    while (left := nodes.do("left")) != {"groups": 0, "busy": 0} and time.monotonic() < deadline:
        time.sleep(0.5)
    return left == {"groups": 0, "busy": 0}


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_bits_on_a_cluster_are_those_of_one_rank(num_ranks, nodes, train, alone, tmp_path):
    training = train(num_ranks=num_ranks)
    assert training.end() == 0, training.said()
    assert result(tmp_path / "run")["params_sha256"] == alone
    assert nothing_left(nodes)


@needs_ray
@pytest.mark.slow
def test_a_node_that_dies_is_survived_and_a_new_one_is_taken_in(nodes, train, alone, tmp_path):
    training = train()
    training.wait_for("StepDone", 3)
    nodes.do("remove")
    training.wait_for("Recovered", 1)
    nodes.do("add")
    training.wait_for("Recovered", 2)
    assert training.end() == 0, training.said()
    assert [row["world_size"] for row in training.rows("Recovered")] == [1, 2]
    assert result(tmp_path / "run")["params_sha256"] == alone
    assert nothing_left(nodes)


@needs_ray
@pytest.mark.slow
def test_a_killed_agent_is_started_again_and_a_killed_rank_replaced(nodes, train, alone, tmp_path):
    training = train("--replace", "1")
    training.wait_for("StepDone", 3)
    pids = {row["slot"]: row["pid"] for row in training.rows("Joined")}
    os.kill(pids[1], signal.SIGKILL)
    training.wait_for("Recovered", 2)
    joined = training.rows("Joined")[-1]["pid"]
    agent = int(Path(f"/proc/{joined}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    training.wait_for("Recovered", 4)
    assert training.end() == 0, training.said()
    assert [row["world_size"] for row in training.rows("Recovered")] == [1, 2, 1, 2]
    assert result(tmp_path / "run")["params_sha256"] == alone


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "code", "status"),
    [
        (signal.SIGINT, 130, "stopped"),
        (signal.SIGTERM, 143, "stopped"),
        (signal.SIGHUP, 129, "stopped"),
        (signal.SIGKILL, -9, None),
    ],
)
def test_a_signal_ends_everything(signum, code, status, nodes, train, tmp_path):
    training = train()
    training.wait_for("StepDone", 3)
    pids = [row["pid"] for row in training.rows("Joined")]
    training.process.send_signal(signum)
    assert training.process.wait(30) == code, training.said()
    if status is not None:
        assert result(tmp_path / "run")["status"] == status
        assert result(tmp_path / "run")["checkpoint"]
    assert nothing_left(nodes)
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, pids))


@needs_ray
@pytest.mark.slow
def test_a_cluster_that_is_too_small_is_one_message(nodes, train, tmp_path):
    training = train(num_ranks=3)
    assert training.process.wait(30) == 2
    said = training.said()
    assert "error: -n 3: the Ray cluster is too small: a rank needs 1 CPU" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
    assert nothing_left(nodes)


@needs_ray
@pytest.mark.slow
def test_what_ranks_print_comes_home(nodes, tmp_path):
    (tmp_path / "script.py").write_text(
        TASK + "\nif __name__ == '__main__':\n    print('größer ' * 3)\n    ls.main(Slow())\n"
    )
    argv = [sys.executable, "-m", "lockstep", "train", "script.py", "steps=5", "-n", "2"]
    argv += ["--launcher", "ray", "--ray-address", nodes.address, "--run-dir", "run"]
    done = run(argv, tmp_path, cold=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("größer größer größer") == 2


@needs_ray
@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("raise ValueError('of mine')", 1, "ValueError: of mine"),
        ("raise ls.errors.DataError('no such file')", 2, "error: no such file"),
        ("import os; os._exit(7)", 7, "the ranks ended with code 7 before they had a result"),
    ],
)
def test_an_error_of_a_rank_is_told_at_home(line, code, words, nodes, tmp_path):
    before = "    def dataset(self, split):\n"
    assert before in TASK
    (tmp_path / "slow.py").write_text(TASK.replace(before, f"{before}        {line}\n"))
    argv = [sys.executable, "-m", "lockstep", "train", "slow.py:Slow", STEPS, "-n", "2"]
    argv += ["--launcher", "ray", "--ray-address", nodes.address, "--run-dir", "run"]
    done = run(argv, tmp_path, cold=True)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    assert nothing_left(nodes)


@needs_ray
@pytest.mark.slow
def test_a_task_in_memory_is_launched_on_a_cluster(nodes, alone, tmp_path):
    (tmp_path / "program.py").write_text(
        TASK.replace("import lockstep as ls", "import lockstep as ls\n\ndef made():\n    pass")
        + "\nif __name__ == '__main__':\n"
        "    class Inner(Slow):\n        pass\n"
        "    kind = type('Slow', (Slow,), {'__module__': '__main__', 'here': True})\n"
        f"    done = ls.launch(kind(), num_ranks=2, launcher='ray', steps={STEPS[6:]},\n"
        f"        ray_address='{nodes.address}', run_dir='run', quiet=True)\n"
        "    print(done.params_sha256, done.world_size)\n"
    )
    done = run([sys.executable, "program.py"], tmp_path, cold=True)
    assert done.stdout.split()[-2:] == [alone, "2"], done.stderr
    assert nothing_left(nodes)


TRAINER = """
import os, sys
def loop(config):
    sys.path.insert(0, config["folder"])
    os.chdir(config["folder"])
    import lockstep as ls
    from slow import Slow
    ls.train(Slow(), steps=config["steps"], run_dir="run")

if __name__ == "__main__":
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer
    TorchTrainer(
        loop,
        train_loop_config={"folder": os.getcwd(), "steps": int(sys.argv[1])},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.5}),
        run_config=RunConfig(storage_path=os.path.abspath("ray")),
    ).fit()
"""


@needs_ray
@pytest.mark.slow
def test_a_script_just_works_in_workers_of_ray_train(nodes, alone, tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    argv = [sys.executable, "trainer.py", STEPS[6:]]
    done = run(argv, tmp_path, cold=True, RAY_ADDRESS=nodes.address)
    assert done.returncode == 0, done.stderr[-3000:]
    run_result = result(tmp_path / "run")
    assert (run_result["params_sha256"], run_result["world_size"]) == (alone, 2)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["target"] == ""
