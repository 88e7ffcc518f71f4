"""Rules that raise: the program is computed as written, and a warning says so once."""

from __future__ import annotations

import dataclasses
import importlib
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad, batching
from numerics import normal

import tracea_jax as tracea
from tracea_jax import faults
from tracea_jax.ops.common import choice, lowering
from tracea_jax.ops.matmul.primitive import matmul_p
from tracea_jax.rewrite import Match, Rule, matmul, splice
from tracea_jax.rewrite.conv2d import CONV2D
from tracea_jax.rewrite.matmul import MATMUL

LINE = re.compile(
    r"report this line: matmul: KeyError: 'a fault' "
    r"\(rewrite/\w+\.py:\d+; tracea_jax \S+, jax \S+\)"
)


@pytest.fixture(autouse=True)
def nothing_reported(monkeypatch):
    monkeypatch.setattr(faults, "_WARNED", set())


def layers(x, w):
    return jnp.tanh(x @ w) @ w


def arguments():
    return normal(3, 5), normal(5, 5, seed=1)


def failing(*_: Any, **__: Any) -> Any:
    raise KeyError("a fault")


@dataclasses.dataclass(frozen=True)
class Site:
    """A call that does not do what the product does.

    Attributes:
      how: "raises", "narrow", "flat", or "operand", which it returns as it is.
    """

    how: str

    def __call__(self, x: Any, w: Any) -> Any:
        match self.how:
            case "raises":
                raise KeyError("a fault")
            case "narrow":
                return (x @ w).astype(jnp.bfloat16)
            case "flat":
                return (x @ w).reshape(-1)
        return x


def with_site(how: str) -> Rule:
    def match(view: Any, index: int) -> Match:
        operands = tuple(view.eqns[index].invars)
        equations = frozenset({index})
        return Match(root=index, equations=equations, operands=operands, site=Site(how))

    return dataclasses.replace(MATMUL, match=match)


RULES = {
    "match": dataclasses.replace(MATMUL, match=failing),
    "prepare": dataclasses.replace(MATMUL, match=lambda *_: None, prepare=failing),
    "site": with_site("raises"),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_a_rule_that_raises_is_a_miss_and_one_warning(rule):
    jaxpr, misses = jax.make_jaxpr(layers)(*arguments()), []
    with pytest.warns(RuntimeWarning, match="leaves it to XLA") as caught:
        assert splice(jaxpr, [rule], misses) is jaxpr
        assert splice(jaxpr, [rule], []) is jaxpr
    assert len(caught) == 1
    assert LINE.search(str(caught[0].message)), caught[0].message
    assert {m.op for m in misses} == {"matmul"}
    assert all(m.reason == "its rule failed with KeyError: 'a fault'" for m in misses)
    assert len(misses) == (1 if rule is RULES["prepare"] else 2)


@pytest.mark.parametrize("how", ["narrow", "flat", "operand"])
def test_a_call_with_other_results_is_a_fault(how):
    jaxpr = jax.make_jaxpr(layers)(*arguments())
    with pytest.warns(RuntimeWarning, match="TypeError: .* in place of"):
        assert splice(jaxpr, [with_site(how)], []) is jaxpr


def test_other_rules_and_other_kinds_of_errors_go_on():
    jaxpr = jax.make_jaxpr(layers)(*arguments())
    with pytest.warns(RuntimeWarning, match="KeyError"):
        fast = splice(jaxpr, [RULES["match"], MATMUL], [])
    assert fast is not jaxpr
    other = dataclasses.replace(MATMUL, match=lambda *_: 1 // 0)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        splice(jaxpr, [other], [])
    another = dataclasses.replace(CONV2D, match=failing, anchors=MATMUL.anchors)
    with pytest.warns(RuntimeWarning, match="rewrite a conv2d"):
        splice(jaxpr, [another], [])


def test_programs_run_and_explain_shows_the_miss(monkeypatch):
    args = arguments()
    expected = layers(*args)
    monkeypatch.setattr(matmul, "product_at", failing)
    with pytest.warns(RuntimeWarning, match="matmul: KeyError"):
        found = jax.jit(tracea.transform(layers, ops="matmul"))(*args)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    grads = jax.grad(tracea.transform(lambda *a: layers(*a).sum(), ops="matmul"))
    assert np.isfinite(grads(*args)).all()
    text = str(tracea.explain(layers, ops="matmul")(*args))
    assert "its rule failed with KeyError: 'a fault'" in text


def test_a_failure_outside_of_rules_leaves_the_jaxpr(monkeypatch):
    module = importlib.import_module("tracea_jax.rewrite.splice")  # not the function
    monkeypatch.setattr(module, "replaced", failing)
    jaxpr, misses = jax.make_jaxpr(layers)(*arguments()), []
    with pytest.warns(RuntimeWarning, match="layer: KeyError"):
        assert splice(jaxpr, [MATMUL], misses) is jaxpr
    assert [(m.op, m.what) for m in misses] == [
        ("layer", "dot_general(float32[3,5], float32[5,5])")
    ]


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), tracea.Unsupported("no kernel"), UserWarning("an error")],
    ids=lambda e: type(e).__name__,
)
def test_errors_of_the_user_reach_the_user(error):
    def match(*_: Any) -> None:
        raise error

    rules = [dataclasses.replace(MATMUL, match=match)]
    jaxpr = jax.make_jaxpr(layers)(*arguments())
    with pytest.raises(type(error)):
        splice(jaxpr, rules, [])


def test_what_was_not_tuned_is_an_error_where_that_was_asked_for():
    """Also where a rule is the first to ask."""
    x = normal(1, 12, 12, 3)

    def f(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME")

    with tracea.options(on_miss="error"), pytest.raises(LookupError, match="on_miss"):
        tracea.transform(f, ops="conv2d")(x.transpose(0, 3, 1, 2), normal(4, 3, 3, 3))


def test_a_warning_that_is_an_error_is_raised_each_time():
    jaxpr = jax.make_jaxpr(layers)(*arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(RuntimeWarning, match="KeyError"):
                splice(jaxpr, [RULES["match"]], [])


# --- rules of primitives --------------------------------------------------------------


def failing_if_first(rule):
    """A derivative rule that fails where only the first operand is perturbed."""

    def jvp(primals, tangents, **params):
        if [type(t) is ad.Zero for t in tangents] == [False, True]:
            raise KeyError("a fault")
        return rule(primals, tangents, **params)

    return jvp


BROKEN = {
    "jvp": (ad.primitive_jvps, lambda rule: failing),
    "transpose": (ad.primitive_transposes, lambda rule: failing),
    "jvp in one operand": (ad.primitive_jvps, failing_if_first),
    "vmap": (batching.fancy_primitive_batchers, lambda rule: failing),
}
TRANSFORMED = {
    "grad": lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=0),
    "grad in both": lambda f: jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1)),
    "jvp": lambda f: lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x,)),
    "vmap": lambda f: lambda x, w: jax.vmap(f, (0, None))(x[None], w),
    "grad of vmap": lambda f: (
        lambda x, w: jax.grad(
            lambda x: (jax.vmap(f, (0, None))(x[None], w) ** 2).sum()
        )(x)
    ),
}


@pytest.fixture
def with_kernels(monkeypatch):
    """Says that a kernel serves every call of an op, so that its rules are used."""
    monkeypatch.setattr(lowering, "would_be_xla", lambda *_: False)


@pytest.mark.parametrize("form", TRANSFORMED)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_failing_rule_of_a_primitive_leaves_a_site(
    form, fault, with_kernels, monkeypatch
):
    rules, broken = BROKEN[fault]
    fast = tracea.transform(layers, ops="matmul")
    choice._with_gradients.cache_clear()
    monkeypatch.setitem(rules, matmul_p, broken(rules[matmul_p]))
    args = arguments()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = TRANSFORMED[form](fast)(*args)
    messages = [str(w.message) for w in caught]
    assert len(messages) == is_met(fault, form), messages
    assert all("matmul: KeyError: 'a fault'" in m for m in messages)
    expected = TRANSFORMED[form](layers)(*args)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for ours, plain in pairs:
        np.testing.assert_allclose(ours, plain, rtol=1e-5, atol=1e-5)


def is_met(fault: str, form: str) -> bool:
    """Whether a form uses the broken rule."""
    if fault == "vmap":
        return "vmap" in form
    if fault == "jvp in one operand":
        return form != "grad in both" and form != "vmap"
    return form != "vmap"


def test_errors_of_plain_derivatives_are_not_reported(with_kernels, monkeypatch):
    """A rule that fails where the user's equations have no derivative either."""

    def f(x, w):
        return jax.pure_callback(lambda y: y, x, x @ w)

    with pytest.raises(ValueError, match="JVP") as plain:
        jax.grad(lambda *a: f(*a).sum())(*arguments())
    with pytest.raises(type(plain.value), match="JVP"):
        jax.grad(lambda *a: tracea.transform(f)(*a).sum())(*arguments())


@pytest.mark.parametrize("error", [FloatingPointError("nan"), tracea.Unsupported("no")])
def test_errors_for_the_user_in_derivative_rules_reach_the_user(
    error, with_kernels, monkeypatch
):
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    choice._with_gradients.cache_clear()
    monkeypatch.setitem(ad.primitive_jvps, matmul_p, raises)
    fast = tracea.transform(layers, ops="matmul")
    with pytest.raises(type(error)):
        jax.grad(lambda *a: fast(*a).sum())(*arguments())
