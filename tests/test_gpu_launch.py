"""The launcher on a GPU: CUDA graphs, changing buffers, and clean memory accesses."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sample_kernels

from tracea_jax import ops
from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import launch, nvrtc

pytestmark = pytest.mark.gpu
PROGRAMS = pathlib.Path(__file__).parent / "gpu_programs.py"


def _launches(flags: str) -> tuple[int, int]:
    """(graph launches, kernels that ran) of 5 calls of a loop of 10 products."""
    done = subprocess.run(
        [sys.executable, PROGRAMS, "capture"],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    found = re.search(r"graphs=(\d+) kernels=(\d+)", done.stdout)
    assert found, done.stdout + done.stderr
    return int(found[1]), int(found[2])


def test_a_loop_of_products_is_captured_into_a_cuda_graph():
    profiled = "--xla_enable_command_buffers_during_profiling=true"
    assert _launches(profiled) == (5, 50)
    # The control: without command buffers the same kernels are launched one by one.
    assert _launches(f"{profiled} --xla_gpu_enable_command_buffer=") == (0, 50)


def test_replays_follow_changing_buffers():
    """More address sets than the graph traces that XLA keeps."""

    @jax.jit
    def chain(x, w):
        for _ in range(6):
            x = ops.matmul(x, w, implementation="gemm_sm90")
        return x

    keys = jax.random.split(jax.random.key(0), 20)
    w = jax.random.normal(jax.random.key(1), (128, 128), jnp.bfloat16) / 12
    inputs = [jax.random.normal(key, (72, 128), jnp.bfloat16) for key in keys]
    first = [chain(x, w) for x in inputs]
    again = [chain(x, w) for x in inputs]
    assert len({x.unsafe_buffer_pointer() for x in inputs}) == 20
    for x, y, z in zip(inputs, first, again, strict=True):
        expected = x
        for _ in range(6):
            expected = expected @ w
        assert jnp.array_equal(y, z)
        assert jnp.allclose(
            y.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.1, atol=0.05
        )


def run(kernel: Kernel, *operands: jax.Array, size: int) -> np.ndarray:
    """The float32 results of one launch."""
    result = [jax.ShapeDtypeStruct((size,), jnp.float32)]
    code = nvrtc.compile(kernel)

    def launched(*operands):
        return launch.cuda_call(
            *operands, results=result, kernel=kernel, cubin=code, embed=False
        )

    return np.asarray(jax.jit(launched)(*operands)[0])


def test_scalars_of_every_type_arrive(hopper):
    found = run(sample_kernels.scalars(), size=12)
    assert found.tolist() == sample_kernels.SCALARS_WRITTEN


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("tap", [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("skipped", [0, 2, 7])
def test_an_im2col_map_reads_the_pixels_of_a_tap(hopper, stride, tap, skipped):
    images, rows, columns, channels = sample_kernels.IMAGES
    x = np.random.default_rng(0).standard_normal(sample_kernels.IMAGES)
    x = x.astype(np.float32)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    positions = [
        (column, row, image)
        for image in range(images)
        for row in range(-1, rows - 1, stride)
        for column in range(-1, columns - 1, stride)
    ][skipped : skipped + 16]
    assert positions
    kernel = sample_kernels.im2col(positions[0], tap, stride)
    found = run(kernel, jnp.asarray(x), size=16 * channels).reshape(16, channels)
    for y, (column, row, image) in zip(found, positions, strict=False):
        np.testing.assert_array_equal(
            y, padded[image, row + 1 + tap[1], column + 1 + tap[0]]
        )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_kernels_are_clean_under_compute_sanitizer(tool):
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    done = subprocess.run(
        [
            sanitizer,
            f"--tool={tool}",
            "--error-exitcode=9",
            *(["--report-api-errors=no"] if tool == "memcheck" else []),
            sys.executable,
            PROGRAMS,
            "every_path",
        ],
        env={**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[:4000] + done.stderr[-2000:]
    ran = set(re.findall("^ok ([a-z0-9_]+) ", done.stdout, re.M))
    assert ran == {
        "gemm_sm90",
        "gemm_sm90_padded",
        "gemm_sm90_split",
        "gemm_sm80",
        "gated_sm90",
    }
