"""Search spaces: their configs, the refused ones with reasons, and their ranking."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from spaces_of_products import CPU, H200, accepts, problem

from tracea_jax import policy, variants
from tracea_jax.device import CpuDevice, CudaDevice
from tracea_jax.diagnosis import Diagnosis
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.policy import Choice
from tracea_jax.problem import GatedMatmulProblem, GemmProblem
from tracea_jax.variants import gemm_sm80 as sm80
from tracea_jax.variants import gemm_sm90_space as sm90
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.space import (
    Space,
    as_config,
    grid,
    legal_columns,
    representative,
    survivors,
)

pytestmark = pytest.mark.once


def cpu_problem(m: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(m=m, n=n, k=k)


# --- any space ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knobs:
    size: int
    order: str
    pair: tuple[int, int] = (1, 1)


@dataclasses.dataclass(frozen=True)
class NoKnobs:
    pass


def test_a_grid_counts_with_the_last_choice_fastest():
    columns = grid(size=(1, 2), order=("row", "column"))
    assert columns["size"].tolist() == [1, 1, 2, 2]
    assert columns["order"].tolist() == ["row", "column"] * 2


def test_configs_come_back_as_they_went_in():
    configs = [Knobs(size=2, order="row"), Knobs(size=1, order="column", pair=(2, 1))]
    space = Space.of(*configs)
    assert len(space) == 2 and list(space.configs()) == configs
    for i, config in enumerate(configs):
        assert space.config(i) == config and space.index(config) == i
        assert [type(v) for v in dataclasses.astuple(space.config(i))] == [
            type(v) for v in dataclasses.astuple(config)
        ]
    assert space.index(Knobs(size=1, order="row")) is None
    assert space.index(NoKnobs()) is None


def test_a_config_without_fields_is_a_space_of_one():
    space = Space.of(NoKnobs())
    assert len(space) == 1 and space.configs() == (NoKnobs(),)
    assert space.config(0) == NoKnobs() and space.index(NoKnobs()) == 0
    assert str(space) == "1 legal config"


def test_a_config_counts_for_the_first_reason_against_it():
    size = grid(size=range(10))["size"]
    alive, pruned = survivors(
        [("odd", size % 2 == 1), ("large", size > 6), ("negative", size < 0)]
    )
    assert size[alive].tolist() == [0, 2, 4, 6]
    assert pruned == {"odd": 5, "large": 1}
    space = Space(config_type=Knobs, columns={"size": size[alive]}, pruned=pruned)
    assert str(space) == "4 legal configs; refused: odd 5, large 1"


@pytest.mark.parametrize("rows", [16, 300, 4096])
@pytest.mark.parametrize("rules", [sm80, sm90], ids=["sm80", "sm90"])
def test_later_rules_find_the_same_of_what_is_left_as_of_the_whole_grid(rules, rows):
    asked, whole = problem(rows, 4096, 4096), grid(**rules.GRID)
    config_type = GemmSm90Config if rules is sm90 else GemmSm80Config
    every = (*rules.LEGAL, *rules.WORTH)
    config = as_config(config_type, whole)
    alive, pruned = survivors((r.code, r.refuses(asked, config, H200)) for r in every)
    columns, counted = legal_columns(whole, config_type, every, asked, H200)
    assert counted == pruned
    for name, values in columns.items():
        np.testing.assert_array_equal(values, whole[name][alive])


def test_the_first_choice_of_the_same_effect_stands_for_a_value():
    values = np.array([1, 2, 4, 8, 16])
    chosen = representative(values, (8, 1, 2, 4, 16), lambda v: np.minimum(v, 5))
    assert chosen.tolist() == [1, 2, 4, 8, 8]
    assert representative(16, (8, 1, 2, 4, 16), lambda v: np.minimum(v, 20)) == 16


# --- gemm_cpu -------------------------------------------------------------------------

sizes = st.one_of(st.integers(0, 40), st.integers(1, 9000))
cpus = st.builds(
    CpuDevice,
    name=st.just("cpu"),
    isa=st.just("avx2"),
    cores=st.integers(1, 64),
    l2_bytes=st.integers(128 << 10, 128 << 20),
)


@hypothesis.given(asked=st.builds(cpu_problem, sizes, sizes, sizes), device=cpus)
@hypothesis.settings(max_examples=60, deadline=None)
def test_cpu_spaces_are_legal_small_and_hold_the_heuristics_choice(asked, device):
    space = GEMM_CPU.space(asked, device)
    configs = space.configs()
    assert 1 <= len(configs) <= 200 and len(set(configs)) == len(configs)
    for index, config in enumerate(configs):
        assert accepts(GEMM_CPU, asked, config, device)
        assert space.index(config) == index
    assert GEMM_CPU.heuristic(asked, device) in configs
    assert all(np.isfinite(values).all() for values in space.derived.values())


def test_a_large_product_on_a_cpu_has_over_a_hundred_configs():
    assert 100 <= len(GEMM_CPU.space(cpu_problem(4096, 4096, 4096), CPU)) <= 200


def test_cpu_blocks_beyond_the_problem_are_one_config():
    columns = GEMM_CPU.space(cpu_problem(512, 100, 120), CPU).columns
    assert len(set(columns["kc"].tolist())) == len(set(columns["nc"].tolist())) == 1
    alone = dataclasses.replace(CPU, cores=1)
    assert len(GEMM_CPU.space(cpu_problem(512, 100, 120), alone)) == 1
    assert GEMM_CPU.space(cpu_problem(512, 100, 120), alone).pruned.keys() == {
        "kc",
        "nc",
        "tasks",
    }


# --- the policy -----------------------------------------------------------------------


def decision(asked: Any, device: CudaDevice | CpuDevice) -> policy.Decision:
    names = [v.name for v in variants.of(asked.op) if not v.why_not(asked, device)]
    return policy.decide(
        Diagnosis(problem=asked, device=device, candidates=tuple(names), rejected=())
    )


def test_a_decision_makes_no_default_but_the_one_that_runs(monkeypatch):
    def failing(*_):
        raise KeyError("a fault")

    unused = variants.get("matmul", "gemm_sm80")
    monkeypatch.setattr(type(unused), "heuristic", failing)
    made = decision(problem(), H200)
    assert made.choice.variant != unused.name
    with pytest.raises(KeyError, match="a fault"):
        list(made.heroes)


@pytest.mark.parametrize("device", [H200, CPU], ids=lambda d: d.platform)
def test_choices_are_all_spaces_in_order_with_the_heroes_first(device):
    made = decision(problem(), device)
    heroes, rest = made.choices[: len(made.heroes)], made.choices[len(made.heroes) :]
    assert heroes == tuple(made.heroes) and made.choice in heroes
    assert made.heroes[:2] == heroes[:2] and made.heroes[-1] == heroes[-1]
    everything = [
        Choice(variant=name, config=config)
        for name, space in made.spaces.items()
        for config in space.configs()
    ]
    assert list(rest) == [c for c in everything if c not in heroes]
    assert (
        list(made.spaces) == [h.variant for h in heroes] and "gelu" not in made.spaces
    )
    for hero in heroes:
        assert made.spaces[hero.variant].index(hero.config) is not None


def test_a_decision_makes_no_space_that_nobody_asks_for(monkeypatch):
    asked = problem(4104)
    monkeypatch.setattr(Space, "__init__", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(pytest.fail.Exception, match="made"):
        decision(asked, CPU).spaces["gemm_cpu"]
    assert decision(asked, CPU).choice is not None


def test_variants_without_choices_of_their_own_have_one_config():
    gated = GatedMatmulProblem(m=64, n=64, k=64)
    made = decision(gated, CPU)
    assert [len(space) for space in made.spaces.values()] == [1, 1, 1]
    assert len(made.choices) == 3
