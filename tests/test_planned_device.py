"""One device for which a program is traced and planned: who decides it, who obeys."""

from __future__ import annotations

import dataclasses
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax import device
from tracea_jax.explain import explain
from tracea_jax.explain.sites import sites
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.options import current, device_for, planned_device, planning
from tracea_jax.runtime import nvrtc

pytestmark = pytest.mark.once

NAMES = ("cpu", *device.NAMED)
SETTINGS = sys.modules[planned_device.__module__]  # tracea_jax.options is a function


def of(*shapes, dtype="bfloat16"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def layer(x, w, b):
    return jax.nn.gelu(x @ w + b) + x


def moments(x):
    x = x.astype(jnp.float32)
    return x.mean((0, 1, 2)), (x * x).mean((0, 1, 2))


def convolved(layout, x, w, v):
    numbers = (layout, "HWIO", layout)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    return jnp.sum(conv(jax.nn.relu(conv(x, w)), v).astype(jnp.float32))


def channels_first(x, w, v):
    return convolved("NCHW", x, w, v)


def channels_last_gradient(x, w, v):
    return jax.grad(lambda w: convolved("NHWC", x, w, v))(w)


def channels_first_gradient(x, w, v):
    return jax.grad(lambda w: convolved("NCHW", x, w, v))(w)


def pooled(x):
    return nn.max_pool(x, (3, 3), (2, 2), "SAME")


def pooled_gradient(x):
    return jax.grad(lambda x: pooled(x).astype(jnp.float32).sum())(x)


def batch_normed(x, scale, bias):
    norm = nn.BatchNorm(use_running_average=False)
    state = {"mean": jnp.zeros(x.shape[-1]), "var": jnp.ones(x.shape[-1])}
    variables = {"params": {"scale": scale, "bias": bias}, "batch_stats": state}
    return jax.nn.relu(norm.apply(variables, x, mutable=["batch_stats"])[0])


def batch_normed_gradient(x, *weights):
    def loss(x):
        return jnp.square(batch_normed(x, *weights)).astype(jnp.float32).sum()

    return jax.grad(loss)(x)


def group_normed(x, scale, bias):
    parameters = {"params": {"scale": scale, "bias": bias}}
    return nn.GroupNorm(8).apply(parameters, x)


def attended(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def attended_gradient(*qkv):
    def loss(*qkv):
        return attended(*qkv).astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*qkv)


def trained(w, v, x):
    def loss(w, v):
        return jnp.square(jax.nn.relu(x @ w) @ v).astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1))(w, v)


IMAGES = (16, 28, 28, 64)
PROGRAMS = {
    "layer": (layer, of((512, 512), (512, 512), (512,))),
    "float32": (layer, of((96, 96), (96, 96), (96,), dtype="float32")),
    "trained": (trained, of((512, 1024), (1024, 512), (512, 512))),
    "moments": (moments, of(IMAGES)),
    "NCHW": (channels_first, of((8, 64, 14, 14), (3, 3, 64, 64), (1, 1, 64, 64))),
    "NCHW float32": (
        channels_first,
        of((2, 32, 7, 7), (3, 3, 32, 32), (3, 3, 32, 8), dtype="float32"),
    ),
    "NCHW gradient": (
        channels_first_gradient,
        of((8, 64, 14, 14), (3, 3, 64, 64), (1, 1, 64, 64)),
    ),
    "NHWC gradient": (
        channels_last_gradient,
        of((8, 14, 14, 64), (3, 3, 64, 64), (1, 1, 64, 64)),
    ),
    "pool": (pooled, of(IMAGES)),
    "pool gradient": (pooled_gradient, of(IMAGES)),
    "batch norm": (batch_normed, of(IMAGES, (64,), (64,), dtype="float32")),
    "batch norm gradient": (
        batch_normed_gradient,
        of(IMAGES, (64,), (64,), dtype="float32"),
    ),
    "group norm": (group_normed, of(IMAGES, (64,), (64,))),
    "attention": (attended, of(*[(2, 256, 4, 64)] * 3)),
    "attention gradient": (attended_gradient, of(*[(2, 256, 4, 64)] * 3)),
}


@pytest.fixture
def without_compiler(monkeypatch):
    """As if no kernel could be compiled here, which GPUs elsewhere do not need."""
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: "NVRTC is not installed")


@pytest.fixture
def other_host(monkeypatch):
    """The same machine as if JAX computed on a GPU by default."""
    monkeypatch.setattr(SETTINGS, "local_device", lambda: device.NAMED["H200"])


def explained(program, **named):
    f, arguments = PROGRAMS[program]
    return explain(f, **named)(*arguments).to_json()


# One of each op, forward and gradient.
FEW = ("layer", "trained", "NCHW", "NHWC gradient", "pool gradient", "batch norm")


@pytest.mark.parametrize("program", slow_unless(FEW, PROGRAMS))
def test_argument_and_settings_name_the_same_device(
    program, other_host, without_compiler
):
    for name in NAMES:
        alone = explained(program, device=name)
        with tracea.options(device=name):
            assert explained(program) == alone
        with tracea.options(device="cpu" if name == "A100" else "A100"):
            assert explained(program, device=name) == alone


def test_the_host_decides_nothing(monkeypatch):
    """Neither its kind nor its compiler."""
    for program in ("NCHW", "pool gradient", "trained"):
        found = [explained(program, device=name) for name in NAMES]
        with monkeypatch.context() as m:
            m.setattr(SETTINGS, "local_device", lambda: device.NAMED["H200"])
            m.setattr(nvrtc, "why_unavailable", lambda: "NVRTC is not installed")
            assert [explained(program, device=name) for name in NAMES] == found


@pytest.mark.parametrize("program", slow_unless(FEW, PROGRAMS))
def test_transform_has_the_sites_that_explain_shows(program):
    f, arguments = PROGRAMS[program]
    for name in NAMES:
        with tracea.options(device=name):
            with without_choices():
                jaxpr = jax.make_jaxpr(tracea.transform(f))(*arguments)
            with planning() as target:
                found = sites(jaxpr, target, current())
        shown = explain(f, device=name)(*arguments)
        assert [_asked(s) for s in found] == [_asked(s) for s in shown.sites]


def _asked(site):
    config = site.plan and dataclasses.asdict(site.plan.config)
    return site.op, str(site.problem), site.count, site.variant, config


@pytest.mark.parametrize(
    ("program", "op"),
    [("moments", "channel_sums"), ("pool", "max_pool"), ("batch norm", "channel_sums")],
)
def test_ops_without_kernels_for_the_host_are_found_for_a_gpu(program, op):
    f, arguments = PROGRAMS[program]
    assert op in explain(f, device="H200")(*arguments).ops
    assert op not in explain(f, device="cpu")(*arguments).ops


def test_what_a_program_is_planned_for(other_host):
    cpu, h200, h100 = device.local_cpu(), device.NAMED["H200"], device.NAMED["H100"]
    assert planned_device() == h200
    with tracea.options(device="cpu"):
        assert planned_device() == cpu
        with planning("H100") as target:
            assert target == planned_device() == device_for("cuda") == h100
            assert device_for("cpu") == cpu
            with tracea.options(device="H200"), planning() as target:
                assert target == h100
        assert planned_device() == cpu
    odd = dataclasses.replace(h100, name="half an H100", sm_count=66)
    with planning(odd):
        assert planned_device() == device_for("cuda") == odd
    assert explain(layer, device=odd)(*PROGRAMS["layer"][1]).device == odd
    with pytest.raises(ValueError, match="'B200' must be one of cpu, H200"):
        with planning("B200"):
            raise AssertionError


def test_only_the_local_device_is_tuned():
    with tracea.options(device="H100"):
        with pytest.raises(ValueError, match="only the local device can be tuned"):
            tracea.tune(layer, *PROGRAMS["float32"][1], budget_s=1, progress=False)


def test_a_function_under_jit_is_traced_for_each_device():
    f, arguments = PROGRAMS["pool"]
    fast = jax.jit(tracea.transform(f))
    assert "tracea" not in str(fast.trace(*arguments).jaxpr)
    with tracea.options(device="H200"):
        assert "tracea" in str(fast.trace(*arguments).jaxpr)
    assert "tracea" not in str(fast.trace(*arguments).jaxpr)
