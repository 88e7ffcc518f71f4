"""Elementwise functions on a CPU: bits, shapes, transformations, and what is chosen."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from elementwise import (
    DTYPES,
    FORMS,
    assert_same,
    expected,
    operands,
    random,
    units_of,
)
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax.device import NAMED, local_cpu
from tracea_jax.dispatch import Unsupported, plan
from tracea_jax.emit import elementwise as emit
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel
from tracea_jax.ops import elementwise
from tracea_jax.problem import ElementwiseProblem
from tracea_jax.problem.elementwise import FUNCTIONS
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.elementwise import ELEMENTWISE_CPU, ELEMENTWISE_CUDA

pytestmark = pytest.mark.once

CPU = local_cpu()
FORCED: dict[str, Any] = {"implementation": "tracea"}


def call(function: str, *arrays: Any, **how: Any) -> jax.Array:
    return getattr(elementwise, function)(*arrays, **{**FORCED, **how})


def kernel_of(problem: ElementwiseProblem, device: Any) -> Kernel:
    config = ELEMENTWISE_CUDA.heuristic(problem, device)
    kernel = ELEMENTWISE_CUDA.call(problem, config, device)
    assert isinstance(kernel, Kernel)
    return kernel


# --- values ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_function_has_the_bits_that_ieee_defines(dtype):
    arrays = {form: operands(*form, dtype) for form in FORMS}
    with jax.enable_x64(True):
        results = jax.jit(
            lambda arrays: {(f, s): call(f, *xs) for (f, s), xs in arrays.items()}
        )(arrays)
    for form, result in results.items():
        wanted = expected(form[0], *arrays[form])
        assert_same(result, wanted, units_of(form[0], dtype))


@pytest.mark.parametrize("tasks", [1, 5, 64])
@pytest.mark.parametrize("past_caches", [False, True])
def test_sizes_and_tasks_leave_no_element_out(tasks, past_caches):
    sizes = (1, 3, 7, 31, 32, 33, 16_411, 300_007)
    pairs = [(random("float32", n), random("float32", n, seed=1)) for n in sizes]
    f = functools.partial(
        call, "subtract", config={"tasks": tasks, "past_caches": past_caches}
    )
    results = jax.jit(lambda pairs: [f(*pair) for pair in pairs])(pairs)
    for pair, result in zip(pairs, results, strict=True):
        assert_same(result, expected("subtract", *pair))


def test_without_x64_wide_operands_are_narrowed_as_in_jnp():
    x = np.arange(5.0)
    assert call("add", x, 1.5).dtype == jnp.float32
    assert call("add", x.astype(complex), 1.5).dtype == jnp.complex64
    assert call("abs", x.astype(complex)).dtype == jnp.float32


@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (0,)])
def test_shapes_are_kept_of_numbers_and_of_nothing_too(shape):
    x = jnp.full(shape, 3.0)
    how = {} if x.size == 0 else FORCED
    for y in (x, 2.0, jnp.float32(2)):
        result = elementwise.divide(x, y, **how)
        np.testing.assert_array_equal(result, np.asarray(x) / np.asarray(y))
    assert elementwise.negative(x, **how).shape == shape


def test_an_empty_array_is_no_work_for_a_kernel():
    with pytest.raises(Unsupported, match="the arrays are empty"):
        elementwise.abs(jnp.zeros((0, 3)), **FORCED)


@pytest.mark.parametrize(
    "pair",
    [
        (jnp.arange(3), 2),
        (jnp.arange(3), 2.5),
        (jnp.bfloat16(2), jnp.arange(3.0)),
        (jnp.arange(3), jnp.float16([1, 2, 3])),
        (1, 2),
    ],
)
def test_operands_are_promoted_as_in_jnp(pair):
    for function in ("add", "divide"):
        wanted = getattr(jnp, function)(*pair)
        result = getattr(elementwise, function)(*pair)
        assert result.dtype == wanted.dtype
        np.testing.assert_array_equal(result, wanted)


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", slow_unless(["float32"], ["float32", "complex64"]))
@pytest.mark.parametrize("function", FUNCTIONS)
def test_derivatives_are_those_of_jnp(function, dtype):
    count = FUNCTIONS[function].operands
    rng = np.random.default_rng(0)
    if dtype == "complex64":
        values = rng.standard_normal((2, 7)) + 1j * rng.standard_normal((2, 7))
    else:
        values = rng.standard_normal((2, 7))
    primals = tuple(jnp.asarray(v, dtype) for v in values[:count])
    tangents = tuple(x[::-1] for x in primals)
    ours = functools.partial(call, function)
    theirs = getattr(jnp, function)
    pairs = (jax.jvp(f, primals, tangents) for f in (ours, theirs))
    for found, wanted in zip(*pairs, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
    out, back = jax.vjp(ours, *primals)
    _, wanted_back = jax.vjp(theirs, *primals)
    for found, wanted in zip(back(out), wanted_back(out), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_the_derivative_of_a_scalar_is_summed():
    x = jnp.arange(1.0, 6.0)

    def loss(f):
        return lambda a: jnp.sum(jnp.sin(f(x, a)))

    ours = jax.grad(loss(functools.partial(call, "multiply")))(2.0)
    np.testing.assert_allclose(ours, jax.grad(loss(jnp.multiply))(2.0), rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 0)])
@pytest.mark.parametrize("is_scalar", [False, True])
def test_mapped_operands_are_one_larger_array(axes, is_scalar):
    x = jnp.asarray(random("float32", 15).reshape(3, 5))
    x = x.T if axes[0] == 1 else x[0] if axes[0] is None else x
    y = jnp.arange(3.0) if is_scalar else jnp.arange(15.0).reshape(3, 5)
    y = y[0] if axes[1] is None else y
    f = functools.partial(call, "add")
    result = jax.jit(jax.vmap(f, in_axes=axes))(x, y)
    np.testing.assert_array_equal(result, jax.vmap(jnp.add, in_axes=axes)(x, y))
    assert str(jax.make_jaxpr(jax.vmap(f, in_axes=axes))(x, y)).count(" elem") <= 1


def test_two_mapped_numbers_are_arrays():
    result = jax.vmap(functools.partial(call, "divide"))(jnp.arange(3.0), jnp.ones(3))
    np.testing.assert_array_equal(result, [0, 1, 2])


# --- mistakes -------------------------------------------------------------------------


def test_only_numbers_broadcast():
    with pytest.raises(ValueError, match=r"arrays of one shape, .*\(3,\) and \(2, 3\)"):
        elementwise.add(jnp.ones(3), jnp.ones((2, 3)))


@pytest.mark.parametrize("x", [None, [1.0], "1"])
def test_only_arrays_and_numbers_are_operands(x):
    kind = type(x).__name__
    with pytest.raises(TypeError, match=f"add takes arrays and numbers, not a {kind}"):
        elementwise.add(x, jnp.ones(3))


def test_words_that_are_none_are_refused():
    with pytest.raises(ValueError, match="must be None or one of tracea, elementwise_"):
        elementwise.add(1.0, 2.0, implementation="gemm_cpu")
    with pytest.raises(Unsupported, match="dtype bfloat16; it takes float32, float64"):
        elementwise.add(jnp.bfloat16(1), jnp.bfloat16(2), **FORCED)
    with pytest.raises(ValueError, match="tasks=0 must be from 1 to 64"):
        call("add", jnp.ones(3), 1.0, config={"tasks": 0})
    with pytest.raises(ValueError, match="function='addd' must be .* 'add'"):
        ElementwiseProblem(function="addd", size=3)
    with pytest.raises(ValueError, match="negative has one operand"):
        ElementwiseProblem(function="negative", size=3, scalar="left")


# --- what is chosen, and shown --------------------------------------------------------


@pytest.mark.parametrize("device", [CPU, NAMED["H200"]])
def test_xla_runs_what_was_not_measured_and_the_reason_is_that_it_fuses(device):
    problem = ElementwiseProblem(function="add", size=1 << 24)
    found = plan(problem, device)
    assert found.variant == "xla"
    assert "XLA fuses it with the operations before and after" in str(found)


def test_doctor_says_so_too():
    (line,) = (t for t in str(tracea.doctor()).splitlines() if "elementwise_cpu" in t)
    assert "runs float32; XLA runs until you tune: XLA fuses it with" in line


# --- the table ------------------------------------------------------------------------


def test_the_kernels_for_cpus_are_made_of_the_table():
    header = sources.directory().parent / "cpu/elementwise/table_impl.h"
    assert header.read_text() == emit.cpu_header(), (
        "run python -m tracea_jax.emit.elementwise > "
        "kernels/cpu/elementwise/table_impl.h, and build again"
    )
    assert pathlib.Path(header).name in (header.parent / "loop_impl.h").read_text()


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["A100", "H200"])
@pytest.mark.parametrize(
    ("function", "side", "dtype"),
    [
        ("add", "none", "float32"),
        ("divide", "none", "complex128"),
        ("divide", "left", "complex64"),
        ("abs", "none", "complex128"),
        ("multiply", "right", "float64"),
    ],
)
def test_kernels_for_gpus_compile_without_spills(function, side, dtype, name):
    problem = ElementwiseProblem(function=function, size=1000, dtype=dtype, scalar=side)
    cubin = nvrtc.compile(kernel_of(problem, NAMED[name]))
    assert (cubin.spill_bytes, cubin.stack_bytes, cubin.warnings) == (0, 0, ())


def test_sizes_have_64_bits():
    problem = ElementwiseProblem(function="add", size=2**31 + 5)
    kernel = kernel_of(problem, NAMED["H200"])
    config = ELEMENTWISE_CUDA.heuristic(problem, NAMED["H200"])
    elements = config.threads * config.packs * 4
    assert kernel.grid[0] * elements >= problem.size > (kernel.grid[0] - 1) * elements
    assert ELEMENTWISE_CPU.why_not(problem, CPU) is None
    huge = ElementwiseProblem(function="add", size=2**41)
    assert "more blocks than a launch has" in str(
        ELEMENTWISE_CUDA.why_not(huge, NAMED["H200"])
    )
