"""gated_matmul under derivatives, vmap, control flow and sharding."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from gates import FORMS, arguments, assert_gated, plain_gated
from jax import checkpoint_policies as policies
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import ACTIVATIONS, normal
from slow_cases import slow_unless
from transforms import assert_close, assert_derivatives_alike, in_f64

from tracea_jax.ops import export_checks, gated_matmul, remat_policy
from tracea_jax.ops.gated_matmul.primitive import (
    gated_matmul_p,
    problem_of,
    reference,
)

pytestmark = pytest.mark.once


def fused(activation, *args):
    return gated_matmul(*args, activation=activation, implementation="gated_fused")


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("activation", slow_unless(["none", "gelu"], ACTIVATIONS))
def test_derivatives_are_those_of_the_plain_code(activation):
    args = arguments()
    assert jnp.abs(args[0] @ args[1]).min() > 0.02  # far from relu's kink
    pair = (functools.partial(f, activation) for f in (fused, plain_gated))
    assert_derivatives_alike(*pair, *args)


@pytest.mark.parametrize("wanted", range(3))
@pytest.mark.parametrize("implementation", [None, "xla", "tracea", "gated_unfused"])
def test_derivatives_of_one_operand(implementation, wanted):
    args = arguments()

    def f(*args):
        return (gated_matmul(*args, implementation=implementation) ** 2).sum()

    expected = in_f64(
        jax.grad(lambda *a: (plain_gated("silu", *a) ** 2).sum(), wanted), *args
    )
    assert_close(jax.grad(f, wanted)(*args), expected, 2e-5)


def test_derivatives_have_the_dtypes_of_their_operands():
    args = arguments(dtype="bfloat16")
    args = (*args[:2], args[2].astype("float32"))

    def loss(*args):
        y = gated_matmul(*args, preferred_element_type="bfloat16")
        return (y.astype("float32") ** 2).sum()

    found = jax.grad(loss, (0, 1, 2))(*args)
    assert [g.dtype for g in found] == [a.dtype for a in args]
    expected = in_f64(
        jax.grad(lambda *a: (plain_gated("silu", *a) ** 2).sum(), (0, 1, 2)), *args
    )
    assert_close(found, expected, 4e-2)


def test_one_gated_product_serves_value_and_derivative():
    args = arguments()

    def loss(*args):
        return gated_matmul(*args).sum()

    gradient = jax.grad(loss, (0, 1, 2))
    assert len(equations(gradient, *args, name="tracea_gated_matmul")) == 1
    assert len(equations(gradient, *args, name="tracea_matmul")) == 4
    (forward,) = equations(loss, *args, name="tracea_gated_matmul")
    assert len(forward.outvars) == 1


def test_it_has_no_transpose():
    x, w_gate, w_up = arguments()
    with pytest.raises(ValueError, match="gated_matmul .* not linear .*use jax.vjp"):
        jax.linear_transpose(lambda w: gated_matmul(x, w_gate, w), w_up)(x @ w_up)


# --- vmap, control flow, sharding -----------------------------------------------------

SUBSETS = [s for s in itertools.product((False, True), repeat=3) if any(s)]


@pytest.mark.parametrize("mapped", SUBSETS, ids=lambda s: "".join("-x"[i] for i in s))
@pytest.mark.parametrize("batch", [((), ()), ((3,), (3,))])
def test_vmap_over_any_operands(batch, mapped):
    shapes = [(*batch[0], 5, 4), (*batch[1], 4, 6), (*batch[1], 4, 6)]
    # The mapped axis is first, last, or in the middle.
    axes = [
        i % (len(s) + 1) if m else None
        for i, (s, m) in enumerate(zip(shapes, mapped, strict=True))
    ]
    args = [
        normal(*s, seed=i) if d is None else normal(*s[:d], 2, *s[d:], seed=i)
        for i, (s, d) in enumerate(zip(shapes, axes, strict=True))
    ]
    found = jax.vmap(functools.partial(fused, "gelu"), in_axes=axes)(*args)
    for i in range(2):
        one = [
            a if d is None else jnp.take(a, i, d)
            for a, d in zip(args, axes, strict=True)
        ]
        assert_gated(found[i], *one, "gelu")


@pytest.mark.parametrize(("layout", "batched"), FORMS)
def test_vmap_of_the_primitive_in_every_form(layout, batched):
    x = normal(2, *[3] * batched[0], *((5, 4) if layout[0] == "n" else (4, 5)))
    w = (4, 6) if layout[1] == "n" else (6, 4)
    w_gate, w_up = (normal(2, *[3] * batched[1], *w, seed=i) for i in (1, 2))
    params = dict(layout=layout, precision=None, activation="silu", config=None)
    params |= dict(save_products=True, implementation="gated_fused")
    bind = functools.partial(gated_matmul_p.bind, **params, out=jnp.dtype("float32"))
    oracle = functools.partial(reference, **params, out=jnp.float64)
    for mapped in ((0, 1, 1), (1, 0, 0), (1, 1, 0), (1, 1, 1)):
        args = [
            a if m else a[0] for a, m in zip((x, w_gate, w_up), mapped, strict=True)
        ]
        found = jax.vmap(bind, in_axes=[0 if m else None for m in mapped])(*args)
        for i in range(2):
            one = [a[i] if m else a for a, m in zip(args, mapped, strict=True)]
            assert_close([y[i] for y in found], in_f64(oracle, *one))


def test_mapped_rows_become_rows_of_one_product():
    f = jax.vmap(
        jax.vmap(functools.partial(fused, "silu"), (0, None, None)), (0, None, None)
    )
    args = normal(2, 6, 5, 4), *arguments()[1:]
    (equation,) = equations(f, *args, name="tracea_gated_matmul")
    problem = problem_of([x.aval for x in equation.invars], **equation.params)
    assert (problem.batch, problem.m, problem.n) == (1, 60, 3)
    assert_gated(f(*args), *args)


def test_vmap_of_grad_gives_gradients_of_each_example():
    args = (normal(6, 5, 4), *arguments()[1:])

    def gradients(f, *args):
        grad = jax.grad(lambda *a: (f("silu", *a) ** 2).sum(), (0, 1, 2))
        return jax.vmap(grad, (0, None, None))(*args)

    expected = in_f64(functools.partial(gradients, plain_gated), *args)
    assert_close(jax.jit(functools.partial(gradients, fused))(*args), expected, 2e-5)


def test_scan_and_its_gradient():
    x, layers = normal(5, 4) / 2, normal(3, 2, 4, 4) / 2

    def loss(f, x, layers):
        def step(x, w):
            return x + f("gelu", x, *w), None

        return (jax.lax.scan(step, x, layers)[0] ** 2).sum()

    expected = in_f64(jax.grad(functools.partial(loss, plain_gated), (0, 1)), x, layers)
    found = jax.jit(jax.grad(functools.partial(loss, fused), (0, 1)))(x, layers)
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize(
    ("name", "forwards"),
    [
        ("nothing_saveable", 2),
        ("dots_saveable", 1),
        ("dots_with_no_batch_dims_saveable", 1),
    ],
)
def test_remat(name, forwards):
    args = arguments()
    policy = getattr(policies, name)

    def loss(f, *args):
        return jnp.sin(f("silu", *args)).sum()

    expected = in_f64(jax.grad(functools.partial(loss, plain_gated), (0, 1, 2)), *args)
    for known in (policy, remat_policy(policy)):
        rematerialised = jax.checkpoint(functools.partial(loss, fused), policy=known)
        gradients = jax.grad(rematerialised, (0, 1, 2))
        assert_close(jax.jit(gradients)(*args), expected, 2e-5)
    assert len(equations(gradients, *args, name="tracea_gated_matmul")) == forwards


def test_batched_products_are_no_products_without_batch_dimensions():
    policy = remat_policy(policies.dots_with_no_batch_dims_saveable)
    args = normal(3, 5, 4), normal(3, 4, 6), normal(3, 4, 6, seed=1)
    f = jax.checkpoint(lambda *a: jnp.sin(fused("silu", *a)).sum(), policy=policy)
    assert len(equations(jax.grad(f), *args, name="tracea_gated_matmul")) == 2


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("operand", range(3))
def test_shard_map_and_gradients_of_replicated_operands(mesh, operand):
    args = arguments(8, 3, 4) if operand else arguments(3, 8, 4)
    rows, columns = (P("x"), P(), P()), (P(), P(None, "x"), P(None, "x"))
    sharded = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=rows if operand else columns
    )
    forward = sharded(
        functools.partial(fused, "gelu"), out_specs=rows[0] if operand else columns[1]
    )
    compiled = jax.jit(forward).lower(*args).compile().as_text()
    assert compiled is not None and compiled.count('"tracea_cpu_gemm_v1"') == 2
    assert_gated(jax.jit(forward)(*args), *args, "gelu")

    def gradient(f, *args):
        return jax.grad(lambda *a: (f("gelu", *a) ** 2).sum(), operand)(*args)

    # Inside, as training steps do it, and outside.
    expected = in_f64(functools.partial(gradient, plain_gated), *args)
    inside = sharded(functools.partial(gradient, fused), out_specs=P())
    outside = functools.partial(gradient, lambda _, *a: forward(*a))
    for f in (inside, outside):
        assert_close(jax.jit(f)(*args), expected, 2e-5)


def test_explicitly_sharded_arrays():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    args = arguments(16, 6, 5)
    specs = (P("x"), P(), P())
    placed = [
        jax.device_put(a, NamedSharding(mesh, s))
        for a, s in zip(args, specs, strict=True)
    ]
    result = jax.jit(gated_matmul)(*placed)
    assert_gated(result, *args)
    assert result.sharding.spec[0] == "x"
    found = jax.jit(jax.grad(lambda *a: (gated_matmul(*a) ** 2).sum(), (0, 1, 2)))(
        *placed
    )
    plain = jax.grad(lambda *a: (plain_gated("silu", *a) ** 2).sum(), (0, 1, 2))
    assert_close(found, in_f64(plain, *args), 2e-5)
    assert [jax.typeof(g) for g in found] == [jax.typeof(a) for a in placed]
    assert_gated(jax.jit(functools.partial(fused, "silu"))(*placed), *args)


def test_export():
    args = arguments()
    program = export.export(
        jax.jit(functools.partial(fused, "silu")), disabled_checks=export_checks()
    )(*args)
    again = export.deserialize(program.serialize())
    assert_gated(again.call(*args), *args)
    rows = export.symbolic_shape("rows, 4")
    symbolic = export.export(jax.jit(gated_matmul))(
        jax.ShapeDtypeStruct(rows, jnp.float32), *args[1:]
    )
    assert_gated(symbolic.call(*args), *args)
