"""The race of whole programs: by which key a program is known again."""

from __future__ import annotations

import jax
import pytest
from numerics import normal
from processes import run_python
from program_races import OPS, sites, step, with_tests

from tracea_jax import verdicts

pytestmark = pytest.mark.once


def test_programs_are_not_hashed_while_no_race_is_known(monkeypatch):
    def hashed(jaxpr):
        raise AssertionError("a program was hashed")

    monkeypatch.setattr(verdicts, "fingerprint", hashed)
    assert sites(step) == (2, 3)


def fingerprint_of(fn, *args):
    return verdicts.problem_of(jax.make_jaxpr(fn)(*args), OPS, False).jaxpr


def test_programs_are_told_apart():
    x, w = normal(4, 4), normal(4, 4, seed=1)

    def nested(scale):
        return lambda x, w: jax.lax.scan(
            lambda c, _: (c @ w * scale, None), x, length=3
        )

    programs = [
        lambda x, w: x @ w,
        lambda x, w: w @ x,
        lambda x, w: (x @ w) @ w,
        lambda x, w: (x @ w, w),
        lambda x, w: (x @ w, x),
        lambda x, w: x @ w + 1.0,
        lambda x, w: x @ w + 2.0,
        lambda x, w: x.T @ w,
        lambda x, w: jax.lax.cumsum(x @ w),
        lambda x, w: jax.lax.cumsum(x @ w, reverse=True),
        nested(1.5),
        nested(2.5),
    ]
    found = [fingerprint_of(f, x, w) for f in programs]
    assert len(set(found)) == len(programs)
    assert found[10] == fingerprint_of(nested(1.5), x, w)
    assert found[0] == fingerprint_of(jax.jit(programs[0]), x, w)
    assert found[0] == fingerprint_of(jax.jit(jax.jit(programs[0])), x, w)
    assert found[0] != fingerprint_of(programs[0], x.astype("bfloat16"), w)


def test_names_and_donation_make_no_other_program():
    x, w = normal(4, 4), normal(4, 4, seed=1)

    def one(x, w):
        return jax.nn.relu(x @ w)

    def other(rows, weights):
        return jax.nn.relu(rows @ weights)

    inner = [jax.jit(one), jax.jit(other), jax.jit(one, donate_argnums=0)]
    found = {fingerprint_of(lambda x, w, f=f: f(x, w) + x, x, w) for f in inner}
    assert len(found) == 1


def test_the_order_of_arguments_counts():
    x, w = normal(4, 4), normal(4, 4, seed=1)
    swapped = jax.jit(lambda w, x: x @ w)
    straight = fingerprint_of(lambda x, w: x @ w, x, w)
    assert straight != fingerprint_of(lambda x, w: swapped(w, x), x, w)


def test_a_key_is_the_same_in_every_process(monkeypatch):
    program = """
        import jax
        from program_races import ARGUMENTS, OPS, step
        from tracea_jax import verdicts
        import tracea_jax as tracea
        fast = tracea.transform(jax.checkpoint(jax.nn.silu))
        f = lambda x, w, k: (fast(x), step(x, w, k), jax.nn.softmax(x))
        print(verdicts.problem_of(jax.make_jaxpr(f)(*ARGUMENTS), OPS, False).jaxpr)
    """
    monkeypatch.setenv("PYTHONPATH", with_tests())
    found = {run_python(program, PYTHONHASHSEED=seed) for seed in ("1", "2")}
    assert len(found) == 1
