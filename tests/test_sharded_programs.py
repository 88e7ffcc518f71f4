"""Sharded training steps: no byte and no work that plain JAX would not have.

Measured in compiled programs for 8 CPU devices: see ``device_work``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import pytest
from sharded_programs import LAYOUTS, PROGRAMS, Spread, alone, spread

import tracea_jax as tracea

CASES = [
    (program, layout)
    for program in PROGRAMS
    for layout in LAYOUTS
    if LAYOUTS[layout].fits(PROGRAMS[program]())
]
# One of each program, and each layout: all others are slow tests.
DEFAULT = {
    *(("mlp", layout) for layout in ("DP", "TP", "DPxTP", "FSDP", "FSDPxTP")),
    ("llama", "SP"),
    ("gpt2", "DPxTP"),
    ("vit", "rows"),
    ("resnet", "rows"),
    ("cross_entropy", "TP"),
    ("cross_entropy", "DP"),
}


def _each(cases: Iterable[tuple[str, str]]) -> Any:
    """Tests of one case follow each other: they compile it once."""
    return pytest.mark.parametrize(
        "case",
        [
            pytest.param(
                c, id="-".join(c), marks=[pytest.mark.slow] * (c not in DEFAULT)
            )
            for c in cases
        ],
        scope="module",
    )


@pytest.fixture
def chunked(monkeypatch):
    """The cross entropies of 2048 classes are computed in eight chunks."""
    from tracea_jax.ops.linear_cross_entropy import chunks

    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 64 * 256)


@functools.lru_cache(1)
def _pair(case: tuple[str, str]) -> tuple[Spread, Spread]:
    """Plain and ours."""
    program, layout = PROGRAMS[case[0]](), LAYOUTS[case[1]]
    return (
        spread(program.step, program, layout),
        spread(tracea.transform(program.step), program, layout),
    )


def _assert_near(found: Any, expected: Any) -> None:
    """Each leaf differs by roundings of its largest entry."""
    leaves, structure = jax.tree.flatten(found)
    wanted, other = jax.tree.flatten(expected)
    assert structure == other
    for x, y in zip(leaves, wanted, strict=True):
        assert np.abs(x - y).max() <= 1e-5 * np.abs(y).max()


@pytest.mark.usefixtures("chunked")
@_each(CASES)
def test_devices_send_and_compute_no_more_than_plain_ones(case):
    plain, ours = _pair(case)
    a, b = plain.work, ours.work
    assert b.sent <= a.sent, f"{b}, and plain: {a}"
    assert b.flops <= 1.02 * a.flops, f"{b}, and plain: {a}"
    assert a.flops > 0 and a.sent > 0
    _assert_near(ours(), plain())


@pytest.mark.usefixtures("chunked")
@_each(CASES)
def test_every_product_is_a_kernel_as_on_one_device(case):
    _, ours = _pair(case)
    work, program = ours.work, PROGRAMS[case[0]]()
    if work.left == program.left:
        assert work.calls >= program.calls, work
        return
    # Plans leave parts of few channels to XLA; a kernel of each can be demanded.
    with tracea.options(implementation="tracea"):
        step = tracea.transform(program.step)
        work = spread(step, program, LAYOUTS[case[1]]).work
    assert work.left == 0 and work.calls >= program.calls + program.left, work


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_products_of_one_device(name):
    program = PROGRAMS[name]()
    plain, ours = (
        alone(program.step, program),
        alone(tracea.transform(program.step), program),
    )
    assert (ours.work.calls, ours.work.left) == (program.calls, program.left)
    assert ours.work.sent == 0
    _assert_near(ours(), plain())
