"""Kernels that NVRTC compiles cleanly, of which a record saves the compilation.

What NVRTC makes of a kernel depends on nothing but what ``nvrtc.key`` hashes: the text,
its headers, options, target and the compiler's version. A kernel that is in the record
has passed ``assert_clean`` as it is, with this compiler; any other one is compiled.

    pytest -m 'nvrtc and not slow' --compile    compiles all, and writes the record anew
"""

from __future__ import annotations

import functools
import hashlib
import pathlib

from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import launch, nvrtc

RECORD = pathlib.Path(__file__).parent / "golden" / "compiled.txt"

is_recording = False  # all are compiled then
_passed: set[str] = set()


def assert_clean(kernel: Kernel) -> None:
    """Asserts that a kernel compiles without local memory and without a warning.

    A warning is such as that products are serialized. The code takes the parameters
    that its launch passes, and no shared memory beside what the launch asks for.
    """
    name = identity(kernel)
    if not is_recording and name in _recorded():
        return
    cubin = nvrtc.compile(kernel)
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())
    assert cubin.smem_static_bytes == 0 or kernel.smem_bytes == 0
    launch.ready(kernel, cubin, False)  # parameters are as many, and alike
    _passed.add(name)


def identity(kernel: Kernel) -> str:
    """A hash of all that ``assert_clean`` depends on: the code, and its launch."""
    attributes = launch.cuda_attributes(kernel, nvrtc.key(kernel))
    numbers = [attributes[name].tolist() for name in ("launch", "params")]
    text = repr((attributes["kernel_key"], *numbers))
    return hashlib.sha256(text.encode()).hexdigest()


def write_record() -> None:
    """Writes what was compiled by this process."""
    RECORD.write_text("".join(f"{name}\n" for name in sorted(_passed)))


@functools.cache
def _recorded() -> frozenset[str]:
    return frozenset(RECORD.read_text().split())
