"""attention on a GPU: cuDNN's results and gradients against float32 and float64."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import lengths, random_mask
from numerics import normal

import tracea_jax as tracea
from tracea_jax.dispatch import plan
from tracea_jax.ops import attention
from tracea_jax.ops.attention import workload as bench
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_cudnn import ATTENTION_CUDNN

pytestmark = pytest.mark.gpu

cudnn = functools.partial(attention, implementation="cudnn")


@pytest.fixture(autouse=True)
def device():
    device = device_for("cuda")
    if device.platform != "cuda" or getattr(device, "capability", (0,)) < (8, 0):
        pytest.skip(f"{device} is not of an architecture that cuDNN's attention needs")
    return device


def arguments(
    batch=2, q_len=256, kv_len=256, heads=4, kv_heads=4, head_dim=64, dtype="bfloat16"
):
    k = (batch, kv_len, kv_heads, head_dim)
    shapes = ((batch, q_len, heads, head_dim), k, k)
    return [normal(*s, seed=i).astype(dtype) for i, s in enumerate(shapes)]


def compiled(f, *args):
    return str(jax.jit(f).lower(*args).compile().as_text())


# --- problems: values and gradients in sampled rows, against float64 ------------------

BASE = AttentionProblem(
    batch=2,
    q_len=384,
    kv_len=384,
    heads=4,
    kv_heads=4,
    head_dim=64,
    dtype="bfloat16",
    scale=0.125,
)
GROUPED = {"kv_heads": 2}
LONGER = {"kv_len": 640}
KINDS = {
    "plain": {},
    "causal": {"is_causal": True},
    "grouped": {**GROUPED, "is_causal": True},
    "one key head": {"kv_heads": 1, "heads": 6},
    "longer keys": {**LONGER, "is_causal": True},
    "longer queries": {"q_len": 640, "is_causal": True},
    "odd lengths": {"q_len": 331, "kv_len": 257, **GROUPED},
    "odd causal": {"q_len": 331, "kv_len": 331, "is_causal": True},
    "prime": {"q_len": 67, "kv_len": 131},
    "dim 8": {"head_dim": 8},
    "dim 72": {"head_dim": 72, **GROUPED},
    "dim 128": {"head_dim": 128, **GROUPED},
    "dim 256": {"head_dim": 256, "is_causal": True},
    "window": {"window": (100, 0), **GROUPED},
    "causal window": {"window": (33, 7), "is_causal": True, **LONGER},
    "window of one": {"window": (0, 0)},
    "mask": {"mask": (2, 1, 384, 384)},
    "key mask": {"mask": (2, 1, 1, 384), "is_causal": True, **GROUPED},
    "key lengths": {"kv_lengths": True, **GROUPED},
    "lengths": {"kv_lengths": True, "q_lengths": True},
    "causal lengths": {"kv_lengths": True, "q_lengths": True, "is_causal": True},
    "query lengths": {"q_lengths": True, "head_dim": 128},
    "lengths and window": {"kv_lengths": True, "window": (64, 0)},
    "mask and lengths": {"kv_lengths": True, "mask": (1, 1, 384, 384)},
}
BIASES = {
    "whole": (2, 4, 384, 384),
    "of a head": (1, 4, 384, 384),
    "of an example": (2, 1, 384, 384),
    "shared": (1, 1, 384, 384),
    "of keys": (2, 1, 1, 384),
    "of queries": (1, 4, 384, 1),
}
for _name, _shape in BIASES.items():
    KINDS[f"bias {_name}"] = {"bias": _shape, "bias_dtype": "bfloat16"}
KINDS["bias, mask, causal"] = {
    **KINDS["bias of a head"],
    **GROUPED,
    "mask": (2, 1, 1, 384),
    "is_causal": True,
}
KINDS["bias and lengths"] = {
    **KINDS["bias of a head"],
    "kv_lengths": True,
    "q_lengths": True,
}
IN_FLOAT16 = ("plain", "grouped", "dim 128", "mask", "bias of a head", "lengths")


def run_and_check(problem: AttentionProblem, device) -> None:
    """Runs cuDNN in buffers full of NaN and compares with float64."""
    config = ATTENTION_CUDNN.heuristic(problem, device)
    inputs = bench.operands(problem, seed=3)
    run = functools.partial(
        bench.execute, problem=problem, choice=Choice(variant="cudnn", config=config)
    )
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    results = call(poison, *inputs)
    error = bench.error(problem, device, inputs, results, seed=3)
    assert error <= 1, f"{error:.3g} of the allowed error"


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [*((k, "bfloat16") for k in KINDS), *((k, "float16") for k in IN_FLOAT16)],
)
def test_cudnn_against_float64(kind, dtype, direction, device):
    changes = dict(KINDS[kind])
    if changes.get("bias"):
        changes["bias_dtype"] = dtype
    problem = dataclasses.replace(BASE, dtype=dtype, direction=direction, **changes)
    reason = ATTENTION_CUDNN.why_not(problem, device)
    if reason and problem.head_dim > 128:
        pytest.skip(reason)
    assert reason is None
    run_and_check(problem, device)


# --- whole gradients, all rows, against XLA in float32 --------------------------------

SETTINGS = {
    "plain": {},
    "causal": {"is_causal": True, "scale": 0.05},
    "window": {"local_window_size": (40, 0)},
    "mask": {"mask": random_mask(2, 1, 256, 256)},
    "lengths": {
        "query_seq_lengths": lengths(256, 77),
        "key_value_seq_lengths": lengths(100, 255),
    },
    "key lengths": {"key_value_seq_lengths": lengths(1, 200), "is_causal": True},
}


def gradients(f, *args):
    def loss(*args):
        y = f(*args).astype("float32")
        return (jnp.cos(jnp.arange(y.size).reshape(y.shape)) * y).sum(), y

    every = tuple(range(len(args)))
    return jax.grad(loss, argnums=every, has_aux=True)(*args)


def assert_near(found, expected, tolerance):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all() and x.shape == y.shape
        assert np.abs(x - y).max() <= tolerance * np.abs(y).max()


@pytest.mark.parametrize(
    ("case", "with_bias"),
    [
        (case, with_bias)
        for case, settings in SETTINGS.items()
        for with_bias in (False, True)
        # cuDNN takes no bias with a window
        if not (with_bias and "local_window_size" in settings)
    ],
)
def test_gradients_are_those_of_xla(case, with_bias):
    args = arguments(kv_heads=2, head_dim=128)
    if with_bias:
        args.append(normal(1, 4, 256, 256, dtype="bfloat16"))
    settings = SETTINGS[case]
    ours = functools.partial(gradients, functools.partial(cudnn, **settings))
    xla = functools.partial(
        attention, **settings, implementation="xla", precision="highest"
    )
    text = compiled(ours, *args)
    name = "ScaleBiasSoftmax" if with_bias or "mask" in settings else "Softmax"
    assert f'"__cudnn$fmha{name}"' in text
    assert f'"__cudnn$fmha{name}Backward"' in text
    wide = [x.astype("float32") for x in args]
    expected = jax.jit(functools.partial(gradients, xla))(*wide)
    assert_near(jax.jit(ours)(*args), expected, 3e-2)


def test_the_log_sum_exp():
    args = arguments(q_len=200, kv_len=328, kv_heads=2)
    settings = {"is_causal": True, "return_residual": True}
    found = cudnn(*args, **settings)
    wide = [x.astype("float32") for x in args]
    expected = attention(*wide, **settings, implementation="xla", precision="highest")
    assert found[1].shape == (2, 200, 4) and found[1].dtype == "bfloat16"
    assert_near(found, expected, 2e-2)


def test_an_example_without_keys_is_finite():
    args = arguments()
    f = functools.partial(cudnn, key_value_seq_lengths=lengths(0, 256))
    for x in jax.tree.leaves(jax.jit(functools.partial(gradients, f))(*args)):
        assert bool(jnp.isfinite(x).all())


def test_a_bias_of_minus_infinity_forbids_keys():
    args = arguments(head_dim=128)
    mask = random_mask(1, 1, 256, 256)
    bias = jnp.where(mask, 0, -jnp.inf).astype("bfloat16")
    found = jax.jit(functools.partial(gradients, cudnn))(*args, bias)
    expected = jax.jit(
        functools.partial(gradients, functools.partial(cudnn, mask=mask))
    )(*args)
    assert_near((found[0][:3], found[1]), expected, 1e-2)


# --- transformations ------------------------------------------------------------------


@pytest.mark.parametrize("what", ["q", "bias", "all"])
def test_vmap(what):
    dims = {
        "q": (0, None, None, None),
        "bias": (None, None, None, 0),
        "all": (0, 1, 2, 0),
    }
    stacked = [
        x if d is None else jnp.stack([x, -x, x[::-1]], d)
        for x, d in zip(
            [*arguments(kv_heads=2), normal(1, 4, 256, 256, dtype="bfloat16")],
            dims[what],
            strict=True,
        )
    ]

    def mapped(f):
        return jax.jit(jax.vmap(functools.partial(gradients, f), dims[what]))

    assert "__cudnn$fmhaScaleBiasSoftmaxBackward" in compiled(mapped(cudnn), *stacked)
    wide = [x.astype("float32") for x in stacked]
    xla = functools.partial(attention, implementation="xla", precision="highest")
    assert_near(mapped(cudnn)(*stacked), mapped(xla)(*wide), 3e-2)


@pytest.mark.parametrize("remat", [False, True])
def test_layers_in_a_scan(remat):
    x = normal(2, 256, 256, dtype="bfloat16")
    weights = (normal(3, 256, 768) / 16).astype("bfloat16")

    def loss(f, x, weights):
        def layer(x, w):
            q, k, v = jnp.split((x @ w).reshape(2, 256, 12, 64), 3, axis=2)
            return x + f(q, k, v, is_causal=True).reshape(x.shape), None

        layer = jax.checkpoint(layer) if remat else layer
        y = jax.lax.scan(layer, x, weights)[0].astype("float32")
        return (y**2).mean()

    def of(f):
        return jax.jit(jax.value_and_grad(functools.partial(loss, f), argnums=(0, 1)))

    assert "__cudnn$fmhaSoftmaxBackward" in compiled(of(cudnn), x, weights)
    xla = functools.partial(attention, implementation="xla", precision="highest")
    wide = of(xla)(x.astype("float32"), weights.astype("float32"))
    assert_near(of(cudnn)(x, weights), wide, 5e-2)


def test_forward_over_reverse():
    args = arguments(batch=1, q_len=128, kv_len=128)

    def product(f, *args):
        gradient = jax.grad(lambda q: (f(q, *args[1:]).astype("float32") ** 2).sum())
        return jax.jvp(gradient, args[:1], args[1:2])

    xla = functools.partial(attention, implementation="xla", precision="highest")
    expected = jax.jit(functools.partial(product, xla))(
        *[x.astype("float32") for x in args]
    )
    assert_near(jax.jit(functools.partial(product, cudnn))(*args), expected, 5e-2)


# --- choice ---------------------------------------------------------------------------


def own_or_cudnn(device):
    """The fastest forward variant at long sequences: on Hopper a kernel of ours."""
    return "attention_sm90" if device.capability == (9, 0) else "cudnn"


def test_it_is_chosen_and_eager_calls_use_it(device):
    args = arguments(q_len=2048, kv_len=2048, head_dim=128)
    text = compiled(attention, *args)
    assert own_or_cudnn(device) in text and "exponential" not in text
    assert '"__cudnn$fmhaSoftmax"' in compiled(cudnn, *args)
    xla = attention(*args, implementation="xla", precision="highest")
    assert_near(attention(*args), xla, 2e-2)


def test_float32_is_left_to_xla():
    args = arguments(dtype="float32")
    assert "__cudnn" not in compiled(functools.partial(gradients, attention), *args)
    with pytest.raises(tracea.Unsupported, match="operands of dtype float32"):
        cudnn(*args)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_tuning_prefers_flash_attention_at_long_sequences(direction, device):
    problem = dataclasses.replace(
        BASE, q_len=4096, kv_len=4096, head_dim=128, direction=direction, is_causal=True
    )
    entry = tracea.tune(problem, effort="none", budget_s=20).entry
    # Which of several depends on what the budget lets it measure.
    assert entry.best.variant != "xla"
    assert plan(problem, device).origin == "tuned"
