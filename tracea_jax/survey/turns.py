"""Whose turn it is on a GPU that several processes, or threads, use.

One that measures is alone. Those that make XLA try kernels while it compiles may be
there together, but never beside one that measures. Nobody waits for ever: who wants to
be alone lets nobody else in meanwhile.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pathlib
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True, slots=True)
class Turns:
    """Turns by locks on two files of a directory, which all who share the GPU name."""

    directory: pathlib.Path

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with contextlib.ExitStack() as room:
            with self._locked("gate", fcntl.LOCK_EX):
                room.enter_context(self._locked("room", fcntl.LOCK_EX))
            yield

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with contextlib.ExitStack() as room:
            with self._locked("gate", fcntl.LOCK_EX):
                room.enter_context(self._locked("room", fcntl.LOCK_SH))
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        self.directory.mkdir(parents=True, exist_ok=True)
        # A file opened again is locked for itself, also in one process.
        with open(self.directory / name, "w") as file:
            fcntl.flock(file, how)
            yield


def on_visible_gpus(directory: pathlib.Path) -> Turns:
    """Turns of those who see the same GPUs and name the same directory."""
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "all").replace(",", "-")
    return Turns(directory / f"turns-{gpus}")
