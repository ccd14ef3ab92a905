"""Random state that depends on what is computed, never on the process that computes it."""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import random
from collections.abc import Iterator, Mapping
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from lockstep.errors import TaskError


class Stream(IntEnum):
    """Uses of randomness, each with random numbers of its own."""

    MODEL = 1
    DATA = 2
    FORWARD = 3
    EVALUATION = 4
    OPTIMIZER = 5
    AFTER_STEP = 6
    ORDER = 7
    SAMPLE = 8
    BLOCK = 9
    HOOK = 10
    SHARD = 11
    BLOCKS = 12
    COMPRESSION = 13
    PART = 14
    BATCH_LOSS = 15
    BACKWARD = 16


_MASK = (1 << 64) - 1


def random_key(seed: int, stream: Stream, step: int = 0, microbatch: int = 0) -> int:
    """63 bits that mix all four numbers (splitmix64; Steele, Lea and Flood 2014, figure 17)."""
    return _mixed(_mixed(_of_stream(seed, stream), step), microbatch) >> 1


@lru_cache(maxsize=64)
def _of_stream(seed: int, stream: Stream) -> int:
    """The state that all keys of a stream start from."""
    return _mixed(_mixed(0, seed), stream)


def _mixed(state: int, word: int) -> int:
    """64 bits, of 64 bits and a number."""
    state = (state + word + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def accelerator() -> Any:
    """Torch's module for the kind of accelerator that it can use here, as `torch.cuda`; else None.

    Whether there is a device of that kind is not asked. Metal's is none, for want of float64. It is
    not kept: a package may add its kind later.
    """
    device = torch.accelerator.current_accelerator()
    return None if device is None or device.type == "mps" else torch.get_device_module(device)


def begun_devices() -> list[int]:
    """The accelerator's current device, where its use has begun: asking earlier would begin it."""
    module = accelerator()
    return [module.current_device()] if module is not None and module.is_initialized() else []


def forked_generators() -> contextlib.AbstractContextManager[None]:
    """Restore torch's global generators, of the CPU and of the current device, at its end."""
    there = torch.accelerator.current_accelerator()
    kind = "cuda" if there is None else there.type
    return torch.random.fork_rng(begun_devices(), device_type=kind)


def seed_torch(key: int) -> None:
    """Set the state of torch's global generators."""
    torch.default_generator.manual_seed(key)
    module = accelerator()
    # Asked after the kind: without one, the question takes longer than the rest.
    if module is not None and module.is_available():
        module.manual_seed(key)


def seed_all(key: int) -> None:
    """Set the state of all global generators: torch's, numpy's and Python's."""
    seed_torch(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)


def generator(device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for the microbatch, sample or step that is being computed.

    It is seeded with a number drawn from torch's global state, which is set for each microbatch.
    Make a new one each time, in `Task.loss`, `Task.after_step` or the dataset: the state of one
    that is kept would depend on how many batches this process has seen.
    """
    return torch.Generator(device).manual_seed(_drawn_seed())


def numpy_generator() -> np.random.Generator:
    """As `generator`, for numpy."""
    return np.random.default_rng(_drawn_seed())


@contextlib.contextmanager
def kept_generators() -> Iterator[None]:
    """Restore all global generators at the end of the context."""
    states = random.getstate(), np.random.get_state()
    with forked_generators():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def global_state() -> object:
    """The state of all global generators, to be compared with `==`; takes some 50 us."""
    module = accelerator()
    if module is None or not module.is_available():
        return host_state()
    return host_state(), module.get_rng_state().numpy().tobytes()


def host_state() -> object:
    """As `global_state`, of the generators that need no GPU."""
    torchs = torch.default_generator.get_state().numpy().tobytes()
    numpys = np.random.get_state(legacy=False)["state"]
    return torchs, random.getstate(), numpys["key"].tobytes(), numpys["pos"]


def has_drawn(key: int) -> bool:
    """Whether numbers were drawn from the global generators since `seed_all(key)`.

    They are elsewhere afterwards.
    """
    found = _next_numbers()
    seed_all(key)
    return found != _next_numbers()


def _next_numbers() -> tuple[object, ...]:
    """Numbers by which states of the global generators can be told apart; draws them."""
    # CUDA's generators count what they have given; to draw one would wait for the device.
    given = [accelerator().default_generators[n].get_offset() for n in begun_devices()]
    return tuple(given), random.getrandbits(64), np.random.random_sample(), _drawn_seed()


def _drawn_seed() -> int:
    return int(torch.randint(2**63 - 1, (), dtype=torch.int64))


AnyGenerator: TypeAlias = (
    torch.Generator
    | np.random.Generator
    | np.random.BitGenerator
    | np.random.RandomState
    | random.Random
)
GENERATORS = (
    torch.Generator, np.random.Generator, np.random.BitGenerator, np.random.RandomState,
    random.Random,
)  # fmt: skip
"""The classes of `AnyGenerator`."""


def is_global(value: object) -> bool:
    """Whether it is one of the generators that the engine sets for each microbatch."""
    own = (torch.default_generator, random._inst, np.random.mtrand._rand)
    return any(value is generator for generator in own)


def generator_state(generator: AnyGenerator) -> object:
    """A value that changes with each number drawn; can be compared, and shown by `repr`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        generator = generator._bit_generator
    elif isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    return _comparable(generator.state)


def _comparable(state: object) -> object:
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, Mapping):
        return {key: _comparable(value) for key, value in state.items()}
    return state


class IdleGenerators:
    """Generators that the first microbatch did not draw from, and that must stay unused."""

    def __init__(self, generators: Mapping[str, AnyGenerator]) -> None:
        """Watch generators, by name."""
        self._generators = dict(generators)
        self.mark()

    def mark(self) -> None:
        """Take the present states, which are equal on all ranks, as the expected ones."""
        self._states = {path: generator_state(g) for path, g in self._generators.items()}

    def check(self) -> None:
        """Check that nothing has been drawn from them.

        Raises:
            TaskError: naming the first generator that was drawn from.
        """
        for path, generator in self._generators.items():
            if generator_state(generator) != self._states[path]:
                raise TaskError(
                    f"{path}: a random generator that is held between microbatches was drawn from; "
                    "what it gives depends on how many of them this rank computes. Draw from the "
                    "global generators or from lockstep.generator(), which are set for each "
                    f"microbatch; if no result depends on it, set `scratch = ({path!r},)` in the "
                    "task's class"
                )


def data_digest(value: Any) -> str:
    """SHA-256 of all tensors, arrays, numbers, texts and bytes in nested lists, tuples and dicts.

    Objects of other kinds count by their class only.
    """
    sha = hashlib.sha256()
    leaves, structure = tree_flatten(value)
    # Run directories keep digests, so classes count by the public names of their packages.
    names = repr(structure).replace("lockstep.systems.", "lockstep.")
    sha.update(names.encode(errors="backslashreplace"))
    for leaf in leaves:
        sha.update(_content(leaf))
    return sha.hexdigest()


def sample_digest(sample: Any) -> str:
    """Another digest than `data_digest`, much quicker for plain numbers and texts.

    Streams are checked by it sample for sample.
    """
    return hashlib.sha256(sample_bytes(sample)).hexdigest()


def sample_bytes(sample: Any) -> bytes:
    """What is digested of a sample of a stream."""
    if _is_plain(sample):
        return marshal.dumps(sample, _WITHOUT_REFERENCES)
    return data_digest(sample).encode()


_WITHOUT_REFERENCES = 2
"""Version of the format in which the bytes depend on values only, not on which objects are one."""

PLAIN = frozenset({int, float, complex, bool, str, bytes, type(None)})
"""Classes of values that nothing can change."""


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is list or kind is tuple:
        return PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value))
    if kind is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return kind in PLAIN


def is_digested_whole(value: Any) -> bool:
    """Whether all of a value counts in `data_digest`."""
    return not any(_content(leaf) == _by_class(leaf) for leaf in tree_flatten(value)[0])


def _by_class(leaf: Any) -> bytes:
    return f"{type(leaf).__name__} ".encode()


def _content(leaf: Any) -> bytes:
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
        plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = plain.view(torch.uint8).numpy().tobytes()
        return f"{leaf.dtype} {tuple(leaf.shape)} ".encode() + data
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"{leaf.dtype} {leaf.shape} ".encode() + np.ascontiguousarray(leaf).tobytes()
    if isinstance(leaf, (bytes, bytearray)):
        return f"bytes {len(leaf)} ".encode() + bytes(leaf)
    if isinstance(leaf, (str, int, float, complex, bool, np.generic, type(None))):
        return f"{type(leaf).__name__} {leaf!r} ".encode(errors="backslashreplace")
    return _by_class(leaf)
