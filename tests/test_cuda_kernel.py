"""Kernels of users: their signatures, mistakes in calls of them, and launches."""

from __future__ import annotations

from typing import Any

import cuda_kernels as kernels
import jax
import jax.numpy as jnp
import pytest
from cuda_kernels import Struct, call_of, program_for_a_gpu
from numerics import normal

import tracea_jax as tracea
from tracea_jax.emit.kernel import Kernel, operand_of
from tracea_jax.emit.signature import signature
from tracea_jax.variants import Steps

# --- signatures -----------------------------------------------------------------------

LIST = """
// __global__ void no(int x);
extern "C" {
__global__ void __launch_bounds__(128, 2) first(const float *__restrict__ x,
    unsigned /* n */ n, float4* y, std::size_t s, long long int z[],
    Pair<int, float> p);
}
template <typename T, int N>
__global__ void second(T const* x, const __nv_bfloat16* y, void* z, uint8_t b = 1);
"""


def test_a_signature_says_what_each_parameter_is():
    first = signature(LIST, "first")
    assert first.is_extern_c and not signature(LIST, "second").is_extern_c
    found = [(p.name, p.is_pointer, p.is_const, p.dtype) for p in first.parameters]
    assert found == [
        ("x", True, True, "float32"),
        ("n", False, False, "uint32"),
        ("y", True, False, "float32"),
        ("s", False, False, "uint64"),
        ("z", True, False, "int64"),
        ("p", False, False, None),
    ]
    second = signature(LIST, "second")
    found = [(p.name, p.is_const, p.dtype) for p in second.parameters]
    assert found == [
        ("x", True, None),
        ("y", True, "bfloat16"),
        ("z", False, None),
        ("b", False, "uint8"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "it has first, second"), ("frist", "did you mean 'first'")],
)
def test_a_source_must_have_the_kernel_that_is_meant(name, message):
    with pytest.raises(ValueError, match=message):
        tracea.cuda_kernel(LIST, name)


# --- calls that make no sense ---------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scalars": {"m": 1}}, "'m': ...}: axpy.* has no such parameter"),
        ({"scratch": {"q": "x"}}, "has no such parameter"),
        ({"vmap": "all"}, "vmap='all' must be 'sequential', 'leading' or a function"),
    ],
)
def test_arguments_are_checked_when_the_op_is_made(how, message):
    with pytest.raises(ValueError, match=message):
        tracea.cuda_kernel(kernels.AXPY, **how)


X = Struct((4, 6), jnp.float32)
N: dict[str, Any] = {"scalars": {"n": lambda x: x.size}}


@pytest.mark.parametrize(
    ("how", "operands", "numbers", "message"),
    [
        ({}, (X, X), {}, "takes the number 'a': pass a=..."),
        ({}, (X, X), {"a": 1.0, "b": 2}, "takes no number 'b'"),
        ({}, (X, X), {"a": jnp.ones(())}, "a=.* must be a number .* is an operand"),
        ({}, (X, X, X, X), {"a": 1.0}, "has 3 arrays, .* called with 4"),
        ({}, (X,), {"a": 1.0}, "has 3 arrays; 1 operands and 1 results"),
        ({"out": ("x", "x")}, (X,), {"a": 1.0}, "'const float. y' of axpy is const"),
        (
            {"out": Struct((), jnp.int32)},
            (X, X),
            {"a": 1.0},
            "float32; the array is int32",
        ),
        ({}, (X, Struct((4, 6), jnp.int8)), {"a": 1.0}, "'const float. y' of axpy has"),
        ({"out": 3}, (X, X), {"a": 1.0}, "out must be a ShapeDtypeStruct"),
        (
            {"grid": lambda q: 1},
            (X, X),
            {"a": 1.0},
            "grid= of axpy asks for 'q'; .* x, y",
        ),
        ({"block": 2.5}, (X, X), {"a": 1.0}, "block=2.5 must be an integer"),
        ({"scalars": {"n": 2**63}}, (X, X), {"a": 1.0}, "'long long n': value="),
        ({"block": 0}, (X, X), {"a": 1.0}, "block=0 must be at least 1"),
        ({"block": -1}, (X, X), {"a": 1.0}, "block=-1 must be at least 1"),
        ({"shared": 1.5}, (X, X), {"a": 1.0}, "shared=1.5 must be an integer"),
        ({"inplace": "q"}, (X, X), {"a": 1.0}, "inplace='q' is no operand"),
        ({"inplace": "y"}, (X, X), {"a": 1.0}, "'const float. y' of axpy is const"),
        ({"inplace": ("z", "z")}, (X, X, X), {"a": 1.0}, "inplace= names 'z' twice"),
        ({"maps": {"x": 3}}, (X, X), {"a": 1.0}, "must be a tracea_jax.TensorMap"),
    ],
)
def test_what_does_not_fit_the_parameters_is_said_in_the_call(
    how, operands, numbers, message
):
    """At the latest: what depends on no call is said before."""
    with pytest.raises((TypeError, ValueError), match=message):
        op = tracea.cuda_kernel(kernels.AXPY, **{**N, **how})
        jax.eval_shape(lambda *x: op(*x, **numbers), *operands)


def test_a_config_must_be_one_of_the_space():
    x = normal(2, 3)
    with pytest.raises(ValueError, match="config has 'block'; .* did you mean 'BLOCK'"):
        kernels.TUNED(x, config={"block": 32})
    with pytest.raises(ValueError, match="BLOCK=33 must be one of 128, 32"):
        program_for_a_gpu(lambda x: kernels.TUNED(x, config={"BLOCK": 33}), x)
    with pytest.raises(ValueError, match="space: B=.* must be a C name"):
        kernels.SOFTMAX_OP.space(B=())


# --- launches -------------------------------------------------------------------------


def test_a_launch_has_what_was_said_and_else_a_thread_for_each_element():
    kernel = call_of(kernels.AXPY_OP, Struct((1000,), jnp.float32), X, a=2.0)
    assert isinstance(kernel, Kernel)
    assert (kernel.grid, kernel.block) == ((4, 1, 1), (256, 1, 1))
    x = Struct((7, 1000), jnp.float32)
    config = (("BLOCK", 64),)
    kernel = call_of(kernels.TUNED, x, config=config)
    assert (kernel.grid, kernel.block) == ((7, 1, 1), (64, 1, 1))
    assert kernel.options == ("-DBLOCK=64",)
    assert [p.value for p in kernel.params[2:]] == [1000]


def test_arrays_that_are_updated_zeroed_or_scratch_are_steps():
    op = tracea.cuda_kernel(
        'extern "C" __global__ void f(const float* a, float* x, float* s, float* y) {}',
        inplace="x",
        out="a",
        scratch={"s": Struct((9,), jnp.float32)},
        zeroed=True,
    )
    a, x = Struct((3,), jnp.float32), Struct((5,), jnp.float32)
    steps = call_of(op, a, x)
    assert isinstance(steps, Steps)
    assert str(steps).splitlines() == [
        "(a, x) -> x updated, y",
        "  scratch s float32[9]",
        "  start of x: x updated = same(x)",
        "  zeros of y: y = zeros(shape=(3,), dtype=float32)",
        "  zeros of s: s = zeros(shape=(9,), dtype=float32)",
        "  f: x updated, y, s = f(a, x updated, y, s)",
    ]
    names = [*steps.steps[-1].reads, *steps.steps[-1].writes]
    numbers = [operand_of(p) for p in steps.kernels[0].params]
    assert [names[n] for n in numbers] == ["a", "x updated", "s", "y"]
    assert [s.shape for s in jax.eval_shape(op, a, x)] == [(5,), (3,)]


def test_a_tensor_map_follows_the_shape_of_its_array():
    described = tracea.TensorMap(box=(2, 8, 16), swizzle=32).param(
        Struct((3, 10, 100), jnp.float16), 1
    )
    assert described.dims == (100, 10, 3) and described.box == (16, 8, 2)
    assert described.strides == (200, 2000) and described.operand == 1
    with pytest.raises(ValueError, match="must have 1 sizes"):
        tracea.TensorMap(box=(2, 8)).param(Struct((3,), jnp.float16), 0)
    with pytest.raises(ValueError, match="swizzle=16 must be 0, 32, 64 or 128"):
        tracea.TensorMap(box=(2,), swizzle=16)


def test_a_file_is_text_with_a_mark_or_without(tmp_path):
    path = tmp_path / "größe π.cu"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(kernels.AXPY + "// ü", encoding=encoding)
        assert call_of(tracea.cuda_kernel(path, **N), X, X, a=2.0).source[0] == "\n"
    path.write_text(kernels.AXPY + "// ü", encoding="latin-1")
    with pytest.raises(ValueError, match="größe π.cu is no text in UTF-8"):
        tracea.cuda_kernel(path)
    with pytest.raises(ValueError, match="source is empty"):
        tracea.cuda_kernel("")
