"""Special values in the attention kernels of GPUs, against readings of the formula."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import attention_values as values
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_values import Form
from numerics import array

from tracea_jax.ops import attention
from tracea_jax.variants.attention_decode_sm90 import AttentionDecodeSm90Config

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

# The largest scores that docs/semantics.md promises for results and gradients.
LIMITS = {"results": 2.0**26, "gradients": 2.0**23}
SEEDS = 15  # of a form
# Sizes that take several tiles and blocks, of which the last ones are not whole.
TILES = Form(q_len=37, kv_len=150, head_dim=16, scale=0.35)
BIASED = {"bias": (1, TILES.heads, TILES.q_len, TILES.kv_len)}
CAPPED = {"cap": 3.0, "sinks": True}
SHAPES: tuple[dict[str, Any], ...] = (
    *({"mask": m} for m in ("none", "causal", "window", "lengths", "keys", "random")),
    *({"mask": m, **BIASED} for m in ("none", "causal", "random")),
    *({"mask": m, **CAPPED} for m in ("none", "causal")),
)
FORMS = tuple(
    dataclasses.replace(TILES, dtype=dtype, **fields)
    for fields in SHAPES
    for dtype in ("bfloat16", "float16")
)
STEP = Form(batch=3, q_len=1, kv_len=300, heads=8, kv_heads=2, head_dim=64, scale=0.2)
STEPS = tuple(
    dataclasses.replace(STEP, dtype=dtype, mask=mask, q_len=q_len)
    for dtype in ("bfloat16", "float16")
    for mask, q_len in (("none", 1), ("none", 3), ("lengths", 1))
)


@functools.cache
def results(form: Form, implementation: str, config: Any = None) -> Callable[..., Any]:
    """[o], or [o, gradients...] without a bias, from a cotangent and the operands."""
    seen = form.seen()
    mask = {"keys": seen[:, :1, :1], "random": seen[:1]}.get(form.mask)
    how: dict[str, Any] = {
        "scale": form.scale,
        "is_causal": form.mask == "causal",
        "local_window_size": (2, 1) if form.mask == "window" else None,
        "logits_soft_cap": form.cap,
        "implementation": implementation,
        "config": config,
    }
    if form.mask == "lengths":
        of_queries, of_keys = map(array, form.lengths)
        how["key_value_seq_lengths"] = of_keys
        if form.q_len > 1:
            how["query_seq_lengths"] = of_queries

    def forward(*x: Any) -> Any:
        named = dict(zip(form.names, x, strict=True))
        return attention(**_renamed(named), mask=mask, **how)

    def run(do: Any, *x: Any) -> list[Any]:
        if form.bias or config is not None:
            return [forward(*x)]
        o, gradients = jax.vjp(forward, *x)
        return [o, *gradients(do)]

    return jax.jit(run)


def _renamed(named: dict[str, Any]) -> dict[str, Any]:
    q, k, v = (named.pop(n) for n in ("q", "k", "v"))
    return {"query": q, "key": k, "value": v, **named}


def check(form: Form, seed: int, implementation: str, config: Any = None) -> str:
    """Differences in the program of a seed; empty if there are none."""
    x, do, words = values.operands(form, seed)
    cotangent = array(do.astype(jnp.dtype(form.dtype)))
    run = results(form, implementation, config)
    found = [np.asarray(a) for a in run(cotangent, *values.as_arrays(form, x))]
    doubt = values.limited(form, x, values.unsure(form, x, do), **LIMITS)
    wrong = ", ".join(values.differences(form, found, x, do, doubt))
    return f"{seed}: {form}: {words}: {wrong}" if wrong else ""


def check_some(form: Form, first: int, *how: Any) -> None:
    found = [check(form, seed, *how) for seed in range(first, first + SEEDS)]
    assert not list(filter(None, found))


@pytest.mark.parametrize("implementation", ["attention_sm90", "attention_sm80"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_have_the_special_values_of_the_formula(form, implementation):
    check_some(form, 100 * FORMS.index(form), implementation)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("form", STEPS, ids=str)
def test_kernels_for_decoding_have_them_too(form, splits):
    config = AttentionDecodeSm90Config(tile_kv=64, splits=splits)
    number = 500 + STEPS.index(form)
    check_some(form, 100 * number, "attention_decode_sm90", config)
