"""What ranks and their supervisor say to each other arrives as it was said."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

from hypothesis import given
from hypothesis import strategies as st

from lockstep.comm.torchdist.supervision import MAX_BYTES, FromRank, Saying, ToRank

numbers = st.integers(0, 2**31)
maybe = st.one_of(st.none(), numbers)
flags = st.one_of(st.none(), st.booleans())


@given(st.sampled_from(get_args(Saying)), numbers, st.booleans(), st.integers(0, 255))
def test_from_a_rank(say: Saying, generation: int, takes_in: bool, code: int) -> None:
    message = FromRank(say, generation, takes_in, code)
    assert FromRank.decode(message.encode()) == message


places = st.one_of(st.none(), st.tuples(st.text(max_size=40), st.integers(1, 65_535)))


@given(maybe, st.lists(numbers, max_size=1000), flags, maybe, maybe, maybe, flags, places)
def test_to_a_rank(
    generation: int | None,
    members: list[int],
    joiner: bool | None,
    built: int | None,
    agree: int | None,
    lost: int | None,
    left: bool | None,
    store: tuple[str, int] | None,
) -> None:
    message = ToRank(generation, tuple(members), joiner, built, agree, lost, left, store)
    packet = message.encode()
    assert len(packet) <= MAX_BYTES
    assert ToRank.decode(packet) == message


def test_the_supervisor_imports_nothing_slow() -> None:
    code = (
        "import sys; import lockstep.comm.torchdist.supervision;"
        "sys.exit(bool({'torch', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
