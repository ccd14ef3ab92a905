"""`lockstep verify` tells equal from different."""

from tests.conftest import target


def test_equal(lockstep):
    done = lockstep(
        "verify", target(), "--ranks", "1,2", "--launchers", "python,mpi,torchrun", "steps=5"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal: 5 runs, one SHA-256" in done.stdout


def test_different_names_step_and_parameter(lockstep):
    done = lockstep("verify", target(), "--ranks", "1,2", "--launchers", "mpi", "evil=rank")
    assert done.returncode == 1
    assert "different: 1 of 2 runs" in done.stdout
    assert "first differ after step 1, in " in done.stdout


def test_a_run_that_fails(lockstep):
    done = lockstep("verify", target(), "--ranks", "1", "--launchers", "mpi", "evil=shape")
    assert done.returncode == 1
    assert "mpi × 1 failed: Task.loss: Loss.sum must be a scalar tensor" in done.stdout


def test_bad_ranks_and_launchers(lockstep):
    done = lockstep("verify", target(), "--ranks", "1,x")
    assert done.returncode == 2
    assert "--ranks 1,x" in done.stderr
    done = lockstep("verify", target(), "--ranks", "2", "--launchers", "python")
    assert done.returncode == 2
    assert "plain python runs one rank" in done.stderr
    done = lockstep("verify", target(), "--launchers", "bus")
    assert done.returncode == 2
    assert "--launchers bus" in done.stderr
