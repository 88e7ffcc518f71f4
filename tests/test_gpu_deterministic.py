"""Kernels give the same bits 200 times, unless their variant says that they may not."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import repeated
from ahead import compiled_ahead
from numerics import normal

import tracea_jax as tracea
from tracea_jax import variants
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.variants.attention_backward_sm90 import ATTENTION_BACKWARD_SM90

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

RUNS = 200
PROBLEMS = tuple(repeated.problems())


def may_vary(problem: Any, choice: Choice) -> str | None:
    variant = variants.get(problem.op, choice.variant)
    return variants.may_vary(variant, problem, choice.config, device_for("cuda"))


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bits_are_the_same_from_run_to_run(problem):
    device = device_for("cuda")
    found = [c for c in repeated.choices(problem, device) if not may_vary(problem, c)]
    with compiled_ahead(problem, found, device):
        for choice in found:
            run = repeated.runner(problem, choice, device)
            assert repeated.differing(run, RUNS) == 0, f"{problem}: {choice}"


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """Self-attention of 12 heads, as of BERT."""
    q, k, v = (
        (x @ part).reshape(*x.shape[:2], 12, 64) for part in jnp.split(w, 3, axis=1)
    )
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape)


def decoded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, scale=0.0884)


def programs() -> dict[str, tuple[Any, tuple[jax.Array, ...]]]:
    x, w = normal(16, 128, 768), 0.03 * normal(768, 3 * 768)
    q, k, v = normal(8, 1, 16, 128), normal(8, 1000, 4, 128), normal(8, 999, 4, 128)
    short = tuple(a.astype("bfloat16") for a in (x, w))
    keys = tuple(a.astype("bfloat16") for a in (q, k[:, :999], v))

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(layer(x, w).astype("float32")))

    return {
        "forward": (layer, short),
        "gradients": (jax.value_and_grad(loss, (0, 1)), short),
        "decoding": (decoded, keys),
    }


@pytest.mark.parametrize("name", ["forward", "gradients", "decoding"])
def test_programs_have_the_same_bits_if_they_must(name):
    fn, args = programs()[name]
    with tracea.options(deterministic=True):
        assert {site.may_vary for site in tracea.explain(fn)(*args).sites} == {None}
        call = jax.jit(tracea.transform(fn))
        assert repeated.differing(lambda: call(*args), RUNS) == 0


def test_other_bits_are_seen():
    """The comparison can fail: sums in no order differ within so many runs."""
    device = device_for("cuda")
    problem = repeated.attention(direction="backward", kv_len=4096, q_len=4096)
    space = ATTENTION_BACKWARD_SM90.space(problem, device)
    config = next(c for c in space.configs() if c.dq == "atomic")
    choice = Choice(variant=ATTENTION_BACKWARD_SM90.name, config=config)
    assert may_vary(problem, choice) is not None
    run = repeated.runner(problem, choice, device)
    assert repeated.differing(run, RUNS) > 0
