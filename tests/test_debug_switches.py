"""JAX's debug switches: transformed functions fail, or not, as plain ones do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tracea_jax as tracea
from tracea_jax import ops


def entries(*shape, first=None, scale=1.0):
    values = np.abs(np.random.default_rng(shape[0]).normal(size=shape)) * scale
    if first is not None:
        values.reshape(-1)[0] = first
    return jnp.asarray(values.astype("float32"))


def logarithm(x, w):
    return jnp.log(x @ w)


def gelu(x, w):
    return jax.nn.gelu(x @ w)


def product(x, w):
    return x @ w


def nested(x, w):
    return jax.jit(lambda x: jax.nn.relu(jnp.sqrt(x @ w)))(x) + 1


def scanned(x, w):
    return lax.scan(lambda c, _: (jnp.log(c @ w) - 5, None), x, None, length=3)[0]


def differentiated(x, w):
    return jax.grad(lambda w: jnp.sqrt(x @ w).sum())(w)


def attended(x, w):
    q = x.reshape(1, 8, 2, 4)
    return jax.nn.dot_product_attention(q, q, w.reshape(1, 8, 2, 4))


FUNCTIONS = (logarithm, gelu, product, nested, scanned, differentiated, attended)


def called(f, *args):
    return jax.jit(f)(*args)


def mapped(f, *args):
    return jax.vmap(f)(*[x[None] for x in args])


def with_gradient(f, *args):
    return jax.value_and_grad(lambda *args: f(*args).sum(), argnums=(0, 1))(*args)


def outcome(make, how, f, args):
    """Values; or the exception's type and text."""
    fresh = make(lambda *args: f(*args))  # of which JAX has no trace
    try:
        return [np.asarray(y) for y in jax.tree.leaves(how(fresh, *args))]
    except Exception as e:
        return type(e), str(e)


def check_alike(how, f, args):
    plain, ours = (outcome(m, how, f, args) for m in (jax.jit, tracea.transform))
    if isinstance(plain, tuple) or isinstance(ours, tuple):
        assert ours == plain
        return plain
    for y, expected in zip(ours, plain, strict=True):
        np.testing.assert_allclose(y, expected, 2e-4, 2e-5)
    return None


@pytest.mark.parametrize(
    "switch",
    [jax.debug_nans, pytest.param(jax.debug_infs, marks=pytest.mark.slow)],
)
def test_special_values_are_named_as_in_plain_jax(switch, capsys):
    bad = np.nan if switch is jax.debug_nans else np.inf
    w = entries(8, 8)
    kinds = [entries(8, 8), entries(8, 8, first=bad), entries(8, 8, scale=-1)]
    kinds += [entries(8, 8, scale=0), entries(8, 8, scale=1e38)]
    errors = []
    with switch(True):
        for f in FUNCTIONS:
            for x in kinds:
                errors.append(check_alike(lambda f, *args: f(*args), f, (x, w)))
        for how in (called, mapped, with_gradient):
            for f in (logarithm, nested):
                for x in kinds[1:4]:
                    errors.append(check_alike(how, f, (x, w)))
    errors = [e for e in errors if e is not None]
    assert len(errors) > 10
    assert all(kind is FloatingPointError for kind, _ in errors)
    named = {text.split()[-1] for _, text in errors}
    assert {"log", "dot_general"} <= named


@pytest.mark.parametrize("switch", [jax.debug_nans, jax.debug_infs])
def test_an_op_outside_of_jit_names_an_equation_of_its_reference(switch):
    bad = np.nan if switch is jax.debug_nans else np.inf
    x, w = entries(5, 8, first=bad), entries(8, 3)
    with switch(True):
        with pytest.raises(FloatingPointError, match="encountered in dot_general"):
            ops.matmul(x, w)
        with pytest.raises(FloatingPointError, match="encountered in"):
            ops.matmul(x, w, activation="gelu")


def branching(x, w):
    y = x @ w
    if y.sum() > 0:
        y = jnp.tanh(y)
    return float(y[0, 0]) + y


def test_values_are_seen_without_jit():
    x, w = entries(5, 8), entries(8, 3)
    expected = branching(x, w)
    fast = tracea.transform(branching)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        fast(x, w)
    with jax.disable_jit():
        np.testing.assert_array_equal(fast(x, w), expected)
        np.testing.assert_array_equal(jax.jit(fast)(x, w), expected)
        found = jax.grad(lambda w: tracea.transform(logarithm)(x, w).sum())(w)
        with jax.debug_nans(True):
            check_alike(called, logarithm, (-x, w))
    expected = jax.grad(lambda w: logarithm(x, w).sum())(w)
    np.testing.assert_allclose(found, expected, 2e-5)


def test_explain_and_bundle_do_not_depend_on_disable_jit(tmp_path):
    x, w = entries(5, 8), entries(8, 3)
    expected = tracea.explain(gelu)(x, w).to_json()
    with jax.disable_jit():
        assert tracea.explain(gelu)(x, w).to_json() == expected
        assert tracea.bundle(gelu, x, w, path=tmp_path / "gelu").plans


SWITCHES = {
    "jax_check_tracer_leaks": True,
    "jax_enable_checks": True,
    "jax_log_compiles": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_key_reuse": True,
}


def normed_layer(x, w):
    y = x - x.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-5)
    return jax.nn.relu(lax.dot(y, w)) + lax.dot(x, w)


def mixed(x, w):
    return x.astype(jnp.bfloat16) @ w + w[0]  # two dtypes, two ranks


def dropped(x, w):
    key = jax.random.key(0)
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    again = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(kept & again, x, 0) @ w


CHECKED = (normed_layer, gelu, attended, mixed, dropped)
LEAKS = "jax_check_tracer_leaks"


@pytest.mark.parametrize(
    ("switch", "functions"),
    [
        *((switch, CHECKED) for switch in SWITCHES if switch != LEAKS),
        (LEAKS, (normed_layer, attended)),
        pytest.param(LEAKS, (gelu, mixed, dropped), marks=pytest.mark.slow),
    ],
)
def test_switches_that_check_programs(switch, functions):
    x, w = entries(8, 8), entries(8, 8)
    # The search for leaks takes seconds at each trace: one call, which traces most.
    hows = (with_gradient, called, lambda f, *args: f(*args))
    hows = hows[:1] if switch == LEAKS else hows
    before = getattr(jax.config, switch)
    jax.config.update(switch, SWITCHES[switch])
    try:
        for f in functions:
            for how in hows:
                plain, ours = (
                    outcome(m, how, f, (x, w)) for m in (jax.jit, tracea.transform)
                )
                if isinstance(plain, tuple):
                    assert isinstance(ours, tuple) and ours[0] is plain[0]
                    continue
                assert not isinstance(ours, tuple), ours
                for y, expected in zip(ours, plain, strict=True):
                    np.testing.assert_allclose(y, expected, 2e-2, 2e-4)
    finally:
        jax.config.update(switch, before)


def test_no_transfers_and_no_traces_once_compiled():
    x, w = entries(8, 8), entries(8, 8)
    fast = tracea.transform(gelu)
    expected = np.asarray(fast(x, w))
    with jax.no_tracing(True), jax.transfer_guard("disallow"):
        found = fast(x, w)
    np.testing.assert_array_equal(np.asarray(found), expected)
    with jax.no_tracing(True):
        check = outcome(tracea.transform, called, product, (x, w))
        assert check[0] is outcome(jax.jit, called, product, (x, w))[0] is RuntimeError


@pytest.mark.parametrize("mode", ["off", "tracebackhide", "remove_frames"])
def test_errors_of_the_function_under_each_filter(mode):
    def wrong(x, w):
        return x @ w @ x[:3, :2]

    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", mode)
    try:
        plain, ours = (
            outcome(m, called, wrong, (entries(8, 8), entries(8, 8)))
            for m in (jax.jit, tracea.transform)
        )
        assert plain == ours and plain[0] is TypeError
    finally:
        jax.config.update("jax_traceback_filtering", before)
