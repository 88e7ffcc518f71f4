"""Dimensions of zero and one, for every rule and under every transformation of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from by_numpy import assert_rounded, evaluated
from edge_programs import LAYERS, WAYS, EdgeProgram, edge_program
from jax import lax
from jaxprs import all_equations
from numerics import normal

import tracea_jax as tracea
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.ops.linear_cross_entropy import chunks

KINDS = len(LAYERS)
DEVICES = (None, "H200")  # of which the rules are; None for this CPU


@pytest.fixture(autouse=True)
def few_logits_are_many(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 64)
    monkeypatch.setattr(chunks, "_ALIGNMENT", 8)


def check(made: EdgeProgram, *, has_values: bool = True) -> set[str]:
    """Asserts that transform, before and after, changes nothing but roundings.

    Args:
      made: the program.
      has_values: whether to compute it; else only types are compared.

    Returns:
      Which ops of ours are called.
    """
    try:
        plain = jax.make_jaxpr(made.use(made.layer))(*made.arguments)
    except (ValueError, TypeError, ZeroDivisionError, RuntimeWarning):
        return set()  # JAX itself refuses some empty arrays
    names = set[str]()
    for device in DEVICES:
        with without_choices(), tracea.options(device=device):
            inside = made.use(tracea.transform(made.layer))
            outside = tracea.transform(made.use(made.layer))
            for f in (inside, outside):
                fast = jax.make_jaxpr(f)(*made.arguments)
                assert [str(a) for a in fast.out_avals] == [
                    str(a) for a in plain.out_avals
                ]
                if has_values:
                    found = evaluated(fast, *made.arguments)
                    assert_rounded(plain, made.arguments, found)
                names |= {e.primitive.name for e in all_equations(fast)}
    return {name for name in names if name.startswith("tracea_")}


def failing(seeds: range, **how: Any) -> Iterator[tuple[int, str]]:
    """Seeds whose programs fail or differ, with what they are."""
    for seed in seeds:
        made = edge_program(seed)
        try:
            check(made, **how)
        except Exception as e:
            yield seed, f"{made}: {type(e).__name__}: {e}"


def test_small_dimensions():
    """One of each kind; the slow test below has them under all transformations."""
    step = KINDS * (len(WAYS) // 2) + 1  # other kinds in other ways
    assert not list(failing(range(0, step * KINDS, step), has_values=False))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12 * KINDS * len(WAYS), KINDS))
def test_many_small_dimensions(first):
    assert not list(failing(range(first, first + KINDS)))


# --- norms over one entry -------------------------------------------------------------


def norm(x):
    mean = x.mean((1,), keepdims=True)
    variance = jnp.square(x - mean).mean((1,), keepdims=True)
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * 2.0)


def by_a_number(x):
    """A number that is known while running only is the scale of one channel."""
    mean = x.mean((1,), keepdims=True)
    variance = jnp.square(x - mean).mean((1,), keepdims=True)
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * x[0, 0, 0])


def group_norm(x):
    mean = x.mean((1, 2), keepdims=True)
    variance = ((x - mean) ** 2).mean((1, 2), keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def standardised(w):
    axes = (1, 2, 3)
    return (w - w.mean(axes, keepdims=True)) / (w.std(axes, keepdims=True) + 0.1)


NORMS = {
    norm: (2, 5, 1),
    by_a_number: (2, 5, 1),
    group_norm: (2, 8, 8, 1),
    standardised: (4, 2, 1, 1),
}


@pytest.mark.parametrize("f", NORMS, ids=lambda f: f.__name__)
def test_norms_of_one_channel(f):
    layer = EdgeProgram(0, "norm", "as it is", f, (normal(*NORMS[f]),))
    check(layer)
    for way in ("jvp", "hessian"):
        check(dataclasses.replace(layer, way=way), has_values=False)
