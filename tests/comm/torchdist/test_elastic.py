"""What a rank hears of its group beside its collectives."""

from __future__ import annotations

import socket
import threading
import time

from torch._C._distributed_c10d import TCPStore

from lockstep.comm.torchdist.elastic_transport import ElasticTransport
from lockstep.comm.torchdist.supervision import MAX_BYTES, FromRank, Supervision, ToRank

HOST = "127.0.0.1"


def test_a_rank_that_trains_alone_is_to_meet_again_when_its_generation_is_lost() -> None:
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def answer() -> None:
        """As a supervisor does with one rank."""
        while packet := ours.recv(MAX_BYTES):
            match FromRank.decode(packet).say:
                case "meet":
                    ours.send(ToRank(generation=1, members=(0,)).encode())
                case "built":
                    ours.send(ToRank(built=1).encode())
                case "leave":
                    ours.send(ToRank(left=True).encode())

    threading.Thread(target=answer, daemon=True).start()
    transport = ElasticTransport("gloo", (HOST, store.port), theirs.fileno(), 0, 10.0)
    assert transport.size == 1
    assert not transport.has_joiner
    # By this a new coordinator begins, with whom others may join already.
    ours.send(ToRank(lost=1).encode())
    deadline = time.monotonic() + 10
    while not transport.has_joiner:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    transport.close()
    ours.close()
    theirs.close()


def test_a_rank_to_which_nobody_listens_any_more_raises_nothing_of_its_own() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        line = Supervision(theirs.fileno(), lambda: None)
        ours.close()
        line.abort(1)
        line.leave()
