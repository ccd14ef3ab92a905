"""Run directories on hosts that share no disk: a host that is lost for good loses nothing."""

import contextlib
import os
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.conftest import result
from tests.distributed.conftest import CONFIG
from tests.distributed.local_disks import Disks, files, newest, sha_alone, steps, warnings
from tests.launching.host.test_agents import free_port

from lockstep.engine.faults import PlannedFault

KEYS = ("steps=60", "checkpoint.every=10")


@pytest.fixture
def disks(tmp_path):
    """Makes hosts; kills what is left of them at the end."""
    made = []

    def make(*arguments, **keys):
        made.append(Disks(tmp_path, *arguments, **keys))
        return made[-1]

    yield make
    for run in made:
        run.kill_all()


@pytest.mark.slow
def test_a_host_is_lost_with_its_disk(tmp_path, disks, lockstep):
    """The other goes on, to the bits of one process."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    run = disks(2, *KEYS)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: newest(run.run_of(1)) >= "step_00000010")
    run.lose(1)
    run.wait_for(lambda: run.rows("Recovered"))
    run.slow_down(False)
    assert run.ended() == [0, -9]
    assert result(run.run_of(0))["params_sha256"] == sha
    assert steps(run.run_of(0)) == [*range(1, 61)]


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True], ids=["without it", "with an empty disk"])
@pytest.mark.parametrize("lost", [0, 1])
def test_after_the_end_of_all_a_run_goes_on_without_a_disk(
    tmp_path, disks, lockstep, lost, is_back
):
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    run = disks(2, *KEYS)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: all(newest(run.run_of(h)) >= "step_00000020" for h in (0, 1)))
    run.kill_all()
    run.lose(lost)
    left = 1 - lost
    before = steps(run.run_of(left))
    again = disks(1 + is_back, *KEYS, hosts=[0, 1] if is_back else [left])
    again.slow_down(False)
    again.begin()
    assert again.ended() == [0] * (1 + is_back), again.said()
    for host in again.known:
        assert result(run.run_of(host))["params_sha256"] == sha
        assert steps(run.run_of(host))[: len(before)] == before
        assert files(run.run_of(host)) == files(run.run_of(left))
        assert newest(run.run_of(host)) == "step_00000060"
    resumed = [r["path"] for r in again.rows("Resumed")]
    assert len(resumed) == 1
    if is_back:
        told = [text for text in warnings(run.run_of(0)) if "is copied from" in text]
        assert len(told) >= 2
    else:
        assert "checkpoint.copies=2: all ranks" in again.said()


@pytest.mark.slow
@pytest.mark.parametrize("slots", [[0], [1], [0, 1]], ids=["first", "second", "both"])
def test_a_kill_between_tensors_and_manifest_costs_no_checkpoint(tmp_path, disks, lockstep, slots):
    """On one host the other goes on; on both, all start again from the checkpoint before."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    faults = [PlannedFault(slot, 30, "checkpoint") for slot in slots]
    run = disks(2, *KEYS, faults=faults).begin()
    codes, left = run.ended(), [host for host in (0, 1) if host not in slots]
    if not left:
        assert all(codes)
        assert newest(run.run_of(0)) == newest(run.run_of(1)) == "step_00000020"
        left = [0, 1]
        run = disks(2, *KEYS, hosts=[1, 0], faults=faults).begin()
        codes = run.ended()
    assert codes == [0, 0], run.said()
    for host in left:
        assert result(run.run_of(host))["params_sha256"] == sha
        assert sorted(set(steps(run.run_of(host)))) == [*range(1, 61)]
        assert newest(run.run_of(host)) == "step_00000060"
        assert not list((run.run_of(host) / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_the_newest_complete_checkpoint_of_all_hosts_is_used(tmp_path, disks, lockstep):
    """One host has an older one and a newer one without a manifest; and it has rank 0 now."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    stop = disks(2, *KEYS, "stop_at_step=40").begin()
    assert stop.ended() == [0, 0], stop.said()
    root = stop.run_of(1) / "checkpoints"
    (root / "step_00000040" / "manifest.json").unlink()
    model = root / "step_00000030" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    again = disks(2, *KEYS, hosts=[1, 0]).begin()
    assert again.ended() == [0, 0], again.said()
    assert result(again.run_of(0))["params_sha256"] == sha
    assert result(again.run_of(1))["params_sha256"] == sha
    assert [row["step"] for row in again.rows("Resumed")] == [40]
    assert files(again.run_of(0)) == files(again.run_of(1))
    told = "\n".join(warnings(again.run_of(1)))
    assert "step_00000040 of " in told
    assert "step_00000040 is copied from" in told
    assert steps(again.run_of(0)) == steps(again.run_of(1)) == [*range(1, 61)]


@pytest.mark.slow
def test_a_third_host_gets_what_a_lost_one_had(tmp_path, disks, lockstep):
    keys = (*KEYS, "checkpoint.keep=2")
    sha = sha_alone(tmp_path, lockstep, *keys)
    run = disks(3, *keys)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: newest(run.run_of(0)) >= "step_00000030")
    [lost] = [host for host in (1, 2) if newest(run.run_of(host))]
    third = 3 - lost
    run.lose(lost)
    run.wait_for(lambda: newest(run.run_of(third)) >= "step_00000020")
    run.wait_for(lambda: any("is copied from" in text for text in warnings(run.run_of(0))))
    run.slow_down(False)
    codes = run.ended()
    assert (codes[0], codes[lost], codes[third]) == (0, -9, 0), run.said()
    assert files(run.run_of(0)) == files(run.run_of(third))
    for host in (0, third):
        assert result(run.run_of(host))["params_sha256"] == sha
        assert steps(run.run_of(host)) == [*range(1, 61)]


@pytest.mark.slow
def test_a_host_joins_with_an_empty_disk(tmp_path, disks, lockstep):
    """It gets the history, and the checkpoints, for one of two hosts was lost."""
    keys = ("steps=150", "checkpoint.every=10")
    sha = sha_alone(tmp_path, lockstep, *keys)
    run = disks(2, *keys)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: newest(run.run_of(1)) >= "step_00000010")
    run.lose(1)
    run.wait_for(lambda: run.rows("Recovered"))
    run.slow_down()
    run.start(1)
    run.wait_for(lambda: newest(run.run_of(1)))
    run.slow_down(False)
    assert run.ended() == [0, 0], run.said()
    assert files(run.run_of(0)) == files(run.run_of(1))
    for host in (0, 1):
        assert result(run.run_of(host))["params_sha256"] == sha
        assert steps(run.run_of(host)) == [*range(1, 151)]


@pytest.fixture
def small_disk(tmp_path):
    """The run directory of host 1, on a file system of 1 MiB."""
    run_dir = tmp_path / "h1" / "run"
    run_dir.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", run_dir], check=True)
    yield run_dir
    subprocess.run(["umount", "-l", run_dir], check=True)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_of_one_host_costs_its_copy(tmp_path, small_disk, disks, lockstep):
    """Training goes on, and says so; at the end both hosts must have the state."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    run = disks(2, *KEYS)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: newest(small_disk) >= "step_00000010")
    balloon = small_disk / "balloon"
    with contextlib.suppress(OSError), balloon.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    run.slow_down(False)
    assert run.ended() == [2, 2], run.said()
    assert "could not be written to" in "\n".join(warnings(run.run_of(0)))
    assert "step_00000060: the last checkpoint could not be written" in run.said()
    assert newest(run.run_of(0)) == "step_00000060"
    balloon.unlink()
    again = disks(2, *KEYS).begin()
    assert again.ended() == [0, 0], again.said()
    for host in (0, 1):
        assert result(run.run_of(host))["params_sha256"] == sha
        assert sorted(set(steps(run.run_of(host)))) == [*range(1, 61)]
    assert files(run.run_of(0)).items() <= files(run.run_of(1)).items()


@pytest.mark.slow
def test_what_cannot_go_on_is_refused(tmp_path, disks, lockstep):
    """A host with another run; hosts that have none of the checkpoints."""
    stop = disks(3, *KEYS, "stop_at_step=30").begin()
    assert stop.ended() == [0, 0, 0], stop.said()
    before = files(stop.run_of(0))
    [spare] = [host for host in (1, 2) if not files(stop.run_of(host))]

    def refused(*keys, hosts):
        run = disks(len(hosts), *keys, hosts=hosts)
        run.log = tmp_path / f"log of {hosts} {keys}"
        run.begin()
        assert run.ended() == [2] * len(hosts), run.said()
        [line] = [line for line in run.said().splitlines() if line.startswith("error: ")]
        return run.said()[run.said().index(line) :]

    told = refused(*KEYS, hosts=[spare])
    assert "no checkpoint is valid" in told
    assert "step_00000030, which is missing" in told
    other = disks(1, "steps=20", "lr=0.5", hosts=[3]).begin()
    assert other.ended() == [0]
    there = files(other.run_of(3))
    assert "lr is 0.5 there, 0.01 here" in refused(*KEYS, hosts=[0, 3])
    assert (files(stop.run_of(0)), files(other.run_of(3))) == (before, there)


@pytest.mark.slow
def test_a_directory_on_each_host_with_one_copy_is_told(tmp_path, disks, lockstep):
    """What the only host with checkpoints has is still found when it is not the first one."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    stop = disks(2, *KEYS, "stop_at_step=30", copies=1).begin()
    assert stop.ended() == [0, 0], stop.said()
    assert "set checkpoint.copies=2" in stop.said()
    assert not files(stop.run_of(1))
    assert steps(stop.run_of(1)) == [*range(1, 31)]
    again = disks(2, *KEYS, hosts=[1, 0], copies=1).begin()
    assert again.ended() == [0, 0], again.said()
    assert [row["step"] for row in again.rows("Resumed")] == [30]
    assert result(again.run_of(1))["params_sha256"] == sha


@pytest.mark.slow
def test_a_host_without_checkpoints_alone_does_not_start_anew(disks):
    """Neither after the end of all between the first checkpoint and the second."""
    run = disks(2, *KEYS, copies=1)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: newest(run.run_of(0)) and steps(run.run_of(1))[-1] > 10)
    run.kill_all()
    assert newest(run.run_of(0)) == "step_00000010"
    before = steps(run.run_of(1))
    alone = disks(1, *KEYS, copies=1, hosts=[1]).begin()
    assert alone.ended() == [2]
    assert "step_00000010, which is missing" in alone.said()
    assert steps(run.run_of(1)) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        ("mesh.tp=2",),
        ("sharding=parameters",),
        ("sharding=optimizer", "checkpoint.background=false"),
    ],
    ids=["shards", "slices", "optimizer"],
)
def test_scattered_state_is_on_both_hosts(tmp_path, disks, lockstep, keys):
    """Each host has two ranks, which share the writing of its files."""
    task = f"{Path(__file__).parents[1] / 'nn' / 'models.py'}:Deep"
    config = (*CONFIG, "checkpoint.every=2", "eval_every=8", "checkpoint.file_bytes=3000")
    argv = ["train", task, *config, "--run-dir", tmp_path / "alone"]
    alone = lockstep(*argv)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    run = disks(2, *config, *keys, task=task, num_ranks=2).begin()
    assert run.ended() == [0, 0], run.said()
    sha = result(tmp_path / "alone")["params_sha256"]
    assert {result(run.run_of(host))["params_sha256"] for host in (0, 1)} == {sha}
    assert files(run.run_of(0)) == files(run.run_of(1))
    own = {name: d for name, d in files(tmp_path / "alone").items() if "manifest" not in name}
    assert {n: d for n, d in files(run.run_of(1)).items() if "manifest" not in n} == own


@contextmanager
def etcd(folder):
    """A server of etcd; its address as one for `--rendezvous`."""
    ports = [free_port() for _ in range(2)]
    client, peer = (f"http://127.0.0.1:{port}" for port in ports)
    argv = ["etcd", "--data-dir", folder / "etcd", "--listen-client-urls", client]
    argv += ["--advertise-client-urls", client, "--listen-peer-urls", peer]
    argv += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield f"etcd://127.0.0.1:{ports[0]}/run"
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("etcd"), reason="needs etcd")
def test_hosts_are_lost_one_after_the_other_in_place(tmp_path, disks, lockstep):
    """That of rank 0 first; what is left has all checkpoints and the whole history."""
    keys = ("steps=200", "checkpoint.every=10", "eval_every=50")
    sha = sha_alone(tmp_path, lockstep, *keys)
    with etcd(tmp_path) as rendezvous:
        run = disks(3, *keys, rendezvous=rendezvous)
        run.slow_down()
        run.begin()
        left = [0, 1, 2]
        for _ in range(2):
            run.wait_for(lambda: sum(bool(newest(run.run_of(host))) for host in left) >= 2)
            run.wait_for(lambda: run.coordinator() in left)
            lost = run.coordinator()
            left.remove(lost)
            reached = max(steps(run.run_of(left[0])), default=0)
            run.lose(lost)
            run.wait_for(
                lambda before=reached: max(steps(run.run_of(left[0])), default=0) > before + 3
            )
        run.slow_down(False)
        run.ended()
    assert result(run.run_of(left[0]))["params_sha256"] == sha
    assert steps(run.run_of(left[0])) == [*range(1, 201)]


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("etcd"), reason="needs etcd")
def test_a_new_rank_0_leaves_another_run_alone(tmp_path, disks):
    """A host joins that holds one at this path, and then the only other host is lost."""
    with etcd(tmp_path) as rendezvous:
        run = disks(2, "steps=4000", "checkpoint.every=10", rendezvous=rendezvous)
        run.slow_down()
        run.begin()
        run.wait_for(lambda: newest(run.run_of(0)) and newest(run.run_of(1)))
        first = run.coordinator()
        run.lose(1 - first)
        run.wait_for(lambda: "Recovered" in (run.run_of(first) / "events.jsonl").read_text())
        other = disks(1, "steps=20", "lr=0.5", hosts=[1 - first]).begin()
        assert other.ended() == [0], other.said()
        path = run.run_of(1 - first)
        there = files(path), steps(path)
        run.slow_down()
        run.start(1 - first)
        run.wait_for(lambda: any("nothing of the run" in t for t in warnings(run.run_of(first))))
        run.lose(first)
        assert run.ended()[1 - first] == 2
    assert "holds a run with another config: " in run.said()
    assert (files(path), steps(path)) == there
