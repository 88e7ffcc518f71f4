"""How often functions are traced that are differentiated inside, and what is left."""

from __future__ import annotations

import functools
import threading
import warnings

import jax
import jax.numpy as jnp
import pytest
from insides import (
    BOTH_ATTENTIONS,
    WIDTH,
    arguments,
    check,
    descended,
    hessian_product,
    in_scan,
    jacobian,
    layer,
    loss,
    mlp_loss,
    names,
    products,
    step,
)
from transformed import assert_near, jit

import tracea_jax as tracea
from tracea_jax import _compat
from tracea_jax.rewrite import left

pytestmark = pytest.mark.usefixtures("our_attention")

# --- transformations of a transformed step --------------------------------------------


def test_derivatives_and_vmap_of_a_transformed_step():
    def after(p, x, y):
        return mlp_loss(descended(p, jax.grad(mlp_loss)(p, x, y)), x, y)

    args = arguments()
    fast = tracea.transform(after)
    got, expected = jit(lambda *args: [jax.grad(f)(*args) for f in (fast, after)])(
        *args
    )
    assert_near(got, expected, 2e-4)
    mapped = [jax.vmap(f, (None, 0, 0)) for f in (fast, after)]
    got, expected = jit(lambda *args: [f(*args) for f in mapped])(*args)
    assert_near(got, expected, 3e-5)


def test_a_transformed_loss_in_a_transformed_step():
    args = arguments()
    inner = step(tracea.transform(loss))
    assert products(tracea.transform(inner), *args) == products(inner, *args)
    # What the inner one was told to leave is found as it is outside of derivatives.
    some = step(tracea.transform(loss, ops=["matmul"]))
    assert "tracea_attention" not in names(some, *args)


def test_layers_in_a_row():
    def chained(p, x, y):
        x = x.reshape(-1, WIDTH)
        return jax.nn.relu(jax.nn.gelu(x @ p["up"]) @ p["down"]).sum()

    check(step, of=chained, has=("tracea_matmul",))


def test_scopes_are_those_of_jax():
    found = {str(site.scope) for site in tracea.explain(step(loss))(*arguments()).sites}
    assert found == {"jvp(layer)", "transpose(jvp(layer))"}


def test_leaks_and_internal_checks():
    args = arguments()
    fast, plain = (f(step(mlp_loss)) for f in (tracea.transform, jax.jit))
    with jax.checking_leaks(), jax.enable_checks(True):
        got = fast(*args)
    assert_near(got, plain(*args), 3e-5)


def test_export():
    args = arguments()
    fast = jax.jit(tracea.transform(step(mlp_loss)))
    again = jax.export.deserialize(jax.export.export(fast)(*args).serialize())
    assert_near(again.call(*args), step(mlp_loss)(*args), 3e-5)


# --- traces that are kept -------------------------------------------------------------


@pytest.mark.parametrize("make", [step, jacobian, in_scan, hessian_product])
def test_the_loss_is_traced_no_more_often_than_by_jax(make):
    calls = []

    def counted(p, x, y):
        calls.append(1)
        return mlp_loss(p, x, y)

    args = arguments()
    counts = []
    for program in (make(counted), tracea.transform(make(counted))):
        calls.clear()
        jax.make_jaxpr(program)(*args)
        counts.append(len(calls))
    plain, ours = counts
    assert 1 <= ours <= plain


def test_traces_are_kept_apart():
    traces = []

    @jax.jit
    def gradient(p, x, y):
        traces.append(1)
        return jax.grad(loss)(p, x, y)

    args = arguments()
    gradient(*args)
    fast = tracea.transform(gradient)
    found = products(fast, *args)
    assert found and len(traces) == 2
    assert {*BOTH_ATTENTIONS} <= {name for name, *_ in found}
    assert not names(gradient, *args)
    assert products(fast, *args) == found and len(traces) == 2
    only = tracea.transform(gradient, ops=["matmul"])
    assert {*names(only, *args)} == {"tracea_matmul"} and len(traces) == 3
    assert not names(gradient, *args) and len(traces) == 3


def test_threads():
    args = arguments()
    ready, found = threading.Barrier(2), []

    def transforming():
        ready.wait()
        fast = [tracea.transform(lambda *a: jax.grad(mlp_loss)(*a)) for _ in range(3)]
        found.extend(bool(names(f, *args)) for f in fast)

    def differentiating():
        ready.wait()
        for _ in range(6):
            found.append(not names(lambda *a: jax.grad(mlp_loss)(*a), *args))

    threads = [threading.Thread(target=f) for f in (transforming, differentiating)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 9


def test_donation():
    p, x, y = arguments()
    fast = tracea.transform(jax.jit(step(mlp_loss), donate_argnums=0))
    expected = step(mlp_loss)(p, x, y)
    lowered = fast.lower(p, x, y)
    assert lowered.as_text().count("tf.aliasing_output") == len(p)
    assert_near(lowered.compile()(jax.tree.map(jnp.copy, p), x, y), expected, 3e-5)


# --- what cannot be reached -----------------------------------------------------------


def test_explain_lists_the_sites_of_a_transformed_loss():
    def mixed(p, x, y):
        integers = x.astype(jnp.int32) @ jnp.ones((WIDTH, WIDTH), jnp.int32)
        return loss(p, x, y) + integers.sum()

    args = arguments()
    train = jax.jit(step(mixed))
    found = tracea.explain(train)(*args)
    inside = tracea.explain(step(tracea.transform(mixed)))(*args)
    assert [s.problem for s in found.sites] == [s.problem for s in inside.sites]
    assert found.ops["attention"] == 2
    (miss,) = found.misses
    assert "int32" in miss.what and miss.scope == "jvp()"
    # Nothing that is kept hides it.
    assert tracea.explain(train)(*args).misses == found.misses


def test_explain_tells_what_was_differentiated_too_early():
    args = arguments()
    _, pull = jax.vjp(loss, *args)
    misses = tracea.explain(lambda ct: pull(ct))(jnp.ones(())).misses
    early = [m for m in misses if m.reason == left.TOO_EARLY]
    assert early and all("transpose(jvp(layer))" in m.scope for m in early)
    assert "apply it to the loss" in str(early[0])

    def push(p):
        return jax.jvp(tracea.transform(lambda p: loss(p, *args[1:])), (p,), (p,))

    assert not tracea.explain(push)(args[0]).misses
    meant = tracea.explain(step(loss), after_grad=True)(*args)
    assert not meant.misses and {*meant.ops} == {"matmul"}


@pytest.fixture
def plain_linearize(monkeypatch):
    """JAX's own function, and a way to replace it: as if nothing was installed yet."""
    from jax._src.interpreters import ad

    original = getattr(ad.linearize, "__wrapped__", ad.linearize)
    monkeypatch.setattr(ad, "linearize", original)
    left._warn.cache_clear()
    yield functools.partial(monkeypatch.setattr, ad, "linearize"), original
    left._warn.cache_clear()


def test_it_is_installed_by_the_first_transform_only(plain_linearize):
    from jax._src.interpreters import ad

    _, original = plain_linearize
    args = arguments()
    jax.make_jaxpr(jax.grad(mlp_loss))(*args)
    assert ad.linearize is original
    fast = tracea.transform(step(loss))
    found = names(fast, *args)
    installed = ad.linearize
    assert installed is not original and "tracea_attention" in found
    assert names(tracea.transform(step(loss)), *args) == found
    assert ad.linearize is installed


def changed(original):
    def linearize(traceable, primals_ft, *rest, unknown=None, **kwargs):
        return original(traceable, primals_ft, *rest, **kwargs)

    return linearize


def renamed(original):
    def linearize(fun, primals_ft, *rest, **kwargs):
        return original(fun, primals_ft, *rest, **kwargs)

    return linearize


@pytest.mark.parametrize("other", [changed, renamed])
def test_an_unknown_jax_is_left_as_it_is(other, plain_linearize):
    replace, original = plain_linearize
    replace(unknown := other(original))
    _assert_degrades("unknown arguments: ")
    from jax._src.interpreters import ad

    assert ad.linearize is unknown


def test_a_jax_without_the_function_is_left_as_it_is(plain_linearize, monkeypatch):
    from jax._src.interpreters import ad

    def missing():
        return "it is gone"

    monkeypatch.setattr(_compat, "install_linearize_hook", missing)
    _assert_degrades("it is gone")
    monkeypatch.undo()
    monkeypatch.delattr(ad, "linearize")
    assert "has no such function" in str(_compat.install_linearize_hook())


def _assert_degrades(why):
    args = arguments()
    gradient = step(loss)
    fast = tracea.transform(gradient)
    with pytest.warns(UserWarning, match="apply transform to the loss") as caught:
        found = names(fast, *args)
    assert why in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert names(tracea.transform(step(loss)), *args) == found
        tracea.transform(layer)(*args[:2])
    assert {*found} == {"tracea_matmul"}
    got, expected = jit(lambda *args: (fast(*args), gradient(*args)))(*args)
    assert_near(got, expected, 3e-5)
    misses = tracea.explain(gradient)(*args).misses
    assert left.TOO_EARLY in {m.reason for m in misses}
