"""Features of problems and configs, by which models predict times."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from modelled import AMX, DEVICES, attentions, convolutions, drawn

from tracea_jax import policy, variants
from tracea_jax.diagnosis import compiled_elsewhere, diagnose
from tracea_jax.model import features
from tracea_jax.problem import AttentionProblem, Conv2dProblem

pytestmark = pytest.mark.once


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_features_are_finite_numbers_at_every_size(device):
    for problem in drawn(24):
        numbers = features.of_problem(problem, device)
        assert all(np.isfinite(value) for value in numbers.values()), problem
        assert all(np.ndim(value) == 0 for value in numbers.values())
        with compiled_elsewhere():
            names = diagnose(problem, device).candidates
        for name in names:
            space = policy.space_of(variants.get(problem.op, name), problem, device)
            own = features.of_space(problem, device, name, space)
            assert not own.keys() & numbers.keys()
            for value in own.values():
                assert np.isfinite(value).all()
                assert np.shape(value) in ((), (len(space),))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_described_configs_have_what_their_space_says(device):
    rng = random.Random(1)
    seen = set()
    for problem in drawn(60, seed=1):
        with compiled_elsewhere():
            names = diagnose(problem, device).candidates
        for name in names:
            variant = variants.get(problem.op, name)
            space = variant.space(problem, device)
            places = [rng.randrange(len(space)) for _ in range(3)]
            configs = [space.config(place) for place in places[: len(space)]]
            own = variants.described(variant, problem, configs, device)
            assert own.configs() == tuple(configs)
            assert own.derived.keys() == space.derived.keys()
            for field, values in own.derived.items():
                expected = space.derived[field][places[: len(configs)]]
                np.testing.assert_allclose(values, expected, rtol=1e-12, err_msg=field)
            assert (own.modelled_us is None) == (space.modelled_us is None)
            if own.modelled_us is not None and space.modelled_us is not None:
                np.testing.assert_allclose(
                    own.modelled_us, space.modelled_us[places[: len(configs)]], 1e-12
                )
            seen |= {name} if space.derived else set()
    assert seen


def test_a_part_of_the_scores_is_seen_as_a_mask_says():
    for problem in drawn(200, draws=(attentions,)):
        assert isinstance(problem, AttentionProblem)
        q, k = np.ogrid[: problem.q_len, : problem.kv_len]
        seen = np.ones((problem.q_len, problem.kv_len), bool)
        if problem.is_causal:
            seen &= k <= q
        if problem.window:
            seen &= (k >= q - problem.window[0]) & (k <= q + problem.window[1])
        part = seen.mean() if seen.size else 0.0
        found = features.of_problem(problem, AMX)["seen"]
        assert found == pytest.approx(part, abs=1e-12)


def test_the_product_of_a_convolution_has_its_operations():
    for problem in drawn(100, draws=(convolutions,)):
        assert isinstance(problem, Conv2dProblem)
        if problem.direction == "input_grad" and problem.strides != (1, 1):
            continue  # the product is over pixels of x, some of which see few taps
        if problem.direction == "input_grad" and problem.out_size != (
            problem.height,
            problem.width,
        ):
            continue
        m, n, k = features.conv_product(problem)
        assert 2 * m * n * k * problem.groups == problem.flops


def test_attention_of_one_query_is_a_kind_of_its_own():
    base = AttentionProblem(
        batch=2,
        q_len=2,
        kv_len=9,
        heads=4,
        kv_heads=4,
        head_dim=8,
        dtype="float16",
        scale=1.0,
    )
    lengths, dtypes = (1, 2, 64), ("float16", "bfloat16", "float32")
    kinds = {
        features.kind(dataclasses.replace(base, q_len=q_len, dtype=dtype))
        for q_len in lengths
        for dtype in dtypes
    }
    assert kinds == {
        "attention forward 16-bit of one query",
        "attention forward 16-bit",
        "attention forward float32 of one query",
        "attention forward float32",
    }
