"""matmul's values: jnp.matmul's semantics, the epilogue, its roundings, errors."""

from __future__ import annotations

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
import transforms
from jaxprs import equations
from numerics import exact, normal

import tracea_jax as tracea
from tracea_jax.ops import matmul
from tracea_jax.variants.gemm_cpu import GemmCpuConfig

pytestmark = pytest.mark.once

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13, 17])
OURS = ("float32", "bfloat16", "float16")
OTHERS = ("int32", "uint8", "bool", "complex64")


@st.composite
def operand_shapes(draw):
    """Shapes that jnp.matmul accepts: any batch rank, broadcasting, vectors."""
    m, n, k = draw(SIZES), draw(SIZES), draw(SIZES)
    batch = draw(st.lists(st.sampled_from([0, 1, 2, 3]), max_size=3))

    def batch_of_operand():
        own = batch[draw(st.integers(0, len(batch))) :]
        return [draw(st.sampled_from([1, d])) for d in own]

    a = (k,) if draw(st.integers(0, 5)) == 0 else (*batch_of_operand(), m, k)
    b = (k,) if draw(st.integers(0, 5)) == 0 else (*batch_of_operand(), k, n)
    return a, b


@pytest.mark.parametrize("examples", [20, pytest.param(400, marks=pytest.mark.slow)])
def test_any_shapes_and_floats_give_what_jnp_gives(examples):
    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(operand_shapes(), st.sampled_from(OURS), st.sampled_from(OURS))
    def check(shapes, lhs, rhs):
        a, b = normal(*shapes[0], dtype=lhs), normal(*shapes[1], dtype=rhs, seed=1)
        result, expected = matmul(a, b), jnp.matmul(a, b)
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        exact(a, b).assert_near(result)

    check()


@hypothesis.settings(max_examples=10)
@hypothesis.given(operand_shapes(), st.sampled_from([*OURS, *OTHERS]))
def test_xla_without_an_epilogue_is_bit_equal(shapes, dtype):
    a, b = (3 * normal(*s, seed=i) for i, s in enumerate(shapes))
    a, b = a.astype(dtype), b.astype(dtype)
    result, expected = matmul(a, b, implementation="xla"), jnp.matmul(a, b)
    # XLA may sum in another order where jnp passes it a product of another shape.
    if a.ndim == b.ndim == 2:
        np.testing.assert_array_equal(result, expected, strict=True)
    else:
        assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(
            *(np.asarray(x, np.complex128) for x in (result, expected)),
            rtol=float(jnp.finfo(dtype).eps) if dtype in OURS else 1e-6,
            atol=1e-4,
        )


@pytest.mark.parametrize(
    ("lhs", "rhs"),
    [d for d in itertools.product((*OURS[:2], *OTHERS), OTHERS) if d[0] != d[1]]
    + [(d, d) for d in OTHERS],
)
def test_dtypes_without_a_kernel_give_what_jnp_gives(lhs, rhs):
    a = (3 * normal(3, 5)).astype(lhs)
    b = (3 * normal(5, 4)).astype(rhs)
    np.testing.assert_allclose(
        *(f(a, b).astype("complex64") for f in (matmul, jnp.matmul)), rtol=1e-5
    )
    assert matmul(a, b).dtype == jnp.matmul(a, b).dtype


@pytest.mark.parametrize("bias", [None, "float32"])
@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("rhs", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_8_bit_floats_may_be_mixed(rhs, out, bias):
    x, w = normal(6, 16, dtype="float8_e4m3fn"), normal(16, 5, dtype=rhs, seed=1)
    b = None if bias is None else normal(5, dtype=bias)
    y = matmul(x, w, bias=b, preferred_element_type=out)
    exact = np.asarray(x, "float64") @ np.asarray(w, "float64")
    exact = exact if b is None else exact + np.asarray(b, "float64")
    np.testing.assert_allclose(np.asarray(y, "float64"), exact, rtol=2**-8, atol=0.02)
    assert y.dtype == out


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        a, b = normal(5, 7).astype("float64") / 3, normal(7, 6).astype("float64") / 7
        bias, residual = a[0, :6] / 3, b[:5] / 7
        result = matmul(a, b, bias=bias, activation="gelu_exact", residual=residual)
        assert result.dtype == "float64"
        expected = exact(a, b, bias, "gelu_exact", residual)
        expected.assert_near(result, unit=2.0**-53)


def test_numpy_arrays_are_operands_too():
    a, b = np.ones((2, 3)), np.ones(3, np.float32)
    result = matmul(a, b)
    assert isinstance(result, jax.Array)
    np.testing.assert_array_equal(result, jnp.matmul(a, b), strict=True)


# --- the epilogue ---------------------------------------------------------------------


def with_epilogue(a, b, bias, residual, activation, **how):
    return matmul(a, b, bias=bias, residual=residual, activation=activation, **how)


@pytest.mark.parametrize("dtype", OURS)
@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_epilogue(activation, dtype):
    a, b = normal(19, 33, dtype=dtype), normal(33, 21, dtype=dtype)
    bias, residual = normal(21, dtype=dtype), normal(19, 21, dtype=dtype)
    args = (a, b, bias, residual)
    result = with_epilogue(*args, activation, implementation="gemm_cpu")
    assert result.dtype == dtype
    exact(a, b, bias, activation, residual).assert_near(result)


@pytest.mark.parametrize("dtype", OURS)
@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_xla_computes_what_people_write(activation, dtype):
    shapes = ((19, 33), (33, 21), (21,), (19, 21))
    a, b, bias, residual = (normal(*shape, dtype=dtype) for shape in shapes)
    plain = jax.jit(transforms.plain, static_argnums=0)
    expected = plain(activation, a, b, bias, residual)
    found = with_epilogue(a, b, bias, residual, activation, implementation="xla")
    np.testing.assert_array_equal(found, expected, strict=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_our_kernel_rounds_once(activation, dtype):
    implementation = "gemm_cpu"
    a, b = normal(32, 64, dtype=dtype), normal(64, 32, dtype=dtype)
    bias, residual = normal(32, dtype=dtype), normal(32, 32, dtype=dtype)

    def run(out):
        return matmul(
            a,
            b,
            bias=bias,
            activation=activation,
            residual=residual,
            preferred_element_type=out,
            implementation=implementation,
        )

    np.testing.assert_array_equal(run(None), run("float32").astype(dtype), strict=True)
    # Rounding the product first is visible in this very example.
    product = matmul(a, b, implementation=implementation).astype("float32")
    z = product + bias.astype("float32")
    y = jax.nn.gelu(z) if activation == "gelu" else z
    twice = (y + residual.astype("float32")).astype(dtype)
    assert (run(None) != twice).any()


@pytest.mark.parametrize("implementation", ["xla", "gemm_cpu"])
def test_bias_and_residual_may_have_other_dtypes(implementation):
    a, b = normal(9, 12, dtype="bfloat16"), normal(12, 10, dtype="bfloat16")
    bias, residual = normal(10), normal(9, 10, dtype="float16")
    result = matmul(a, b, bias=bias, residual=residual, implementation=implementation)
    assert result.dtype == "bfloat16"
    exact(a, b, bias, "none", residual).assert_near(result)


@pytest.mark.parametrize("shape", [(), (7,), (5, 1), (3, 1, 7), (1, 5, 7)])
def test_the_residual_broadcasts(shape):
    a, b, residual = normal(3, 5, 4), normal(4, 7), normal(*shape)
    exact(a, b, residual=residual).assert_near(matmul(a, b, residual=residual))


@pytest.mark.parametrize(
    ("a", "b"), [((4,), (4, 3)), ((2, 4), (4,)), ((4,), (4,)), ((5, 2, 4), (5, 4, 3))]
)
def test_bias_and_residual_fit_vectors_and_batches(a, b):
    a, b = normal(*a), normal(*b)
    product = jnp.matmul(a, b)
    columns = product.shape[-1] if b.ndim > 1 else 1
    bias, residual = normal(columns), normal(*product.shape)
    result = matmul(a, b, bias=bias, activation="silu", residual=residual)
    bias = bias if b.ndim > 1 else bias[0]
    exact(a, b, bias, "silu", residual).assert_near(result)


@pytest.mark.parametrize("implementation", ["xla", "gemm_cpu"])
@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_no_number_stays_no_number(activation, implementation):
    a = jnp.array([[jnp.nan], [jnp.inf], [1.0], [-jnp.inf]])
    b = jnp.array([[1.0, 0.0]])
    y = matmul(a, b, activation=activation, implementation=implementation)
    # 0 * inf is no number either, as in gelu and silu of -inf.
    smooth = activation not in ("none", "relu")
    np.testing.assert_array_equal(np.isnan(y), [[1, 1], [0, 1], [0, 0], [smooth, 1]])
    assert y[1, 0] == jnp.inf


def test_integers_take_bias_relu_and_residual():
    a, b = jnp.array([[1, -2]]), jnp.array([[3], [4]])
    y = matmul(a, b, bias=jnp.array([1]), activation="relu", residual=jnp.array([[5]]))
    assert y.dtype == "int32" and y.tolist() == [[5]]
    with pytest.raises(ValueError, match="activation='gelu' needs a floating-point"):
        matmul(a, b, activation="gelu")


# --- precision and output dtype -------------------------------------------------------

PRECISIONS = (
    None,
    "default",
    "float32",
    jax.lax.Precision.HIGH,
    ("high", "highest"),
    jax.lax.DotAlgorithmPreset.F32_F32_F32,
    "BF16_BF16_F32_X3",
)


def traced_precision(f, *args, name="tracea_matmul"):
    (equation,) = equations(f, *args, name=name)
    return equation.params["precision"]


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_precision_means_what_it_means_in_lax(precision):
    a, b = normal(4, 6), normal(6, 5)
    ours = traced_precision(lambda a, b: matmul(a, b, precision=precision), a, b)
    assert ours == traced_precision(
        lambda a, b: jnp.matmul(a, b, precision=precision), a, b, name="dot_general"
    )
    np.testing.assert_array_equal(
        matmul(a, b, precision=precision, implementation="xla"),
        jnp.matmul(a, b, precision=precision),
    )


def test_the_default_precision_is_jaxs():
    a, b = normal(4, 6), normal(6, 5)
    with jax.default_matmul_precision("highest"):
        inside = traced_precision(matmul, a, b)
    assert inside == (jax.lax.Precision.HIGHEST,) * 2
    assert traced_precision(matmul, a, b) is None


def test_an_unknown_precision_is_laxs_error():
    with pytest.raises(ValueError, match="[Pp]recision"):
        matmul(normal(2, 2), normal(2, 2), precision="bogus")


@pytest.mark.parametrize("out", ["float32", jnp.bfloat16, np.dtype("float16"), float])
@pytest.mark.parametrize("dtype", OURS)
def test_the_result_has_the_preferred_dtype(dtype, out):
    a, b = normal(6, 40, dtype=dtype), normal(40, 9, dtype=dtype)
    result = matmul(a, b, preferred_element_type=out, implementation="gemm_cpu")
    assert result.dtype == jnp.zeros((), out).dtype
    exact(a, b).assert_near(result)
    np.testing.assert_array_equal(
        matmul(a, b, preferred_element_type=out, implementation="xla"),
        jnp.matmul(a, b, preferred_element_type=out),
        strict=True,
    )


def test_small_integers_may_be_summed_in_wide_ones():
    a = jnp.full((2, 9), 100, jnp.int8)
    result = matmul(a, a.T, preferred_element_type=jnp.int32)
    np.testing.assert_array_equal(result, jnp.full((2, 2), 90_000), strict=True)


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"b": normal(5, 3)}, r"a, \(2, 4\).*of b, \(5, 3\): 4 != 5"),
        ({"a": normal(2, 5, 4), "b": normal(3, 4, 3)}, r"\(2,\), \(3,\)"),
        ({"a": jnp.float32(2)}, "at least one dimension"),
        ({"bias": normal(4)}, r"bias must have shape \(3,\).*\(4,\)"),
        ({"bias": normal(2, 3)}, r"bias must have shape \(3,\).*\(2, 3\)"),
        (
            {"residual": normal(3, 3)},
            r"residual, \(3, 3\), must broadcast to the result, \(2, 3\)",
        ),
        ({"activation": "swish"}, "'swish'.*none, relu, gelu, gelu_exact, silu"),
        ({"activation": None}, "None.*none, relu, gelu, gelu_exact, silu"),
        (
            {"implementation": "cublas"},
            "'cublas'.*None.*tracea, gemm_sm90, .*gemm_cpu, xla",
        ),
        (
            {"config": {"kc": 1, "mc": 2}},
            "gemm_cpu has no config field mc.*kc, nc, tasks",
        ),
        ({"config": {"kc": 64}}, "does not fit gemm_cpu.*nc.*tasks"),
        ({"config": {"kc": 0, "nc": 64, "tasks": 1}}, "kc=0.*from 1 to"),
        ({"config": {"kc": 64.0, "nc": 64, "tasks": 1}}, "kc=64.0.*integer"),
        ({"config": "fast"}, "config='fast' does not fit gemm_cpu"),
        (
            {"config": GemmCpuConfig(kc=64, nc=64, tasks=1), "implementation": "xla"},
            "fits no allowed variant: xla",
        ),
    ],
)
def test_mistakes_are_value_errors(arguments, message):
    call = {"a": normal(2, 4), "b": normal(4, 3), **arguments}
    with pytest.raises(ValueError, match=f"(?s){message}"):
        matmul(call.pop("a"), call.pop("b"), **call)


@pytest.mark.parametrize("name", ["a", "b", "bias", "residual"])
def test_lists_are_type_errors(name):
    call = {"a": normal(2, 2), "b": normal(2, 2), name: [1.0, 2.0]}
    with pytest.raises(TypeError, match=f"{name} is a list"):
        matmul(call.pop("a"), call.pop("b"), **call)


def test_an_unsupported_dtype_lists_every_variants_reason():
    a = jnp.ones((4, 4), jnp.int32)
    with pytest.raises(tracea.Unsupported) as e:
        matmul(a, a, implementation="tracea")
    assert "gemm_sm90: it runs on NVIDIA GPUs; the device is cpu" in str(e.value)
    assert "gemm_cpu: operands of dtype int32" in str(e.value)
    assert isinstance(e.value, ValueError)


def test_one_variant_gives_its_own_reason_only():
    a = normal(4, 4)
    with pytest.raises(tracea.Unsupported, match="gemm_sm90: it runs on") as e:
        matmul(a, a, implementation="gemm_sm90")
    assert "gemm_cpu" not in str(e.value)
