"""Errors that XLA takes for those of what it does next.

Before XLA loads a kernel it looks whether the CUDA runtime has seen an error in this
thread, and gives up if so. It does not take the error away: one call that failed, as of
cuDNN, ends all that a thread may still do. Caller: ``attention_answers``.
"""

from __future__ import annotations

import contextlib
import ctypes
import pathlib

_MAPS = pathlib.Path("/proc/self/maps")


def forget_error() -> int:
    """Takes the last error of the CUDA runtime of this thread away; 0 if none."""
    if not _MAPS.exists():
        return 0
    paths = {line.split()[-1] for line in _MAPS.read_text().splitlines() if line}
    found = 0
    for path in sorted(p for p in paths if "libcudart" in p):
        with contextlib.suppress(OSError, AttributeError):
            found = ctypes.CDLL(path).cudaGetLastError() or found
    return found
