"""``jax.checkpoint`` saves the same named values in functions that were spliced."""

from __future__ import annotations

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies
from jax.ad_checkpoint import checkpoint_name
from numerics import normal
from transformed import assert_near, jit

import tracea_jax as tracea

BATCH, LENGTH, HEADS, HEAD = 2, 6, 2, 4
WIDTH, HIDDEN = HEADS * HEAD, 3 * HEADS * HEAD
# Every value of a layer that can have a name; those in the middle of an attention keep
# it from being one.
NAMES = "query key value mixed out product biased hidden mlp sum".split()
AMIDST = ["scores", "weights"]


def layer(p: Any, x: Any, names: tuple[str, ...]) -> Any:
    def named(x: Any, name: str) -> Any:
        return checkpoint_name(x, name) if name in names else x

    q, k, v = (
        named((x @ p[name]).reshape(BATCH, LENGTH, HEADS, HEAD), name)
        for name in ("query", "key", "value")
    )
    scores = named(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, "scores")
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -jnp.inf)
    weights = named(jax.nn.softmax(scores, axis=-1), "weights")
    mixed = named(jnp.einsum("bhqk,bkhd->bqhd", weights, v), "mixed")
    x = x + named(mixed.reshape(x.shape) @ p["o"], "out")
    hidden = named(named(x @ p["up"], "product") + p["bias"], "biased")
    hidden = named(jax.nn.gelu(hidden), "hidden")
    return named(x + named(hidden @ p["down"], "mlp"), "sum")


def arguments() -> tuple[Any, Any]:
    square = {
        name: 0.3 * normal(WIDTH, WIDTH, seed=i)
        for i, name in enumerate(["query", "key", "value", "o"])
    }
    up, down = 0.3 * normal(WIDTH, HIDDEN), 0.3 * normal(HIDDEN, WIDTH)
    p = {**square, "up": up, "bias": normal(HIDDEN), "down": down}
    return p, normal(BATCH, LENGTH, WIDTH, seed=9)


@functools.cache
def loss_of(names: tuple[str, ...]) -> Any:
    """The loss of two layers that save only the values with these names."""
    block = jax.checkpoint(
        functools.partial(layer, names=names),
        policy=policies.save_only_these_names(*names),
    )
    return lambda p, x: jnp.sin(block(p, block(p, x))).sum()


def steps(loss: Any, saved: list[Any]) -> list[Any]:
    """Plain, transformed as a whole, and of a transformed loss.

    Each notes the shapes of what its backward pass is given.
    """

    def step(loss: Any, p: Any, x: Any) -> Any:
        value, pull = jax.vjp(loss, p, x)
        leaves = jax.tree.leaves(pull)
        saved.append(collections.Counter(jnp.shape(leaf) for leaf in leaves))
        return value, pull(jnp.ones_like(value))

    plain = functools.partial(step, loss)
    inside, outside = tracea.transform(plain), tracea.transform(loss)
    return [plain, inside, functools.partial(step, outside)]


TOGETHER = [("mixed", "hidden"), tuple(NAMES)]
KEPT = [("query",), ("mixed",), ("biased",), ("weights",), *TOGETHER]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(names, marks=[pytest.mark.slow] * (names not in KEPT))
        for names in [(name,) for name in [*NAMES, *AMIDST]] + TOGETHER
    ],
    ids="+".join,
)
def test_the_same_arrays_are_saved(names):
    loss, args, saved = loss_of(names), arguments(), []
    for step in steps(loss, saved):
        jax.eval_shape(step, *args)
    assert len(saved) == 3 and saved[0] == saved[1] == saved[2]
    # An attention with a name in the middle of it is none.
    attentions = 0 if set(names) & set(AMIDST) else 2
    assert tracea.explain(loss)(*args).ops.get("attention", 0) == attentions


@pytest.mark.parametrize(
    "names",
    [
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in (("weights",), ("product",))
        ),
        *TOGETHER,
    ],
    ids="+".join,
)
def test_values_and_gradients_are_the_same(names):
    made = steps(loss_of(names), [])
    expected, *others = jit(lambda *args: [step(*args) for step in made])(*arguments())
    for found in others:
        assert_near(found, expected, 3e-5)


def test_a_name_that_is_not_asked_for_is_not_saved():
    def saved(policy):
        block = jax.checkpoint(
            functools.partial(layer, names=("hidden", "mixed")), policy=policy
        )
        loss = tracea.transform(lambda p, x: jnp.sin(block(p, block(p, x))).sum())
        _, pull = jax.vjp(loss, *arguments())
        return collections.Counter(jnp.shape(leaf) for leaf in jax.tree.leaves(pull))

    shape = (BATCH, LENGTH, HIDDEN)
    hidden = saved(policies.save_only_these_names("hidden"))
    mixed = saved(policies.save_only_these_names("mixed"))
    assert (hidden[shape], mixed[shape]) == (2, 0)
