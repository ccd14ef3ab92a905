"""The pure parts of the laboratory: shapes, queues, and the wire that delays and loses frames."""

import contextlib
import os
import random
import socket
import sys
import threading
import time

import pytest
from benchmarks.lab import NAMED, Lab, Shape, network, parse_shape, tools, wire
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import ConfigError, EnvironError


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("lan", Shape()),
        ("1gbit", Shape(rate=1e9)),
        ("100mbit", Shape(rate=1e8)),
        ("20ms", Shape(delay_s=0.02)),
        ("lossy", Shape(loss=0.01)),
        ("rate=100mbit,delay=20ms,loss=1%", Shape(1e8, 0.02, 0.01)),
        ("loss=0.5%, rate=1.5gbit", Shape(1.5e9, 0.0, 0.005)),
        ("delay=250us", Shape(delay_s=250e-6)),
    ],
)
def test_a_shape_is_what_its_name_or_spelling_says(text, shape):
    found = parse_shape(text)
    assert found.rate == shape.rate
    assert found.delay_s == pytest.approx(shape.delay_s)
    assert found.loss == pytest.approx(shape.loss)


@given(
    st.integers(100, 10**8), st.integers(0, 10**4), st.integers(0, 99), st.permutations(range(3))
)
def test_a_shape_does_not_depend_on_the_order_of_its_parts(kbits, delay_ms, loss, order):
    parts = (f"rate={kbits}kbit", f"delay={delay_ms}ms", f"loss={loss}%")
    found = parse_shape(",".join(parts[i] for i in order))
    assert found.rate == pytest.approx(kbits * 1000)
    assert found.delay_s == pytest.approx(delay_ms / 1000)
    assert found.loss == pytest.approx(loss / 100)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is none of lan, 1gbit"),
        ("wan", "'wan' is none of"),
        ("speed=1mbit", "'speed=1mbit' is none of"),
        ("rate=1mbit,rate=2mbit", "rate is there twice"),
        ("rate=1", "'1' is not a number with one of the units kbit"),
        ("rate=1mbps", "'1mbps' is not a number"),
        ("rate=-1mbit", "'-1mbit' is not a number"),
        ("rate=1.2.3mbit", "'1.2.3mbit' is not a number"),
        ("rate=nanmbit", "'nanmbit' is not a number"),
        ("rate=0mbit", "between 100kbit and 100gbit"),
        ("rate=101gbit", "between 100kbit and 100gbit"),
        ("delay=20", "'20' is not a number with one of the units us, ms, s"),
        ("delay=11s", "at most 10s"),
        ("loss=100%", "below 100%"),
        ("loss=0.1", "units %"),
        ("lan;reboot", "'lan;reboot' is none of"),
    ],
)
def test_a_shape_that_cannot_be_used_is_said(text, told):
    with pytest.raises(ConfigError, match="shape") as raised:
        parse_shape(text)
    assert told in str(raised.value)


@pytest.mark.parametrize("num_hosts", [0, -1, 65])
def test_a_number_of_hosts_that_cannot_be_made_is_said(num_hosts):
    with pytest.raises(ConfigError, match=f"hosts={num_hosts}: give 1 to 64"):
        Lab(num_hosts)


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironError, match="needs root"), Lab(1):
        pass


def test_missing_programs_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EnvironError, match=r"ip, tc, nsenter, .* not found .*iproute2"), Lab(1):
        pass


def test_a_program_that_fails_is_told_with_what_it_said():
    code = "import sys; sys.exit('it is\\n broken')"
    with pytest.raises(EnvironError, match="it is broken"):
        tools.call([sys.executable, "-c", code])


def test_an_unshaped_host_has_no_queue():
    assert network.queue(Shape(), None) == []
    assert network.queue(NAMED["20ms"], "wire") == []


@given(st.floats(1e5, 1e11), st.floats(0, 10))
def test_netem_has_room_for_all_that_it_delays(rate, delay_s):
    words = network.queue(Shape(rate, delay_s, 0.0), "netem")
    assert words[:2] == ["root", "netem"]
    frames = int(words[words.index("limit") + 1])
    assert frames * 1514 * 8 >= rate * delay_s
    assert float(words[words.index("delay") + 1].removesuffix("us")) == pytest.approx(
        delay_s * 1e6, abs=1
    )


@given(st.floats(1e5, 1e11))
def test_the_rate_lets_whole_frames_through(rate):
    words = network.queue(Shape(rate), None)
    assert words[:2] == ["root", "tbf"]
    assert float(words[words.index("rate") + 1].removesuffix("bit")) == pytest.approx(rate, abs=1)
    assert int(words[words.index("burst") + 1]) >= 10 * 1514


def frame(to, number=0):
    """A frame to a host, or to all."""
    address = b"\xff" * 6 if to is None else bytes.fromhex(wire.mac_of(to).replace(":", ""))
    return address + bytes(8) + number.to_bytes(4, "big")


@given(st.integers(1, 64), st.data())
def test_a_frame_goes_to_whom_it_is_for(num_hosts, data):
    sender = data.draw(st.integers(0, num_hosts - 1))
    to = data.draw(st.integers(0, num_hosts + 2))
    expected = [to] if to != sender and to < num_hosts else []
    assert wire.receivers(frame(to), sender, num_hosts) == expected
    everybody = set(range(num_hosts)) - {sender}
    assert set(wire.receivers(frame(None), sender, num_hosts)) == everybody


def test_a_strange_address_is_nobodys():
    assert wire.receivers(b"\x02\x42\x00\x00\x00\x01" + bytes(8), 1, 4) == []


def carry(frames, delay_s, loss):
    """What host 1 gets of frames of host 0, and how many seconds each of them took."""
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
    hosts, taps = zip(*pairs, strict=True)
    for tap in taps:
        tap.setblocking(False)
    stop, stopping = socket.socketpair()
    carrier = wire.Wire([tap.fileno() for tap in taps], delay_s, loss, random.Random(0))
    thread = threading.Thread(target=carrier.run, args=(stop.fileno(),))
    thread.start()
    found, sent = [], {}

    def take(seconds):
        hosts[1].settimeout(seconds)
        with contextlib.suppress(TimeoutError):
            data = hosts[1].recv(2000)
            found.append((data, time.monotonic() - sent[data]))
            return True
        return False

    try:
        for each in frames:
            sent[each] = time.monotonic()
            hosts[0].send(each)
            take(0.01)  # a socket holds few of them
        while take(delay_s + 0.3):
            pass
        return found
    finally:
        stopping.close()
        thread.join()
        for one in (*hosts, *taps, stop):
            one.close()


def test_frames_come_late_and_in_order():
    sent = [frame(1, number) for number in range(8)]
    found = carry(sent, delay_s=0.2, loss=0.0)
    assert [data for data, _ in found] == sent
    assert all(0.2 <= seconds < 0.5 for _, seconds in found)


def test_the_share_of_frames_that_is_asked_for_is_lost():
    lost = 160 - len(carry([frame(1, number) for number in range(160)], 0.0, 0.3))
    assert 25 <= lost <= 71  # four standard deviations


def test_nothing_but_the_wanted_frames_is_lost():
    assert len(carry([frame(1, n) for n in range(8)], 0.0, 0.0)) == 8
