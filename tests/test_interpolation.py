"""The answers that the neighbours of a problem give."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import numpy as np
import pytest
from neighbour_cases import near, observed, shaped
from synthetic_bench import (
    DEVICE,
    PROBLEM,
    choice,
    entry,
    found,
)

from tracea_jax import catalogue, variants
from tracea_jax.device import NAMED, Device
from tracea_jax.policy import Choice
from tracea_jax.problem import AttentionProblem, GemmProblem
from tracea_jax.tuning.answers import interpolate
from tracea_jax.tuning.answers.answer import Question
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.neighbours import Neighbour
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.attention_sm90 import ATTENTION_SM90
from tracea_jax.variants.base import Xla
from tracea_jax.variants.space import Space

pytestmark = pytest.mark.once


# --- the answer -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class TileConfig:
    tile: int


TILES = (16, 32, 64, 128, 256)


def modelled(problem: Any, tile: int) -> float:
    """Rows that the last tile wastes cost as much as others; small tiles cost more."""
    rows = -(-problem.m // tile) * tile
    return rows * problem.n * problem.k * 1e-4 * (1 + 8 / tile)


class Tiled(Xla):
    """A variant with one choice and a model of it."""

    def check(self, problem: Any, config, device):
        if config.tile > problem.m:
            raise ValueError("a tile must not be taller than the matrix")

    def space(self, problem: Any, device):
        tiles = np.array([tile for tile in TILES if tile <= problem.m])
        times = np.array([modelled(problem, int(tile)) for tile in tiles])
        return Space(config_type=TileConfig, columns={"tile": tiles}, modelled_us=times)

    def heuristic(self, problem, device):
        return TileConfig(tile=16)


TILED = Tiled(name="tiled", config_type=TileConfig)


@pytest.fixture
def tiled():
    op = dataclasses.replace(catalogue.get("matmul"), variants=(TILED, variants.XLA))
    interpolate._modelled.cache_clear()
    with catalogue.using(op):
        yield
    interpolate._modelled.cache_clear()


def true_times(problem: Any, factor=1.3) -> dict[int, float]:
    return {t: factor * modelled(problem, t) for t in TILES if t <= problem.m}


def interpolated(problem, *near, device: Device = DEVICE, **how):
    return interpolate.answer(Question.about(problem, device, **how), near)


def answered(problem, *near, **how):
    answer = interpolated(problem, *near, **how)
    assert answer is not None and answer.origin == "interpolated"
    assert not answer.is_exact
    return answer


def test_the_nearest_best_is_not_just_copied(tiled):
    asked, nearest = shaped(136), shaped(128)
    times = true_times(nearest)
    assert min(times, key=times.__getitem__) == 128  # which would waste 120 rows
    answer = answered(asked, near(nearest, times, to=asked))
    assert answer.choice.config == TileConfig(tile=32)
    assert answer.time_us == pytest.approx(1.3 * modelled(asked, 32))
    assert answer.neighbours == 1


def test_where_the_model_is_right_but_for_a_factor_so_is_the_answer(tiled):
    draw = random.Random(0)
    for _ in range(30):
        asked = shaped(draw.randrange(20, 400))
        others = [shaped(draw.randrange(20, 400), n=draw.choice((40, 80, 160)))]
        others += [shaped(max(16, asked.m + draw.choice((-3, 3))))]
        around = [near(p, true_times(p), to=asked) for p in others]
        around.sort(key=lambda n: n.distance)
        answer = answered(asked, *around)
        tile = answer.choice.config.tile
        assert answer.time_us == pytest.approx(1.3 * modelled(asked, tile))
        raced = {16} | {
            t
            for p in others
            for t in sorted(true_times(p), key=true_times(p).__getitem__)[:3]
            if t <= asked.m
        }
        assert modelled(asked, tile) == min(modelled(asked, t) for t in raced)


def test_what_the_model_misses_is_learnt_from_the_neighbours(tiled):
    # The model says 64; what was measured on either side says that 32 is faster.
    asked = shaped(128)
    slow_64 = {16: 3.0, 32: 1.0, 64: 2.0, 128: 2.0}
    around = [
        near(p, {t: f * modelled(p, t) for t, f in slow_64.items()}, to=asked)
        for p in (shaped(129), shaped(160))
    ]
    assert modelled(asked, 64) < modelled(asked, 32)
    assert answered(asked, *around).choice.config == TileConfig(tile=32)


def test_xla_wins_where_it_did(tiled):
    asked, other = shaped(100), shaped(110)
    times = true_times(other)
    fast = near(other, times, to=asked, xla_us=0.7 * min(times.values()))
    answer = answered(asked, fast)
    assert answer.choice.variant == "xla"
    assert answer.time_us == answer.xla_us and answer.ratio == 1.0
    ours = answered(asked, fast, allowed=("tiled",))
    assert ours.choice.variant == "tiled" and ours.ratio and ours.ratio < 1
    slow = near(other, times, to=asked, xla_us=1.4 * min(times.values()))
    assert answered(asked, slow).choice.variant == "tiled"


@pytest.mark.parametrize("factor", [0.9, 1.0, 1.01, 1.03, 1.06, 1.1])
def test_a_narrow_win_is_left_to_xla_unless_it_is_not_allowed(tiled, factor):
    asked, other = shaped(100), shaped(100, n=PROBLEM.n + 1)
    times = true_times(other)
    around = near(other, times, to=asked, xla_us=factor * min(times.values()))
    answer, ours = answered(asked, around), answered(asked, around, allowed=("tiled",))
    assert ours.choice.variant == "tiled" and ours.ratio == pytest.approx(factor)
    clear = factor >= interpolate.CLEARLY
    assert answer.choice.variant == ("tiled" if clear else "xla")
    assert answer.time_us == (ours.time_us if clear else answer.xla_us)


def test_the_tiles_of_xla_need_not_be_cut_off_where_ours_are(tiled):
    # Ours are: from 64 rows on tiles of 64 are best, and 65 rows take two of them.
    asked, other = shaped(65), shaped(64)
    around = near(other, {64: 1.0}, to=asked, xla_us=1.2)
    answer, ours = answered(asked, around), answered(asked, around, allowed=("tiled",))
    assert answer.choice.variant == "xla"
    assert answer.xla_us == pytest.approx(1.2 * 65 / 64)
    # Where ours fit better than at the neighbour, so may those of XLA.
    back = answered(other, near(asked, {64: 2.0}, to=other, xla_us=1.2))
    assert ours.time_us and ours.time_us > 1.2 * 65 / 64
    assert back.xla_us and back.xla_us < 1.2 * 64 / 65


def test_what_is_illegal_or_failed_or_unverified_is_no_candidate(tiled):
    asked, other = shaped(130), shaped(260)
    times = true_times(other)
    times[256] = 1e-3  # taller than the matrix that is asked
    wrong = Observation(
        variant="tiled", config={"tile": 128}, failure="wrong_result", message="bad"
    )
    unverified = observed(64, 1e-3, raced=False)
    times = {t: us for t, us in times.items() if t not in (64, 128)}
    around = near(other, times, to=asked, extra=(wrong, unverified))
    assert answered(asked, around).choice.config == TileConfig(tile=32)


def test_nothing_is_said_about_shapes_that_are_far(tiled):
    asked = shaped(128)
    for m, is_near in ((128 * 5, True), (128 * 6, False)):
        around = near(shaped(m), true_times(shaped(m)), to=asked)
        assert (interpolated(asked, around) is not None) == is_near
    assert interpolated(asked) is None


def test_without_a_model_the_work_tells_the_time(tmp_path):
    knowledge = Knowledge(tmp_path)
    for n in (40, 160):
        # Twice the work takes twice the time, for us and for XLA.
        best = Best(
            **named(PROBLEM, choice(8), DEVICE),
            time_us=float(n),
            xla_us=1.5 * n,
        )
        record = dataclasses.replace(entry(problem=shaped(n=n)), best=best)
        knowledge.own.record(record)
    answer = found(Knowledge(tmp_path))
    assert answer.choice == choice(8) and answer.origin == "interpolated"
    assert answer.time_us == pytest.approx(80.0, rel=0.3)
    assert answer.ratio == pytest.approx(1.5)


def test_the_order_of_records_does_not_matter(tiled, tmp_path):
    draw, answers = random.Random(1), set()
    problems = [shaped(m, n) for m, n in itertools.product((100, 120, 150), (64, 128))]
    for attempt in range(4):
        directory = tmp_path / str(attempt)
        for problem in problems:
            known = near(problem, true_times(problem, 1 + problem.m / 100))
            tiles = Choice(variant="tiled", config=TileConfig(tile=16))
            record = dataclasses.replace(
                entry(tiles, problem=problem),
                best=known.best,
                observations=known.observations,
            )
            Knowledge(directory).own.record(record)
        draw.shuffle(problems)
        answers.add(found(Knowledge(directory), shaped(130)))
    (answer,) = answers
    assert answer.neighbours == 6


def test_the_variant_with_a_model_of_its_own():
    h200 = NAMED["H200"]
    bf16: dict = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "bfloat16"}
    around = []
    for m in (4096, 2048):
        problem = GemmProblem(m=m, n=4096, k=4096, **bf16)
        config = variants.get("matmul", "gemm_sm90").heuristic(problem, h200)
        best = Best(
            variant="gemm_sm90",
            config=dataclasses.asdict(config),
            time_us=m / 20,
            xla_us=m / 18,
        )
        around.append(
            Neighbour(
                problem=problem,
                distance=abs(math.log2(m / 3072)),
                origin="shipped",
                best=best,
                observations=(),
            )
        )
    asked = GemmProblem(m=3072, n=4096, k=4096, **bf16)
    answer = interpolated(asked, *around, device=h200)
    assert answer and answer.choice.variant == "gemm_sm90"
    assert answer.time_us == pytest.approx(3072 / 20, rel=0.15)


def test_a_neighbour_that_other_variants_can_serve_tells_nothing(tiled, monkeypatch):
    monkeypatch.setattr(
        Tiled, "why_not", lambda _, p, device: "odd rows" if p.m % 2 else None
    )
    even, odd = (
        near(shaped(m), {16: 9.0, 32: 1.0}, to=shaped(128), xla_us=0.1)
        for m in (130, 129)
    )
    assert answered(shaped(128), even).neighbours == 1
    assert answered(shaped(128), odd, even).neighbours == 1
    assert interpolated(shaped(128), odd) is None
    assert answered(shaped(131), odd).choice.variant == "xla"


# --- ops without a model --------------------------------------------------------------


def attended(batch: int, **other) -> AttentionProblem:
    usual: dict[str, Any] = {"q_len": 2048, "kv_len": 2048, "heads": 16}
    return AttentionProblem(
        batch=batch,
        head_dim=128,
        dtype="bfloat16",
        scale=0.1,
        kv_heads=16,
        **(usual | other),
    )


def of_cudnn(problem: AttentionProblem, asked: AttentionProblem) -> Neighbour:
    """Where cuDNN took half the time of the kernel that is the default."""
    ours = ATTENTION_SM90.heuristic(problem, NAMED["H100"])
    return Neighbour(
        problem=problem,
        distance=abs(math.log2(problem.batch / asked.batch)),
        origin="shipped",
        best=Best(
            variant="cudnn",
            config={},
            time_us=50.0,
            xla_us=None,
            runner_up={
                "variant": ATTENTION_SM90.name,
                "config": dataclasses.asdict(ours),
                "time_us": 100.0,
            },
        ),
        observations=(),
    )


@pytest.mark.parametrize(
    ("batches", "is_answered"),
    [((2, 8), True), ((3, 5), True), ((1, 3), False), ((5, 8), False), ((3,), False)],
)
def test_attention_is_answered_between_measured_batches_alone(batches, is_answered):
    asked = attended(4)
    near = sorted(
        (of_cudnn(attended(b), asked) for b in batches), key=lambda n: n.distance
    )
    answer = interpolated(asked, *near, device=NAMED["H100"])
    assert (answer is not None) == is_answered
    if answer is not None:
        assert answer.choice.variant == "cudnn" and answer.time_us is not None
        assert 25 < answer.time_us < 100


def test_attention_of_other_lengths_and_heads_tells_nothing(tmp_path):
    device, asked = NAMED["H100"], attended(4)
    shipped = Knowledge(tmp_path)
    others = [{"q_len": 1024, "kv_len": 1024}, {"q_len": 4096, "kv_len": 4096}]
    others += [{"heads": 32}, {"heads": 48}, {"is_causal": True}, {"saves_lse": True}]
    for batch in (1, 2, 8, 16):
        for other in others:
            problem = attended(batch, **other)
            best = of_cudnn(problem, asked).best
            assert best is not None
            shipped.own.record(
                Entry(
                    problem=problem.to_json(),
                    environment=environment(device),
                    best=best,
                )
            )
    known = Knowledge(tmp_path)
    assert known.lookup(asked, device) is None
    between = known.lookup(attended(4, q_len=4096, kv_len=4096), device)
    assert (
        between is not None
        and between.origin == "interpolated"
        and between.choice.variant == "cudnn"
    )
