"""A model, ways to differentiate its loss, and comparing what becomes of them."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import partial_eval
from jaxprs import all_equations
from numerics import normal
from transformed import assert_near, jit

import tracea_jax as tracea

LENGTH, HEADS, WIDTH = 8, 2, 16


BOTH_ATTENTIONS = ("tracea_attention", "tracea_attention_backward")


def attend(p, x):
    """Causal attention as people write it: (batch, length, width) to the same."""
    q, k, v = (
        (x @ p[name]).reshape(*x.shape[:2], HEADS, WIDTH // HEADS) for name in "qkv"
    )
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(WIDTH // HEADS)
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e30)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), v)
    return o.reshape(x.shape) @ p["o"]


def layer(p, x):
    with jax.named_scope("layer"):
        x = x + checkpoint_name(attend(p, x), "attended")
        return x + jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]


def loss(p, x, y):
    return ((layer(p, x) - y) ** 2).mean()


def mlp_loss(p, x, y):
    return ((jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"] - y) ** 2).mean()


def parameters():
    shapes = {name: (WIDTH, WIDTH) for name in ("q", "k", "v", "o", "up", "down")}
    matrices = {
        name: 0.2 * normal(*shape, seed=i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return {**matrices, "bias": normal(WIDTH)}


def arguments():
    x, y = (normal(2, LENGTH, WIDTH, seed=seed) for seed in (7, 8))
    return parameters(), x, y


def descended(p, grads):
    return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads)


def products(f, *args) -> collections.Counter[Any]:
    """The sites of a program, and products left to JAX: kind, types and choices.

    Only of what its results need: where JAX differentiates what is under ``jit``, which
    a transformed loss is, it drops the rest itself.
    """
    found = collections.Counter()
    whole = jax.make_jaxpr(f)(*args).jaxpr
    needed, _ = partial_eval.dce_jaxpr(whole, [True] * len(whole.outvars))
    for e in all_equations(needed):
        name = e.primitive.name
        if name.startswith("tracea_") or name == "dot_general":
            params = {k: str(v) for k, v in e.params.items() if k != "body"}
            types = tuple(x.aval.str_short() for x in e.invars)
            found[name, types, tuple(sorted(params.items()))] += 1
    return found


def names(f, *args) -> collections.Counter[str]:
    """How many equations there are of each primitive of ours."""
    found = collections.Counter[str]()
    for (name, *_), count in products(f, *args).items():
        if name.startswith("tracea_"):
            found[name] += count
    return found


def check(
    make: Callable[[Any], Any],
    *args: Any,
    of: Any = loss,
    has: tuple[str, ...] = BOTH_ATTENTIONS,
    tolerance: float = 3e-5,
) -> Callable[..., Any]:
    """Asserts that transform(make(loss)) is make(transform(loss)), and right.

    Args:
      make: of a loss, a function of the arguments that differentiates it.
      *args: its arguments; those of the loss by default.
      of: the loss.
      has: primitives of ours that must be there.
      tolerance: relative to the largest entry of each result.

    Returns:
      The transformed step.
    """
    args = args or arguments()
    plain, fast = make(of), tracea.transform(make(of))
    before = products(plain, *args)
    found = products(fast, *args)
    assert found == products(make(tracea.transform(of)), *args)
    assert {name for name, *_ in found} >= {*has}
    got, expected = jit(lambda *args: (fast(*args), plain(*args)))(*args)
    assert_near(got, expected, tolerance)
    assert products(plain, *args) == before
    assert not names(plain, *args)
    return fast


def step(loss):
    def step(p, x, y):
        value, grads = jax.value_and_grad(loss)(p, x, y)
        return value, descended(p, grads)

    return step


def jacobian(loss):
    def step(p, x, y):
        return jax.jacrev(lambda b: jnp.stack([loss({**p, "bias": b}, x, y)] * 2))(
            p["bias"]
        )

    return step


def hessian_product(loss):
    def step(p, x, y):
        def along(p):
            grads = jax.tree.leaves(jax.grad(loss)(p, x, y))
            return sum(map(jnp.sum, map(jnp.multiply, grads, jax.tree.leaves(p))))

        return jax.grad(along)(p)

    return step


def in_scan(loss):
    def body(p, xy):
        return descended(p, jax.grad(loss)(p, *xy)), None

    return lambda p, x, y: lax.scan(body, p, (jnp.stack([x, y]), jnp.stack([y, x])))[0]
