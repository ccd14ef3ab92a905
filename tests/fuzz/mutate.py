"""Inputs that are almost right: mutations of valid samples, some of which know the format."""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

RAW = "\x01raw%d\x01"
"""Stands in a JSON text for something that `json.dumps` would not write."""

RAW_TOKENS = (
    "9" * 5000,
    "-" + "9" * 400,
    "1e999",
    "-1e999",
    "NaN",
    "-Infinity",
    "[" * 5000,
    "[" * 70 + "]" * 70,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '{"a":1,"a":2}',
    "0x10",
    "01",
    "1.",
    "",
    "nul",
    '"\\ud800"',
    '"\\u0000"',
    "\\",
    "/*",
    "-",
    "'a'",
)

VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    -5,
    3,
    2**31,
    2**53 + 1,
    2**63,
    -(2**63) - 1,
    10**290,
    0.5,
    -0.0,
    1e-320,
    1e308,
    "",
    "x",
    "nan",
    "step",
    "float64",
    "load",
    "torch",
    "../../etc/passwd",
    "/dev/zero",
    "a\nb",
    "é実🚀",
    "\x00",
    "%s%n",
    "x" * 9000,
    [],
    [[]],
    {},
    {"": 0},
    [0] * 300,
    {"dtype": "float32"},
    {"dtype": "float32", "value": 1e39},
    {"tensor": True},
    {"tensor": False},
    {"dict": {}},
)

TOKENS = (
    "0",
    "-1",
    "1e999",
    "9" * 30,
    "9" * 5000,
    "nan",
    "inf",
    "''",
    '"',
    "[",
    "]",
    "{",
    "}",
    "[" * 3000,
    "(",
    ")",
    "((((((((",
    "&a ",
    "*a",
    "<<: ",
    "!!python/name:os.system ",
    "!x ",
    "? ",
    "- ",
    "- " * 500,
    ": ",
    "#",
    "|",
    ">",
    "---\n",
    "\n",
    "\r",
    "\t",
    "\0",
    ",",
    ";",
    "=",
    "%",
    "\\",
    "..",
    "/",
    "~",
    "null",
    "true",
    "2024-99-99",
    "1:" * 99,
    "0x",
    "0b_",
    "é",
    "\ud7ff",
    "🚀",
    "\u202e",
    "x" * 5000,
    " " * 5000,
)


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """A few bits, bytes or stretches changed, moved, lost or added."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        place = rng.randrange(len(out) + 1)
        end = min(len(out), place + rng.choice((1, 1, 2, 4, 8, 64, 4096)))
        kind = rng.randrange(8)
        if kind == 0 and place < len(out):
            out[place] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del out[place:]
        elif kind == 2:
            del out[place:end]
        elif kind == 3:
            out[place:place] = out[place:end] * rng.choice((1, 2, 50))
        elif kind == 4:
            out[place:place] = rng.randbytes(rng.choice((1, 2, 8, 300)))
        elif kind == 5:
            out[place:end] = rng.choice((b"\0", b"\xff", b"\x7f", b"\x80")) * (end - place)
        elif kind == 6:
            out[place:end] = rng.randbytes(end - place)
        else:
            number = rng.choice((0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1))
            size = rng.choice((4, 8))
            order = rng.choice(("big", "little"))
            out[place : place + size] = (number % 2 ** (8 * size)).to_bytes(size, order)  # type: ignore[arg-type]
    return bytes(out)


def mutate_text(rng: random.Random, text: str, tokens: Sequence[str] = ()) -> str:
    """Words and signs replaced, lost, added or said again."""
    parts = re.findall(r"\w+|\s+|[^\w\s]", text) or [""]
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        place = rng.randrange(len(parts))
        token = rng.choice((*TOKENS, *tokens, *tokens, rng.choice(parts)))
        kind = rng.randrange(5)
        if kind == 0:
            parts[place] = token
        elif kind == 1:
            parts.insert(place, token)
        elif kind == 2:
            parts[place] = ""
        elif kind == 3:
            end = place + rng.randrange(1, 20)
            parts[place:place] = parts[place:end] * rng.choice((1, 1, 30))
        else:
            parts[place] = parts[place].swapcase()[:-1] + rng.choice("0_-.é")
    if rng.randrange(12) == 0:
        del parts[rng.randrange(len(parts)) :]
    return "".join(parts)


def mutate_json(rng: random.Random, value: Any) -> tuple[Any, dict[str, str]]:
    """A changed copy of a JSON value, and what stands for what no value can say."""
    value = json.loads(json.dumps(value))
    raw: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        holder = [value]
        parent, key = holder, 0
        while rng.randrange(8) and isinstance(parent[key], (dict, list)) and parent[key]:
            parent = parent[key]
            key = (
                rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
            )
        _change(rng, parent, key, raw)
        value = holder[0] if parent is holder else value
    return value, raw


def _change(rng: random.Random, parent: Any, key: Any, raw: dict[str, str]) -> None:
    old = parent[key]
    value = copy.deepcopy(rng.choice(VALUES))
    kind = rng.randrange(10)
    if kind == 0:
        mark = RAW % len(raw)
        raw[json.dumps(mark)] = rng.choice(RAW_TOKENS)
        parent[key] = mark
    elif kind == 1 and isinstance(parent, dict):
        del parent[key]
    elif kind == 2 and isinstance(old, dict):
        old[rng.choice(("more", "", "0", "9", "step", "__class__"))] = value
    elif kind == 3 and isinstance(parent, dict):
        parent[rng.choice((str(key) + "x", str(key).upper(), ""))] = parent.pop(key)
    elif kind == 4 and isinstance(old, list):
        parent[key] = old * rng.choice((0, 2, 30)) or [value]
    elif kind == 5 and isinstance(old, (int, float)):
        parent[key] = rng.choice((-old, old + 1, old - 1, old * 2, float(old), str(old), [old]))
    elif kind == 6 and isinstance(old, str) and old:
        parent[key] = mutate_text(rng, old)
    else:
        parent[key] = value


def written(value: Any, raw: dict[str, str], rng: random.Random) -> str:
    """The JSON text of what `mutate_json` gave; now and then with a key twice."""
    text = json.dumps(value)
    for mark, token in raw.items():
        text = text.replace(mark, token)
    if rng.randrange(15) == 0 and text.startswith('{"'):
        text = text.replace("{", '{"step": 0, "step": 1, ', 1)
    return text


def json_mutator(rng: random.Random, data: bytes) -> bytes:
    """Of a JSON text: of its bytes, or of what it says."""
    if rng.randrange(3) == 0:
        return mutate_bytes(rng, data)
    value, raw = mutate_json(rng, json.loads(data))
    return written(value, raw, rng).encode("utf-8", "surrogatepass")


def text_mutator(*tokens: str) -> Callable[[random.Random, bytes], bytes]:
    """Of a text with such words in it."""

    def mutate(rng: random.Random, data: bytes) -> bytes:
        if rng.randrange(4) == 0:
            return mutate_bytes(rng, data)
        return mutate_text(rng, data.decode("utf-8", "replace"), tokens).encode(
            "utf-8", "surrogatepass"
        )

    return mutate


def lines_mutator(rng: random.Random, data: bytes) -> bytes:
    """Of a text of JSON objects, one a line."""
    lines = data.split(b"\n")
    place = rng.randrange(len(lines))
    if lines[place]:
        lines[place] = json_mutator(rng, lines[place])
    if rng.randrange(5) == 0:
        lines.insert(place, rng.choice(lines))
    return b"\n".join(lines) if rng.randrange(5) else mutate_bytes(rng, data)
