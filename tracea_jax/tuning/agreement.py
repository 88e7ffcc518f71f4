"""Agreement: all processes of a program choose alike, or the program ends in an error.

Processes that lower different programs hang in the first collective. So process 0 puts
a digest of its tuned answers into the key-value store of the program's coordinator, and
every other process compares its own digest with that one. Lowering itself must not run
collectives, because these could meet the collectives of a program that is running.
The key-value store itself is passed in by the one caller, ``tracea_jax.knowledge``.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Protocol

PATIENCE_S = 300.0  # that a process waits for process 0 to reach the same call
_SLICE_S = 5.0  # between two calls of ``on_wait``


class KeyValue(Protocol):
    """A store that all processes reach."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value as soon as it is set; None if it is not set in time."""
        ...


class Disagreement(RuntimeError):
    """The processes of a program would choose different configs or variants."""


class Agreement:
    """One process's side of the comparison.

    All processes must make the same calls in the same order: the n-th call of a method
    in one process is compared with the n-th call of that method in process 0.
    """

    def __init__(self, store: KeyValue, process: int) -> None:
        self._store = store
        self._process = process
        self._count = collections.Counter[str]()
        self._lock = threading.Lock()

    def check(self, subject: str, digest: str) -> None:
        """Compares a digest with the one that process 0 gave in its same call.

        Args:
          subject: what the digest is of; calls are counted for each subject.
          digest: of this process.

        Raises:
          Disagreement: if the digests differ, or process 0 has given none within
            ``PATIENCE_S`` seconds.
        """
        key = self._next(subject)
        if self._process == 0:
            self._store.set(key, digest.encode())
            return
        told = self._store.get(key, PATIENCE_S)
        if told is None:
            raise Disagreement(
                f"process {self._process} waited {PATIENCE_S:.0f} s for what process 0 "
                f"answers from ({key}); all processes must lower the same programs and "
                "call tracea.tune alike, process 0 too"
            )
        if told.decode() != digest:
            raise Disagreement(
                f"the tuned answers of process {self._process} differ from those of "
                f"process 0 ({digest[:12]}, not {told.decode()[:12]}), so they would "
                "lower different programs. Give all processes one TRACEA_CACHE_DIR, or "
                "copy process 0's answers: `tracea cache export FILE` there, `tracea "
                "cache merge FILE` here; and install the same tracea_jax for the same "
                "kind of device everywhere"
            )

    def share(self, work: Callable[[], bytes], on_wait: Callable[[], None]) -> bytes:
        """Runs ``work`` in process 0 only and returns its result in every process.

        Args:
          work: called in process 0; the other processes wait for as long as it takes.
          on_wait: called every few seconds in a process that waits.

        Raises:
          Disagreement: in the waiting processes, if ``work`` failed in process 0;
            process 0 raises the original error.
        """
        key = self._next("work")
        if self._process == 0:
            try:
                result = work()
            except BaseException as e:
                self._store.set(key, b"-" + f"{type(e).__name__}: {e}".encode())
                raise
            self._store.set(key, b"+" + result)
            return result
        while (told := self._store.get(key, _SLICE_S)) is None:
            on_wait()
        if told.startswith(b"-"):
            raise Disagreement(f"process 0 failed: {told[1:].decode()}")
        return told[1:]

    def _next(self, subject: str) -> str:
        with self._lock:
            self._count[subject] += 1
            return f"tracea_jax/{subject}/{self._count[subject]}"
