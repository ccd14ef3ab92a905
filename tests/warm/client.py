"""An interpreter that stands for the process that does its work."""

from __future__ import annotations

import os
import signal
import socket

import protocol

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_HANDLED = {signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ}  # by Python itself, in any process


def hand_over(path: str, argv: list[str]) -> None:
    """Have `argv` run by a process of the server, and end as it does; else just return."""
    is_option = len(argv) > 2 and argv[1] in ("-m", "-c")
    if not is_option and not (len(argv) > 1 and argv[1].endswith(".py")):
        return
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(path)
    except OSError:
        return
    fds = protocol.inherited()
    ignored = [s for s in signal.valid_signals() if signal.getsignal(s) is signal.SIG_IGN]
    order = {
        "argv": argv,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "fds": fds,
        "cores": sorted(os.sched_getaffinity(0)),
        "ignored": sorted(int(s) for s in ignored if s not in _HANDLED),
    }
    # The process may be known, and signalled, before there is anything to forward to.
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    protocol.send(line, order, tuple(fds))
    pid, _ = protocol.receive(line)
    if pid is None:  # refused: it has to be a start of its own
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
        return

    def forward(signum: int, frame: object) -> None:
        os.kill(pid, signum)

    for signum in _FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:
            signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    for fd in fds:
        os.close(fd)  # pipes end when those who write to them do
    status, _ = protocol.receive(line)
    if status is None:
        os._exit(70)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL) if os.WTERMSIG(status) != 9 else None
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))
