"""Calls of several steps: what is valid, what they compute, and what they lower to."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
import sample_kernels
from jax.interpreters import mlir
from numerics import normal

from tracea_jax import emission
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.runtime import nvrtc
from tracea_jax.runtime.nvrtc import Cubin
from tracea_jax.variants import Buffer, Expression, Launch, Steps, kernels_in
from tracea_jax.variants.steps import converted, sum_of_parts, zeros


def kernel(entry: str, operands: int) -> Kernel:
    """A kernel that takes the addresses of so many buffers, and a float."""
    return dataclasses.replace(
        sample_kernels.scale(),
        entry=entry,
        source=f'extern "C" __global__ void {entry}() {{}}',
        params=(
            *(Pointer(operand=i) for i in range(operands)),
            Scalar(value=0.125, dtype="float32"),
        ),
    )


# A contraction split in four: partial products in scratch, then their sum.
PARTS = Buffer(name="parts", shape=(4, 16, 24), dtype="float32")
SPLIT_K = Steps(
    operands=("lhs", "rhs"),
    results=("y",),
    scratch=(PARTS,),
    steps=(
        Launch(
            name="products",
            kernel=kernel("products", 3),
            reads=("lhs", "rhs"),
            writes=("parts",),
        ),
        Expression(name="sum", function=sum_of_parts, reads=("parts",), writes=("y",)),
    ),
)


# The backward pass of attention, one head: delta in array code, one kernel that adds to
# dq in float32 and writes dk and dv, and the conversion of dq.
def delta(module: Any, o: Any, do: Any) -> Any:
    return module.sum(o.astype("float32") * do.astype("float32"), -1)


N, D = 20, 8
WIDE_DQ: Any = (("shape", (N, D)), ("dtype", "float32"))
BACKWARD = Steps(
    operands=("q", "k", "v", "o", "lse", "do"),
    results=("dq", "dk", "dv"),
    scratch=(
        Buffer(name="delta", shape=(N,), dtype="float32"),
        Buffer(name="wide_dq", shape=(N, D), dtype="float32"),
    ),
    steps=(
        Expression(name="delta", function=delta, reads=("o", "do"), writes=("delta",)),
        Expression(
            name="clear",
            function=zeros,
            reads=(),
            writes=("wide_dq",),
            arguments=WIDE_DQ,
        ),
        Launch(
            name="main",
            kernel=kernel("backward", 10),
            reads=("q", "k", "v", "lse", "do", "delta", "wide_dq"),
            writes=("wide_dq", "dk", "dv"),
        ),
        Expression(
            name="convert",
            function=converted,
            reads=("wide_dq",),
            writes=("dq",),
            arguments=(("dtype", "bfloat16"),),
        ),
    ),
)


# --- what they are --------------------------------------------------------------------


def test_they_are_values_that_print():
    again = dataclasses.replace(SPLIT_K, steps=tuple(SPLIT_K.steps))
    assert again == SPLIT_K and hash(again) == hash(SPLIT_K)
    assert hash(BACKWARD) != hash(SPLIT_K)
    assert str(BACKWARD).splitlines() == [
        "(q, k, v, o, lse, do) -> dq, dk, dv",
        "  scratch delta float32[20]",
        "  scratch wide_dq float32[20, 8]",
        "  delta: delta = delta(o, do)",
        "  clear: wide_dq = zeros(shape=(20, 8), dtype=float32)",
        "  main: wide_dq, dk, dv = backward(q, k, v, lse, do, delta, wide_dq)",
        "  convert: dq = converted(wide_dq, dtype=bfloat16)",
    ]


def test_kernels_are_compiled_once_each():
    once = kernel("once", 2)
    launches = [
        Launch(name=name, kernel=once, reads=(read,), writes=(name,))
        for name, read in (("y", "x"), ("z", "y"))
    ]
    call = Steps(operands=("x",), results=("y", "z"), steps=tuple(launches))
    assert kernels_in(call) == (once,)
    assert [k.entry for k in kernels_in(BACKWARD)] == ["backward"]
    assert kernels_in(once) == (once,)


PRODUCTS, SUM = SPLIT_K.steps
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "order": ({"steps": (SUM, PRODUCTS)}, "step 'sum' reads 'parts', which no earlier"),
    "unknown": (
        {"scratch": ()},
        "step 'products' names the buffer 'parts'; there are lhs, rhs, y",
    ),
    "missing result": ({"results": ("y", "z")}, "no step writes the result 'z'"),
    "idle scratch": (
        {"scratch": (PARTS, dataclasses.replace(PARTS, name="more"))},
        "no step uses the scratch buffer 'more'",
    ),
    "names": ({"operands": ("lhs", "lhs", "rhs")}, "2 buffers have the name 'lhs'"),
    "step names": ({"steps": (PRODUCTS, SUM, SUM)}, "2 steps have the name 'sum'"),
    "operand": (
        {"steps": (PRODUCTS, dataclasses.replace(SUM, writes=("lhs",)))},
        "step 'sum' writes 'lhs', an operand",
    ),
    "again": (
        {"steps": (PRODUCTS, SUM, dataclasses.replace(SUM, name="more"))},
        "step 'more' writes 'y' again; .* also reads it",
    ),
    "twice": (
        {"steps": (PRODUCTS, dataclasses.replace(SUM, writes=("y", "y")))},
        "step 'sum' must write one buffer or more, each once",
    ),
    "nothing": (
        {"steps": (PRODUCTS, SUM, dataclasses.replace(SUM, name="idle", writes=()))},
        "step 'idle' must write one buffer or more",
    ),
    "numbers": (
        {"steps": (dataclasses.replace(PRODUCTS, reads=("lhs",)), SUM)},
        "step 'products' names 2 buffers, and its kernel uses operand 2",
    ),
}


@pytest.mark.parametrize(("change", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_step_and_buffer(change, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*the steps are"):
        dataclasses.replace(SPLIT_K, **change)


# --- what they compute ----------------------------------------------------------------


def shapes(*arrays: tuple[tuple[int, ...], str]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in arrays]


def test_a_split_contraction_with_a_stand_in_for_the_kernel():
    lhs, rhs = normal(16, 32), normal(32, 24)

    def launch(step, arrays, results):
        assert step is PRODUCTS
        assert [(x.shape, x.dtype) for x in results] == [(PARTS.shape, PARTS.dtype)]
        a, b = arrays
        return [jnp.einsum("msk,skn->smn", a.reshape(16, 4, 8), b.reshape(4, 8, 24))]

    (y,) = emission.run(SPLIT_K, launch, shapes(((16, 24), "float32")), lhs, rhs)
    np.testing.assert_allclose(y, lhs @ rhs, rtol=1e-5, atol=1e-5)


def attention(q: Any, k: Any, v: Any) -> Any:
    return jax.nn.softmax(q @ k.T, axis=-1) @ v


def test_the_backward_pass_of_attention_with_a_stand_in_for_the_kernel():
    q, k, v, do = (normal(N, D, seed=i) for i in range(4))
    o, vjp = jax.vjp(attention, q, k, v)
    lse = jax.nn.logsumexp(q @ k.T, -1)

    def main(step, arrays, results):
        q, k, v, lse, do, delta, wide_dq = arrays
        p = jnp.exp(q @ k.T - lse[:, None])
        ds = p * (do @ v.T - delta[:, None])
        return [wide_dq + ds @ k, ds.T @ q, p.T @ do]

    wanted = [((N, D), "bfloat16"), ((N, D), "float32"), ((N, D), "float32")]
    found = emission.run(BACKWARD, main, shapes(*wanted), q, k, v, o, lse, do)
    assert found[0].dtype == "bfloat16"
    for x, y, tolerance in zip(found, vjp(do), (2**-7, 1e-5, 1e-5), strict=True):
        np.testing.assert_allclose(
            np.asarray(x, "float32"), y, rtol=tolerance, atol=tolerance
        )


def test_array_code_runs_in_numpy_too():
    x = normal(3, 5)
    total = Expression(name="s", function=sum_of_parts, reads=("x",), writes=("y",))
    (found,) = total(np, np.asarray(x))
    np.testing.assert_allclose(found, np.asarray(x).sum(0), rtol=1e-6)


def test_an_expression_of_another_shape_or_dtype_is_refused():
    def launch(step, arrays, results):
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    operands = normal(16, 32), normal(32, 24)
    for shape, dtype in (((16, 25), "float32"), ((16, 24), "bfloat16")):
        wrong = shapes((shape, dtype))
        with pytest.raises(ValueError, match=r"'sum' computes float32\[16, 24\] for"):
            emission.run(SPLIT_K, launch, wrong, *operands)


# --- what they lower to ---------------------------------------------------------------


def lowered(
    steps: Steps, results: list[Any], *operands: Any, code: Cubin | None = None
) -> str:
    """The program of a primitive that is served by these steps on CUDA."""
    primitive = jex.Primitive("test_steps")
    primitive.multiple_results = True
    written = jax.make_jaxpr(lambda: [jnp.zeros(x.shape, x.dtype) for x in results])()
    primitive.def_abstract_eval(lambda *_: list(written.out_avals))
    cubins = dict.fromkeys(kernels_in(steps), code or sample_kernels.cubin())

    def rule(ctx: Any, *values: Any) -> Any:
        return emission.emit(ctx, values, steps, cubins)

    mlir.register_lowering(primitive, rule, platform="cuda")
    traced = jax.jit(primitive.bind).trace(*operands)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def test_scratch_is_the_result_of_one_call_and_the_operand_of_array_code():
    results = shapes(((16, 24), "float32"))
    operands = shapes(((16, 32), "float32"), ((32, 24), "float32"))
    text = lowered(SPLIT_K, results, *operands)
    assert text.count("@tracea_cuda_launch_v1") == 1
    assert "(tensor<16x32xf32>, tensor<32x24xf32>) -> tensor<4x16x24xf32>" in text
    added = r"stablehlo.reduce.*stablehlo.add across dimensions = \[0\]"
    assert re.search(rf"{added} : \(tensor<4x16x24xf32>", text)


def test_a_buffer_is_updated_in_place_and_converted_by_xla():
    matrix = ((N, D), "bfloat16")
    operands = shapes(*[matrix] * 4, ((N,), "float32"), matrix)
    text = lowered(BACKWARD, shapes(*[matrix] * 3), *operands)
    assert text.count("@tracea_cuda_launch_v1") == 1
    (call,) = (s for s in text.splitlines() if "@tracea_cuda_launch_v1" in s)
    # Seven buffers read, three written; the last one read is the first one written.
    read = "tensor<20x8xbf16>, " * 3 + "tensor<20xf32>, tensor<20x8xbf16>, "
    read += "tensor<20xf32>, tensor<20x8xf32>"
    written = "tensor<20x8xf32>, tensor<20x8xbf16>, tensor<20x8xbf16>"
    assert f"({read}) -> ({written})" in call
    alias = r"output_tuple_indices = \[0\], operand_index = 6, operand_tuple_indices = "
    assert re.search(alias, call)
    assert re.search(
        r"stablehlo.convert %\S+ : \(tensor<20x8xf32>\) -> tensor<20x8xbf16>", text
    )


@pytest.mark.nvrtc
def test_kernels_of_steps_are_compiled_and_launched_in_their_order():
    """Three steps with scratch: two launches of one compiled kernel, then a sum."""
    first, second = sample_kernels.scale(by=3), sample_kernels.scale(by=5)
    call = Steps(
        operands=("x",),
        results=("y",),
        scratch=tuple(
            Buffer(name=name, shape=(4, 250), dtype="float32") for name in ("a", "b")
        ),
        steps=(
            Launch(name="first", kernel=first, reads=("x",), writes=("a",)),
            Launch(name="second", kernel=second, reads=("a",), writes=("b",)),
            Expression(name="sum", function=sum_of_parts, reads=("b",), writes=("y",)),
        ),
    )
    code = nvrtc.compile(first)
    assert code.key == nvrtc.key(second) and kernels_in(call) == (first, second)
    operand, result = shapes(((4, 250), "float32"), ((250,), "float32"))
    text = lowered(call, [result], operand, code=code)
    launches = [s for s in text.splitlines() if "@tracea_cuda_launch_v1" in s]
    for launched, by in zip(launches, (3, 5), strict=True):
        assert f'kernel_key = "{code.key}"' in launched
        assert f"params = dense<[0, 0, 0, 1, 1, 1000, 1, {by}]>" in launched
    assert text.index("stablehlo.reduce") > text.index(launches[1])
