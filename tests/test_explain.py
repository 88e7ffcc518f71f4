"""explain: sites, counts, plans and misses of functions that are never run."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import normal

import tracea_jax as tracea
from tracea_jax import device, dispatch, knowledge, serving
from tracea_jax.explain import Explanation, explain
from tracea_jax.explain.parts import Part
from tracea_jax.explain.sites import Site
from tracea_jax.problem import Epilogue, GemmProblem, problem_from_json
from tracea_jax.runtime import nvrtc

H200 = device.NAMED["H200"]


def arrays(*shapes: tuple[Any, ...], dtype: str = "float32") -> list:
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def gemm(site: Site | Part) -> GemmProblem:
    assert isinstance(site.problem, GemmProblem)
    return site.problem


def product(x, w):
    return x @ w


def mlp(params, x):
    for i, (w, b) in enumerate(params):
        with jax.named_scope(f"layer_{i}"):
            x = jax.nn.gelu(x @ w + b)
    return x


@pytest.fixture
def with_compiler(monkeypatch):
    """As if the kernel compiler were there, which explaining does not call."""
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: None)


# --- sites ----------------------------------------------------------------------------


def test_a_model_of_real_arrays():
    params = [(normal(24, 24, seed=i), normal(24, seed=i)) for i in range(3)]
    found = explain(mlp)(params, normal(16, 24))
    epilogue = Epilogue(bias="row", activation="gelu")
    problem = GemmProblem(m=16, n=24, k=24, epilogue=epilogue)
    assert [site.problem for site in found.sites] == [problem] * 3
    assert [site.scope for site in found.sites] == ["layer_0", "layer_1", "layer_2"]
    assert {(site.op, site.count) for site in found.sites} == {("matmul", 1)}
    assert all("test_explain.py" in site.source for site in found.sites)
    plan = dispatch.plan(problem, device.local_cpu())
    assert found.sites[0].plan == plan and found.misses == ()
    assert found.sites[0].variant == plan.variant
    assert (found.ops, found.flops) == (
        {"matmul": 3},
        {plan.variant: 3 * problem.flops},
    )


def test_shapes_stand_in_for_arrays_in_pytrees_and_keywords():
    params = [tuple(arrays((24, 24), (24,)))]
    (x,) = arrays((16, 24))
    (site,) = explain(mlp)(params, x=x).sites
    assert gemm(site).m == 16


def test_loops_count():
    def layers(x, w):
        def inner(x, _):
            return jnp.tanh(x @ w), None

        def outer(x, _):
            x, _ = jax.lax.scan(inner, x, None, length=5)
            return x @ w, None

        x, _ = jax.lax.scan(outer, x, None, length=3)
        x = jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ w, x)
        return x @ w

    found = explain(layers)(*arrays((8, 8), (8, 8)))
    counts = [site.count for site in found.sites]
    assert counts == [15, 3, None, 1]
    assert sum(found.flops.values()) == (15 + 3 + 1 + 1) * 2 * 8**3
    assert "(3), 19 runs" in str(found) and "a loop of unknown length" in str(found)


def test_scopes_name_what_encloses_them():
    @jax.jit
    def inner(x, w):
        with jax.named_scope("inner"):
            return x @ w

    def f(x, w):
        with jax.named_scope("outer"):
            return inner(x, w)

    (site,) = explain(f)(*arrays((8, 8), (8, 8))).sites
    assert site.scope == "outer/inner"


def test_calls_of_our_ops_are_sites_too():
    def f(x, w):
        y = tracea.ops.matmul(x, w, activation="relu", implementation="xla")
        return jnp.sin(jnp.cos(y) @ w)

    first, second = explain(f)(*arrays((8, 8), (8, 8))).sites
    assert (first.variant, first.reason) == ("xla", "XLA was asked for")
    assert gemm(first).epilogue.activation == "relu"
    assert second.problem == GemmProblem(m=8, n=8, k=8)
    (only,) = explain(f, ops=())(*arrays((8, 8), (8, 8))).sites
    assert only == first


def test_the_backward_pass_of_a_transformed_loss():
    def loss(w, x):
        return tracea.transform(product)(x, w).sum()

    found = explain(jax.grad(loss), ops=())(*arrays((8, 4), (16, 8)))
    layouts = [gemm(site).layout for site in found.sites]
    assert layouts[0] == "nn" and "t" in "".join(layouts[1:])


def test_a_training_step_that_differentiates_inside():
    def step(w, x):
        return jax.grad(lambda w: jnp.square(x @ w).sum())(w)

    found = explain(step, after_grad=True)(*arrays((8, 4), (16, 8)))
    assert found.ops == {"matmul": 2}


# --- devices --------------------------------------------------------------------------


def test_a_gpu_that_is_not_there(with_compiler):
    wide = arrays((4096, 4096), (4096, 4096), (4096,), dtype="bfloat16")

    def layer(x, w, b):
        return jax.nn.gelu(x @ w + b) + x

    found = explain(layer, device="H200")(*wide)
    (site,) = found.sites
    assert found.device == H200 and "NVIDIA H200" in str(found)
    assert site.plan and site.variant == "gemm_sm90"
    assert site.plan.origin in ("shipped", "policy")
    assert f"gemm_sm90 [{site.plan.config}], {site.plan.origin}" in str(found)
    assert {"gemm_cpu"} < {r.variant for r in site.plan.rejected}
    narrow = explain(layer, device="H200")(*arrays((64, 64), (64, 64), (64,)))
    (site,) = narrow.sites
    assert site.variant == "xla"
    assert "not gemm_sm90" in str(narrow) and "float32" in str(narrow)


def test_the_cpu_by_name():
    found = explain(product, device="cpu")(*arrays((8, 8), (8, 8)))
    assert found.device == device.local_cpu()


def test_mistakes():
    with pytest.raises(ValueError, match="'B200' must be one of cpu, H200, H100"):
        explain(product, device="B200")
    with pytest.raises(ValueError, match="ops=.*'sort'.* must be some of .*matmul"):
        explain(product, ops=["sort"])


# --- settings -------------------------------------------------------------------------


def test_options_apply():
    with tracea.options(implementation="xla"):
        (site,) = explain(product)(*arrays((8, 8), (8, 8))).sites
    assert (site.variant, site.reason) == ("xla", "XLA was asked for")


def test_what_cannot_run_is_a_reason(with_compiler):
    shapes = arrays((8, 8), (8, 8))

    def precise(a, b):
        return jnp.matmul(a, b, precision="highest")

    with tracea.options(implementation="tracea"):
        found = explain(precise, device="A100")(*shapes)
    (site,) = found.sites
    assert site.variant is None and site.plan is None
    assert "implementation='tracea' cannot run" in site.reason
    assert "gemm_sm90: " in site.reason and "gemm_cpu: " in site.reason
    assert f"cannot run: {site.reason}" in str(found) and found.flops == {}
    with tracea.options(on_miss="error"):
        (site,) = explain(product)(*shapes).sites
    assert site.variant is None and "has no tuned answer" in site.reason


def test_nothing_is_tuned(monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("explain must not tune")

    monkeypatch.setattr(knowledge, "tune", never)

    def f(x, w):  # derivative rules ask for plans, too
        return jax.grad(lambda w: tracea.ops.matmul(x, w, activation="gelu").sum())(w)

    with tracea.options(on_miss="tune"):
        sites = explain(f)(*arrays((8, 8), (8, 8))).sites
    assert sites and all(site.plan.origin == "policy" for site in sites if site.plan)


def test_the_function_is_not_run():
    ran = []

    def f(x, w):
        io_callback(lambda: ran.append(1), None)
        jax.debug.callback(lambda: ran.append(2))
        return x @ w

    found = explain(f)(normal(8, 8), np.ones((8, 8), "float32"))
    jax.effects_barrier()
    assert len(found.sites) == 1 and not ran


# --- what is left to XLA --------------------------------------------------------------


def test_symbolic_shapes():
    from jax import export

    (rows,) = export.symbolic_shape("rows")

    def f(x, w):
        return tracea.ops.matmul(x, w)

    x, w = arrays((rows, 8), (8, 8))
    (site,) = explain(f)(x, w).sites
    assert (site.op, site.problem, site.variant) == ("matmul", None, "xla")
    assert site.reason == "the shapes are symbolic" and site.flops == 0
    assert site.to_json()["problem"] is None
    with tracea.options(implementation="tracea"):
        (site,) = explain(f)(x, w).sites
    assert site.variant is None and "the shapes are symbolic" in site.reason


def test_partitioned_arrays():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=rows)
    (w,) = arrays((8, 8))
    explanation = explain(product)(x, w)
    (site,) = explanation.sites
    assert site.variant != "xla" and site.reason.startswith(serving.SPLIT)
    assert "each of 2 devices (d 2): matmul 4x8x8" in str(explanation)

    local = jax.shard_map(product, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))

    def both(x, w):
        return local(x, w), x @ w

    inside, outside = explain(both)(w, w).sites
    assert inside.plan and gemm(inside).m == 4
    assert not inside.reason.startswith(serving.SPLIT)
    assert outside.plan and outside.reason.startswith(serving.SPLIT)

    @jax.jit
    def constrained(x, w):
        return jax.lax.with_sharding_constraint(x, rows) @ w

    (site,) = explain(constrained)(w, w).sites
    assert site.reason.startswith(serving.SPLIT)

    @functools.partial(
        jax.shard_map, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"}
    )
    def partly(x, w):
        return x @ w

    two = jax.make_mesh((2, 2), ("d", "e"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(two):
        (site,) = explain(partly)(w, w).sites
    assert site.variant == "xla" and site.reason == serving.PARTLY_MANUAL


def test_parts_of_partitioned_arrays():
    """Each device's problem, and what moves around it."""
    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(AxisType.Auto,) * 2)

    def abstract(shape, *spec):
        sharding = NamedSharding(mesh, P(*spec))
        return jax.ShapeDtypeStruct(shape, "float32", sharding=sharding)

    def two(x, w, v):
        return jax.nn.gelu(x @ w) @ v

    args = (
        abstract((64, 32), "d"),
        abstract((32, 48), "d", "m"),
        abstract((48, 16), "m"),
    )
    with tracea.options(implementation="tracea"):
        first, second = explain(two)(*args).sites
        graph = tracea.Graph.from_function(two, *args)
    (one,), (other,) = first.local, second.local
    assert (one.devices, dict(one.mesh)) == (8, {"d": 4, "m": 2})
    sizes = [(p.m, p.n, p.k) for p in map(gemm, (one, other))]
    assert sizes == [(16, 24, 32), (16, 16, 24)]
    assert one.variant == other.variant == "gemm_cpu"
    assert one.moves == ("operand 1 gathered over mesh axis 'd'",)
    assert other.moves == ("result 0 summed over mesh axis 'm'",)
    assert first.to_json()["local"][0]["moves"] == [*one.moves]
    assert {node.problem for node in graph} == {one.problem, other.problem}

    with tracea.options(implementation="tracea", device="H200"):
        for site in explain(two)(*args).sites:
            assert not site.local and "parts: NVIDIA H200 is not here" in site.reason


def test_parts_are_found_again_in_programs_that_were_compiled_before():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct((8, 8), "float32", sharding=sharding)
    (w,) = arrays((8, 8))
    for _ in range(2):
        with tracea.options(implementation="tracea"):
            (site,) = explain(product)(x, w).sites
        assert len(site.local) == 1
    jax.jit(product).lower(w, w).compile()
    kept = pathlib.Path(jax.config.jax_compilation_cache_dir)
    assert any(kept.iterdir()) and not list(kept.glob("*explained*"))


@jax.custom_vjp
def own(x, w):
    return x @ w


own.defvjp(lambda x, w: (own(x, w), (x, w)), lambda saved, ct: (ct, ct))


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (product, "int32", "int32 is left to XLA"),
        (
            lambda x, w: jnp.matmul(x, w, precision="high"),
            "float32",
            "it asks for a precision other than the default or the highest",
        ),
        (own, "float32", "bodies of custom_vjp functions are left as they are"),
    ],
)
def test_misses(fn, dtype, reason):
    def scoped(x, w):
        with jax.named_scope("here"):
            return fn(x, w)

    found = explain(scoped, ops=["matmul"])(*arrays((8, 8), (8, 8), dtype=dtype))
    (miss,) = found.misses
    assert not found.sites
    assert (miss.op, miss.reason) == ("matmul", reason)
    assert "here" in miss.scope and miss.what.startswith("dot_general(")
    text = str(found)
    assert (
        "no sites" in text
        and f"{miss.what} is not rewritten as matmul: {reason}" in text
    )
    assert not explain(scoped, ops=())(*arrays((8, 8), (8, 8))).misses


def test_our_ops_in_custom_vjp_bodies_are_sites():
    @jax.custom_vjp
    def f(x, w):
        return tracea.ops.matmul(x, w)

    f.defvjp(lambda x, w: (f(x, w), (x, w)), lambda saved, ct: (ct, ct))
    assert len(explain(f)(*arrays((8, 8), (8, 8))).sites) == 1


# --- text and data --------------------------------------------------------------------


def test_alike_sites_share_a_row():
    def deep(x, w):
        for i in range(40):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.sin(x @ w)
        return x, x.astype(int) @ x.astype(int), x.astype(int) @ w.astype(int)

    found = explain(deep)(*arrays((8, 8), (8, 8)))
    assert len(found.sites) == 40 and len(found.misses) == 2
    text = str(found)
    assert "layer_0, layer_1, layer_2, ... (40)" in text and "layer_3" not in text
    assert (
        "- (2):" in text and "40 sites: 40 matmul; of 41 kflop gemm_cpu 100 %" in text
    )
    assert len(text.splitlines()) < 12


def test_what_several_rows_would_repeat_is_said_once():
    def two(x, w, v):
        return x @ w, x @ v

    found = explain(two, device="H200")(
        *arrays((64, 64), (64, 128), (64, 3), dtype="bfloat16")
    )
    assert str(found).count("it runs on CPUs") == 1
    assert "\nnot used anywhere: gemm_cpu (it runs" in str(found)
    # What one of them alone is refused for stays in its row.
    ours, none = [{r.variant for r in s.plan.rejected} for s in found.sites if s.plan]
    assert "gemm_sm90" in none - ours
    assert str(found).count("\n    not gemm_sm90: ") == 1


def test_sites_of_scopes_without_a_name_tell_their_line():
    def loss(w, x):
        with jax.named_scope("head"):
            x = x @ w
        return jnp.square(x @ x.T).sum()

    found = str(explain(jax.grad(loss))(*arrays((8, 4), (16, 8))))
    assert "\ntest_explain.py:" in found and ".loss), jvp()\n" in found
    assert "\njvp(head)" in found


def test_why_a_tiny_product_is_left_to_xla_is_said(calls_cost):
    tiny = explain(product)(*arrays((33, 65), (65, 129)))
    assert "the product saves less than its call costs" in str(tiny)
    large = explain(product)(*arrays((256, 256), (256, 256)))
    assert [site.variant for site in (*tiny.sites, *large.sites)] == ["xla", "gemm_cpu"]


def test_plain_data_describes_every_site():
    def f(x, w):
        return jax.nn.relu(x @ w), x.astype(int) @ w.astype(int)

    found = explain(f)(*arrays((8, 8), (8, 8)))
    data = json.loads(json.dumps(found.to_json()))
    (site,), (row,) = found.sites, data["sites"]
    assert problem_from_json(row["problem"]) == site.problem
    assert site.plan and row["config"] == dataclasses.asdict(site.plan.config)
    assert row["rejected"] == [dataclasses.asdict(r) for r in site.plan.rejected]
    assert "gemm_sm90" in {r["variant"] for r in row["rejected"]}
    for name in ("scope", "op", "count", "variant", "reason"):
        assert row[name] == getattr(site, name)
    assert data["misses"] == [dataclasses.asdict(m) for m in found.misses]
    assert data["function"] == "f" and data["device"]["platform"] == "cpu"
    assert data["flops"] == found.flops and data["ops"] == {"matmul": 1}


def test_expected_times_are_shown():
    problem = GemmProblem(m=8, n=8, k=8)
    target = device.local_cpu()
    plan = dispatch.plan(problem, target)
    (site,) = explain(product)(*arrays((8, 8), (8, 8))).sites
    timed = dataclasses.replace(plan, origin="tuned", time_us=10.0, xla_us=15.0)
    found = Explanation(
        function="f",
        device=target,
        sites=(dataclasses.replace(site, plan=timed),),
        misses=(),
    )
    assert "10.0 us, XLA 15.0 us" in str(found)
    assert found.to_json()["sites"][0]["xla_us"] == 15.0
