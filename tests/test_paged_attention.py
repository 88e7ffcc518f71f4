"""paged_attention on a CPU: what it computes, JAX's transformations, its mistakes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import normal

from tracea_jax.ops import attention, paged_attention

pytestmark = pytest.mark.once

LENGTHS = jnp.asarray([0, 13, 24], jnp.int32)
PAGES = jnp.asarray([[9, 9, 9], [4, 0, 9], [1, 7, 3]], jnp.int32)


def arguments(dtype: str = "float32") -> list[jax.Array]:
    """Queries of 3 sequences and 6 heads, 11 pages of 8 keys of 2 heads."""
    shapes = ((3, 6, 16), (2, 11, 8, 16), (2, 11, 8, 16))
    return [normal(*s, seed=i).astype(dtype) for i, s in enumerate(shapes)]


def one_by_one(q, k, v, scale: float):
    """float64, the keys of each sequence taken from its pages."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    o = np.zeros(q.shape)
    for example, (length, pages) in enumerate(zip(LENGTHS, PAGES, strict=True)):
        if length == 0:
            continue
        for head in range(6):
            keys, values = (
                np.concatenate(x[head // 3, pages])[:length] for x in (k, v)
            )
            scores = scale * keys @ q[example, head]
            weights = np.exp(scores - scores.max())
            o[example, head] = weights @ values / weights.sum()
    return o


def test_it_is_attention_to_the_pages_of_each_sequence():
    for dtype, error in (("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 2e-3)):
        q, k, v = arguments(dtype)
        found = jax.jit(functools.partial(paged_attention, scale=0.3))(
            q, k, v, LENGTHS, PAGES
        )
        assert found.dtype == q.dtype
        np.testing.assert_allclose(
            np.asarray(found, np.float64), one_by_one(q, k, v, 0.3), atol=error
        )


def test_scores_are_not_scaled_unless_asked():
    """As in jax.experimental.pallas.ops.tpu.paged_attention."""
    q, k, v = arguments()
    found = paged_attention(q, k, v, LENGTHS, PAGES)
    np.testing.assert_allclose(found, one_by_one(q, k, v, 1.0), atol=1e-5)


def test_what_lies_behind_a_length_has_no_influence():
    q, k, v = arguments()
    clean = paged_attention(q, k, v, LENGTHS, PAGES)
    # Page 9, and of page 0 what follows 5 keys, belong to nobody.
    k, v = (
        x.at[:, 9].set(bad).at[:, 0, 5:].set(bad)
        for x, bad in ((k, jnp.nan), (v, jnp.inf))
    )
    pages = PAGES.at[1, 2].set(1 << 30).at[0, 0].set(-5)
    found = paged_attention(q, k, v, LENGTHS, pages)
    np.testing.assert_array_equal(found, clean)


def test_derivatives_are_those_of_attention():
    q, k, v = arguments()

    def loss(q, k, v):
        return (paged_attention(q, k, v, LENGTHS[1:], PAGES[1:], scale=0.3) ** 2).sum()

    def gathered(q, k, v):
        keys, values = (
            jnp.moveaxis(x[:, PAGES[1:]], 0, 3).reshape(2, 24, 2, 16) for x in (k, v)
        )
        o = attention(
            q[:, None], keys, values, scale=0.3, key_value_seq_lengths=LENGTHS[1:]
        )
        return (o**2).sum()

    found = jax.grad(loss, argnums=(0, 1, 2))(q[1:], k, v)
    expected = jax.grad(gathered, argnums=(0, 1, 2))(q[1:], k, v)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def test_no_sequences():
    q, k, v = arguments()
    some = jnp.stack([q, q])
    empty = paged_attention(q[:0], k, v, LENGTHS[:0], PAGES[:0])
    assert empty.shape == (0, 6, 16)
    for queries, lengths, pages in (
        (some[:0], LENGTHS, PAGES),
        (some[:, :0], LENGTHS[:0], PAGES[:0]),
    ):
        axes = (0, None, None, None, None)
        found = jax.vmap(paged_attention, axes)(queries, k, v, lengths, pages)
        assert found.shape == queries.shape


def _slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "mapped", [(0, 3), (4,), (0, 1, 2, 3, 4), *map(_slow, [(0,), (0, 1, 2)])]
)
def test_maps(mapped):
    args = [*arguments(), LENGTHS, PAGES]
    second = [args[0] + 1, args[1] * 2, args[2] - 1, LENGTHS // 2, PAGES[::-1]]
    axes = [1 if i in mapped else None for i in range(5)]
    both = [
        x if axis is None else jnp.stack([x, y], axis)
        for x, y, axis in zip(args, second, axes, strict=True)
    ]
    found = jax.vmap(paged_attention, in_axes=axes)(*both)
    for place in range(2):
        each = [
            x if axis is None else jnp.take(x, place, axis)
            for x, axis in zip(both, axes, strict=True)
        ]
        np.testing.assert_allclose(found[place], paged_attention(*each), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: jnp.ones((3, 1, 6, 16))}, "q must have shape"),
        ({0: jnp.ones((3, 5, 16))}, "a multiple of its heads"),
        ({0: jnp.ones((3, 6, 16), jnp.bfloat16)}, "must share a floating dtype"),
        ({2: jnp.ones((2, 11, 9, 16))}, "v_pages must have k_pages' shape"),
        ({3: jnp.ones((3,))}, "lengths must be int32"),
        ({4: jnp.zeros((2, 3), jnp.int32)}, "page_indices must be int32 of shape (3,"),
    ],
)
def test_mistakes_are_named(change, message):
    args = [*arguments(), LENGTHS, PAGES]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(ValueError) as error:
        paged_attention(*args)
    assert message in str(error.value)


def test_a_scale_must_be_known():
    args = [*arguments(), LENGTHS, PAGES]
    with pytest.raises(ValueError, match="known while tracing"):
        jax.jit(lambda scale: paged_attention(*args, scale=scale))(1.0)
