"""What is done when an alert comes: a real server, real programs."""

import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from lockstep.launching.rank.early import is_rank
from lockstep.observe.monitor.alerts import Action, Condition, Rule
from lockstep.observe.monitor.alerts.manager import Actions, as_variables
from lockstep.observe.monitor.watch import Alert

ALERT = Alert("high", "on", "runs/a b", "digits", 7, "loss 3 is above 2", 10.0, 12.5)


@pytest.fixture
def server():
    """A server that notes what it gets, and answers with `status` after `delay_s`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body)))
            time.sleep(self.server.delay_s)
            self.send_response(self.server.status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.status, server.delay_s = [], 200, 0.0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def acted(*given, alerts=(ALERT,)):
    """The lines that are told when alerts are acted on."""
    lines = []
    actions = Actions(lines.append)
    do = tuple(Action(**action) for action in given)
    rule = Rule(name="high", when=Condition(rank_lost=True), do=do)
    for alert in alerts:
        actions(alert, rule)
    actions.close(20)
    return lines


def address(server):
    return f"http://127.0.0.1:{server.server_port}/hook"


def test_a_webhook_gets_the_alert_as_json(server):
    assert acted({"webhook": address(server)}) == []
    assert server.got == [
        ("/hook", "application/json", {
            "rule": "high", "state": "on", "run": "runs/a b", "task": "digits", "step": 7,
            "message": "loss 3 is above 2", "since": 10.0, "time": 12.5,
            "text": "alert high on: runs/a b: loss 3 is above 2",
        })
    ]  # fmt: skip


def test_names_that_are_no_text_reach_a_webhook_too(server):
    strange = Alert("a", "on", os.fsdecode(b"\xff\n"), "t", 1, "m\x00", 1.0, 1.0)
    assert acted({"webhook": address(server)}, alerts=[strange]) == []
    assert server.got[0][2]["run"] == os.fsdecode(b"\xff\n")


def test_a_webhook_that_refuses_is_told_once_until_it_takes_one(server):
    server.status = 500
    lines = acted({"webhook": address(server)}, alerts=[ALERT] * 3)
    assert lines == [f"alert high: {address(server)}: answered 500 Internal Server Error"]
    assert len(server.got) == 3


def test_a_webhook_that_does_not_answer_in_time_or_at_all_is_told(server):
    server.delay_s = 1.0
    lines = acted({"webhook": address(server), "timeout_s": 0.1}, {"webhook": "http://127.0.0.1:1"})
    assert len(lines) == 2
    assert "timed out" in lines[0]
    assert lines[1].startswith("alert high: http://127.0.0.1:1: cannot be reached: ")


def test_a_server_that_speaks_no_http_is_told():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            there, _ = listening.accept()
            with there:
                there.recv(100)
                there.sendall(b"no http at all\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        lines = acted({"webhook": f"http://127.0.0.1:{listening.getsockname()[1]}"})
        thread.join()
    assert len(lines) == 1


def test_a_command_is_started_without_a_shell_and_gets_the_facts(tmp_path):
    code = (
        "import json, os, sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
    )
    file = tmp_path / "facts"
    assert acted({"command": [sys.executable, "-c", code, str(file), "$HOME; `id`"]}) == []
    arguments, environ = json.loads(file.read_text())
    assert arguments == ["$HOME; `id`"]
    assert environ.items() >= {
        "ALERT_RULE": "high", "ALERT_STATE": "on", "ALERT_RUN": "runs/a b", "ALERT_TASK": "digits",
        "ALERT_STEP": "7", "ALERT_MESSAGE": "loss 3 is above 2", "ALERT_SINCE": "10.0",
        "ALERT_TIME": "12.5",
    }.items()  # fmt: skip


def test_a_command_does_not_think_that_it_is_a_rank(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("LOCKSTEP_", "OMPI_", "PMI", "TORCHELASTIC_", "SLURM_")):
            monkeypatch.delenv(name)
    for name, value in as_variables(ALERT).items():
        monkeypatch.setenv(name, value)
    assert not is_rank()


def test_commands_that_fail_are_told_once_and_the_next_ones_are_done(tmp_path):
    file = tmp_path / "done"
    lines = acted(
        {"command": ["/no/such/program"]},
        {"command": [sys.executable, "-c", "raise SystemExit(3)"]},
        {"command": ["/bin/touch", str(file)]},
        alerts=[ALERT, ALERT],
    )
    assert len(lines) == 2
    assert "/no/such/program" in lines[0]
    assert lines[1].endswith(": ended with 3")
    assert file.exists()


def test_a_command_that_takes_too_long_is_ended_with_its_children(tmp_path):
    file = tmp_path / "pid"
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(['/bin/sleep', '60'])\n"
        "open(sys.argv[1], 'w').write(str(child.pid)); time.sleep(60)"
    )
    begun = time.monotonic()
    lines = acted({"command": [sys.executable, "-c", code, str(file)], "timeout_s": 2})
    assert lines[0].endswith(": took more than 2 s, and was ended")
    assert time.monotonic() - begun < 20
    status = Path(f"/proc/{file.read_text()}/stat")
    while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() - begun < 40
        time.sleep(0.05)


def test_a_line_is_printed_without_signs_that_change_a_terminal():
    alert = Alert("a\x1b[2J", "over", "r\n", "", 0, "m", 10.0, 12.0)
    assert acted({"print": True}, alerts=[alert]) == [r"alert a\x1b[2J over after 2 s: r ⏎ : m"]


def test_what_a_slow_address_leaves_waiting_is_bounded(server, monkeypatch):
    monkeypatch.setattr("lockstep.observe.monitor.alerts.manager._MAX_WAITING", 2)
    server.delay_s = 0.2
    lines = acted({"webhook": address(server)}, alerts=[ALERT] * 9)
    assert lines == ["alerts: 2 wait for an action; others are left out"]
    assert 2 <= len(server.got) <= 4


def test_no_process_is_left_behind():
    acted({"command": ["/bin/true"]})
    children = subprocess.run(
        ["/bin/ps", "--ppid", str(os.getpid()), "-o", "comm="],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "true" not in children.stdout.split()
