"""matmul transformed: derivatives, vmap, control flow, remat, sharding."""

from __future__ import annotations

import functools
import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import checkpoint_policies as policies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads
from jaxprs import equations
from numerics import ACTIVATIONS, exact, normal

import tracea_jax as tracea
from tracea_jax.ops import matmul, remat_policy
from tracea_jax.ops.matmul import matmul_p, reference
from tracea_jax.problem import Epilogue

gemm_cpu = functools.partial(matmul, implementation="gemm_cpu")
LAYOUTS = ("nn", "nt", "tn", "tt")
PLAIN = {
    "none": lambda z: z,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}


def ours(activation, a, b, bias, residual):
    return gemm_cpu(a, b, bias=bias, activation=activation, residual=residual)


def plain(activation, a, b, bias, residual):
    return PLAIN[activation](a @ b + bias) + residual


def arguments(m=5, n=3, k=4):
    """a, b, bias, residual; no sum before the activation is near relu's kink."""
    a, b, bias, residual = normal(m, k), normal(k, n), normal(n), normal(m, n)
    assert jnp.abs(a @ b + bias).min() > 0.02
    return a, b, bias, residual


def in_f64(f, *args):
    """f of the same numbers in float64."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), args)
        return jax.tree.map(np.asarray, f(*wide))


def assert_close(found, expected, tolerance=2e-6):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for x, y in zip(found, expected, strict=True):
        assert x.shape == y.shape
        error = np.abs(np.asarray(x, np.float64) - y).max(initial=0)
        assert error <= tolerance * max(1, np.abs(y).max(initial=0))


def products(f, *args, name="tracea_matmul"):
    """How many products f traces to."""
    return len(equations(f, *args, name=name))


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_to_second_order_agree_with_differences(activation):
    check_grads(
        jax.jit(functools.partial(ours, activation)),
        arguments(2, 3, 3),
        order=2,
        modes=["fwd", "rev"],
        atol=2e-2,
        rtol=2e-2,
        eps=1e-2,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_are_those_of_the_plain_code(activation):
    args = arguments()
    tangents = tuple(normal(*x.shape, seed=1) for x in args)
    weights = normal(5, 3, seed=2)

    def derivatives(f, args, tangents, weights):
        f = functools.partial(f, activation)

        def loss(*args):
            return (weights * f(*args) ** 2).sum()

        every = (0, 1, 2, 3)
        gradient = jax.grad(loss, argnums=every)
        return {
            "value": f(*args),
            "jvp": jax.jvp(f, args, tangents)[1],
            "linearize": jax.linearize(f, *args)[1](*tangents),
            "vjp": jax.vjp(f, *args)[1](weights),
            "grad": gradient(*args),
            "hvp": jax.jvp(gradient, args, tangents)[1],
            "reverse over reverse": jax.grad(
                lambda *args: sum(
                    (g * t).sum()
                    for g, t in zip(gradient(*args), tangents, strict=True)
                ),
                argnums=every,
            )(*args),
            "jacobians": (jax.jacfwd(f)(*args), jax.jacrev(f)(*args)),
        }

    found = jax.jit(functools.partial(derivatives, ours))(args, tangents, weights)
    expected = in_f64(functools.partial(derivatives, plain), args, tangents, weights)
    assert found.keys() == expected.keys()
    for name in found:
        assert_close(found[name], expected[name], 2e-5)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)])
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_derivatives_of_some_operands(activation, wanted):
    args = arguments()

    def gradients(f, *args):
        return jax.grad(lambda *x: (f(activation, *x) ** 2).sum(), argnums=wanted)(
            *args
        )

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 2e-5)


@pytest.mark.parametrize("batched", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transposes_of_every_layout(layout, batched):
    lhs = normal(*[3] * batched[0], *((4, 5) if layout[0] == "n" else (5, 4)))
    rhs = normal(*[3] * batched[1], *((5, 6) if layout[1] == "n" else (6, 5)))
    params = dict(layout=layout, out=jnp.dtype("float32"), precision=None)
    params |= dict(epilogue=Epilogue(), config=None)

    def gradients(f, lhs, rhs):
        return jax.grad(lambda x, y: jnp.sin(f(x, y)[0]).sum(), argnums=(0, 1))(
            lhs, rhs
        )

    bind = functools.partial(matmul_p.bind, **params, implementation="gemm_cpu")
    found = jax.jit(functools.partial(gradients, bind))(lhs, rhs)
    oracle = functools.partial(reference, **{**params, "out": jnp.float64})
    assert_close(found, in_f64(functools.partial(gradients, oracle), lhs, rhs))


@pytest.mark.parametrize("operand", range(3))
def test_linear_transpose(operand):
    a, b, residual = normal(4, 5), normal(5, 6), normal(4, 6)
    args = [a, b, residual]

    def linear(x):
        a, b, residual = [*args[:operand], x, *args[operand + 1 :]]
        return gemm_cpu(a, b, residual=residual if operand == 2 else None)

    cotangent = normal(4, 6, seed=1)
    if operand == 2:
        a = args[0] = jnp.zeros_like(a)  # affine in the residual is not linear in it
    (found,) = jax.linear_transpose(linear, args[operand])(cotangent)
    expected = (cotangent @ b.T, a.T @ cotangent, cotangent)[operand]
    assert_close(found, np.asarray(expected))


def test_an_activation_has_no_transpose():
    f = functools.partial(gemm_cpu, b=normal(3, 3), activation="relu")
    with pytest.raises(NotImplementedError, match="activation='relu' is not linear"):
        jax.linear_transpose(f, normal(2, 3))(normal(2, 3))


def test_derivatives_have_the_dtypes_of_their_operands():
    args = [normal(4, 5), normal(5, 3), normal(3), normal(4, 3)]
    dtypes = ("bfloat16", "bfloat16", "float32", "float16")
    args = [x.astype(d) for x, d in zip(args, dtypes, strict=True)]

    def loss(*args):
        y = matmul(*args[:2], bias=args[2], activation="gelu", residual=args[3])
        assert y.dtype == "bfloat16"
        return (y.astype("float32") ** 2).sum()

    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*args)
    assert [g.dtype for g in found] == list(dtypes)
    expected = in_f64(
        jax.grad(lambda *x: (plain("gelu", *x) ** 2).sum(), argnums=(0, 1, 2, 3)), *args
    )
    assert_close(found, expected, 2e-2)


def test_wide_results_of_narrow_operands_have_derivatives():
    a, b = normal(4, 5, dtype="bfloat16"), normal(5, 3, dtype="bfloat16")

    def loss(a, b):
        return (matmul(a, b, preferred_element_type="float32") ** 2).sum()

    found = jax.grad(loss, argnums=(0, 1))(a, b)
    assert [g.dtype for g in found] == ["bfloat16"] * 2
    assert_close(
        found, in_f64(jax.grad(lambda a, b: ((a @ b) ** 2).sum(), (0, 1)), a, b), 4e-3
    )


def test_one_product_serves_value_and_derivative():
    a, b, bias, residual = arguments()

    def loss(a, b):
        return ours("gelu", a, b, bias, residual).sum()

    assert products(loss, a, b) == 1
    assert products(jax.grad(loss, argnums=(0, 1)), a, b) == 3


# --- vmap -----------------------------------------------------------------------------

SUBSETS = [s for s in itertools.product((False, True), repeat=4) if any(s)]


@pytest.mark.parametrize("mapped", SUBSETS, ids=lambda s: "".join("-x"[i] for i in s))
@pytest.mark.parametrize("batch", [(), (3,)])
def test_vmap_over_any_operands(batch, mapped):
    size, (m, n, k) = 2, (5, 3, 4)
    shapes = [(*batch, m, k), (k, n), (n,), (*batch, m, n)]
    # The mapped axis is first, last, or in the middle.
    axes = [
        i % (len(s) + 1) if x else None
        for i, (s, x) in enumerate(zip(shapes, mapped, strict=True))
    ]
    args = [
        normal(*s) if axis is None else normal(*s[:axis], size, *s[axis:])
        for s, axis in zip(shapes, axes, strict=True)
    ]
    out_axis = len(batch) + 1
    f = jax.vmap(functools.partial(ours, "gelu"), in_axes=axes, out_axes=out_axis)
    found = jnp.moveaxis(jax.jit(f)(*args), out_axis, 0)
    assert found.shape == (size, *batch, m, n)
    for i in range(size):
        a, b, bias, residual = (
            x if axis is None else jnp.take(x, i, axis)
            for x, axis in zip(args, axes, strict=True)
        )
        exact(a, b, bias, "gelu", residual).assert_near(found[i])


@st.composite
def primitive_calls(draw):
    """(shapes, mapped operands, parameters) of the primitive in any of its forms."""
    flag = st.booleans()
    layout, batched = draw(st.sampled_from(LAYOUTS)), (draw(flag), draw(flag))
    kinds = ["none", "row", "batched_row"] if any(batched) else ["none", "row"]
    epilogue = Epilogue(
        bias=draw(st.sampled_from(kinds)),
        activation=draw(st.sampled_from(["none", "silu"])),
        residual=draw(flag),
        save_preactivation=draw(flag),
    )
    m, n, k = (draw(st.sampled_from([0, 1, 3, 4])) for _ in "mnk")
    batch = [draw(st.sampled_from([1, 2]))] if any(batched) else []
    shapes = [
        (*(batch if batched[0] else []), *((m, k) if layout[0] == "n" else (k, m))),
        (*(batch if batched[1] else []), *((k, n) if layout[1] == "n" else (n, k))),
    ]
    if epilogue.bias != "none":
        shapes.append((*(batch if epilogue.bias == "batched_row" else []), n))
    if epilogue.residual:
        shapes.append((*batch, m, n))
    mapped = [draw(flag) for _ in shapes]
    hypothesis.assume(any(mapped))
    return shapes, mapped, dict(layout=layout, epilogue=epilogue)


@hypothesis.settings(max_examples=40)
@hypothesis.given(primitive_calls(), st.sampled_from([1, 3]))
def test_vmap_of_the_primitive_in_every_form(call, size):
    shapes, mapped, params = call
    args = [
        normal(*([size] if x else []), *s, seed=i)
        for i, (s, x) in enumerate(zip(shapes, mapped, strict=True))
    ]
    axes = [0 if x else None for x in mapped]
    how = dict(precision=None, implementation="gemm_cpu", config=None)
    bind = functools.partial(matmul_p.bind, **params, **how, out=jnp.dtype("float32"))
    found = jax.vmap(bind, in_axes=axes)(*args)
    for i in range(size):
        one = [x[i] if axis == 0 else x for x, axis in zip(args, axes, strict=True)]
        expected = in_f64(
            functools.partial(reference, **params, **how, out=jnp.float64), *one
        )
        assert_close([y[i] for y in found], expected)


def test_nested_vmap():
    a, b, bias, residual = (
        normal(2, 3, 5, 4),
        normal(3, 4, 6),
        normal(2, 6),
        normal(5, 6),
    )
    inner = jax.vmap(functools.partial(ours, "relu"), in_axes=(0, 0, None, None))
    outer = jax.vmap(inner, in_axes=(0, None, 0, None))
    exact(a, b, bias[:, None, None], "relu", residual).assert_near(
        outer(a, b, bias, residual)
    )


def test_vmap_of_grad_gives_gradients_of_each_example():
    args = (normal(6, 5, 4), normal(4, 3), normal(3), normal(6, 5, 3))
    axes = (0, None, None, 0)

    def gradients(f, *args):
        grad = jax.grad(lambda *x: (f("gelu", *x) ** 2).sum(), argnums=(0, 1, 2, 3))
        return jax.vmap(grad, in_axes=axes)(*args)

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 1e-5)


def test_grad_of_vmap_sums_over_examples():
    args = (normal(6, 5, 4), normal(4, 3), normal(6, 3), normal(5, 3))

    def gradients(f, *args):
        mapped = jax.vmap(functools.partial(f, "silu"), in_axes=(0, None, 0, None))
        return jax.grad(lambda *x: (mapped(*x) ** 2).sum(), argnums=(0, 1, 2, 3))(*args)

    expected = in_f64(functools.partial(gradients, plain), *args)
    assert_close(jax.jit(functools.partial(gradients, ours))(*args), expected, 1e-5)


def test_a_mapped_left_operand_becomes_rows_of_one_product():
    f = jax.vmap(gemm_cpu, in_axes=(0, None))
    (equation,) = equations(f, normal(6, 5, 4), normal(4, 3), name="tracea_matmul")
    assert equation.outvars[0].aval.shape == (30, 3)


# --- control flow ---------------------------------------------------------------------


def test_scan_while_fori_and_cond():
    x, layers = normal(5, 4), normal(3, 4, 4)

    def step(mm, x, w):
        return mm(x, w, activation="gelu"), None

    def plain_mm(x, w, activation):
        return PLAIN[activation](x @ w)

    def scanned(mm, x, layers):
        return jax.lax.scan(functools.partial(step, mm), x, layers)[0]

    def looped(mm, x, layers):
        return jax.lax.fori_loop(0, 3, lambda i, x: step(mm, x, layers[i])[0], x)

    def whiled(mm, x, layers):
        def body(carry):
            i, x = carry
            return i + 1, step(mm, x, layers[i])[0]

        return jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))[1]

    def branched(mm, x, layers):
        def run(w, x):
            return step(mm, x, w)[0]

        for i in range(3):
            x = jax.lax.cond(x.sum() < jnp.inf, run, lambda w, x: x, layers[i], x)
        return x

    expected = in_f64(functools.partial(scanned, plain_mm), x, layers)
    for f in (scanned, looped, whiled, branched):
        assert_close(jax.jit(functools.partial(f, gemm_cpu))(x, layers), expected)

    def gradients(f, mm, *args):
        return jax.grad(lambda *x: f(mm, *x).sum(), argnums=(0, 1))(*args)

    expected = in_f64(functools.partial(gradients, scanned, plain_mm), x, layers)
    for f in (scanned, looped, branched):
        found = jax.jit(functools.partial(gradients, f, gemm_cpu))(x, layers)
        assert_close(found, expected, 1e-5)
    tangent = in_f64(
        lambda *x: jax.jvp(functools.partial(whiled, plain_mm), x, x)[1], x, layers
    )
    whiled_jvp = jax.jvp(functools.partial(whiled, gemm_cpu), (x, layers), (x, layers))[
        1
    ]
    assert_close(whiled_jvp, tangent, 1e-5)


def test_donated_operands_are_read_before_they_are_overwritten():
    a, b, bias, residual = normal(8, 8), normal(8, 8), normal(8), normal(8, 8)
    expected = exact(a, b, bias, "gelu", residual)
    for donated in (0, 1, 3):
        args = [x + 0 for x in (a, b, bias, residual)]
        f = jax.jit(functools.partial(ours, "gelu"), donate_argnums=donated)
        expected.assert_near(f(*args))
        assert args[donated].is_deleted()


# --- rematerialisation ----------------------------------------------------------------


def two_layers(mm, x, w):
    h = mm(x, w, activation="gelu")
    return jnp.sin(mm(h, w)).sum()


def two_plain_layers(x, w):
    return two_layers(lambda x, w, activation="none": PLAIN[activation](x @ w), x, w)


@pytest.mark.parametrize(
    "name",
    [
        "nothing_saveable",
        "everything_saveable",
        "dots_saveable",
        "dots_with_no_batch_dims_saveable",
    ],
)
def test_remat(name):
    x, w = normal(5, 4), normal(4, 4)
    policy = getattr(policies, name)
    expected = in_f64(jax.grad(two_plain_layers, argnums=(0, 1)), x, w)
    layers = functools.partial(two_layers, gemm_cpu)
    for known in (policy, remat_policy(policy)):
        gradients = jax.grad(jax.checkpoint(layers, policy=known), argnums=(0, 1))
        assert_close(jax.jit(gradients)(x, w), expected, 1e-5)
    # Ours are computed again exactly where JAX computes its own again.
    rematerialised = jax.checkpoint(two_plain_layers, policy=policy)
    theirs = products(jax.grad(rematerialised, (0, 1)), x, w, name="dot_general")
    assert products(gradients, x, w) == theirs


def test_policies_tell_batched_products_from_others():
    policy = remat_policy(policies.dots_with_no_batch_dims_saveable)
    x, w = normal(3, 5, 4), normal(3, 4, 4)

    def f(x, w):
        return jnp.sin(gemm_cpu(x, w)).sum()

    def count(w, policy):
        return products(jax.grad(jax.checkpoint(f, policy=policy), (0, 1)), x, w)

    without = products(jax.grad(f, (0, 1)), x, w)
    assert count(w, policy) == without + 1  # computed again
    assert count(w[0], policy) == without
    assert count(w, remat_policy(policies.dots_saveable)) == without


def test_other_primitives_reach_the_policy_as_they_are():
    seen = []
    jax.grad(
        jax.checkpoint(
            lambda x: jnp.sin(jnp.cos(x)),
            policy=remat_policy(lambda prim, *_, **__: seen.append(prim.name) or False),
        )
    )(1.0)
    assert {"cos", "sin"} <= set(seen)


# --- several devices ------------------------------------------------------------------


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def block(x, w, bias):
    return gemm_cpu(x, w, bias=bias, activation="gelu")


def plain_block(x, w, bias):
    return jax.nn.gelu(x @ w + bias)


def custom_calls(f, *args):
    return f.lower(*args).compile().as_text().count('"tracea_cpu_gemm_v1"')


def test_shard_map_over_the_batch(mesh):
    x, w, bias = normal(16, 5), normal(5, 6), normal(6)
    sharded = jax.shard_map(
        block, mesh=mesh, in_specs=(P("x"), P(), P()), out_specs=P("x")
    )
    f = jax.jit(sharded)
    exact(x, w, bias, "gelu").assert_near(f(x, w, bias))
    assert custom_calls(f, x, w, bias) == 1

    def gradients(f, *args):
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*args)

    expected = in_f64(functools.partial(gradients, plain_block), x, w, bias)
    assert_close(
        jax.jit(functools.partial(gradients, sharded))(x, w, bias), expected, 1e-5
    )


@pytest.mark.parametrize("operand", range(4))
def test_gradients_of_replicated_operands_are_summed_over_the_mesh(mesh, operand):
    # grad inside of shard_map: what data-parallel training steps do
    args = arguments(8, 3, 4)
    specs = [P("x") if i in (0, 3) and i != operand else P() for i in range(4)]
    if operand == 3:
        args = (*args[:3], args[3][:1])

    def gradient(*local):
        return jax.grad(lambda *x: (ours("gelu", *x) ** 2).sum(), argnums=operand)(
            *local
        )

    if operand == 0:  # replicated rows, differing columns
        specs = [P(), P(None, "x"), P("x"), P(None, "x")]
        args = (normal(3, 4), normal(4, 8), normal(8), normal(3, 8))
    found = jax.jit(
        jax.shard_map(gradient, mesh=mesh, in_specs=tuple(specs), out_specs=P())
    )(*args)
    expected = in_f64(
        jax.grad(lambda *x: (plain("gelu", *x) ** 2).sum(), argnums=operand), *args
    )
    assert_close(found, expected, 1e-5)


def test_shard_map_over_the_contraction(mesh):
    x, w = normal(5, 16), normal(16, 6)

    def partial_sums(x, w):
        return jax.lax.psum(gemm_cpu(x, w), "x")

    f = jax.jit(
        jax.shard_map(
            partial_sums, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P()
        )
    )
    exact(x, w).assert_near(f(x, w))
    found = jax.grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))(x, w)
    expected = in_f64(jax.grad(lambda x, w: ((x @ w) ** 2).sum(), argnums=(0, 1)), x, w)
    assert_close(found, expected, 1e-5)


def test_shard_map_refuses_what_it_refuses_of_jnp(mesh):
    x, w = normal(16, 4), normal(4, 3)
    for mm in (gemm_cpu, jnp.matmul):
        f = jax.shard_map(mm, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
        with pytest.raises(ValueError, match="(?s)out_specs"):
            f(x, w)


def test_vmap_inside_of_shard_map(mesh):
    x, w, bias = normal(16, 5, 4), normal(4, 3), normal(16, 3)
    each = jax.vmap(block, in_axes=(0, None, 0))
    f = jax.shard_map(each, mesh=mesh, in_specs=(P("x"), P(), P("x")), out_specs=P("x"))
    exact(x, w, bias[:, None], "gelu").assert_near(jax.jit(f)(x, w, bias))


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_partitioner_is_given_plain_xla(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
    x, w, bias = normal(16, 5), normal(5, 6), normal(6)
    args = (jax.device_put(x, NamedSharding(mesh, P("x"))), w, bias)
    args = (args[0], *jax.device_put((w, bias), NamedSharding(mesh, P())))

    def f(*args, implementation=None):
        return matmul(
            *args[:2], bias=args[2], activation="gelu", implementation=implementation
        )

    jitted = jax.jit(f, static_argnames="implementation")
    result = jitted(*args)
    exact(x, w, bias, "gelu").assert_near(result)
    assert result.sharding.spec[0] == "x"
    text = jitted.lower(*args).compile().as_text()
    assert text is not None
    assert "custom-call" not in text and "all-gather" not in text

    def gradients(f, *args):
        return jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))(*args)

    expected = in_f64(functools.partial(gradients, plain_block), x, w, bias)
    assert_close(jax.jit(functools.partial(gradients, f))(*args), expected, 1e-5)

    for demanded in ("tracea", "gemm_cpu"):
        with pytest.raises(tracea.Unsupported, match=f"'{demanded}'.*use shard_map"):
            jitted(*args, implementation=demanded)
    with (
        tracea.options(implementation="tracea"),
        pytest.raises(tracea.Unsupported, match="'tracea'.*use shard_map"),
    ):
        jitted(*args)
