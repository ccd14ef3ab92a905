"""Run a command as ranks on hosts of a shaped network, and say what time and bytes it took.

As root, in the project's folder:

    python -m benchmarks.lab --hosts 4 --ranks 2 --shape 100mbit -- lockstep train digits steps=20

Its exit code is that of the ranks; 2 if hosts cannot be made.
"""

from __future__ import annotations

import argparse
import signal
import sys
from typing import Any

from lockstep.errors import LockstepError

from .network import Lab
from .ranks import start_ranks
from .shape import NAMED


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hosts", type=int, default=2, help="number of hosts; 2")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks on each; 1")
    parser.add_argument(
        "--shape", default="lan", help=f"{', '.join(NAMED)}, or rate=100mbit,delay=20ms,loss=1%%"
    )
    parser.add_argument("--launcher", choices=("mpi", "torchrun"), default="mpi")
    parser.add_argument("--seconds", type=float, default=600.0, help="longest time; 600")
    parser.add_argument("command", nargs="+", help="program and arguments of each rank")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, _stop)
    try:
        with Lab(args.hosts, args.shape) as lab:
            ended = start_ranks(
                lab, args.ranks, args.command, args.launcher, timeout_s=args.seconds
            )
            keeper = f", delay and loss by {lab.keeper}" if lab.keeper else ""
    except LockstepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    print(
        f"lab: {args.hosts} hosts × {args.ranks} ranks over {args.launcher}, {args.shape}{keeper}: "
        f"{ended.seconds:.2f} s, {ended.bytes_between_hosts:,} bytes between hosts, exit code "
        f"{ended.exit_code}"
    )
    return ended.exit_code if ended.exit_code >= 0 else 128 - ended.exit_code


def _stop(number: int, _: Any) -> None:
    """End as after Ctrl-C, so that the hosts are removed."""
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
