"""Printing does not wait for a reader that has stopped reading."""

import contextlib
import io
import os
import pty
import sys
import threading
import time

import pytest

from lockstep.launching.host.output_pump import OutputPump, pumped_output

LINE = b"x" * 999 + b"\n"


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for fd in ends:
        with contextlib.suppress(OSError):
            os.close(fd)


def printed(pump, num_lines):
    started = time.monotonic()
    for number in range(num_lines):
        pump.write(b"%d %s" % (number, LINE))
    return time.monotonic() - started


def read_all(fd):
    """What comes through a pipe until all who write to it have closed it."""
    read = []

    def run():
        while block := os.read(fd, 1 << 16):
            read.append(block)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, read


def test_a_reader_that_reads_late_gets_everything_in_order(pipe):
    reader, writer = pipe
    pump = OutputPump(writer, "standard output")
    assert printed(pump, 1000) < 2.0
    thread, read = read_all(reader)
    assert pump.finish(30.0) == 0
    os.close(writer)
    thread.join(30.0)
    assert b"".join(read) == b"".join(b"%d %s" % (number, LINE) for number in range(1000))


def test_what_the_buffer_cannot_hold_is_dropped_and_said_once_the_reader_reads_again(pipe):
    reader, writer = pipe
    pump = OutputPump(writer, "standard output", max_bytes=100_000)
    printed(pump, 1000)
    thread, read = read_all(reader)
    assert pump.finish(30.0) == 0, "it was said"
    os.close(writer)
    thread.join(30.0)
    lines = b"".join(read).decode().splitlines()
    said = [line for line in lines if line.startswith("...")]
    assert len(said) == 1
    number = int(said[0].split()[1])
    assert number + len(lines) - 1 == 1000, "each line was read or counted"
    end = "lines of output were dropped: the reader of standard output does not read"
    assert said[0] == f"... {number} {end}"
    assert lines[-1].startswith("999 "), "the newest lines are kept"


def test_the_end_waits_for_a_reader_that_reads_slowly_but_not_for_one_that_does_not_read(pipe):
    reader, writer = pipe
    pump = OutputPump(writer, "standard output")
    printed(pump, 400)
    slow = threading.Timer(0.7, os.read, (reader, 70_000))
    slow.start()
    started = time.monotonic()
    lost = pump.finish(1.0)
    assert 1.6 < time.monotonic() - started < 4.0
    slow.join()
    assert 0 < lost < 400


def test_printing_nothing_ends_nothing(pipe):
    reader, writer = pipe
    pump = OutputPump(writer, "standard output")
    pump.write(b"")
    pump.write(b"one\n")
    assert os.read(reader, 100) == b"one\n"
    assert pump.finish(5.0) == 0


def test_a_reader_that_is_gone_is_an_error_for_who_prints(pipe):
    reader, writer = pipe
    os.close(reader)
    pump = OutputPump(writer, "standard output")
    with pytest.raises(BrokenPipeError):
        pump.write(LINE)
    assert pump.finish(5.0) == 0


def test_a_terminal_whose_output_was_stopped_holds_nobody_up(monkeypatch):
    leader, follower = pty.openpty()
    stream = io.TextIOWrapper(io.FileIO(follower, "w", closefd=False), write_through=True)
    monkeypatch.setattr(sys, "stdout", stream)
    started = time.monotonic()
    with pumped_output(patience_s=0.5):
        assert sys.stdout.isatty()
        for _ in range(200):
            print("x" * 1000)
    assert time.monotonic() - started < 3.0
    assert sys.stdout is stream
    os.close(leader)
    os.close(follower)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_prints_by_itself(pipe):
    reader, writer = pipe
    pump = OutputPump(writer, "standard output")
    pump.write(b"parent\n")
    if os.fork() == 0:
        try:
            pump.write(b"child\n")
        finally:
            os._exit(0)
    os.wait()
    assert os.read(reader, 100) == b"parent\nchild\n"
    assert pump.finish(5.0) == 0


def test_a_file_is_written_directly(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with pumped_output():
            assert sys.stdout is stream
