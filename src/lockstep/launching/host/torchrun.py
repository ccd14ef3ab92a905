"""torchrun for the ranks of one host, with an agent that listens on no network interface.

With `--standalone`, torchrun's agent hosts a key-value store that listens on all interfaces. For
one host a file is enough; torch would not remove it. This file is run as a script that does not
import `lockstep`, as `launching.host.supervisor` is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence

_HOST = "127.0.0.1"


def torchrun(num_ranks: int, argv: Sequence[str]) -> None:
    """Run `argv` on each rank; ends the process as torchrun does.

    Args:
        num_ranks: number of ranks to start.
        argv: program and arguments that each rank runs.
    """
    from torch.distributed.run import main

    # Rank 0 hosts the store of the ranks, on the address that is given here.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        options = ["--max-restarts=0", "--nnodes=1", f"--nproc-per-node={num_ranks}"]
        options += ["--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-id=lockstep"]
        options += [f"--rdzv-endpoint={folder}/rendezvous", f"--local-addr={_HOST}", "--no-python"]
        main([*options, *argv])


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules would hide others of their names
    torchrun(int(sys.argv[1]), sys.argv[2:])
