"""The programs in tests/capi, built as a user builds them, and runs of them."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Sequence

import numpy as np
import pytest

from tracea_jax.bundle.installation import Library

SOURCE = pathlib.Path(__file__).parent / "capi"
INVALID, UNSUPPORTED, CUDA_ERROR = 1, 2, 3  # statuses of tracea.h
BROKEN = 99  # the status with which they exit where something is wrong


def built(
    place: pathlib.Path, *options: str, source: pathlib.Path = SOURCE
) -> pathlib.Path:
    """The directory of the programs; skips where nothing can be built."""
    if missing := [tool for tool in ("cmake", "cc", "c++") if not shutil.which(tool)]:
        pytest.skip(f"there is no {', '.join(missing)}")
    package = f"-Dtracea_DIR={Library.installed().cmake}"
    for command in (
        ["cmake", "-S", str(source), "-B", str(place), package, *options],
        ["cmake", "--build", str(place), "--parallel", "2"],
    ):
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
    return place


def run(
    program: pathlib.Path, *arguments: str | pathlib.Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A run in an environment without anything of Python's."""
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(
        [program, *arguments], env=environment, capture_output=True, text=True
    )


def computed(
    program: pathlib.Path,
    platform: str,
    bundle: pathlib.Path,
    inputs: Sequence[np.ndarray],
    like: np.ndarray,
) -> np.ndarray:
    """The first output of a bundle, computed by a program."""
    place = bundle.parent / f"{bundle.name}.arrays"
    place.mkdir(exist_ok=True)
    for i, array in enumerate(inputs):
        np.ascontiguousarray(array).tofile(place / f"in{i}.bin")
    out = place / "out0.bin"
    out.unlink(missing_ok=True)
    done = run(program, platform, bundle, place)
    assert done.returncode == 0, done.stdout + done.stderr
    return np.fromfile(out, like.dtype).reshape(like.shape)


def same_bits(x: np.ndarray, y: np.ndarray) -> bool:
    """Whether two arrays are equal, NaN for NaN and zero for zero."""
    return x.dtype == y.dtype and x.tobytes() == y.tobytes()
