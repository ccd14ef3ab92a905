"""Run directories on hosts that share no disk: a host that is lost for good loses nothing."""

import pytest
from tests.conftest import result
from tests.distributed.local_disks import Disks, files, newest, sha_alone, steps, warnings

KEYS = ("steps=60", "checkpoint.every=10")


def test_a_host_is_lost_with_its_disk_and_then_all_are(tmp_path, lockstep):
    """The survivor goes on; after the end of all, its directory alone has the run."""
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    run = Disks(tmp_path, 2, *KEYS)
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
def test_after_the_end_of_all_a_run_goes_on_without_a_disk(tmp_path, lockstep, lost, is_back):
    sha = sha_alone(tmp_path, lockstep, *KEYS)
    run = Disks(tmp_path, 2, *KEYS)
    run.slow_down()
    run.begin()
    run.wait_for(lambda: all(newest(run.run_of(h)) >= "step_00000020" for h in (0, 1)))
    run.kill_all()
    run.lose(lost)
    left = 1 - lost
    before = steps(run.run_of(left))
    again = Disks(tmp_path, 1 + is_back, *KEYS, hosts=[0, 1] if is_back else [left])
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
