"""transform changes nothing of random programs of every dtype but roundings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation import evaluated
from numerics import f64
from transformed import kind
from value_programs import Program, program

import tracea_jax as tracea
from tracea_jax.rewrite import rules, splice
from tracea_jax.rewrite.attention import steps

pytestmark = [pytest.mark.usefixtures("calls_only"), pytest.mark.once]


@np.errstate(all="ignore")
def assert_among(found: Any, readings: list[Any], unit: float) -> None:
    """Asserts that a result is what one of the readings is, or between two of them.

    Args:
      found: the result.
      readings: results with other roundings.
      unit: of a rounding.
    """
    y, all_of = f64(found), np.stack([f64(x) for x in readings])
    finite = np.isfinite(all_of)
    low = np.where(finite, all_of, np.inf).min(0)
    high = np.where(finite, all_of, -np.inf).max(0)
    size = np.abs(np.where(finite, all_of, 0)).max(0)
    # The first readings are of one sign; what is in between may add up otherwise.
    allowed = 4 * unit * size + (high - low) * np.isfinite(low) * 0.5
    allowed = np.where(np.isfinite(allowed), allowed, 0)
    tiny = float(jnp.finfo(jnp.float32).tiny)
    between = (y >= low - allowed - tiny) & (y <= high + allowed + tiny)
    same = (y == all_of).any(0) | (np.isnan(y) & np.isnan(all_of).any(0))
    assert (between & np.isfinite(y) | same).all(), (y, all_of)


@np.errstate(all="ignore")  # JAX converts numbers with NumPy
def check(made: Program, *, compiled: bool = False) -> bool:
    """Asserts that only rounding separates the transformed from the plain program.

    Returns:
      Whether anything is replaced in it.
    """
    jaxpr = jax.make_jaxpr(made)(*made.arguments)
    fast = splice(jaxpr, rules(), [])
    if fast is jaxpr:
        return False
    if compiled:
        found = jax.jit(tracea.transform(made))(*made.arguments)
    else:
        (found,) = evaluated(fast, *made.arguments)
    (expected,) = evaluated(jaxpr, *made.arguments)
    assert kind(found)[:2] == kind(expected)[:2]
    if not np.array_equal(f64(found), f64(expected), equal_nan=True):
        readings = made.readings()
        if readings is not None:
            assert_among(found, [expected, *readings], made.unit)
    return True


def differing(seeds: range) -> Iterator[tuple[int, str]]:
    """Seeds whose programs differ, with what they are."""
    for seed in seeds:
        made = program(seed)
        try:
            check(made)
        except AssertionError as e:
            yield seed, f"{made}\n{e}"


def test_random_programs():
    """The slow test below has a hundred thousand."""
    assert sum(check(program(seed)) for seed in range(6)) > 4


def test_compiled_programs():
    assert sum(check(program(s), compiled=True) for s in range(1000, 1003)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 100_000, 1000))
def test_a_hundred_thousand_programs(first):
    assert not list(differing(range(first, first + 1000)))


def test_differences_are_found(monkeypatch):
    def converts(eqn):
        return eqn.primitive.name == "convert_element_type"

    monkeypatch.setattr(steps, "only_rounds", converts)
    assert any(differing(range(30, 40)))  # as 33 does
