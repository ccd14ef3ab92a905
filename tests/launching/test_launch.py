"""`ls.launch`: ranks from a program, with the bits, files and errors of `lockstep train`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import WARM, environment, run
from tests.launching.api.test_train import Line
from torch import nn

import lockstep as ls
from lockstep import errors
from lockstep.engine.digests import model_digest
from lockstep.engine.faults import PlannedFault, to_env
from lockstep.launching.transfer import received
from lockstep.observe import read_events

ROOT = str(Path(__file__).parents[2])

MODULE = """
from tests.launching.api.test_train import Line


class InAFile(Line):
    '''A line, of a class that ranks can import.'''
"""


def config(**keys: Any) -> ls.TrainConfig:
    return ls.TrainConfig(**{"batch_size": 16, "num_microbatches": 4, "lr": 0.1, "steps": 8} | keys)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ls.Result]:
    """`ls.launch` in an empty folder, with ranks that start quickly."""
    folder = tmp_path / "мои runs"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for name, value in WARM.items():
        monkeypatch.setenv(name, value)

    def call(task: Any, *arguments: Any, **options: Any) -> ls.Result:
        return ls.launch(task, *arguments, **{"num_ranks": 2, "quiet": True, **options})

    return call


@pytest.fixture
def in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Line]:
    (tmp_path / "in_a_file.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "in_a_file", raising=False)
    kind: type[Line] = __import__("in_a_file").InAFile
    return kind


class PressesCtrlC(Line):
    """Interrupts the program that has launched it, at its third step."""

    program = 0

    def after_step(self, model: nn.Module, step: int) -> None:
        time.sleep(0.03)  # so that there are steps left when the ranks hear of it
        if step == 3 and os.environ.get("LOCKSTEP_LOCAL_RANK") == "0":
            os.kill(self.program, signal.SIGINT)


class Waits(Line):
    """Takes its time until all joining ranks have joined, however long they take to start."""

    events = Path()

    def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
        if self.events.exists() and self.events.read_text().count('"Joined"') < 3:
            time.sleep(0.03)
        return super().loss(model, batch)


def target(run_dir: Path) -> str:
    return str(json.loads((run_dir / "run.json").read_text())["target"])


def test_any_way_to_the_ranks_gives_the_bits_of_one_process(
    launch: Callable[..., ls.Result], in_a_file: type[Line], tmp_path: Path
) -> None:
    plain = ls.train(Line(config()), run_dir=tmp_path / "plain", quiet=True)
    task = in_a_file(config())
    named = launch(task, run_dir="named")
    assert target(named.run_dir) == f"{tmp_path}/in_a_file.py:InAFile"
    assert (named.run_dir / "ranks.log").exists()
    assert (named.status, named.step, named.world_size) == ("completed", 8, 2)
    assert named.task is task
    assert named.metrics == pytest.approx(plain.metrics)
    assert model_digest(named.model) == named.params_sha256 == plain.params_sha256
    assert not named.model.training

    class Local(Line):
        scale = 1.0

        def __init__(self, config: ls.TrainConfig | None = None) -> None:
            super().__init__(config)
            self.more = lambda x: x * self.scale

    copied = launch(Local(), config(), num_ranks=3)
    assert target(copied.run_dir) == ""
    assert copied.run_dir.parent == Path("runs")
    assert copied.params_sha256 == plain.params_sha256
    over_mpi = launch(task, run_dir="mpi", launcher="mpi")
    assert over_mpi.params_sha256 == plain.params_sha256


def test_a_task_that_holds_more_than_its_config_is_copied_with_it(
    launch: Callable[..., ls.Result], in_a_file: type[Line]
) -> None:
    task = in_a_file(config())
    vars(task)["more"] = 3
    result = launch(task)
    assert target(result.run_dir) == ""
    with pytest.raises(errors.LaunchError, match="holds more than its config makes of it"):
        launch(task, launcher="mpi")


@pytest.mark.slow
def test_a_killed_rank_is_replaced_by_one_that_gets_the_copy_too(
    launch: Callable[..., ls.Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = config(steps=120, eval_every=120)
    plain = ls.train(Line(long), run_dir=tmp_path / "plain", quiet=True)
    for name, value in to_env([PlannedFault(slot=1, step=3)]).items():
        monkeypatch.setenv(name, value)
    task = Waits(long)
    vars(task)["more"] = lambda: 3
    task.events = Path("run", "events.jsonl").absolute()
    result = launch(task, replacements=1, run_dir="run")
    assert target(result.run_dir) == ""
    assert result.params_sha256 == plain.params_sha256
    kinds = [row["event"] for row in read_events(result.run_dir / "events.jsonl")]
    assert "RankLost" in kinds
    assert kinds.count("Joined") == 3


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_the_run_goes_on_later(
    launch: Callable[..., ls.Result], tmp_path: Path, here: Any
) -> None:
    long = config(steps=40, eval_every=40)
    plain = ls.train(Line(long), run_dir=tmp_path / "plain", quiet=True)
    task = PressesCtrlC(long)
    task.program = os.getpid()
    with pytest.raises(ls.Stopped, match="interrupted; go on with") as caught:
        launch(task, run_dir=tmp_path / "run")
    stopped = caught.value.result
    assert caught.value.exit_code == 130
    assert 3 <= stopped.step < 40
    assert stopped.checkpoint is not None
    assert stopped.checkpoint.is_dir()
    assert model_digest(stopped.model) == stopped.params_sha256
    result = launch(task, run_dir=tmp_path / "run", resume=True, num_ranks=1)
    assert result.params_sha256 == plain.params_sha256
    done = here("resume", "run")
    assert done.returncode == 2
    assert "launch(task, config, num_ranks=..., run_dir=..., resume=True)" in done.stderr


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"watch": "nonsense"}, errors.ConfigError, "watch='nonsense'"),
        ({"lr": 1e30, "optimizer": {"name": "sgd"}}, errors.NonFiniteError, "step"),
        ({"min_ranks": 3}, errors.ConfigError, "min_ranks=3"),
    ],
)
def test_errors_of_the_ranks_are_raised_here(
    launch: Callable[..., ls.Result],
    capfd: pytest.CaptureFixture[str],
    keys: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    with pytest.raises(kind, match=message):
        launch(Line(config(**keys | {"steps": 60})))
    assert "Traceback" not in "".join(capfd.readouterr())


def test_an_exception_of_the_task_is_raised_here_once(launch: Callable[..., ls.Result]) -> None:
    class Bad(Line):
        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            raise KeyError("lost")

    with pytest.raises(errors.TaskFailure, match="KeyError: 'lost'") as caught:
        launch(Bad(config()))
    assert caught.value.exit_code == 1


class Forgetful(Line):
    """Cannot be unpickled, nor made of its config."""

    def __init__(self, config: ls.TrainConfig, more: int) -> None:
        super().__init__(config)

    def __reduce__(self) -> Any:
        return int, ("nothing",)


def test_a_copy_that_cannot_be_rebuilt(launch: Callable[..., ls.Result]) -> None:
    with pytest.raises(errors.LaunchError, match="cannot be rebuilt in a rank: ValueError: inv"):
        launch(Forgetful(config(), more=3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_ranks": 0}, "num_ranks=0: must be an integer of at least 1"),
        ({"num_ranks": "2"}, "num_ranks='2': must be"),
        ({"num_ranks": True}, "num_ranks=True: must be"),
        ({"launcher": "torchrun"}, "launcher='torchrun': must be one of mpi, local"),
        ({"replacements": -1}, "replacements=-1: must be"),
        ({"task": Line}, "needs a Task, got .*; call Line()"),
        ({"task": 3}, "needs a Task, got 3"),
        ({"config": "fast"}, "needs a TrainConfig, got a str"),
    ],
)
def test_arguments_that_do_not_work(
    launch: Callable[..., ls.Result], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ls.LockstepError, match=message):
        launch(**{"task": Line(config()), **options})
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there is a GPU for each rank")
def test_no_gpu(launch: Callable[..., ls.Result]) -> None:
    with pytest.raises(errors.ConfigError, match=r"device='cuda': (this host has|torch)"):
        launch(Line(config(device="cuda")))


def test_what_cannot_be_copied_is_named(launch: Callable[..., ls.Result]) -> None:
    lock = threading.Lock()

    class Locked(Line):
        def loss(self, model: nn.Module, batch: Any) -> ls.Loss:
            with lock:
                return super().loss(model, batch)

    held = Line(config())
    vars(held)["held"] = {"lock": lock}
    for task, path in [(held, r"task\.held\['lock'\]"), (Locked(config()), r"task\.loss\.lock")]:
        with pytest.raises(errors.TaskError, match=f"^{path}: cannot be copied") as caught:
            launch(task)
        assert "cannot pickle '_thread.lock' object" in str(caught.value)


@pytest.mark.slow
def test_from_a_thread_twice_with_more_ranks_than_cores(launch: Callable[..., ls.Result]) -> None:
    digests: list[str] = []

    def work() -> None:
        for num_ranks in (1, 3):
            result = launch(Line(config()), num_ranks=num_ranks)
            digests.append(result.params_sha256)

    threads = torch.get_num_threads()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert torch.get_num_threads() == threads


SCRIPT = """
import lockstep as ls
from tests.launching.api.test_train import Line as Base

class Line(Base):
    seen = []
    def loss(self, model, batch):
        {loss}
        return super().loss(model, batch)

def main():
    print(ls.launch(Line(ls.TrainConfig(steps=2)), num_ranks=2, run_dir="run").status)

seen = 0
{call}
"""


@pytest.mark.parametrize(
    ("call", "code", "message"),
    [
        ("main()", 2, "error: launch: this process is already a rank; in a script, call it below"),
        ("if __name__ == '__main__': main()", 0, "completed"),
    ],
)
def test_a_script(tmp_path: Path, call: str, code: int, message: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(loss="pass", call=call))
    done = run([sys.executable, script], tmp_path, PYTHONPATH=ROOT)
    assert done.returncode == code
    assert message in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if code:
        assert not (tmp_path / "run").exists()
    else:
        assert target(tmp_path / "run") == f"{script}:Line"


def test_at_a_prompt_global_state_is_found_in_the_ranks(tmp_path: Path) -> None:
    lines = "global seen; seen = seen + 1"
    code = SCRIPT.format(loss=lines, call="main()")
    done = run([sys.executable, "-c", code], tmp_path, PYTHONPATH=ROOT)
    assert "seen" in done.stderr
    assert done.returncode == 2
    assert not (tmp_path / "run").exists()


def test_a_named_file_is_never_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "evil"
    path.write_bytes(b"cos\nsystem\n(S'touch ran'\ntR.")
    with path.open("rb") as file, pytest.raises(errors.LaunchError, match="is not memory of the"):
        received(file.fileno())
    done = run([sys.executable, "-m", "lockstep.launching.transfer", "0"], tmp_path)
    assert done.returncode == 2
    assert "call that" in done.stderr
    assert environment().get("LOCKSTEP_SESSION") is None
