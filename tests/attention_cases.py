"""Tests for every attention kernel on a GPU: classes to inherit."""

from __future__ import annotations

import dataclasses
from typing import Any

import attention_checks as checks
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_checks import BACKWARD, BASE, BIAS, LENGTHS, SCORES, arguments
from attentions import lengths

from tracea_jax.ops import attention

EVERYTHING = {**checks.EVERYTHING, "saves_lse": True}
LENGTHS_OF_KEYS = (1, 7, 31, 32, 63, 64, 65, 127, 128, 129, 193, 1000)


class ForwardCases:
    """Tests of a forward kernel.

    Attributes:
      variant: the kernel's.
    """

    variant: Any

    def check(self, **fields: Any) -> None:
        checks.run_and_check(self.variant, dataclasses.replace(BASE, **fields))

    def assert_as_xla(self, args: Any, **settings: Any) -> None:
        checks.assert_as_xla(self.variant.name, args, **settings)

    def ours(self, *args: Any, **settings: Any) -> jax.Array:
        return attention(*args, implementation=self.variant.name, **settings)

    @pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 96, 112, 160, 192, 200])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_heads_that_fill_no_slab(self, head_dim, dtype):
        for fields in ({}, EVERYTHING):
            self.check(head_dim=head_dim, dtype=dtype, **fields)

    @pytest.mark.parametrize("kv_len", LENGTHS_OF_KEYS)
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_lengths_around_those_of_tiles(self, kv_len, is_causal):
        for q_len in (1, 63, 128, 200, 1000):
            self.check(q_len=q_len, kv_len=kv_len, is_causal=is_causal)

    @pytest.mark.parametrize(
        "window", [(0, 0), (5, 0), (0, 9), (128, 128), (1000, 3), (3, 1000)], ids=str
    )
    def test_windows(self, window):
        sizes = {"q_len": 777, "kv_len": 777, "window": window}
        for is_causal in (False, True):
            self.check(**sizes, is_causal=is_causal)
            how = {"kv_lengths": True, "saves_lse": True}
            self.check(**sizes, is_causal=is_causal, **how)

    @pytest.mark.parametrize("group", [1, 3, 5, 8])
    def test_heads_that_share_keys(self, group):
        self.check(heads=3 * group, kv_heads=3)
        self.check(heads=group, kv_heads=1, is_causal=True)

    def test_more_heads_than_a_section(self):
        sizes = {"q_len": 300, "kv_len": 20_000, "heads": 10, "kv_heads": 5}
        for is_causal in (False, True):
            self.check(**sizes, head_dim=128, is_causal=is_causal)

    @pytest.mark.parametrize("head_dim", [64, 128, 256])
    @pytest.mark.parametrize(
        "fields",
        [
            {"segments": True, "is_causal": True},
            {"soft_cap": 5.0, "is_causal": True},
            {"soft_cap": 1e6, "sinks": True, "saves_lse": True},
            {"soft_cap": 1e-3},
            {"is_causal": True, "aligned_at_end": True, "kv_lengths": True},
            BIAS,
            {"mask": (1, *SCORES)},
            {"mask": (1, 4, 3, 4), "mask_block": (128, 128), "is_causal": True},
            {"mask": (1, 4, 4, 10), "mask_block": (100, 50)},
        ],
        ids=len,
    )
    def test_options(self, head_dim, fields):
        self.check(head_dim=head_dim, **fields)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("kv_len", [1, 456, 457])
    def test_biases_that_are_shared(self, dtype, kv_len):
        for shape in (
            (2, 4, 331, kv_len),
            (2, 1, 1, kv_len),
            (1, 4, 331, 1),
            (1, 4, 1, 1),
        ):
            self.check(kv_len=kv_len, bias=shape, bias_dtype=dtype)

    @pytest.mark.parametrize(
        "sizes", [(1, 1), (7, 129), (129, 127), (300, 9000)], ids=str
    )
    def test_segments_and_masks_around_the_sizes_of_tiles(self, sizes):
        q_len, kv_len = sizes
        how = {"q_len": q_len, "kv_len": kv_len, "saves_lse": True}
        self.check(**how, segments=True)
        self.check(**how, mask=(1, 4, q_len, kv_len))

    @pytest.mark.parametrize(
        "dims", [(192, 128), (64, 256), (96, 64), (40, 72)], ids=str
    )
    def test_values_of_another_size(self, dims):
        head_dim, value_dim = dims
        for fields in ({}, EVERYTHING, {"segments": True}):
            self.check(head_dim=head_dim, value_dim=value_dim, **fields)

    # -- against XLA, every row

    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_a_query_that_sees_no_key_takes_the_mean_of_all(self, head_dim):
        args = arguments(700, 300, head_dim)
        self.assert_as_xla(args, local_window_size=(40, 0))
        self.assert_as_xla(args, is_causal=True, local_window_size=(40, 3))
        self.assert_as_xla(args, key_value_seq_lengths=lengths(0, 300))
        some = lengths(0, 17)
        self.assert_as_xla(args, key_value_seq_lengths=some, is_causal=True)

    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_queries_whose_segment_has_no_key_take_the_mean_of_all(self, head_dim):
        args = arguments(300, 400, head_dim)
        queries = np.arange(300)[None].repeat(2, 0) // 50
        keys = np.arange(400)[None].repeat(2, 0) // 40
        keys[keys == 3] = 2
        queries[1, :40] = -7
        for is_causal in (False, True):
            self.assert_as_xla(
                args,
                query_segment_ids=jnp.asarray(queries, jnp.int32),
                key_value_segment_ids=jnp.asarray(keys, jnp.int32),
                is_causal=is_causal,
            )

    @pytest.mark.parametrize("head_dim", [64, 256])
    def test_queries_past_their_number_are_zeros(self, head_dim):
        args = arguments(500, 300, head_dim)
        for first, second in ((0, 500), (1, 130), (499, 256)):
            counts = lengths(first, second)
            self.assert_as_xla(args, query_seq_lengths=counts)
            found = self.ours(*args, query_seq_lengths=counts)
            for example, count in enumerate((first, second)):
                assert not np.asarray(found[example, count:]).any()

    def test_large_scores(self):
        q, k, v = arguments(300, 400)
        for factor in (30.0, 1e3):
            for settings in ({}, {"is_causal": True}):
                self.assert_as_xla([q * factor, k, v], **settings)
        self.assert_as_xla([q, k, v], scale=30.0)
        self.assert_as_xla([q, k, v], scale=1e-12, is_causal=True)

    def test_keys_that_are_not_seen_may_be_nan(self):
        q, k, v = arguments(300, 400)
        clean = self.ours(q, k, v, key_value_seq_lengths=lengths(129, 250))
        broken = k.at[0, 129:].set(jnp.nan).at[1, 250:].set(jnp.inf)
        found = self.ours(q, broken, v, key_value_seq_lengths=lengths(129, 250))
        np.testing.assert_array_equal(found, clean)
        # Values of blocks that no query of a tile sees are not read.
        far = v.at[:, 256:].set(jnp.nan)
        found, clean = (self.ours(q, k, x, is_causal=True) for x in (far, v))
        np.testing.assert_array_equal(found[:, :128], clean[:, :128])

    def test_nan_and_infinities_stay_in_their_rows(self):
        q, k, v = arguments(300, 400)
        odd = q.at[0, 17, 1, 3].set(jnp.nan).at[1, 200, 2, 5].set(jnp.inf)
        self.assert_as_xla([odd, k, v])
        found, clean = (np.array(self.ours(x, k, v)) for x in (odd, q))
        assert np.isnan(found[0, 17, 1]).all() and np.isnan(found[1, 200, 2]).all()
        for x in (found, clean):
            x[0, 17, 1] = x[1, 200, 2] = 0
        np.testing.assert_array_equal(found, clean)
        infinite = v.at[0, 5, 0, 7].set(jnp.inf)
        self.assert_as_xla([q, k, infinite])

    # -- in programs

    def test_loops_and_maps_around_it(self):
        q, k, v = arguments(300, 400)
        expected = self.ours(q, k, v)
        twice, _ = jax.lax.scan(
            lambda q, _: (self.ours(q, k, v), None), q, None, length=2
        )
        np.testing.assert_array_equal(twice, self.ours(expected, k, v))
        stacked = jnp.stack([q, q + q])
        mapped = jax.vmap(self.ours, in_axes=(0, None, None))(stacked, k, v)
        np.testing.assert_array_equal(mapped[0], expected)
        np.testing.assert_array_equal(mapped[1], self.ours(q + q, k, v))


class BackwardCases:
    """Tests of kernels of the gradients.

    Attributes:
      variant: theirs.
      forward: the name of the forward kernel before them.
      entry: of one of their kernels, as a compiled program names it.
    """

    variant: Any
    forward: Any
    entry: str

    def check(self, **fields: Any) -> None:
        checks.run_and_check(self.variant, dataclasses.replace(BACKWARD, **fields))

    def assert_as_xla(self, args: Any, **settings: Any) -> None:
        checks.assert_gradients_as_xla(self.forward, args, **settings)

    @pytest.mark.parametrize("head_dim", [8, 40, 72, 96, 112])
    def test_heads_that_fill_no_slab(self, head_dim):
        for fields in ({}, {"dtype": "float16", **checks.EVERYTHING}):
            self.check(head_dim=head_dim, **fields)

    @pytest.mark.parametrize("kv_len", [1, 65, 127, 128, 1000])
    @pytest.mark.parametrize("is_causal", [False, True])
    def test_lengths_around_those_of_tiles(self, kv_len, is_causal):
        for q_len in (1, 64, 129, 1000):
            self.check(q_len=q_len, kv_len=kv_len, is_causal=is_causal)

    @pytest.mark.parametrize("window", [(0, 0), (5, 0), (128, 128), (3, 1000)], ids=str)
    def test_windows(self, window):
        sizes = {"q_len": 777, "kv_len": 777, "window": window}
        for is_causal in (False, True):
            self.check(**sizes, is_causal=is_causal)
            self.check(**sizes, is_causal=is_causal, head_dim=128, **LENGTHS)

    @pytest.mark.parametrize("group", [1, 3, 8])
    def test_heads_that_share_keys(self, group):
        self.check(heads=3 * group, kv_heads=3)
        self.check(heads=group, kv_heads=1, is_causal=True)

    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_a_query_that_sees_no_key_gives_to_all_values(self, head_dim):
        args = arguments(700, 300, head_dim)
        self.assert_as_xla(args, local_window_size=(40, 0))
        self.assert_as_xla(args, key_value_seq_lengths=lengths(0, 300))
        some = {"key_value_seq_lengths": lengths(0, 17), "is_causal": True}
        self.assert_as_xla(args, query_seq_lengths=lengths(130, 700), **some)

    def test_large_scores(self):
        q, k, v = arguments(300, 400)
        for factor in (5.0, 30.0):
            self.assert_as_xla([q * factor, k, v], is_causal=True)

    def test_loops_and_maps_around_it(self):
        q, k, v = arguments(300, 400)

        def loss(q, k, v):
            return (attention(q, k, v, implementation=self.forward) ** 2).sum()

        both = jax.grad(loss, argnums=(0, 1))
        lowered = jax.jit(both).lower(q, k, v)
        assert self.entry in f"{lowered.as_text()}{lowered.compile().as_text()}"
        expected = both(q, k, v)
        stacked = jnp.stack([q, q + q])
        mapped = jax.vmap(both, in_axes=(0, None, None))(stacked, k, v)
        for x, y in zip(mapped, expected, strict=True):
            np.testing.assert_array_equal(x[0], y)
        saved = jax.grad(jax.checkpoint(loss), argnums=(0, 1))(q, k, v)
        for x, y in zip(saved, expected, strict=True):
            np.testing.assert_array_equal(x, y)
