"""`ls.launch` in the kernel of a notebook, which nbclient and Jupyter's client talk to."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager, start_new_kernel
from nbclient import NotebookClient
from tests.conftest import environment, result
from tests.launching.api.test_train import Line

import lockstep as ls
from lockstep.observe import read_events

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
CONFIG = {"batch_size": 16, "num_microbatches": 4, "lr": 0.1, "eval_every": 60, "steps": 60}

CELL = f"""
import sys
sys.path.append({str(ROOT)!r})
import time
import lockstep as ls
from tests.launching.api.test_train import Line

class InACell(Line):
    def after_step(self, model, step):
        time.sleep(0.02)

def go(**options):
    config = ls.TrainConfig(log_every=1, **{CONFIG!r})
    return ls.launch(InACell(config), num_ranks=2, run_dir="run", **options)
"""


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    manager, client = start_new_kernel(env=environment(), cwd=str(tmp_path))
    try:
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()


def reply(client: BlockingKernelClient, request: str) -> tuple[dict[str, Any], str]:
    """What a kernel answers to a request to run code, and what the cell shows then."""
    shown = ""
    while True:
        message = client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        content = message["content"]
        if content.get("execution_state") == "idle":
            break
        shown += content.get("text", "") + "\n".join(content.get("traceback", []))
        shown += content.get("data", {}).get("text/plain", "")
    while True:
        answer = client.get_shell_msg(timeout=60)
        if answer["parent_header"].get("msg_id") == request:
            return answer["content"], shown


def test_the_example_runs_on_two_ranks(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    cells = {cell["id"]: cell for cell in notebook.cells}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env=environment())
    (bar,) = [o for o in cells["train"].outputs if o.output_type == "display_data"]
    assert bar.data["text/plain"].startswith("step 240/240")
    assert '<progress value="240" max="240">' in bar.data["text/html"]
    text = "".join(o.get("text", "") for o in cells["train"].outputs)
    assert "2 ranks on 1 host" in text
    assert "completed at step 240" in text
    correct = int(cells["model"].outputs[0].text.split()[0])
    assert correct > 1800
    assert result(tmp_path / "runs" / "spirals")["world_size"] == 2


def test_interrupting_a_cell_stops_with_a_checkpoint_and_the_run_goes_on(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    plain = ls.train(Line(ls.TrainConfig(**CONFIG)), run_dir=tmp_path / "plain", quiet=True)
    answer, shown = reply(client, client.execute(CELL))
    assert answer["status"] == "ok", shown
    request = client.execute("go()")
    deadline = time.monotonic() + 60
    while not any(row["event"] == "StepDone" for row in events(tmp_path / "run")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    manager.interrupt_kernel()
    answer, shown = reply(client, request)
    assert (answer["status"], answer["ename"]) == ("error", "Stopped")
    assert "stopping at the next step boundary" in shown
    assert "Stopped: stopped after step" in shown
    assert "Traceback" not in shown
    stopped = result(tmp_path / "run")
    assert 0 < stopped["step"] < 60
    assert Path(tmp_path, stopped["checkpoint"]).is_dir()
    again = client.execute("done = go(resume=True, quiet=True)\nprint(done.params_sha256)")
    answer, shown = reply(client, again)
    assert answer["status"] == "ok", shown
    assert plain.params_sha256 in shown


LOOP = """
def looped(leave_at=0, **options):
    config = ls.TrainConfig(log_every=1, **CONFIG)
    steps = ls.steps(InACell(config), run_dir="loop", quiet=True, **options)
    for step in steps:
        if step.number == leave_at:
            break
    return steps.result
"""


def test_a_loop_in_a_cell_is_left_interrupted_and_gone_on_with(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    plain = ls.train(Line(ls.TrainConfig(**CONFIG)), run_dir=tmp_path / "plain", quiet=True)
    first = f"{CELL}\nCONFIG = {CONFIG!r}{LOOP}\nprint(looped(3).reason)"
    answer, shown = reply(client, client.execute(first))
    assert answer["status"] == "ok", shown
    assert "the loop was left" in shown
    request = client.execute("looped(resume=True)")
    deadline = time.monotonic() + 60
    while events(tmp_path / "loop")[-1]["step"] < 6:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    manager.interrupt_kernel()
    answer, shown = reply(client, request)
    assert (answer["status"], answer["ename"]) == ("error", "Stopped"), shown
    answer, shown = reply(client, client.execute("print(looped(resume=True).params_sha256)"))
    assert answer["status"] == "ok", shown
    assert plain.params_sha256 in shown


def test_an_error_is_one_message_in_a_cell(
    kernel: tuple[KernelManager, BlockingKernelClient],
) -> None:
    _, client = kernel
    code = f"{CELL}\nls.launch(InACell(), num_ranks=0)"
    answer, shown = reply(client, client.execute(code))
    assert answer["ename"] == "LaunchError"
    assert shown == "LaunchError: num_ranks=0: must be an integer of at least 1"


def test_interrupting_a_cell_before_the_first_step(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    request = client.execute(f"{CELL}\ngo()")
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "ranks.log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    manager.interrupt_kernel()
    answer, shown = reply(client, request)
    assert answer["ename"] == "NothingSaved"
    assert shown.endswith("KeyboardInterrupt: stopped before the first step; nothing was saved")


def events(run_dir: Path) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    return read_events(path) if path.exists() else []
