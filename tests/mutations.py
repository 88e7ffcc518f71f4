"""Damaged copies of a file: bytes changed, or its JSON changed and signed again."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

VALUES = (
    *(None, True, False, 0, 1, -1, 8, 1 << 31, 1 << 63, 10**400, 0.0, -0.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), 5e-324, "", "1", "xla", "gemm_cpu"),
    *("\x1b[2J", "\x9b", "\u202e", "\ud800", "a\nb", "x" * 5000, "../../x", "NaN"),
    *([], [1, 2], [[]], {}, {"": {}}, {"a": [None]}, {"variant": "xla", "config": {}}),
    *({"\x1b": 1}, [float("nan")], {"unknown": 1}, "wrong_result", "matmul"),
)
PIECES = (
    *(b"\0", b"\n", b"\xff", b'"', b"{", b"}", b"[" * 3000, b'{"a":' * 3000, b"NaN"),
    *(b"1e999", b"-", b",", b"\\ud800", b"\x1b[2J", b"9" * 5000, b"null", b"true"),
)


def bytes_of(draw: random.Random, content: bytes) -> bytes:
    """The content with one to three places changed."""
    for _ in range(draw.randint(1, 3)):
        at, end = sorted(draw.randrange(len(content) + 1) for _ in range(2))
        match draw.randrange(6):
            case 0:  # one bit
                at = min(at, len(content) - 1)
                if at >= 0:
                    flipped = content[at] ^ 1 << draw.randrange(8)
                    content = content[:at] + bytes([flipped]) + content[at + 1 :]
            case 1:
                content = content[:at]
            case 2:
                content = content[:at] + content[end:]
            case 3:
                content = content[:end] + content[at:]
            case 4:
                content = content[:at] + draw.choice(PIECES) + content[at:]
            case 5:
                noise = draw.randbytes(draw.randrange(1, 9))
                content = content[:at] + noise + content[at + len(noise) :]
    return content


def data_of(draw: random.Random, data: Any) -> Any:
    """A copy of plain data with one to three fields changed, removed or added."""
    data = copy.deepcopy(data)
    for _ in range(draw.randint(1, 3)):
        places = [p for p in _containers(data) if p]
        if not places:
            return draw.choice(VALUES)
        place = draw.choice(places)
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        match draw.randrange(8):
            case 0:
                del place[key]
            case 1 if isinstance(place, dict):
                place[draw.choice(["later", "unknown", "", "\x1b", "message"])] = value(
                    draw
                )
            case 2:
                other = draw.choice(places)
                place[key] = copy.deepcopy(other)
            case _:
                place[key] = value(draw)
    return data


def value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))


def _containers(data: Any) -> list[Any]:
    if not isinstance(data, list | dict):
        return []
    inner = data.values() if isinstance(data, dict) else data
    return [data, *(place for item in inner for place in _containers(item))]


def of(
    seed: int, content: bytes, data: Any, encode: Callable[[Any], bytes]
) -> tuple[bytes, bool]:
    """One mutation of a file, and whether it is signed again.

    Args:
      seed: chooses the mutation.
      content: of the file.
      data: what it says.
      encode: makes a file of changed data.
    """
    draw = random.Random(seed)
    if draw.random() < 0.5:
        return bytes_of(draw, content), False
    return encode(data_of(draw, data)), True


def dumps(data: Any) -> str:
    return json.dumps(data)
