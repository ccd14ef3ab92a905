"""A rank that does nothing but steps, until it is asked to stop; then tells why all did."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch

from lockstep.launching.rank.environment import detect
from lockstep.launching.rank.join import open_transport
from lockstep.launching.rank.process import StopRequest, whole_lines

TIMEOUT_S = 60.0


def main(run_dir: Path) -> None:
    environment = detect(os.environ)

    def emit(event: str, **fields: Any) -> None:
        if environment.rank == 0:
            with (run_dir / "events.jsonl").open("a") as file:
                file.write(json.dumps({"event": event, "step": 0, **fields}) + "\n")

    with whole_lines(), StopRequest() as stop:
        transport = open_transport(environment, torch.device("cpu"), TIMEOUT_S)
        mine = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "place": vars(environment),
            "omp": os.environ["OMP_NUM_THREADS"],
        }
        for rank, info in enumerate(transport.gather_json(mine)):
            emit("Joined", slot=rank, rank=rank, **info)
        for number in range(3000):
            print("rank", transport.rank, "says", number)
        deadline = time.monotonic() + TIMEOUT_S
        while None in (reasons := transport.gather_json(stop.reason())):
            if time.monotonic() > deadline:
                sys.exit("nobody asked for a stop")
            time.sleep(0.01)
        emit("Finished", status="stopped", reason=reasons[0], reasons=reasons)
        transport.close()


main(Path(sys.argv[1]))
