"""`lockstep monitor`: chooses the parts that run, and ends them in order."""

from __future__ import annotations

import importlib
import math
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from lockstep.config.parsing import shown
from lockstep.errors import ConfigError
from lockstep.launching.rank.early import Interrupted, ending_at_interrupt
from lockstep.launching.remote import followed
from lockstep.observe.monitor import describe
from lockstep.observe.monitor.describe import Log, overview
from lockstep.observe.monitor.watch import Listener, Monitor, MonitorThread, Watch

if TYPE_CHECKING:
    from lockstep.observe.monitor.alerts import Rules
    from lockstep.observe.monitor.watch import Alert

_FOLDER = Path("runs")
_LOOPBACK = "127.0.0.1"
_WEB_PORT = 8270
_MAX_NOTES = 50


@dataclass(frozen=True)
class Options:
    """The options of `lockstep monitor`.

    Attributes:
        folders: run directories, or folders with such; empty for `runs`.
        web: whether to serve the page.
        host: address that the page and the exporter listen at; None for loopback.
        port: port of the page; None for the default one.
        token: token that the page requires; None for none, or for a new one where it is needed.
        prometheus: port of the exporter; None for none.
        alerts: file of rules; None for none.
        check: whether only to show what the rules would watch.
        grafana: file to write the dashboard to; None for none.
        interval_s: seconds between two looks.
        once: whether to print one picture only.
    """

    folders: Sequence[Path] = ()
    web: bool = False
    host: str | None = None
    port: int | None = None
    token: str | None = None
    prometheus: int | None = None
    alerts: Path | None = None
    check: bool = False
    grafana: Path | None = None
    interval_s: float = 1.0
    once: bool = False


def monitor(options: Options) -> int:
    """Watch runs until Ctrl-C or SIGTERM.

    Returns:
        The exit code: 1 where a single look has found an alert, else 0.

    Raises:
        ConfigError: an option does not fit, or what it needs is not installed.
        RunDirectoryError: a folder is not there.
        DataError: the dashboard cannot be written.
    """
    _check(options)
    rules = _rules(options)
    if options.grafana is not None:
        from lockstep.observe.monitor.exporter import write_dashboard

        write_dashboard(options.grafana)
        print(f"dashboard  {options.grafana}")
        return 0
    if options.check and rules is not None:
        from lockstep.observe.monitor.alerts import rule_lines

        print("\n".join(map(describe.shown, rule_lines(rules))))
        return 0
    with followed(options.folders) as folders:
        options = replace(options, folders=folders)
        watch = _watch(options)
        if options.once:
            print("\n".join(overview(watch, time.time())))
            return 0 if rules is None else _look_once(rules, watch)
        with _ending(), ExitStack() as opened:
            _run(options, rules, watch, opened)
    return 0


def _look_once(rules: Rules, watch: Watch) -> int:
    """Evaluate rules once, and run their actions; the exit code is 1 if an alert is on."""
    with _ending(), ExitStack() as opened:
        manager, alerts = _alerts(rules, _print, opened, looks_once=True)
        manager(watch, list(watch.runs.values()))
        return 1 if alerts() else 0
    return 130


def _check(options: Options) -> None:
    if not (math.isfinite(options.interval_s) and 0.05 <= options.interval_s <= 3600):
        raise ConfigError(f"--interval {options.interval_s}: must be from 0.05 to 3600 seconds")
    for name, port in (("--port", options.port), ("--prometheus", options.prometheus)):
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"{name} {port}: must be from 0 (any that is free) to 65535")
    for name, value in (("--port", options.port), ("--token", options.token)):
        if value is not None and not options.web:
            raise ConfigError(f"{name}: needs --web")
    if options.host is not None and not (options.web or options.prometheus is not None):
        raise ConfigError("--host: needs --web or --prometheus")
    if options.host is not None and not options.host.strip():
        raise ConfigError(f"--host {shown(options.host)}: must be an address, such as 0.0.0.0")
    if options.check and options.alerts is None:
        raise ConfigError("--check: needs --alerts FILE")
    if options.once and (options.web or options.prometheus is not None):
        raise ConfigError("--once: does not go with --web and --prometheus")


def _rules(options: Options) -> Rules | None:
    if options.alerts is None:
        return None
    from lockstep.observe.monitor.alerts import read_rules

    return read_rules(options.alerts)


def _watch(options: Options) -> Watch:
    # The default folder may appear later; another one that is missing is likely a mistake.
    return Watch(options.folders or [_FOLDER], may_come=not options.folders)


def _run(options: Options, rules: Rules | None, watch: Watch, opened: ExitStack) -> None:
    has_screen = not options.web and _is_terminal()
    if has_screen:
        with ending_at_interrupt():
            _need_textual()
    notes: deque[str] | None = deque(maxlen=_MAX_NOTES) if has_screen else None
    tell = notes.append if notes is not None else _print
    listeners: list[Listener] = []
    if options.prometheus is not None:
        listeners.append(_exporter(options, options.prometheus, tell, opened))
    alerts: Callable[[], Sequence[Alert]] = tuple
    if rules is not None:
        listener, alerts = _alerts(rules, tell, opened)
        listeners.append(listener)
    if not has_screen and not options.web:
        listeners.append(Log(_print))
    runs = Monitor(watch, listeners, options.interval_s, alerts, notes)
    if options.web:
        _serve(options, watch, runs if listeners else None)
    elif notes is not None:
        with ending_at_interrupt():
            from lockstep.observe.monitor.terminal.app import show
        show(runs)
    else:
        while True:
            runs.look()
            time.sleep(options.interval_s)


def _exporter(
    options: Options, port: int, tell: Callable[[str], None], opened: ExitStack
) -> Listener:
    from lockstep.observe.monitor.exporter import Exporter, Server

    exporter = Exporter()
    host = options.host or _LOOPBACK
    server = Server(exporter, host, port)
    opened.callback(server.close)
    tell(f"prometheus http://{host}:{server.port}/metrics")
    return exporter


def _alerts(
    rules: Rules, tell: Callable[[str], None], opened: ExitStack, looks_once: bool = False
) -> tuple[Listener, Callable[[], Sequence[Alert]]]:
    from lockstep.observe.monitor.alerts.manager import Actions, AlertManager

    actions = Actions(tell)
    opened.callback(actions.close)
    manager = AlertManager(rules, actions, looks_once=looks_once)
    return manager, lambda: manager.on


def _serve(options: Options, watch: Watch, runs: Monitor | None) -> None:
    """Serve the page; the exporter and the alerts have a reader of their own.

    Raises:
        Exception: the error that has ended the exporter, the alerts or the page.
    """
    with ending_at_interrupt():
        from lockstep.observe.monitor.web import serve
    failed: list[BaseException] = []
    end_page = partial(_end_page, failed)
    thread = MonitorThread(runs, failed=end_page) if runs is not None else None
    try:
        if thread is not None:
            thread.start()
            watch = _watch(options)
        port = _WEB_PORT if options.port is None else options.port
        host = options.host or _LOOPBACK
        serve(watch, host, port, options.token, _print, options.interval_s, end_page)
    finally:
        if thread is not None:
            thread.end()
        # The page or this command itself may have received the signal.
        if failed:
            raise failed[0]


def _end_page(failed: list[BaseException], error: BaseException) -> None:
    """Let a failed part end the whole command, which would otherwise seem to watch."""
    failed.append(error)
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _ending() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the context in order."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _end) if is_main else signal.SIG_DFL
    try:
        yield
    except Interrupted:
        return
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Interrupted


def _is_terminal() -> bool:
    capable = os.environ.get("TERM", "").lower() not in ("", "dumb", "unknown")
    return sys.stdout.isatty() and sys.stdin.isatty() and capable


def _need_textual() -> None:
    try:
        importlib.import_module("textual")
    except ImportError:
        raise ConfigError(
            'the screen needs textual: pip install "lockstep-train[monitor]"; without it there is '
            "lockstep monitor --once"
        ) from None


def _print(line: str) -> None:
    print(line, flush=True)
