"""Bundles on a GPU: the bits of the same kernels in JAX, by threads, and mistakes."""

from __future__ import annotations

import ctypes
import functools
import shutil

import bundle_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from capi_client import AttentionOptions, Conv2dOptions, Failed, Graph
from capi_programs import built, computed, same_bits

import tracea_jax as tracea

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

NONE, RELU = 0, 1  # of tracea_activation

PROGRAMS = {
    "resnet": (*bundle_programs.resnet_block(jnp.bfloat16), "conv2d_sm90"),
    "mlp": (*bundle_programs.mlp(jnp.bfloat16), "gemm_sm90"),
    "attention": (
        *bundle_programs.attention_block(jnp.bfloat16, "attention_sm90"),
        "gemm_sm90",
    ),
}


def bundled(name, tmp_path):
    fn, x, implementation = PROGRAMS[name]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "b.tracea")
    want = bundle_programs.in_jax(fn, x, implementation=implementation)
    return tmp_path / "b.tracea", np.asarray(x), want


@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_threads_compute_the_bits_of_the_jax_program(tmp_path, name):
    place, x, want = bundled(name, tmp_path)
    graph = Graph(place, "cuda")
    results = graph([x], want, threads=8)
    graph.close()
    assert len(results) == 8
    assert all(same_bits(got, want) for got in results)


@pytest.mark.parametrize("language", ["c", "cpp"])
def test_programs_compute_the_bits_of_the_jax_program(tmp_path, language):
    if not shutil.which("cmake"):
        pytest.skip("there is no cmake")
    programs = built(tmp_path / "programs")
    place, x, want = bundled("mlp", tmp_path)
    got = computed(programs / f"run_{language}", "cuda", place, [x], want)
    assert same_bits(got, want)


def test_memory_is_moved_and_numbers_are_combined(tmp_path):
    x = np.random.default_rng(7).normal(size=(6, 10, 32)).astype(np.float32)

    def fn(x, module=jnp):
        padded = module.pad(x[:, 1::2], ((1, 2), (0, 3), (0, 0)))  # (9, 8, 32)
        both = module.concatenate([padded, x[:1].repeat(1, 0)[:, :8]], axis=0)
        return -(both * both - abs(both)) + np.float32(0.5)

    tracea.bundle(fn, x, path=tmp_path / "moves.tracea")
    want = fn(x, np)
    graph = Graph(tmp_path / "moves.tracea", "cuda")
    (got,) = graph([x], want)
    graph.close()
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function_of_elements_is_that_of_numpy(tmp_path, dtype):
    x, y = bundle_programs.special((19, 31), dtype)
    with jax.enable_x64(dtype is np.float64), np.errstate(all="ignore"):
        fn = functools.partial(bundle_programs.every_function, jnp)
        report = tracea.bundle(fn, x, y, path=tmp_path / "functions.tracea")
        want = bundle_programs.every_function(np, x, y)
    likes = [np.empty(shape, kind) for _, kind, shape in report.outputs]
    graph = Graph(tmp_path / "functions.tracea", "cuda")
    results = graph.run([x, y], likes)
    graph.close()
    names = [name.split("'")[1] for name, *_ in report.outputs]
    rtol = 4e-6 if dtype is np.float32 else 1e-13
    bundle_programs.assert_all_close(dict(zip(names, results, strict=True)), want, rtol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_and_softmax_between_products_are_right(tmp_path, dtype):
    fn, x = bundle_programs.normalised_block(dtype)
    tracea.bundle(fn, x, path=tmp_path / "block.tracea")
    want = np.asarray(fn(x))
    graph = Graph(tmp_path / "block.tracea", "cuda")
    (got,) = graph([np.asarray(x)], want)
    graph.close()
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    assert error < (2e-3 if dtype == jnp.float32 else 0.02)  # products in TF32


def test_single_products_run_by_the_kernels_of_bundles(tmp_path):
    array = bundle_programs.Arrays(jnp.bfloat16, 11)
    x, w, b = array(64, 256), array(256, 128, scale=0.05), array(128)

    def fn(x, w, b):
        return tracea.ops.matmul(
            x, w, bias=b, activation="relu", implementation="gemm_sm90"
        )

    tracea.bundle(fn, x, w, b, path=tmp_path / "matmul.tracea")
    want = np.asarray(jax.jit(fn)(x, w, b))
    graph = Graph(tmp_path / "matmul.tracea", "cuda")
    operands = [*map(np.asarray, (x, w, b)), None]
    assert same_bits(graph.direct("tracea_matmul", operands, RELU, want), want)
    with pytest.raises(Failed, match="no graph that the context has loaded has") as e:
        graph.direct("tracea_matmul", operands, NONE, want)
    assert e.value.status == 2
    graph.close()


def test_single_convolutions_run_by_the_kernels_of_bundles(tmp_path):
    array = bundle_programs.Arrays(jnp.bfloat16, 12)
    x, w, b = array(2, 16, 16, 64), array(3, 3, 64, 64, scale=0.05), array(64)

    def fn(x, w, b):
        return tracea.ops.conv2d(
            *(x, w),
            bias=b,
            strides=(2, 2),
            padding=((1, 1), (1, 1)),
            implementation="conv2d_sm90",
        )

    tracea.bundle(fn, x, w, b, path=tmp_path / "conv2d.tracea")
    want = np.asarray(jax.jit(fn)(x, w, b))
    graph = Graph(tmp_path / "conv2d.tracea", "cuda")
    options = ctypes.byref(Conv2dOptions(stride=(2, 2), padding=(1, 1)))
    operands = [*map(np.asarray, (x, w, b)), None]
    assert same_bits(graph.direct("tracea_conv2d", operands, options, want), want)
    graph.close()


def test_single_attentions_run_by_the_kernels_of_bundles(tmp_path):
    array = bundle_programs.Arrays(jnp.bfloat16, 13)
    q, k, v = (array(2, 128, 4, 64) for _ in "qkv")

    def fn(q, k, v):
        return tracea.ops.attention(q, k, v, implementation="attention_sm90")

    tracea.bundle(fn, q, k, v, path=tmp_path / "attention.tracea")
    want = np.asarray(jax.jit(fn)(q, k, v))
    graph = Graph(tmp_path / "attention.tracea", "cuda")
    options = ctypes.byref(AttentionOptions())
    operands = [*map(np.asarray, (q, k, v)), None, None]
    assert same_bits(graph.direct("tracea_attention", operands, options, want), want)
    graph.close()


def test_bundles_of_other_devices_and_host_arrays_are_refused(tmp_path):
    fn, x, implementation = PROGRAMS["mlp"]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "gpu.tracea")
    with pytest.raises(Failed, match="was made for NVIDIA GPUs") as e:
        Graph(tmp_path / "gpu.tracea", "cpu")
    assert e.value.status == 2
    tracea.bundle(
        *bundle_programs.mlp(jnp.float32), path=tmp_path / "cpu.tracea", device="cpu"
    )
    with pytest.raises(Failed, match="was made for CPUs") as e:
        Graph(tmp_path / "cpu.tracea", "cuda")
    assert e.value.status == 2
    with tracea.options(implementation="gemm_sm80"):
        tracea.bundle(fn, x, path=tmp_path / "a100.tracea", device="A100")
    with pytest.raises(Failed, match="the device is sm_90") as e:
        Graph(tmp_path / "a100.tracea", "cuda")
    assert e.value.status == 2
