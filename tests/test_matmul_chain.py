"""Layers in a row: one derivative rule for all, and how transform finds them."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import ACTIVATED, exact_gemm, normal
from transformed import assert_alike, assert_all_alike
from transforms import PLAIN, assert_derivatives_alike, in_f64

import tracea_jax as tracea
from tracea_jax.ops.common import lowering
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.ops.matmul.chain import Layer, chain
from tracea_jax.ops.matmul.primitive import matmul_p, unfused
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.rewrite import replace


@pytest.fixture(params=[False, True], ids=["unfused", "fused"])
def fused(request, monkeypatch):
    """Whether a kernel is said to make the products of the backward pass."""
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: not request.param)
    return request.param


def layer(activation: str, **steps) -> Layer:
    return Layer(
        layout=steps.pop("layout", "nn"),
        out=jnp.dtype("float32"),
        precision=None,
        epilogue=Epilogue(activation=activation, **steps),  # pyright: ignore
    )


LAYERS = (
    layer("silu", bias="row"),
    layer("gelu_exact", layout="nt"),
    layer("gelu", bias="row"),
    layer("relu", bias="row", residual=True),
)
OPERANDS = (
    (5, 3), (3, 4), (4,), (6, 4), (6, 3), (3,), (3, 4), (4,), (5, 4),
)  # fmt: skip


def operands():
    """Small ones: XLA's own tanh is inaccurate far out when it does not optimise."""
    return tuple(0.5 * normal(*shape, seed=4) for shape in OPERANDS)


def written(x, w1, b1, w2, w3, b3, w4, b4, residual):
    """The same as people write it."""
    x = PLAIN["silu"](x @ w1 + b1)
    x = PLAIN["gelu_exact"](x @ w2.T)
    x = PLAIN["gelu"](x @ w3 + b3)
    return PLAIN["relu"](x @ w4 + b4) + residual


def test_derivatives_in_every_mode(fused):
    args = operands()
    assert_derivatives_alike(functools.partial(chain, LAYERS), written, *args)


@pytest.mark.parametrize("activation", ACTIVATED)
def test_one_product_gives_the_gradients_of_a_layer_and_its_bias(activation, fused):
    layers = layer(activation, bias="row"), layer("none")
    args = tuple(normal(*shape) for shape in ((5, 3), (3, 4), (4,), (4, 6)))

    def gradient(f, *args):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=(0, 1, 2, 3))(*args)

    def plain(x, w1, b1, w2):
        return PLAIN[activation](x @ w1 + b1) @ w2

    ours = functools.partial(gradient, functools.partial(chain, layers))
    steps = [str(e.params["epilogue"]) for e in equations(ours, *args, name=PRODUCT)]
    backward = [f"{activation}' &sums"] if fused else ["none"]
    # Forward; gradients of w2, of x and w1.
    assert sorted(steps) == sorted([f"bias+{activation} &z", *backward, *["none"] * 4])
    found = jax.jit(ours)(*args)
    for x, y in zip(
        found, in_f64(functools.partial(gradient, plain), *args), strict=True
    ):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)


PRODUCT = "tracea_matmul"


@pytest.mark.parametrize(
    ("wanted", "count"),
    # Four products, those of the backward pass, and no z of what has no derivative.
    [((8,), 4), ((6,), 5), ((4, 5), 6), ((2,), 7), ((0,), 8)],
)
def test_what_is_not_differentiated_costs_nothing(wanted, count, monkeypatch):
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)
    args = operands()

    def gradient(f, *args):
        return jax.grad(lambda *x: (f(*x) ** 2).sum(), argnums=wanted)(*args)

    ours = functools.partial(gradient, functools.partial(chain, LAYERS))
    expected = in_f64(functools.partial(gradient, written), *args)
    for x, y in zip(jax.jit(ours)(*args), expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5)
    assert len(equations(ours, *args, name=PRODUCT)) == count


def test_a_product_with_a_derivative_is_linear_in_its_factors():
    lhs, rhs, z = normal(5, 3), normal(3, 4), normal(5, 4)
    step = Epilogue(
        activation="gelu", residual=True, residual_op="derivative", column_sums=True
    )
    how: dict[str, Any] = dict(layout="nn", out=jnp.dtype("float32"), epilogue=step)
    how |= dict(precision=None, config=None, implementation=None)
    bind = functools.partial(matmul_p.bind, **how)
    y, sums = bind(lhs, rhs, z)
    for exact, found in zip(
        exact_gemm("nn", step, lhs, rhs, z), (y, sums), strict=True
    ):
        exact.assert_near(found)
    for f in (lambda x: bind(x, rhs, z), lambda x: unfused(x, rhs, z, **how)):
        (ct,) = jax.linear_transpose(f, lhs)([normal(5, 4, seed=1), normal(4, seed=1)])
        _, pull = jax.vjp(lambda x: unfused(x, rhs, z, **how), lhs)
        (expected,) = pull([normal(5, 4, seed=1), normal(4, seed=1)])
        np.testing.assert_allclose(ct, expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="not linear in the derivative's argument"):
        jax.linear_transpose(lambda z: bind(lhs, rhs, z), z)([y, sums])
    many = jax.vmap(bind, in_axes=(0, None, 0))(lhs[None], rhs, z[None])
    np.testing.assert_allclose(many[1][0], sums, rtol=1e-6, atol=1e-6)


# --- how transform finds them ---------------------------------------------------------


def mlp(x, w1, b1, w2, b2):
    with jax.named_scope("first"):
        x = jax.nn.gelu(x @ w1 + b1)
    with jax.named_scope("second"):
        return jax.nn.relu(x @ w2 + b2)


def arguments(*rows: int):
    return tuple(
        normal(*shape) for shape in ((*rows, 8), (8, 16), (16,), (16, 4), (4,))
    )


def chained(f, *args) -> int:
    """Layers of the only chain in a transformed function; 0 without a chain."""
    found = equations(tracea.transform(f), *args, name="tracea_matmul_chain")
    assert len(found) <= 1
    return sum(len(e.params["layers"]) for e in found)


def scanned(x, w1, b1, w2, b2):
    return lax.scan(lambda c, x: (c, mlp(x, w1, b1, w2, b2)), 0, x)[1]


def twice(x, w1, b1, w2, b2):
    y = jax.nn.gelu(x @ w1 + b1)
    return y @ w2 + b2, y


def turned(x, w1, b1, w2, b2):
    return (w2.T @ jax.nn.gelu(x @ w1 + b1).T).T + b2


def reshaped(x, w1, b1, w2, b2):
    return (jax.nn.gelu(x @ w1 + b1).reshape(-1, 8) @ w1).reshape(-1, 4, 8) @ w1


def unused(x, w1, b1, w2, b2):
    y = jax.nn.gelu(jax.nn.gelu(x @ w1 + b1) @ w2 + b2)
    jnp.sin(y)
    return y @ w2.T


def unused_first(x, w1, b1, w2, b2):
    y = jax.nn.gelu(x @ w1 + b1)
    jnp.sin(y)
    return jax.nn.gelu(y @ w2 + b2) @ w2.T


FOUND = {
    "rows": (mlp, arguments(6), 2),
    "batches of rows": (mlp, arguments(2, 3), 2),
    "vmap": (jax.vmap(mlp, in_axes=(0, *[None] * 4)), arguments(2, 3), 2),
    "checkpoint": (jax.checkpoint(mlp), arguments(6), 2),
    "scan": (scanned, arguments(2, 3), 2),
    "jit": (jax.jit(mlp), arguments(6), 2),
    "transposed": (turned, arguments(6), 2),
    "an unused value of the second": (unused, arguments(6), 2),
    "an unused value of the first": (unused_first, arguments(6), 2),
    "used twice": (twice, arguments(6), 0),
    "another shape": (reshaped, arguments(6), 0),
    "a vector": (mlp, arguments(), 2),
}


def test_finds_layers_in_a_row():
    for name, (f, args, layers) in FOUND.items():
        assert chained(f, *args) == layers, name
    assert_all_alike({name: (f, args) for name, (f, args, _) in FOUND.items()})


def test_many_chains_are_found_in_linear_time(monkeypatch):
    read = []
    free = replace._free
    monkeypatch.setattr(replace, "_free", lambda eqns: read.append(1) or free(eqns))

    def pairs(x, w):
        for _ in range(40):
            x = jax.nn.silu(x @ w) @ w
            x = x + x.sum()
        return x

    x = normal(3, 3)
    found = equations(tracea.transform(pairs), x, x, name="tracea_matmul_chain")
    assert len(found) == 40
    assert len(read) < 5 * 160


def test_vmap_of_a_transformed_function(monkeypatch):
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)
    fast = jax.vmap(tracea.transform(mlp), in_axes=(0, None, 0, None, None))
    plain = jax.vmap(mlp, in_axes=(0, None, 0, None, None))
    x, w1, b1, w2, b2 = arguments(3, 4)
    assert_alike(plain, x, w1, jnp.stack([b1, 2 * b1, -b1]), w2, b2, fast=fast)


@pytest.mark.parametrize("check_vma", [True, False])
def test_layers_in_shard_map(check_vma, monkeypatch):
    monkeypatch.setattr(lowering, "left_to_xla", lambda *_, **__: False)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))

    def loss(*args):
        return lax.pmean((mlp(*args) ** 2).sum(), "x")

    shard = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("x"), *[P()] * 4),
        out_specs=P(),
        check_vma=check_vma,
    )
    for fast in (tracea.transform(shard(loss)), shard(tracea.transform(loss))):
        assert_alike(shard(loss), *arguments(16), fast=fast, tolerance=5e-5)


def test_layers_keep_their_scopes_and_store_nothing_for_inference():
    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in LARGE]
    fast = tracea.transform(mlp)

    def step(*args):
        return jax.grad(lambda *x: fast(*x).astype("float32").sum(), (0, 1, 2))(*args)

    with tracea.options(device="H200"):
        forward, backward = (sites(f, *args) for f in (fast, step))
    assert forward == [("first", "bias+gelu"), ("second", "bias+relu")]
    assert [e for _, e in backward] == [
        "bias+gelu &z", "bias+relu &z", "gelu' &sums", "none", "none",
    ]  # fmt: skip
    assert all("second" in scope for scope, e in backward if "sums" in e)
    lines = {s.source.rpartition("/")[2] for s in tracea.explain(fast)(*args).sites}
    assert len(lines) == 2 and all("test_matmul_chain.py" in x for x in lines)


LARGE = ((4096, 2048), (2048, 4096), (4096,), (4096, 2048), (2048,))


def sites(f, *args) -> list[tuple[str, str]]:
    """Scope and epilogue of every product."""
    found = []
    for site in tracea.explain(f)(*args).sites:
        assert isinstance(site.problem, GemmProblem)
        found.append((site.scope, str(site.problem.epilogue)))
    return found


def test_a_demanded_kernel_makes_the_product_where_it_has_no_derivative():
    """As on a CPU: nobody wrote the derivative as an epilogue of the product."""
    args = normal(8, 6), normal(6, 16), normal(16), normal(16, 4)

    def layers(x, w1, b1, w2):
        return jax.nn.silu(x @ w1 + b1) @ w2

    with tracea.options(implementation="tracea"):
        assert_alike(layers, *args)


def test_what_the_user_chose_is_left_alone():
    def chosen(x, w1, b1, w2, b2):
        y = tracea.ops.matmul(x, w1, bias=b1, activation="gelu", implementation="xla")
        return y @ w2 + b2

    assert chained(chosen, *arguments(6)) == 0


# --- how it is lowered and judged -----------------------------------------------------


@pytest.mark.nvrtc
def test_a_kernel_leaves_partial_sums_that_xla_adds_up():
    def gradient(x, w1, b1, w2):
        y = tracea.transform(lambda x, w1, b1, w2: jax.nn.silu(x @ w1 + b1) @ w2)
        return jax.grad(lambda *a: y(*a).astype("float32").sum(), (1, 2))(x, w1, b1, w2)

    args = [jax.ShapeDtypeStruct(s, "bfloat16") for s in LARGE[:4]]
    with tracea.options(device="H200"):
        traced = jax.jit(gradient).trace(*args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    summed = r"tensor<(\d+)x4096xf32>, tensor<f32>\) -> tensor<4096xf32>"
    # A warp sums 16 rows of one slab or of two.
    assert re.findall(summed, text) in (["256"], ["128"])


def test_wrong_sums_are_found_before_they_are_kept():
    # Of what XLA computes accurately: its tanh is not, far out, and it may round
    # bfloat16 products before the epilogue.
    step = Epilogue(
        activation="silu", residual=True, residual_op="derivative", column_sums=True
    )
    fields = dict.fromkeys(("lhs", "rhs", "out"), "float32")
    problem = GemmProblem(m=200, n=64, k=32, layout="nt", epilogue=step, **fields)  # pyright: ignore
    inputs = matmul_workload.operands(problem, seed=0)
    choice = Choice(variant="xla", config=None)
    y, sums = matmul_workload.execute(*inputs, problem=problem, choice=choice)
    judge = matmul_workload.judge(problem, device_for("cpu"), inputs, 0)
    assert judge([y, sums]) <= 1 and judge([y]) <= 1
    without_some_rows = sums - y[16:32].sum(0)
    assert judge([y, without_some_rows]) > 1
    assert judge([y, sums.at[3].set(jnp.nan)]) == float("inf")
    assert judge([y + y, sums]) > 1
