"""Kernels of users on a GPU: what they compute, under JAX's transformations, tuned."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import cuda_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pages import Reader, blocks

import tracea_jax as tracea
from tracea_jax.ops.cuda_kernel.text import toolkit

pytestmark = pytest.mark.gpu


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def close(found, expected, limit: float = 2e-6) -> None:
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape and found.dtype == expected.dtype
    assert np.abs(found - expected).max(initial=0) <= limit * np.abs(expected).max(
        initial=1
    )


def runs_kernel(f, *args) -> bool:
    return "tracea_cuda_launch" in jax.jit(f).lower(*args).as_text()


@pytest.mark.parametrize("shape", [(1, 1), (7, 1000), (3, 5, 33), (0, 8), (4096, 257)])
def test_a_softmax_is_a_function_of_jax(shape):
    x = normal(*shape)
    f = kernels.SOFTMAX_OP
    assert runs_kernel(f, x)
    close(f(x), jax.nn.softmax(x))
    close(jax.jit(f)(x), jax.nn.softmax(x))


def test_a_softmax_has_the_derivative_that_was_given():
    x, w = normal(6, 300), normal(6, 300, seed=1)

    def loss(f):
        return jax.grad(lambda x: (f(x) * w).sum())

    gradient = loss(kernels.SOFTMAX_OP)
    assert jax.jit(gradient).lower(x).as_text().count("tracea_cuda_launch") >= 2
    close(jax.jit(gradient)(x), loss(jax.nn.softmax)(x))
    mapped = jax.jit(jax.vmap(gradient))
    x, w = normal(5, 6, 300), w
    close(mapped(x), jax.vmap(loss(jax.nn.softmax))(x))


def test_a_kernel_with_a_derivative_has_tangents():
    x, dx = normal(6, 300), normal(6, 300, seed=1)
    y, dy = jax.jit(lambda x, dx: jax.jvp(kernels.SOFTMAX_OP, (x,), (dx,)))(x, dx)
    wanted, tangent = jax.jvp(jax.nn.softmax, (x,), (dx,))
    close(y, wanted)
    close(dy, tangent)


@pytest.mark.parametrize("axis", [0, 1])
def test_vmap_launches_one_after_another_or_once(axis):
    x, y = normal(5, 7, 33), normal(7, 33, seed=1)
    by_one = jax.vmap(lambda x, y: kernels.AXPY_OP(x, y, a=3.0), in_axes=(axis, None))
    y = y if axis == 0 else normal(5, 33, seed=1)
    expected = jax.vmap(lambda x, y: 3.0 * x + y, in_axes=(axis, None))(x, y)
    close(by_one(x, y), expected)
    close(jax.jit(by_one)(x, y), expected)
    close(
        jax.vmap(kernels.SOFTMAX_OP, axis)(x), jax.nn.softmax(jnp.moveaxis(x, axis, 0))
    )


def test_a_loop_is_a_scan_of_launches():
    x = normal(64, 100)

    def step(x, _):
        return kernels.SOFTMAX_OP(x * 100), None

    expected = x
    for _ in range(10):
        expected = jax.nn.softmax(expected * 100)
    close(jax.jit(lambda x: jax.lax.scan(step, x, length=10)[0])(x), expected, 1e-4)


LOAD = """
import sys, jax, numpy as np, tracea_jax
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
x = np.load(sys.argv[2])
np.save(sys.argv[3], np.asarray(exported.call(x)))
"""


def test_a_program_carries_its_kernel_to_another_process(tmp_path):
    x = np.asarray(normal(9, 65))
    exported = jax.export.export(jax.jit(kernels.SOFTMAX_OP))(x)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", x)
    files = [str(tmp_path / name) for name in ("program", "x.npy", "y.npy")]
    environment = {
        **os.environ,
        "TRACEA_CACHE_DIR": str(tmp_path / "empty"),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *files],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    close(np.load(tmp_path / "y.npy"), jax.nn.softmax(x))


NUMBERS = """
extern "C" __global__ void numbers(float* y, signed char a, unsigned char b, short c,
    unsigned short d, int e, unsigned f, long long g, unsigned long long h, bool i,
    float j, double k) {
  float all[] = {float(a), float(b), float(c), float(d), float(e), float(f), float(g),
                 float(h), float(i), j, float(k)};
  if (threadIdx.x < 11) y[threadIdx.x] = all[threadIdx.x];
}
"""


def test_numbers_of_every_type_arrive():
    op = tracea.cuda_kernel(NUMBERS, out=jax.ShapeDtypeStruct((11,), jnp.float32))
    given: dict[str, Any] = dict(a=-100, b=200, c=-30000, d=60000, e=-(2**31), f=2**31)
    given |= dict(g=-(2**62), h=2**63, i=True, j=-0.375, k=2.0**-100)
    assert op(**given).tolist() == [float(v) for v in given.values()]


SCALE = """
template <typename T, int EACH>
__global__ void scale(const T* x, T* y, T by, long long n) {
  const long long start = (blockIdx.x * (long long)blockDim.x + threadIdx.x) * EACH;
  for (long long i = start; i < start + EACH && i < n; ++i) y[i] = by * x[i];
}
"""


@pytest.mark.parametrize("dtype", [np.float32, np.int16, np.int32])
def test_a_template_takes_the_types_of_its_operands(dtype):
    scale = tracea.cuda_kernel(SCALE, "scale<{x}, 4>", scalars={"n": lambda x: x.size})
    x = np.arange(1001).astype(dtype)
    np.testing.assert_array_equal(scale(x, by=dtype(3)), 3 * x)


ADD = """
extern "C" __global__ void add(float* x, const float* by, float* count) {
  x[threadIdx.x] += by[threadIdx.x];
  atomicAdd(count, 1.0f);
}
"""


def test_operands_are_updated_in_place():
    add = tracea.cuda_kernel(
        ADD,
        inplace="x",
        out=jax.ShapeDtypeStruct((), jnp.float32),
        zeroed=True,
        grid=1,
        block=lambda x: x.size,
    )
    x, by = normal(100), normal(100, seed=1)
    expected = np.asarray(x + by)
    for _ in range(3):
        y, count = add(x, by)
        close(y, expected)
        assert count == 100
    given = jnp.array(x)
    address = given.unsafe_buffer_pointer()
    y, _ = jax.jit(add, donate_argnums=0)(given, by)
    assert y.unsafe_buffer_pointer() == address and given.is_deleted()
    close(y, expected)


TWICE = """
extern "C" __global__ void twice(const float* x, float* parts, float* y) {
  parts[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = parts[blockDim.x - 1 - threadIdx.x];
}
"""


def test_scratch_lives_during_the_call():
    reverse = tracea.cuda_kernel(
        TWICE, scratch={"parts": "x"}, grid=1, block=lambda x: x.size
    )
    x = normal(64)
    np.testing.assert_array_equal(reverse(x), x[::-1])


TILE = """
struct alignas(64) Map { unsigned long long opaque[16]; };
extern "C" __global__ void tile(const __grid_constant__ Map x, float* y) {
  __shared__ alignas(128) float box[8 * 32];
  __shared__ alignas(8) unsigned long long barrier;
  const unsigned to = __cvta_generic_to_shared(box);
  const unsigned bar = __cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(bar) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 1024;" ::"r"(bar)
                 : "memory");
    const int column = blockIdx.x * 32, row = blockIdx.y * 8;
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier"
                 "::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(to), "l"(&x), "r"(column), "r"(row), "r"(bar) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64"
               " p, [%0], 0; @!p bra again; }" ::"r"(bar) : "memory");
  const int block = blockIdx.y * gridDim.x + blockIdx.x;
  y[block * 256 + threadIdx.x] = box[threadIdx.x];
}
"""


def test_a_tensor_map_describes_its_array(hopper):
    tile = tracea.cuda_kernel(
        TILE,
        maps={"x": tracea.TensorMap(box=(8, 32))},
        grid=lambda x: (-(-x.shape[1] // 32), -(-x.shape[0] // 8)),
        out=lambda x: jax.ShapeDtypeStruct(
            (-(-x.shape[0] // 8), -(-x.shape[1] // 32), 8, 32), x.dtype
        ),
    )
    x = normal(21, 100)
    padded = jnp.pad(x, ((0, 3), (0, 28)))
    expected = padded.reshape(3, 8, 4, 32).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(tile(x), expected)


FILL = """
extern "C" __global__ void fill(signed char* y, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = i % 101;
}
"""


def test_arrays_of_more_than_31_bits_of_elements():
    size = 2**31 + 5
    fill = tracea.cuda_kernel(
        FILL, out=jax.ShapeDtypeStruct((size,), jnp.int8), scalars={"n": size}
    )
    y = fill()
    for part in (slice(0, 1000), slice(2**31 - 500, size)):
        expected = np.arange(part.start, part.stop)
        np.testing.assert_array_equal(np.asarray(y[part]), expected % 101)


CAPTURE = """
import collections, pathlib, sys, tempfile
sys.path.insert(0, sys.argv[1])
import jax, jax.numpy as jnp, cuda_kernels as kernels
x = jax.random.normal(jax.random.key(0), (64, 100))
def loop(x):
    for _ in range(10):
        x = kernels.SOFTMAX_OP(x)
    return x
f = jax.jit(loop)
for _ in range(3):
    y = jax.block_until_ready(f(x))
assert jnp.allclose(y.sum(-1), 1, atol=1e-5)
counts = collections.Counter()
with tempfile.TemporaryDirectory() as directory:
    with jax.profiler.trace(directory):
        for _ in range(5):
            jax.block_until_ready(f(x))
    (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines:
            for event in line.events:
                counts["graphs"] += event.name.startswith("cuGraphLaunch")
                is_on_gpu = plane.name.startswith("/device:GPU")
                counts["kernels"] += is_on_gpu and event.name == "softmax"
print("graphs=%d kernels=%d" % (counts["graphs"], counts["kernels"]))
"""


PAGE = pathlib.Path(__file__).parent.parent / "docs" / "howto" / "cuda_kernels.md"


def test_the_page_about_kernels_runs(tmp_path):
    """With its tuning, in a process that does not have the page's functions."""
    reader = Reader(tmp_path)
    for block in blocks(PAGE):
        reader.read(block)
    softmax: Any = reader.names["softmax"]
    x: Any = reader.names["x"]
    (site,) = tracea.explain(softmax)(x).sites
    assert site.plan is not None and site.plan.origin == "tuned"
    for how in ({"implementation": "tracea"}, {"config": {"BLOCK": 1024}}):
        assert runs_kernel(lambda x, how=how: softmax(x, **how), x)
        close(softmax(x, **how), jax.nn.softmax(x))


def test_launches_are_captured_into_a_cuda_graph():
    flags = "--xla_enable_command_buffers_during_profiling=true"
    done = subprocess.run(
        [sys.executable, "-c", CAPTURE, os.path.dirname(__file__)],
        env={
            **os.environ,
            "XLA_FLAGS": flags,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        },
        capture_output=True,
        text=True,
    )
    assert "graphs=5 kernels=50" in done.stdout, done.stdout + done.stderr


HALVES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
extern "C" __global__ void halves(const __nv_bfloat16* x, __half* y, __nv_bfloat16 by) {
  const int i = threadIdx.x;
  y[i] = __float2half(__bfloat162float(x[i]) * __bfloat162float(by));
}
"""


def test_headers_of_the_toolkit_are_found():
    if toolkit() is None:
        pytest.skip("no CUDA toolkit's headers are installed")
    halves = tracea.cuda_kernel(
        HALVES,
        grid=1,
        block=lambda x: x.size,
        out=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float16),
    )
    x = normal(64).astype(jnp.bfloat16)
    expected = (x.astype(jnp.float32) * 1.5).astype(jnp.float16)
    np.testing.assert_array_equal(halves(x, by=1.5), expected)
