"""Our kernels where the compiler partitions arrays: values, kernels and collectives."""

from __future__ import annotations

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_work import measured
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import all_equations
from numerics import normal
from partitioned import assert_alike, compiled, mesh, pair, placed

import tracea_jax as tracea
from tracea_jax import _compat_partition, serving
from tracea_jax.ops.channel_sums import primitive as channel_sums
from tracea_jax.ops.common import partition, sharding
from tracea_jax.ops.group_norm import primitive as group_norm
from tracea_jax.ops.linear_cross_entropy import chunks
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.ops.matmul.sharding import rule as matmul_rule
from tracea_jax.ops.max_pool import primitive as max_pool
from tracea_jax.problem import Epilogue

# --- products -------------------------------------------------------------------------


def block(x, w, bias, residual):
    return jax.nn.gelu(x @ w + bias) + residual


def loss(*args):
    return (block(*args) ** 2).mean()


gradients = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))

SPLITS = {
    "rows": (P("x"), P(), P(), P("x")),
    "columns": (P(), P(None, "y"), P("y"), P(None, None, "y")),
    "rows and columns": (P("x"), P(None, "y"), P("y"), P("x", None, "y")),
    "contraction": (P(None, None, "x"), P("x"), P(), P()),
    "rows and contraction": (P("x", None, "y"), P("y"), P(), P("x")),
    "rows over two axes": (P(("x", "y")), P(), P(), P(("x", "y"))),
    "weights over the axis of rows": (P("x"), P("x"), P(), P("x")),
    "nothing": (P(), P(), P(), P()),
}


def operands():
    shapes = (8, 6, 24), (24, 40), (40,), (8, 6, 40)
    return tuple(normal(*shape) for shape in shapes)


@pytest.mark.parametrize("name", SPLITS)
def test_products_run_kernels(name):
    plain, ours = pair(gradients, mesh(4, 2), operands(), SPLITS[name])
    assert_alike(plain, ours)
    assert ours.kernels == {"tracea_cpu_gemm_v1": 3}


def test_a_split_contraction_is_summed_once_before_the_epilogue():
    splits = SPLITS["contraction"]
    plain, ours = pair(block, mesh(4, 2), operands(), splits)
    assert_alike(plain, ours)
    assert ours.collectives == {"all-reduce": 1}
    (call,) = ours.decisions
    assert call.decision.split["k0"] and not call.decision.split["m0"]


def test_a_sum_that_is_wanted_split_is_scattered():
    splits = (P(None, None, "x"), P("x"), P(), P("x"))
    plain, ours = pair(block, mesh(4, 2), operands(), splits, out=P("x"))
    assert_alike(plain, ours)
    assert ours.collectives == {"reduce-scatter": 1}


def test_layers_in_a_row():
    def network(x, w, bias, w2, b2):
        return ((jax.nn.silu(x @ w + bias) @ w2 + b2) ** 2).mean()

    args = (normal(16, 24), normal(24, 40), normal(40), normal(40, 24), normal(24))
    specs = (P("x"), P(None, "y"), P("y"), P("y"), P())
    f = jax.value_and_grad(network, argnums=(0, 1, 2, 3, 4))
    plain, ours = pair(f, mesh(2, 4), args, specs)
    assert_alike(plain, ours)
    assert ours.kernels == {"tracea_cpu_gemm_v1": 6}


def test_columns_of_several_dimensions_are_split_along_any():
    def fused(x, w, bias):
        parts = jnp.einsum("btd,dce->btce", x, w) + bias
        return (parts[:, :, 0] * parts[:, :, 1] + parts[:, :, 2]).sum()

    args = (normal(4, 6, 16), normal(16, 3, 8), normal(3, 8))
    specs = (P("x"), P(None, None, "y"), P(None, "y"))
    f = jax.value_and_grad(fused, argnums=(0, 1, 2))
    plain, ours = pair(f, mesh(2, 4), args, specs)
    assert_alike(plain, ours)
    assert ours.kernels == {"tracea_cpu_gemm_v1": 3}


def test_rows_are_split_along_the_sequence():
    args = operands()
    specs = (P(None, "x"), P(), P(), P(None, "x"))
    plain, ours = pair(gradients, mesh(2), args, specs)
    assert_alike(plain, ours)
    (forward, *_) = ours.decisions
    assert forward.decision.split["m1"] and not forward.decision.split["m0"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gated_products_complete_both_sums_before_the_gate(dtype):
    def gated(x, gate, up):
        return jax.nn.silu(x @ gate) * (x @ up)

    args = [
        jnp.asarray(x, dtype) for x in (normal(8, 16), normal(16, 24), normal(16, 24))
    ]
    specs = (P("y", "x"), P("x"), P("x"))
    plain, ours = pair(gated, mesh(4, 2), args, specs)
    assert_alike(plain, ours, 1e-5 if dtype == "float32" else 0.02)
    assert ours.decisions[0].name == "tracea_gated_matmul"


def test_a_scan_of_rematerialised_layers():
    def layers(x, ws):
        @jax.checkpoint
        def layer(h, w):
            return jnp.tanh(jax.nn.gelu(h @ w)), None

        return (jax.lax.scan(layer, x, ws)[0] ** 2).mean()

    f = jax.value_and_grad(layers, argnums=(0, 1))
    args = normal(16, 24), normal(3, 24, 24)
    plain, ours = pair(f, mesh(4, 2), args, (P("x"), P(None, None, "y")))
    assert_alike(plain, ours)
    assert sum(ours.kernels.values()) >= 4


def test_mapped_products_split_the_mapped_axis():
    f = jax.vmap(lambda x, w: jax.nn.relu(x @ w))
    plain, ours = pair(
        f, mesh(4, 2), (normal(8, 6, 16), normal(8, 16, 24)), (P("x"), P("x"))
    )
    assert_alike(plain, ours)
    assert ours.kernels == {"tracea_cpu_gemm_v1": 1} and not ours.collectives


def test_a_mesh_of_devices_in_another_order():
    devices = np.array(jax.devices()).reshape(2, 4).T
    turned = jax.sharding.Mesh(devices, ("x", "y"))
    splits = SPLITS["rows and contraction"]
    plain, ours = pair(gradients, turned, operands(), splits)
    assert_alike(plain, ours)


def test_shard_map_inside_of_a_partitioned_program():
    own = mesh(4, 2)
    local = jax.shard_map(
        lambda x, w: jax.nn.gelu(x @ w),
        mesh=own,
        in_specs=(P("x"), P(None, "y")),
        out_specs=P("x", "y"),
    )
    args = normal(8, 16), normal(16, 24), normal(24, 6)
    specs = (P("x"), P(None, "y"), P("y"))
    plain, ours = pair(lambda x, w, v: local(x, w) @ v, own, args, specs)
    assert_alike(plain, ours)
    assert ours.kernels == {"tracea_cpu_gemm_v1": 2}
    assert len(ours.decisions) == 1


def test_the_policy_decides_about_local_problems():
    # On one device a kernel; of a sixteenth of it, XLA.
    def f(x, w):
        return jax.nn.gelu(x @ w)

    x, w = normal(256, 512), normal(512, 512)
    args = placed(mesh(8), (x, w), (P("x"), P()))
    (site,) = tracea.explain(f)(x, w).sites
    ours = compiled(tracea.transform(f), *args)
    assert bool(ours.decisions) == (site.variant != "xla")
    np.testing.assert_allclose(ours.results, f(x, w), rtol=2e-4, atol=2e-3)


# --- attention ------------------------------------------------------------------------


def attend(q, k, v, **how):
    return jax.nn.dot_product_attention(q, k, v, **how)


ATTENTION = {
    "examples": (P("x"),) * 3,
    "heads": (P(None, None, "x"),) * 3,
    "examples and heads": (P("x", None, "y"),) * 3,
    "more devices than heads of keys": (P(None, None, ("x", "y")), P(), P()),
    "queries": (P(None, "x"),) * 3,
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_split(name):
    args = normal(4, 16, 8, 16), normal(4, 16, 4, 16), normal(4, 16, 4, 16)

    def f(*args):
        return (attend(*args, is_causal=True) ** 2).mean()

    plain, ours = pair(
        jax.value_and_grad(f, argnums=(0, 1, 2)), mesh(4, 2), args, ATTENTION[name]
    )
    assert_alike(plain, ours)
    assert sum(ours.kernels.values()) == 2
    assert "all-gather" not in ours.collectives or name == "queries"


def test_a_causal_window_over_split_queries():
    args = normal(2, 32, 2, 16), normal(2, 32, 2, 16), normal(2, 32, 2, 16)
    f = functools.partial(attend, is_causal=True, local_window_size=(5, 0))
    plain, ours = pair(f, mesh(4), args, (P(None, "x"),) * 3)
    assert_alike(plain, ours)
    assert ours.decisions[0].decision.split["t"]


# --- what is refused ------------------------------------------------------------------


def test_what_a_rule_refuses_is_gathered_with_a_warning():
    args = normal(2, 8, 2, 16), normal(2, 8, 2, 16), normal(2, 8, 2, 16)
    own = mesh(4, 2)
    columns = P(None, None, None, "x")
    given = placed(own, args, (columns, columns, P()))
    with (
        tracea.options(implementation="tracea"),
        pytest.warns(UserWarning, match="attention gathers.*mesh axis 'x': head_dim"),
    ):
        ours = compiled(tracea.transform(attend), *given)
    np.testing.assert_allclose(ours.results, attend(*args), rtol=1e-4, atol=1e-5)


def test_sizes_that_do_not_divide():
    own = mesh(8)

    def f(x, w):
        spread = jax.lax.with_sharding_constraint(x, NamedSharding(own, P("x")))
        return spread @ w

    args = placed(own, (normal(12, 16), normal(16, 8)), (P(), P()))
    with (
        tracea.options(implementation="tracea"),
        pytest.warns(UserWarning, match="12 is no multiple of 8"),
    ):
        ours = compiled(tracea.transform(f), *args)
    np.testing.assert_allclose(ours.results, args[0] @ args[1], rtol=1e-4, atol=1e-4)


# --- without the private functions ----------------------------------------------------


def test_without_the_functions_of_this_jax_xla_serves(monkeypatch):
    monkeypatch.setattr(_compat_partition, "why_not", lambda: "they are gone")
    own = mesh(4, 2)
    args = placed(own, operands(), SPLITS["rows"])
    ours = compiled(tracea.transform(block), *args)
    assert not ours.kernels and not ours.decisions
    with (
        tracea.options(implementation="tracea"),
        pytest.raises(tracea.Unsupported, match="use shard_map"),
    ):
        compiled(tracea.transform(block), *args)


def test_the_probe_names_what_is_missing(monkeypatch):
    assert _compat_partition.why_not() is None
    from jax._src.interpreters import mlir

    monkeypatch.delattr(mlir, "build_mlir_module_helper")
    reason = _compat_partition.why_not.__wrapped__()
    assert reason is not None and "build_mlir_module_helper" in reason


# --- texts and caches -----------------------------------------------------------------


def test_programs_hold_no_path_and_no_identity(tmp_path):
    args = placed(mesh(4, 2), operands(), SPLITS["rows and contraction"])

    def lowered(directory):
        with tracea.options(implementation="tracea", cache_dir=directory):
            text = jax.jit(tracea.transform(block)).lower(*args).as_text()
        return re.findall(r'backend_config = "([^"]*)"', text)

    first, second = lowered(tmp_path / "a"), lowered(tmp_path / "b")
    assert first == second
    (key,) = first
    assert re.fullmatch(r"tracea_matmul:[0-9a-f]{64}", key)


def test_parameters_that_show_their_address_are_left_to_xla():
    assert partition.has_text({"out": jnp.dtype("float32"), "config": None})
    assert not partition.has_text({"f": object()})


def test_plans_follow_the_settings_of_lowering():
    args = placed(mesh(4, 2), operands(), SPLITS["rows"])
    with tracea.options(implementation="tracea"):
        lowered = jax.jit(tracea.transform(block)).lower(*args)
    with tracea.options(implementation="xla"), partition.recording() as decisions:
        program = lowered.compile()
    assert len(decisions) == 1
    text = program.as_text()
    assert text is not None
    assert dict(measured(text).kernels) == {"tracea_cpu_gemm_v1": 1}
    np.testing.assert_allclose(program(*args), block(*operands()), 1e-4, 1e-4)


# --- cross entropy --------------------------------------------------------------------


@pytest.mark.parametrize("split", ["rows", "sequence", "vocabulary", "both"])
def test_the_chunked_cross_entropy_gathers_no_vocabulary(split, monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1 << 14)

    def cross_entropy(x, w, labels):
        scores = jax.nn.log_softmax(x @ w.T)
        return -jnp.take_along_axis(scores, labels[..., None], -1).mean()

    x, w = normal(8, 8, 16), normal(512, 16)
    labels = (np.arange(64, dtype=np.int32) * 7 % 512).reshape(8, 8)
    (site,) = tracea.explain(cross_entropy)(x, w, labels).sites[:1]
    assert site.op == "linear_cross_entropy"
    rows = {"vocabulary": P(), "sequence": P(None, "x")}.get(split, P("x"))
    columns = P("y") if split in ("vocabulary", "both") else P()
    f = jax.value_and_grad(cross_entropy, argnums=(0, 1))
    plain, ours = pair(f, mesh(2, 4), (x, w, labels), (rows, columns, rows))
    assert_alike(plain, ours, work=1.4)  # the logits are computed once more


# --- convolutions ---------------------------------------------------------------------


CONVOLUTIONS = {
    "images": (P("x"), P()),
    "results' channels": (P(), P(None, None, None, "x")),
    "channels": (P(None, None, None, "x"), P(None, None, "x")),
    "images and channels": (P("y", None, None, "x"), P(None, None, "x")),
    "rows": (P(None, "x"), P()),
    "rows and columns": (P(None, "x", "y"), P()),
}


@pytest.mark.parametrize("strides", [1, 2])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_are_split(name, strides):
    def f(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (strides,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (jax.nn.relu(y) ** 2).mean()

    gradients = jax.value_and_grad(f, argnums=(0, 1))
    args = normal(4, 16, 8, 8), normal(3, 3, 8, 12)
    plain, ours = pair(gradients, mesh(4, 2), args, CONVOLUTIONS[name])
    # Not plain's values: where rows are split, XLA adds some gradients up twice.
    right = dataclasses.replace(plain, results=gradients(*args))
    assert_alike(right, ours)
    assert len(ours.decisions) == 3
    rows = "rows" in name
    assert all(call.decision.split["h"] for call in ours.decisions) == rows
    assert "all-gather" not in ours.collectives


@pytest.mark.parametrize(
    ("kernel", "dilation", "padding"), [(5, 1, 2), (3, 2, 2), (1, 1, 0)]
)
def test_halos_reach_over_several_devices(kernel, dilation, padding):
    def f(x, w):
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            [(padding, padding)] * 2,
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return (y**2).mean()

    args = normal(2, 8, 6, 4), normal(kernel, kernel, 4, 8)
    plain, ours = pair(
        jax.value_and_grad(f, argnums=(0, 1)), mesh(8), args, (P(None, "x"), P())
    )
    assert_alike(plain, ours)


def test_groups_of_channels_are_split():
    def f(x, w):
        y = jax.lax.conv_general_dilated(
            x,
            w,
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=16,
        )
        return (y**2).mean()

    args = normal(2, 8, 8, 16), normal(3, 3, 1, 16)
    channels = P(None, None, None, "x")
    plain, ours = pair(
        jax.value_and_grad(f, argnums=(0, 1)), mesh(4), args, (channels, channels)
    )
    assert_alike(plain, ours)
    assert all(call.decision.split["g"] for call in ours.decisions)


# --- the others -----------------------------------------------------------------------


def test_functions_of_elements():
    args = normal(8, 6), normal(8, 6)
    plain, ours = pair(
        tracea.ops.elementwise.multiply, mesh(4, 2), args, (P("x", "y"),) * 2
    )
    assert_alike(plain, ours)
    assert not ours.collectives


def test_paged_attention_splits_sequences_and_heads(always):
    def f(q, pages, lengths, indices):
        return tracea.ops.paged_attention(q, pages, pages, lengths, indices)

    q, pages = normal(8, 8, 16), normal(4, 12, 8, 16)
    lengths = np.array([9, 1, 16, 3, 24, 8, 5, 17], np.int32)
    indices = np.arange(24, dtype=np.int32).reshape(8, 3) % 12
    own = mesh(2, 4)
    specs = P("x", "y"), P("y"), P("x"), P("x")
    local = compiled(f, *placed(own, (q, pages, lengths, indices), specs))
    assert len(local.decisions) == 1 and not local.collectives
    np.testing.assert_allclose(
        local.results, f(q, pages, lengths, indices), rtol=1e-4, atol=1e-5
    )


# --- rules of ops whose kernels are for GPUs ------------------------------------------


@pytest.fixture
def always(monkeypatch):
    """Every call is split by its rule, and computed by XLA on each device."""
    monkeypatch.setattr(serving.Served, "is_xla", False)


POOLS = {
    "images and channels": P("x", None, None, "y"),
    "rows": P(None, "x"),
    "rows and columns": P(None, "y", "x"),
}


@pytest.mark.parametrize(("window", "stride", "pad"), [(3, 2, 1), (2, 2, 0), (5, 1, 2)])
@pytest.mark.parametrize("name", POOLS)
def test_max_pools_are_split(name, window, stride, pad, always):
    params = {
        "kernel": (window,) * 2,
        "strides": (stride,) * 2,
        "padding": ((pad, max(window - stride - pad, 0)),) * 2,
    }

    def pool(x):
        how = {"implementation": None, "config": None}
        return max_pool.max_pool_p.bind(x, **params, **how)[0]

    def f(x):
        y, pull = jax.vjp(pool, x)
        return y, pull(jnp.cos(y))[0]

    def right(x):
        y, pull = jax.vjp(lambda x: max_pool.reference(x, **params)[0], x)
        return y, pull(jnp.cos(y))[0]

    x = normal(4, 16, 16, 4)
    found = compiled(f, *placed(mesh(4, 2), (x,), (POOLS[name],)))
    assert [call.name for call in found.decisions] == [
        "tracea_max_pool",
        "tracea_max_pool_gradient",
    ]
    assert "all-gather" not in found.collectives
    for result, want in zip(found.results, right(x), strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("relu", ["none", "result"])
def test_sums_of_channels_are_split(relu, always):
    x, dy = normal(8, 6, 8), normal(8, 6, 8)
    center = normal(8)
    args = (x, dy, center) if relu == "none" else (x, dy, normal(8, 6, 8), center)

    def f(*args):
        return channel_sums.bind(*args, relu=relu)

    specs = [P("x", None, "y")] * (len(args) - 1) + [P("y")]
    found = compiled(f, *placed(mesh(4, 2), args, specs))
    assert len(found.decisions) == 1
    assert found.collectives == {"all-reduce": 2}
    want = channel_sums.reference(*args, relu=relu)
    for result, right in zip(found.results, want, strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_columns_are_sent_with_the_bits_of_the_derivative(dtype):
    shapes = (8, 16), (16, 24), (8, 24)
    args = [jnp.asarray(normal(*shape), dtype) for shape in shapes]
    params = {
        "layout": "nn",
        "epilogue": Epilogue(
            activation="gelu",
            residual=True,
            residual_op="derivative",
            column_sums=True,
        ),
        "out": jnp.dtype(dtype),
        "precision": None,
        "implementation": None,
        "config": None,
    }
    rule = matmul_rule(matmul_p, [x.aval for x in args], **params)
    rows = (("x",), ())
    given, wanted = [rows, ((), ()), rows], [rows, ((),)]
    split = sharding.decide(rule, given, wanted, {"x": 8}, [1] * 5)
    device = sharding.Device(decision=split, rule=rule)
    assert (local_of := rule.local) is not None
    local = jax.shard_map(
        lambda *operands: local_of(operands, device),
        mesh=mesh(8),
        in_specs=(P("x"), P(), P("x")),
        out_specs=[P("x"), P()],
    )
    traced = all_equations(jax.make_jaxpr(local)(*args).jaxpr)
    (sent,) = [e for e in traced if e.primitive.name.startswith("psum")]
    assert sent.invars[0].aval.dtype == dtype
    y, sums = local(*args)
    assert sums.dtype == jnp.float32
    want = matmul_p.bind(*args, **params)
    for found, right in zip((y, sums), want, strict=True):
        gap = np.abs(np.asarray(found, np.float32) - np.asarray(right, np.float32))
        assert gap.max() <= (1e-5 if dtype == "float32" else 0.02) * np.abs(right).max()


NORMS = {
    "images": P("x"),
    "rows": P(None, "x"),
    "rows and columns": P(None, "x", "y"),
    "groups": P(None, None, None, "y"),
    "channels of a group": P(None, None, None, ("x", "y")),
    "images, rows and groups": P("y", "x"),
}


@pytest.mark.parametrize(
    ("name", "groups"),
    [*((name, 2) for name in NORMS), ("rows", 1), ("channels of a group", 1)],
)
def test_group_norms_are_split(name, groups, always):
    def norm(x, scale, bias):
        how = {"groups": groups, "epsilon": 1e-5, "activation": "silu"}
        return group_norm.bind(x, scale, bias, **how)

    def f(*args):
        y, pull = jax.vjp(norm, *args)
        return y, *pull(jnp.cos(y))

    args = normal(4, 8, 6, 16) + 1, normal(16), normal(16)
    spec = NORMS[name]
    right = jax.jit(f)(*args)
    given = placed(mesh(4, 2), args, (spec, P(*spec[3:]), P(*spec[3:])))
    found = compiled(f, *given)
    assert [call.name for call in found.decisions] == [
        "tracea_group_norm",
        "tracea_group_norm_gradients",
    ]
    assert "all-gather" not in found.collectives
    for result, want in zip(found.results, right, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-4, atol=1e-4)
