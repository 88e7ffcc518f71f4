"""gated_matmul: its values, transformations, plans and errors."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gates import assert_gated, plain_gated
from jax import checkpoint_policies as policies
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations
from numerics import ACTIVATIONS, exact, normal
from transforms import LAYOUTS, assert_close, in_f64

import tracea_jax as tracea
from tracea_jax import dispatch
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.doctor import diagnose
from tracea_jax.ops import export_checks, gated_matmul, remat_policy
from tracea_jax.ops.gated_matmul import gated_matmul_p, problem_of, reference
from tracea_jax.problem import GatedMatmulProblem, problem_from_json
from tracea_jax.tune import local_device
from tracea_jax.variants.gated import GATED_FUSED, products

ROUNDINGS = {"xla": 1, "gated_fused": 2, "gated_unfused": 3}
IMPLEMENTATIONS = tuple(ROUNDINGS)
NAMES = ("gated_fused", "gated_unfused")
H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=2)


def arguments(m=5, n=3, k=4, dtype="float32"):
    """x, w_gate, w_up."""
    args = normal(m, k), normal(k, n), normal(k, n, seed=1)
    return tuple(a.astype(dtype) for a in args)


def fused(activation, *args):
    return gated_matmul(*args, activation=activation, implementation="gated_fused")


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


FORMS = list(zip(LAYOUTS, [(0, 0), (0, 1), (1, 0), (1, 1)], strict=True))


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


# --- derivatives ----------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_derivatives_are_those_of_the_plain_code(activation):
    args = arguments()
    assert jnp.abs(args[0] @ args[1]).min() > 0.02  # far from relu's kink
    tangents = tuple(normal(*a.shape, seed=2) for a in args)
    weights = normal(5, 3, seed=3)

    def derivatives(f, args, tangents, weights):
        f = functools.partial(f, activation)

        def gradient(*args):
            return jax.grad(lambda *a: (weights * f(*a) ** 2).sum(), (0, 1, 2))(*args)

        return {
            "value": f(*args),
            "jvp": jax.jvp(f, args, tangents)[1],
            "vjp": jax.vjp(f, *args)[1](weights),
            "grad": gradient(*args),
            "hvp": jax.jvp(gradient, args, tangents)[1],
        }

    found = jax.jit(functools.partial(derivatives, fused))(args, tangents, weights)
    plain = functools.partial(derivatives, plain_gated)
    expected = in_f64(plain, args, tangents, weights)
    for name in found:
        assert_close(found[name], expected[name], 2e-5)


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
    assert equation.outvars[0].aval.shape == (60, 3)
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


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_the_partitioner_is_given_plain_xla(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(getattr(AxisType, kind),))
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
    with pytest.raises(tracea.Unsupported, match="'gated_fused'.*use shard_map"):
        jax.jit(functools.partial(fused, "silu"))(*placed)


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


def test_it_is_fused_unmeasured_where_the_kernel_usually_wins():
    large, small = (gated(n, n, n, dtype="bfloat16") for n in (4096, 256))
    assert GATED_FUSED.expects_to_win(large, H200)
    assert not GATED_FUSED.expects_to_win(small, H200)
    assert GATED_FUSED.expects_to_win(gated(), CPU)
    assert not GATED_FUSED.expects_to_win(small, CPU)  # 16 bits


def test_tuning_finds_an_answer():
    problem = gated(24, 40, 32, save_products=True)
    entry = tracea.tune(problem, effort="none", budget_s=1).entry
    assert entry.best.time_us and entry.verified["ok"]
    assert {o.variant for o in entry.observations} == set(IMPLEMENTATIONS)
    found = dispatch.plan(problem, local_device())
    assert (found.origin, found.variant) == ("tuned", entry.best.variant)
    assert problem_from_json(entry.problem) == problem


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_problem_of_an_equation(layout):
    x = jax.ShapeDtypeStruct((5, 4) if layout[0] == "n" else (4, 5), "bfloat16")
    w = jax.ShapeDtypeStruct((3, *((4, 6) if layout[1] == "n" else (6, 4))), "float32")
    params = dict(layout=layout, out="float16", precision=None, activation="gelu")
    found = problem_of((x, w, w), **params, save_products=True, config=None)
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
