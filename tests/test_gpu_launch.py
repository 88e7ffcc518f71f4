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
import pytest

from tracea_jax import ops

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
