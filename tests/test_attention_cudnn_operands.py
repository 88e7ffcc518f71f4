"""Operands of cuDNN in attention_cudnn, with cuDNN's formula evaluated in jnp."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import CASES, EXTRAS, definition, lengths, qkv, random_mask
from numerics import normal
from slow_cases import slow_unless
from transforms import assert_close

from tracea_jax import _compat_cudnn
from tracea_jax.ops.attention import cudnn as attention_cudnn
from tracea_jax.ops.attention.reference import OPTIONAL, Spec, backward_reference
from tracea_jax.ops.attention.reference import reference as forward_reference

pytestmark = pytest.mark.once


def as_cudnn(q, k, v, bias, lengths, *, scale, causal, window):
    """(o, lse) as cuDNN computes them; past the lengths is what memory holds."""
    assert bias is None or bias.shape[2:] == (q.shape[1], k.shape[1])
    assert bias is None or (bias.dtype == q.dtype and bool(jnp.isfinite(bias).all()))
    settings = {}
    if lengths is not None:
        assert all(n.dtype == "int32" and n.shape == q.shape[:1] for n in lengths)
        settings["key_value_seq_lengths"] = lengths[1]
    if window is not None:
        assert causal
        settings["local_window_size"] = (window - 1, 0)
    wide = [x.astype("float32") for x in (q, k, v)]
    o, lse = definition(*wide, bias, scale=scale, is_causal=causal, **settings)
    return o, lse.swapaxes(1, 2)


def past(x, lengths):
    """x with garbage where cuDNN promises nothing."""
    if lengths is None:
        return x
    inside = jnp.arange(x.shape[1]) < lengths[:, None]
    return jnp.where(inside[:, :, None, None], x, jnp.nan)


@pytest.fixture
def emulated(monkeypatch):
    """cuDNN's two calls, emulated on the CPU."""

    def forward(qkv, bias, lengths, *, residual, **mask):
        q, k, v = qkv
        o, lse = as_cudnn(q, k, v, bias, lengths, **mask)
        o = past(o, lengths and lengths[0]).astype(qkv[0].dtype)
        return [o, lse] if residual else [o]

    def backward(qkv, bias, lengths, o, lse, do, *, dbias, **mask):
        if lengths is not None:
            inside = jnp.arange(do.shape[1]) < lengths[0][:, None]
            do = jnp.where(inside[:, :, None, None], do, 0)

        def f(q, k, v, bias=None):
            return as_cudnn(q, k, v, bias, lengths, **mask)[0]

        pull = jax.vjp(f, *qkv, *(() if bias is None else (bias,)))[1]
        dq, dk, dv, *more = pull(do.astype("float32"))
        if lengths is not None:
            dq, dk, dv = (
                past(dq, lengths[0]),
                past(dk, lengths[1]),
                past(dv, lengths[1]),
            )
        return [dq, dk, dv, *(more if dbias else ())]

    monkeypatch.setattr(_compat_cudnn, "attention_forward", forward)
    monkeypatch.setattr(_compat_cudnn, "attention_backward", backward)


ARGUMENTS = dict(
    zip(
        OPTIONAL,
        (
            "bias",
            "mask",
            "query_seq_lengths",
            "key_value_seq_lengths",
            "query_segment_ids",
            "key_value_segment_ids",
            "sinks",
            "alibi_slopes",
        ),
        strict=True,
    )
)
TAKEN = [c for c in CASES if c not in ("window", "symmetric window", "everything")]


@pytest.mark.once
@pytest.mark.parametrize(
    ("case", "dtype"),
    slow_unless(
        [(case, "bfloat16") for case in ("lengths", "all masks", "segments")]
        + [("minus infinity", "float16")],
        [
            *(
                (case, "bfloat16")
                for case in (*TAKEN, "minus infinity", "all masks", "segments")
            ),
            *((case, "float16") for case in ("minus infinity", "all masks")),
        ],
    ),
)
def test_its_operands_mean_the_same(emulated, case, dtype):
    settings = {
        **CASES,
        "segments": EXTRAS["segments"],
        "minus infinity": {"bias": jnp.where(random_mask(2, 4, 6, 5), 0, -jnp.inf)},
        "all masks": {
            "bias": normal(2, 1, 6, 1),
            "mask": random_mask(1, 4, 1, 5),
            "query_seq_lengths": lengths(6, 2),
            "is_causal": True,
        },
    }[case]
    given = {n: settings.get(a) for n, a in ARGUMENTS.items()}
    if given["bias"] is not None:
        given["bias"] = given["bias"].astype(dtype)
    spec = Spec(
        scale=settings.get("scale", 8**-0.5),
        is_causal=settings.get("is_causal", False),
        window=settings.get("local_window_size"),
        optional=tuple(n for n in OPTIONAL if given[n] is not None),
    )
    primals = [x.astype(dtype) for x in qkv()]
    primals += [given[n] for n in spec.optional]
    found = attention_cudnn.forward(
        *primals, spec=spec, implementation=None, lse=jnp.float32
    )
    exact = jax.jit(
        functools.partial(forward_reference, spec=spec, lse=jnp.dtype("float32"))
    )(*[_wide(x) for x in primals])
    assert found[0].dtype == dtype and found[1].shape == (2, 4, 6)
    assert_close(found[0].astype("float32"), _f64(exact[0]), 1e-2)
    short = settings.get("query_seq_lengths")
    inside = np.arange(6) < (6 if short is None else np.asarray(short)[:, None, None])
    assert_close(
        jnp.where(inside, found[1], 0), _f64(jnp.where(inside, exact[1], 0)), 1e-2
    )

    bias_gradient = given["bias"] is not None
    do = normal(2, 6, 4, 8, seed=9).astype(dtype)
    found = attention_cudnn.backward(
        *primals,
        *found,
        do,
        spec=spec,
        implementation=None,
        bias_gradient=bias_gradient,
    )
    wide = [_wide(x) for x in (*primals, *exact, do)]
    reference = functools.partial(
        backward_reference, spec=spec, bias_gradient=bias_gradient
    )
    exact = jax.jit(reference)(*wide)
    for x, y in zip(found, exact, strict=True):
        assert x.dtype == dtype
        assert_close(x.astype("float32"), _f64(y), 2e-2)


def _wide(x):
    return x.astype("float32") if jnp.issubdtype(x.dtype, jnp.floating) else x


def _f64(x):
    return np.asarray(x, np.float64)


def test_an_example_without_keys_is_finite(emulated):
    spec = Spec(scale=1.0, optional=("kv_lengths",))
    args = [x.astype("bfloat16") for x in qkv()]
    (o,) = attention_cudnn.forward(*args, lengths(0, 3), spec=spec, implementation=None)
    assert bool(jnp.isfinite(o).all())
