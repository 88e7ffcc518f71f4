"""gated_matmul: its values, plans and errors."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates import FORMS, arguments, assert_gated, plain_gated
from numerics import ACTIVATIONS, exact, normal
from transforms import LAYOUTS

import tracea_jax as tracea
from tracea_jax import dispatch
from tracea_jax.campaign import local_device
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.diagnosis import diagnose
from tracea_jax.ops import gated_matmul
from tracea_jax.ops.gated_matmul.primitive import gated_matmul_p, problem_of
from tracea_jax.problem import GatedMatmulProblem, problem_from_json
from tracea_jax.variants import cpu_calls
from tracea_jax.variants.gated import GATED_FUSED, products

pytestmark = pytest.mark.once

ROUNDINGS = {"xla": 1, "gated_fused": 2, "gated_unfused": 3}
IMPLEMENTATIONS = tuple(ROUNDINGS)
NAMES = ("gated_fused", "gated_unfused")
H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=2)


def gated(m=64, n=64, k=64, dtype="float32", **fields):
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **fields}
    return GatedMatmulProblem(m=m, n=n, k=k, **fields)


# --- values ---------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["xla", "gated_fused"])
@pytest.mark.parametrize(
    ("x", "w"),
    [
        ((5, 7), (7, 9)),
        ((7,), (7, 9)),
        ((7,), (3, 7, 9)),
        ((2, 5, 7), (7, 9)),
        ((5, 7), (3, 7, 9)),
        ((2, 1, 5, 7), (3, 7, 9)),
        ((4, 5, 7), (1, 7, 9)),
        ((33, 65), (65, 17)),
        ((1, 1), (1, 1)),
        ((0, 7), (7, 9)),
        ((5, 0), (0, 9)),
        ((5, 7), (7, 0)),
        ((0, 5, 7), (0, 7, 9)),
    ],
)
def test_any_shapes(x, w, implementation):
    args = normal(*x), normal(*w), normal(*w, seed=1)
    result = gated_matmul(*args, implementation=implementation)
    assert (result.shape, result.dtype) == (jnp.matmul(*args[:2]).shape, "float32")
    assert_gated(result, *args)


@pytest.mark.parametrize("implementation", ["gated_fused", "gated_unfused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_activation_and_dtype(dtype, implementation):
    args = arguments(19, 21, 33, dtype)
    for activation in ACTIVATIONS:
        result = gated_matmul(
            *args, activation=activation, implementation=implementation
        )
        assert result.dtype == dtype
        assert_gated(result, *args, activation, roundings=ROUNDINGS[implementation])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("layout", "batched"), [*FORMS, ("nn", (1, 0))])
def test_the_products_are_further_results(layout, batched, implementation):
    x = normal(*[2] * batched[0], 5, 7)
    weights = [normal(*[2] * batched[1], 7, 9, seed=i) for i in (1, 2)]
    stored = [
        a.swapaxes(-1, -2) if side == "t" else a
        for a, side in zip(
            (x, *weights), (layout[0], layout[1], layout[1]), strict=True
        )
    ]
    y, g, u = gated_matmul_p.bind(
        *stored,
        layout=layout,
        out=jnp.dtype("float32"),
        precision=None,
        activation="gelu",
        save_products=True,
        implementation=implementation,
        config=None,
    )
    assert_gated(y, x, *weights, "gelu")
    exact(x, weights[0]).assert_near(g)
    exact(x, weights[1]).assert_near(u)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_xla_computes_what_people_write(activation, dtype):
    args = arguments(16, 32, 64, dtype)
    plain = jax.jit(functools.partial(plain_gated, activation))
    found = gated_matmul(*args, activation=activation, implementation="xla")
    np.testing.assert_array_equal(found, plain(*args), strict=True)


def test_other_dtypes():
    x, w_gate, w_up = arguments()
    mixed = gated_matmul(x.astype("bfloat16"), w_gate.astype("bfloat16"), w_up)
    assert mixed.dtype == "float32"
    assert_gated(mixed, x.astype("bfloat16"), w_gate.astype("bfloat16"), w_up)
    ones = jnp.ones((2, 3), int), -jnp.ones((3, 2), int), jnp.ones((3, 2), int)
    assert gated_matmul(*ones, activation="none").tolist() == [[-9] * 2] * 2
    with pytest.raises(ValueError, match="activation='silu' needs a floating-point"):
        gated_matmul(*ones)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a, np.float64)) / 3 for a in (x, w_gate, w_up)]
        y, expected = gated_matmul(*wide), plain_gated("silu", *wide)
        assert y.dtype == "float64"
        np.testing.assert_allclose(y, expected, rtol=1e-14)


# --- plans ----------------------------------------------------------------------------


def planned(monkeypatch, f, *args, platform="cpu"):
    """The plans that lowering f makes, in their order."""
    plans, plan = [], dispatch.plan

    def spy(*args, **kwargs):
        plans.append(plan(*args, **kwargs))
        return plans[-1]

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "plan", spy)
        text = jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return plans, text


@pytest.mark.parametrize("save_products", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_products_are_planned_as_the_variant_says(monkeypatch, name, save_products):
    def f(*args):
        call = functools.partial(gated_matmul, implementation=name)
        return jax.vjp(call, *args)[0] if save_products else call(*args)

    (whole, *parts), text = planned(monkeypatch, f, *arguments())
    assert (whole.variant, whole.problem.save_products) == (name, save_products)
    wanted = products(whole.problem, fused=name == "gated_fused")
    assert tuple(p.problem for p in parts) == wanted
    assert {p.variant for p in parts} == {"gemm_cpu"}
    assert text.count("tracea_cpu_gemm_v1") == 2
    multiplies = name == "gated_unfused"
    assert ("stablehlo.multiply" in text) == multiplies


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", ["gated_sm90", "gated_fused", "gated_unfused"])
def test_a_gpu_that_is_not_here_is_lowered_for(monkeypatch, name):
    args = [
        jax.ShapeDtypeStruct(s, "bfloat16") for s in ((2048, 1024), *[(1024, 4096)] * 2)
    ]
    with tracea.options(device="H200"):
        (whole, *parts), text = planned(
            monkeypatch,
            functools.partial(
                gated_matmul, implementation=None if name == "gated_sm90" else name
            ),
            *args,
            platform="cuda",
        )
    assert whole.variant == name and len(parts) == (0 if name == "gated_sm90" else 2)
    assert text.count("tracea_cuda_launch_v1") == (len(parts) or 1)
    assert ("_silu_mul_" in text) == (name == "gated_fused")


def test_the_doctor_passes_the_kernels_reasons_on():
    found = diagnose(gated(k=0, dtype="bfloat16"), H200)
    assert found.candidates == ("xla",)
    for name in NAMES:
        reason = str(found.reason(name))
        assert "gemm_sm90: an extent is 0" in reason
        assert "gemm_cpu: it runs on CPUs" in reason
    assert diagnose(gated(), CPU).candidates == (*NAMES, "xla")
    assert "float64" in str(diagnose(gated(dtype="float64"), CPU).reason("gated_fused"))


def test_tiny_products_are_left_to_xla_for_what_their_calls_cost(calls_cost):
    assert not GATED_FUSED.expects_to_win(gated(), CPU)
    assert GATED_FUSED.doubt(gated(), CPU) == cpu_calls.REASON
    assert GATED_FUSED.expects_to_win(gated(256, 256, 256), CPU)


def test_it_is_fused_unmeasured_where_the_kernel_usually_wins():
    large, small = (gated(n, n, n, dtype="bfloat16") for n in (4096, 256))
    assert GATED_FUSED.expects_to_win(large, H200)
    assert not GATED_FUSED.expects_to_win(small, H200)
    assert GATED_FUSED.expects_to_win(gated(), CPU)
    assert not GATED_FUSED.expects_to_win(small, CPU)  # 16 bits


def test_tuning_finds_an_answer():
    problem = gated(24, 40, 32, save_products=True)
    entry = tracea.tune(problem, effort="none", budget_s=1).entry
    assert entry.best.time_us
    assert entry.best.variant == "xla" or entry.verified["ok"]  # XLA is the reference
    assert {o.variant for o in entry.observations} == set(IMPLEMENTATIONS)
    found = dispatch.plan(problem, local_device())
    assert (found.origin, found.variant) == ("tuned", entry.best.variant)
    assert problem_from_json(entry.problem) == problem


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_problem_of_an_equation(layout):
    x = jax.ShapeDtypeStruct((5, 4) if layout[0] == "n" else (4, 5), "bfloat16")
    w = jax.ShapeDtypeStruct((3, *((4, 6) if layout[1] == "n" else (6, 4))), "float32")
    params: dict[str, Any] = dict(layout=layout, out="float16", precision=None)
    avals: list[Any] = [x, w, w]
    found = problem_of(
        avals, **params, activation="gelu", save_products=True, config=None
    )
    assert found == GatedMatmulProblem(
        batch=3,
        m=5,
        n=6,
        k=4,
        lhs="bfloat16",
        rhs="float32",
        out="float16",
        layout=layout,  # pyright: ignore[reportArgumentType]
        rhs_batched=True,
        activation="gelu",
        save_products=True,
    )


# --- errors ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w_up": normal(4, 2)}, r"one shape.*\(4, 3\) and \(4, 2\)"),
        ({"w_gate": normal(4), "w_up": normal(4)}, r"one shape.*\(4,\) and \(4,\)"),
        ({"x": normal(5, 3)}, r"x, \(5, 3\).*weights, \(4, 3\)"),
        ({"x": jnp.float32(1)}, r"x, \(\).*weights, \(4, 3\)"),
        (
            {"x": normal(2, 5, 4), "w_gate": normal(3, 4, 3), "w_up": normal(3, 4, 3)},
            "broadcast|incompatible",
        ),
        ({"activation": "swish"}, "'swish'.*none, relu, gelu, gelu_exact, silu"),
        (
            {"implementation": "gemm_cpu"},
            "gemm_cpu.*tracea, gated_sm90, gated_fused, gated_unfused, xla",
        ),
        ({"config": {"kc": 3}}, "no config field kc"),
        ({"precision": "bogus"}, "[Pp]recision"),
    ],
)
def test_errors(changes, message):
    call = dict(zip(("x", "w_gate", "w_up"), arguments(), strict=True)) | changes
    with pytest.raises(ValueError, match=message):
        gated_matmul(**call)


def test_lists_are_no_arrays():
    with pytest.raises(TypeError, match="gated_matmul takes arrays; w_up is a list"):
        x, w_gate, _ = arguments()
        gated_matmul(x, w_gate, [[1.0]])  # pyright: ignore[reportArgumentType]


def test_what_no_kernel_takes_is_refused_with_every_reason():
    ones = jnp.ones((4, 4), int)
    with pytest.raises(tracea.Unsupported) as e:
        gated_matmul(ones, ones, ones, activation="relu", implementation="tracea")
    for words in (
        "gated_fused: gemm_sm90: it runs on",
        "gemm_cpu: operands of dtype int32",
    ):
        assert words in str(e.value)
