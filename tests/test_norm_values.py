"""transform changes nothing of random programs with norms but roundings.

Programs are spliced by the rules of a GPU and of a CPU, and evaluated without being
compiled: calls of our ops are their references.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import by_numpy
import jax
import numpy as np
import pytest
from by_numpy import assert_rounded, evaluated
from jaxprs import all_equations
from norm_programs import NormProgram, norm_program

import tracea_jax as tracea
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.rewrite import group_norm, rules, splice

DEVICES = (None, "H200")  # of which the rules are; None for this CPU


@pytest.fixture(autouse=True)
def every_norm_is_served(monkeypatch):
    """Norms of channels alone are sites at any size, not only where kernels win."""
    monkeypatch.setattr(group_norm, "is_served", lambda *_: True)


def spliced(jaxpr: Any, device: str | None) -> Any:
    with without_choices(), tracea.options(device=device):
        return splice(jaxpr, rules(), [])


@np.errstate(all="ignore")  # JAX converts numbers with NumPy
def check(made: NormProgram) -> set[str]:
    """Asserts that only rounding separates the transformed from the plain program.

    Returns:
      Which ops of ours are called in it, by the rules of any device.
    """
    jaxpr, names = jax.make_jaxpr(made)(*made.arguments), set[str]()
    for device in DEVICES:
        fast = spliced(jaxpr, device)
        if fast is not jaxpr:
            assert [str(a) for a in fast.out_avals] == [str(a) for a in jaxpr.out_avals]
            assert_rounded(jaxpr, made.arguments, evaluated(fast, *made.arguments))
            names |= {e.primitive.name for e in all_equations(fast)}
    return {name for name in names if name.startswith("tracea_")}


def differing(seeds: range) -> Iterator[tuple[int, str]]:
    """Seeds whose programs differ, with what they are."""
    for seed in seeds:
        made = norm_program(seed)
        try:
            check(made)
        except AssertionError as e:
            yield seed, f"{made}\n{e}"


def test_random_norms():
    """The slow test below has twenty thousand."""
    found = [check(norm_program(seed)) for seed in range(45)]
    assert sum("tracea_group_norm" in names for names in found) > 12


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20_000, 1000))
def test_twenty_thousand_norms(first):
    assert not list(differing(range(first, first + 1000)))


def test_differences_are_found(monkeypatch):
    """The slightest change of a constant is no rounding."""
    reference = by_numpy.reference

    def doubled(eqn: Any) -> Any:
        params = dict(eqn.params)
        if "epsilon" in params:
            params["epsilon"] *= 2
        return reference(eqn.replace(params=params))

    monkeypatch.setattr(by_numpy, "reference", doubled)
    assert any(differing(range(20)))
