"""Hosts made of network namespaces: what the network does, and what is left behind."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.lab import Lab
from benchmarks.lab.leftovers import FILES, NAMESPACES, STATE
from tests.conftest import environment

from lockstep.errors import EnvironError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("machine_has_what_hosts_need")]

# Interpreters that a warm process forks would not be on the host.
ENVIRONMENT = environment(cold=True)

ROOT = Path(__file__).parents[2]
SINK = """
import socket, time
server = socket.create_server(("", 5000))
print("up", flush=True)
peer, _ = server.accept()
started, total = None, 0
while data := peer.recv(1 << 20):
    started = started or time.perf_counter()
    total += len(data)
print(total, time.perf_counter() - started)
"""
SOURCE = """
import socket, sys
with socket.create_connection(("h1", 5000)) as peer:
    for _ in range(int(sys.argv[1])):
        peer.sendall(bytes(1 << 16))
"""
ECHO = """
import socket
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 5000))
print("up", flush=True)
while True:
    data, peer = own.recvfrom(2000)
    own.sendto(data, peer)
"""
ASK = """
import json, socket, sys, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.settimeout(0.2)
taken = []
for _ in range(int(sys.argv[1])):
    started = time.perf_counter()
    own.sendto(b"x", ("h1", 5000))
    try:
        own.recv(10)
        taken.append(time.perf_counter() - started)
    except TimeoutError:
        pass
print(json.dumps(taken))
"""


def python(lab, host, code, *arguments, **options):
    """A program of Python on a host."""
    argv = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(lab.command(host, argv), stdout=subprocess.PIPE, text=True, **options)


def transferred(lab, chunks):
    """Bits per second from host 0 to host 1."""
    with python(lab, 1, SINK) as sink:
        assert sink.stdout.readline() == "up\n"
        with python(lab, 0, SOURCE, chunks):
            total, seconds = sink.communicate(timeout=120)[0].split()
    assert int(total) == chunks << 16
    return int(total) * 8 / float(seconds)


def echoed(lab, times):
    """Seconds that datagrams from host 0 to host 1 and back took, without those that were lost."""
    with python(lab, 1, ECHO) as echo:
        assert echo.stdout.readline() == "up\n"
        with python(lab, 0, ASK, times) as ask:
            taken = json.loads(ask.communicate(timeout=120)[0])
        echo.kill()
    return taken


def left_behind(name):
    """What there is of a lab."""
    folders = (NAMESPACES, STATE, FILES)
    return [path for folder in folders for path in folder.glob(f"{name}*")]


def output(lab, host, *argv):
    return subprocess.check_output(lab.command(host, argv), text=True).strip()


@pytest.mark.parametrize(
    ("shape", "rate", "chunks"),
    [
        ("100mbit", 1e8, 400),
        ("rate=20mbit", 2e7, 80),
        ("rate=50mbit,delay=5ms", 5e7, 300),
    ],
)
def test_a_transfer_has_the_rate_of_the_shape(shape, rate, chunks):
    with Lab(2, shape) as lab:
        assert transferred(lab, chunks) == pytest.approx(rate, rel=0.2)


def test_an_unshaped_network_is_faster_than_a_shaped_one():
    with Lab(2) as lab:
        assert transferred(lab, 4000) > 1.3e8


@pytest.mark.parametrize(("shape", "delay_s"), [("20ms", 0.02), ("rate=1gbit,delay=3ms", 0.003)])
def test_there_and_back_takes_twice_the_delay(shape, delay_s):
    with Lab(2, shape) as lab:
        taken = echoed(lab, 40)
    assert len(taken) == 40
    assert min(taken) >= 2 * delay_s
    assert statistics.median(taken) <= 2 * delay_s + 0.004


def test_the_share_of_the_shape_is_lost():
    with Lab(2, "loss=20%") as lab:
        came = len(echoed(lab, 150))
    deviation = (150 * 0.64 * 0.36) ** 0.5
    assert abs(came - 150 * 0.8**2) < 4 * deviation


@pytest.mark.parametrize("shape", ["100mbit", "20ms"])
def test_bytes_are_counted_where_they_leave(shape):
    with Lab(3, shape) as lab:
        assert lab.bytes_between_hosts() == 0
        transferred(lab, 100)
        sent = lab.bytes_sent()
        assert sum(sent) == pytest.approx(lab.bytes_between_hosts(), rel=0.01)
    payload = 100 << 16
    assert payload < sent[0] < 1.1 * payload
    assert 0 < sent[1] < 0.1 * payload
    assert sent[2] == 0


def test_hosts_know_each_other_and_nothing_else():
    before = Path("/etc/hosts").read_bytes()
    with Lab(3) as lab:
        assert [output(lab, host, "hostname") for host in range(3)] == ["h0", "h1", "h2"]
        assert output(lab, 2, "getent", "hosts", "h1").split()[0] == lab.address(1)
        code = "import socket; print(socket.socket(2, 2).connect_ex(('192.0.2.1', 9)) != 0)"
        assert output(lab, 0, sys.executable, "-c", code) == "True"
        own = {os.readlink("/proc/self/ns/net"), *(output(lab, h, "readlink", "/proc/self/ns/net")
               for h in range(3))}  # fmt: skip
        assert len(own) == 4
        assert Path("/etc/hosts").read_bytes() == before


def test_labs_at_the_same_time_do_not_meet():
    with Lab(2, "rate=20mbit") as one, Lab(2) as other:
        assert one.name != other.name
        transferred(other, 100)
        assert one.bytes_between_hosts() == 0
        assert transferred(one, 40) == pytest.approx(2e7, rel=0.2)
    assert not left_behind(one.name) + left_behind(other.name)


@pytest.mark.parametrize("shape", ["lan", "20ms"])
def test_nothing_is_left_after_an_exception(shape):
    def fail():
        with Lab(2, shape) as lab:
            assert len(left_behind(lab.name)) == 6  # namespaces, state, and two files of hosts
            raise RuntimeError(lab.name, python(lab, 1, "import time; time.sleep(100)"))

    with pytest.raises(RuntimeError) as raised:
        fail()
    name, sleeper = raised.value.args
    assert not left_behind(name)
    assert sleeper.wait(timeout=5) == -signal.SIGKILL
    sleeper.stdout.close()


def test_nothing_is_left_when_the_start_fails(monkeypatch, tmp_path):
    monkeypatch.setattr("benchmarks.lab.network.has_netem", lambda: False)
    script = tmp_path / "wire.py"
    script.write_text("import sys; sys.exit('there is no tun')")
    monkeypatch.setattr("benchmarks.lab.wire.__file__", str(script))
    lab = Lab(2, "20ms")
    with pytest.raises(EnvironError, match=r"no netem .* there is no tun; use a kernel with"), lab:
        pass
    assert lab.name == ""
    assert not left_behind(f"lockstep-lab-{os.getpid()}-")


@pytest.mark.parametrize("shape", ["lan", "20ms"])
def test_the_next_lab_removes_what_a_killed_one_has_left(shape):
    code = (
        "import subprocess, sys, time; from benchmarks.lab import Lab; lab = Lab(2, sys.argv[1]);"
        "lab.__enter__(); p = subprocess.Popen(lab.command(1, ['sleep', '100']));"
        "print(lab.name, p.pid, flush=True); time.sleep(100)"
    )
    argv = [sys.executable, "-c", code, shape]
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) as killed:
        name, sleeper = killed.stdout.readline().split()
        with Lab(1):  # does not touch a lab whose process lives
            assert len(left_behind(name)) == 6
        killed.kill()
    assert left_behind(name)
    assert Path("/proc", sleeper).exists()
    with Lab(1):
        assert not left_behind(name)
        assert not is_running(sleeper)


def is_running(pid):
    """Whether a process is there that is no zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("launcher", ["mpi", "torchrun"])
def test_a_signal_ends_the_command_and_leaves_nothing(launcher, number):
    argv = [sys.executable, "-m", "benchmarks.lab", "--launcher", launcher, "--", "sleep", "97"]
    with subprocess.Popen(argv, cwd=ROOT, env=ENVIRONMENT) as lab:
        deadline = time.monotonic() + 30
        while not any("97" in line.split("\0") for line in commands("sleep")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.3)
        lab.send_signal(number)
        assert lab.wait(timeout=60) == 128 + number
    assert not left_behind(f"lockstep-lab-{lab.pid}-")
    assert not [line for line in commands("sleep") if "97" in line.split("\0")]


def commands(program):
    """The commands that run a program, arguments apart by zeros."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text()
        except OSError:
            continue
        if Path(line.split("\0")[0]).name == program:
            found.append(line)
    return found
