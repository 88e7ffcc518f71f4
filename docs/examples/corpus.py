"""The text that the language models of the examples read: this project's own, as bytes.

A byte is a token, so the vocabulary is 256 and nothing has to be downloaded.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

VOCABULARY = 256
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_FILES = ("README.md", "docs/ARCHITECTURE.md", "CONTRIBUTING.md", "LICENSE")


def text() -> bytes:
    return b"\n".join((_ROOT / file).read_bytes() for file in _FILES)


def batches(
    steps: int, size: int, length: int, *, content: bytes | None = None, seed: int = 0
) -> Iterator[np.ndarray]:
    """Windows of the text, (size, length + 1): inputs and the tokens after them."""
    tokens = np.frombuffer(content or text(), np.uint8).astype(np.int32)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        yield windows[rng.integers(len(windows), size=size)]
