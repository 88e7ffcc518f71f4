"""Kernels of a cache, and other users who run programs, for the tests of trust."""

from __future__ import annotations

import os
import pathlib
import stat
import subprocess
import tempfile

import pytest
from processes import forked

import tracea_jax
from tracea_jax.runtime import cubins as kernels
from tracea_jax.runtime.nvrtc import Cubin

NOBODY = 65534
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root changes owners"
)


KEY = "0" * 64


def cubin(image: bytes = b"\x7fELF image") -> Cubin:
    nothing = dict.fromkeys(
        ("registers", "stack_bytes", "spill_bytes", "smem_static_bytes")
    )
    texts = {"entry": "scale", "log": "", "warnings": ()}
    return Cubin(key=KEY, arch="sm_90a", image=image, compile_s=0.5, **texts, **nothing)


def save_kernel(directory: pathlib.Path, image: bytes = b"\x7fELF image") -> None:
    from sample_kernels import scale

    kernels._save(directory, scale(), cubin(image))


def as_nobody(program: str, *arguments: object, **environment: str) -> str:
    """The output of the program when another user runs it, warnings included.

    It runs as root first, elsewhere, so that all that Python loads is loaded: the other
    user may not reach Python's own files.

    The package's data and metadata are read later, by the other user. Where root keeps
    them in a private directory, such as a virtual environment in its home, no program
    of that user can have them and nothing can be tested; ``.ci/run`` opens its own.
    """
    tests, package = (pathlib.Path(f).parent for f in (__file__, tracea_jax.__file__))
    for place in (tests, package):
        if not is_open_to_others(place):
            pytest.skip(f"another user cannot reach {place}")
    with tempfile.TemporaryDirectory() as empty:
        words = [program, repr(environment), str(tests), empty, *arguments]
        command = forked(AS_NOBODY, *(str(word) for word in words), strict=False)
        done = subprocess.run(
            command, cwd="/", capture_output=True, text=True, timeout=600
        )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.partition("=====\n")[2]


def is_open_to_others(directory: pathlib.Path) -> bool:
    """Whether every user may read a directory and go through those above it."""
    above = all(path.stat().st_mode & stat.S_IXOTH for path in directory.parents)
    return above and directory.stat().st_mode & 0o5 == 0o5


AS_NOBODY = f"""
import ast, os, sys, traceback, warnings
_, program, environment, tests, empty, *arguments = sys.argv
sys.path.append(tests)
import tracea_jax.builtin
os.environ["TRACEA_CACHE_DIR"] = os.environ["HOME"] = empty
sys.argv = ["", empty]
try:
    exec(program, {{}})
except AssertionError:
    pass  # it expects more than an empty cache
sys.stdout.flush()
print("=====", flush=True)
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.argv = ["", *arguments]
os.environ |= ast.literal_eval(environment)
sys.stderr = sys.stdout
warnings.resetwarnings()
warnings.simplefilter("always", RuntimeWarning)
exec(program, {{}})
"""


def collected(directory: pathlib.Path) -> kernels.Collected:
    return kernels.collect(directory, 0, min_age_s=-60)
