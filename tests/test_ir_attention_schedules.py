"""Attention's pipeline survives random schedules, and its mutants do not."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tracea_jax.ir.attention_schedules import Protocol, run_tiles
from tracea_jax.ir.schedules import Hazard
from tracea_jax.ir.sum_schedules import run_sums

pytestmark = pytest.mark.once

TILES = (
    (1,),
    (3, 1, 4),
    (2, 0, 0, 5, 1, 0),
    (0, 0),
    (7, 6, 5, 4, 3, 2, 1),
    (1, 1, 1, 1, 1),
)
SEEDS = range(25)
FEW = SEEDS[:3]


@pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(SEEDS, marks=pytest.mark.slow)], ids=len
)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("kind", ["plain", "early queries", "follows", "skips"])
def test_every_schedule_is_right(kind, stages, tiles, seeds):
    stages_q = 1 if kind == "plain" else 2
    kinds = itertools.product((1, 2, 3), (False, True), (0, 2 * stages_q))
    for consumers, in_place, places in kinds:
        if kind == "skips" and places:
            continue
        for ping_pong in {False, consumers > 1}:
            protocol = Protocol(
                stages=stages,
                consumers=consumers,
                stages_q=stages_q,
                follows=kind == "follows",
                skips=kind == "skips",
                ping_pong=ping_pong,
                in_place=in_place,
                places=places,
            )
            for seed in seeds[: 5 if places else 9]:
                run_tiles(protocol, tiles, seed)


@pytest.mark.parametrize(
    ("broken", "in_place"),
    [
        ("places", False),
        ("awaits_queries", False),
        ("awaits_queries", True),
        ("awaits_store", True),
        ("announces_blind", True),
        ("releases_late", False),
        ("follows", True),
    ],
)
def test_a_rule_that_is_broken_is_caught(broken, in_place):
    right = Protocol(stages=2, consumers=2, in_place=in_place)
    change = {"places": 1} if broken == "places" else {broken: broken == "follows"}
    wrong = dataclasses.replace(right, **change)
    caught = 0
    for tiles, seed in itertools.product(TILES, range(60)):
        try:
            run_tiles(wrong, tiles, seed)
        except Hazard:
            caught += 1
    assert caught


# Blocks of queries that tiles of keys see, the last one first: all, causal, a window,
# and documents.
SEEN = (
    [list(range(6, -1, -1))] * 5,
    [list(range(7, 2 * tile - 1, -1)) for tile in range(4)],
    [list(range(tile + 2, tile - 1, -1)) for tile in range(6)],
    [[1, 0], [1, 0], [], [4, 2], [4, 3, 2], [5]],
)


@pytest.mark.parametrize("seen", SEEN)
def test_tiles_add_in_order_and_never_wait_for_each_other(seen):
    for resident, seed in itertools.product((1, 2, 4), range(20)):
        for adding in run_sums(seen, seed, resident=resident).values():
            assert adding == sorted(adding)


@pytest.mark.parametrize("broken", [{"launches_in_order": False}, {"barriers": 1}])
def test_tiles_that_add_in_another_way_are_caught(broken):
    caught = 0
    for seen, seed in itertools.product(SEEN, range(40)):
        try:
            run_sums(seen, seed, **broken)
        except Hazard:
            caught += 1
    assert caught
