"""Kernels whose compilation hangs, crashes or otherwise disturbs its process."""

from __future__ import annotations

import dataclasses
import os
import sys
import time

import sample_kernels

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc


class Hangs(str):
    """Source text that keeps the compiler waiting."""

    def encode(self, *args) -> bytes:
        time.sleep(1000)
        return b""


class Aborts(str):
    """Source text that ends the compiler's process."""

    def encode(self, *args) -> bytes:
        print("out of registers", file=sys.stderr, flush=True)
        os.abort()


class Tells(str):
    """Source text whose error says what its process has imported."""

    def encode(self, *args) -> bytes:
        loaded = sorted({"jax", "jaxlib", "scipy"} & set(sys.modules))
        raise nvrtc.CompileError(f"loaded: {loaded}", "")


def with_source(kind: type[str], number: int = 0) -> Kernel:
    source = kind(f"// {kind.__name__} {number}")
    return dataclasses.replace(sample_kernels.scale(), source=source)


def variation(number: int) -> Kernel:
    """A kernel that compiles, and is another one for each number."""
    return dataclasses.replace(sample_kernels.scale(), options=(f"-DX={number}",))
