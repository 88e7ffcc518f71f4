"""Search spaces: their configs, the refused ones with reasons, and their ranking."""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy.stats import spearmanr
from spaces import one_of_each
from tile_order import raster

import tracea_jax
from tracea_jax import policy, variants
from tracea_jax.device import NAMED, CpuDevice, CudaDevice
from tracea_jax.diagnosis import Diagnosis
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.emit.gemm_sm90_kernel import OUT_DTYPES
from tracea_jax.policy import Choice
from tracea_jax.problem import ITEMSIZE, Epilogue, GatedMatmulProblem, GemmProblem
from tracea_jax.tuning.store.records import Entry
from tracea_jax.variants import gemm_sm80 as sm80
from tracea_jax.variants import gemm_sm90_space as sm90
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_model import late_bytes, modelled_us
from tracea_jax.variants.space import (
    Space,
    as_config,
    first_refusal,
    grid,
    legal_columns,
    representative,
    survivors,
)

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=4)
SHIPPED = pathlib.Path(tracea_jax.__file__).parent / "data" / "tuned"


def load_benchmark(name: str) -> Any:
    path = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def problem(m: int = 4096, n: int = 4096, k: int = 4096, **fields: Any) -> GemmProblem:
    dtype = "bfloat16"
    return GemmProblem(m=m, n=n, k=k, lhs=dtype, rhs=dtype, out=dtype, **fields)


def cpu_problem(m: int, n: int, k: int) -> GemmProblem:
    return GemmProblem(m=m, n=n, k=k)


# ---- any space -----------------------------------------------------------------------


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


# ---- gemm_sm90: the formulas of one config and of columns agree ----------------------

extents = st.one_of(st.integers(1, 600), st.integers(1, 1 << 15)).map(lambda x: 8 * x)
epilogues = st.sampled_from(
    [Epilogue(), Epilogue(bias="row", activation="gelu", save_preactivation=True)]
)
gpu_problems = st.builds(
    problem,
    m=st.one_of(st.integers(1, 300), extents),
    n=extents,
    k=extents,
    batch=st.sampled_from([1, 1, 3, 100]),
    lhs_batched=st.just(True),
    epilogue=epilogues,
)
gpus = st.builds(
    dataclasses.replace,
    st.just(H200),
    sm_count=st.integers(1, 200),
    smem_per_block_bytes=st.integers(100 << 10, 232448),
)


def accepts(variant: Any, asked: GemmProblem, config: Any, device: Any) -> bool:
    try:
        variant.check(asked, config, device)
    except ValueError:
        return False
    return True


@hypothesis.given(asked=gpu_problems, device=gpus, data=st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_the_space_is_what_check_accepts_less_what_repeats(asked, device, data):
    hypothesis.assume(GEMM_SM90.why_not(asked, device) is None)
    space = GEMM_SM90.space(asked, device)
    configs = space.configs()
    assert len(configs) == len(space) == len(set(configs)) > 0
    assert len(space) + sum(space.pruned.values()) == np.prod(
        [len(values) for values in sm90.GRID.values()]
    )
    # Columns against single configs, at random places of the grid and of the space.
    for _ in range(20):
        fields = {name: data.draw(st.sampled_from(v)) for name, v in sm90.GRID.items()}
        config = GemmSm90Config(**fields)
        legal = accepts(GEMM_SM90, asked, config, device)
        rule = first_refusal(sm90.WORTH, asked, config, device) if legal else None
        assert (space.index(config) is not None) == (legal and rule is None)
        assert rule is None or rule.why(asked, config, device)
    for index in data.draw(st.lists(st.integers(0, len(space) - 1), max_size=20)):
        config = space.config(index)
        assert configs[index] == config and space.index(config) == index
        assert accepts(GEMM_SM90, asked, config, device)
        assert space.modelled_us is not None
        assert space.modelled_us[index] == pytest.approx(
            modelled_us(asked, config, device), rel=1e-12
        )


@hypothesis.given(asked=gpu_problems, device=gpus)
@hypothesis.settings(max_examples=60, deadline=None)
def test_the_heuristics_choice_is_in_the_space_and_near_the_models(asked, device):
    hypothesis.assume(GEMM_SM90.why_not(asked, device) is None)
    space = GEMM_SM90.space(asked, device)
    index = space.index(GEMM_SM90.heuristic(asked, device))
    assert index is not None and space.modelled_us is not None
    assert np.isfinite(space.modelled_us).all() and space.modelled_us.min() > 0
    assert set(map(len, space.derived.values())) == {len(space)}
    assert all(np.isfinite(values).all() for values in space.derived.values())
    # Times within 2 % are alike; the heuristic leaves out deeper rings and some bands.
    assert space.modelled_us[index] <= 1.1 * space.modelled_us.min()


def order_of_tiles(asked: GemmProblem, config: GemmSm90Config) -> list[Any]:
    m_tiles, n_tiles, batch = emit.tile_grid(asked, config)
    count = m_tiles * n_tiles * batch
    return [raster(i, m_tiles, n_tiles, config.raster_band) for i in range(count)]


@pytest.mark.parametrize("shape", [(3000, 1500, 64), (700, 2600, 64), (2600, 128, 64)])
def test_a_band_that_is_left_out_walks_as_one_that_is_kept(shape):
    asked, device = problem(*shape), dataclasses.replace(H200, sm_count=24)
    kept = set(GEMM_SM90.space(asked, device).configs())
    bands = sm90.GRID["raster_band"]
    compared = 0
    for config in kept:
        usual = {
            tuple(order_of_tiles(asked, c))
            for band in bands
            if (c := dataclasses.replace(config, raster_band=band)) in kept
        }
        alone = emit.tile_count(asked, config) <= 24 // config.cluster_size
        for band in bands:
            other = dataclasses.replace(config, raster_band=band)
            if other not in kept and not alone:
                assert tuple(order_of_tiles(asked, other)) in usual
                compared += 1
    assert compared > 20


def test_only_the_first_of_equal_depths_is_kept():
    asked = problem(512, 512, 192)  # 3 stages of k, a tile for each block
    space = GEMM_SM90.space(asked, H200)
    assert set(space.columns["stages"].tolist()) == {2, 3}
    assert space.pruned["idle_stages"] > 0
    # With more tiles than blocks, the ring runs ahead into the next tile.
    assert max(GEMM_SM90.space(problem(8192, 8192, 64), H200).columns["stages"]) > 8


def test_tiles_and_clusters_are_no_larger_than_the_output():
    columns = GEMM_SM90.space(problem(60, 4096, 4096), H200).columns
    assert set(columns["tile_m"].tolist()) == {64}
    assert set(columns["cluster_m"].tolist()) == {1}
    columns = GEMM_SM90.space(problem(4096, 184, 4096), H200).columns
    assert set(columns["tile_n"].tolist()) == {64, 128, 160, 192}
    wide = columns["tile_n"] == 192
    assert set(columns["cluster_n"][wide].tolist()) == {1}


def test_a_large_problem_has_about_three_thousand_configs():
    space = GEMM_SM90.space(problem(), H200)
    assert 2000 <= len(space) <= 4000
    assert {"rows", "accumulators", "cluster", "smem"} <= set(space.pruned)
    assert str(space).startswith(f"{len(space)} legal configs; refused: rows ")


# ---- gemm_sm90: the model ------------------------------------------------------------


@hypothesis.given(asked=gpu_problems, factor=st.sampled_from([3, 5]), data=st.data())
@hypothesis.settings(max_examples=40, deadline=None)
def test_more_work_takes_longer(asked, factor, data):
    """Odd factors leave it as it is how rows lie in the lines of a cache."""
    hypothesis.assume(GEMM_SM90.why_not(asked, H200) is None)
    space = GEMM_SM90.space(asked, H200)
    config = space.config(data.draw(st.integers(0, len(space) - 1)))
    whole = config.tile_m * config.cluster_m
    asked = dataclasses.replace(asked, m=whole * -(-asked.m // whole))
    once = modelled_us(asked, config, H200)
    for extent in ("m", "n", "k", "batch"):
        more = {extent: factor * getattr(asked, extent)}
        larger = dataclasses.replace(asked, **more)
        assert modelled_us(larger, config, H200) >= once * (1 - 1e-12)
    if config.stages > 2:
        shallower = dataclasses.replace(config, stages=config.stages - 1)
        # Unless the ring leaves room for more of the epilogue's buffers.
        if buffers(asked, shallower) == buffers(asked, config):
            assert modelled_us(asked, shallower, H200) >= once * (1 - 1e-12)


def buffers(asked: GemmProblem, config: GemmSm90Config) -> int:
    return emit.storage(asked, config, H200.smem_per_block_bytes).epilogue_buffers


@hypothesis.given(asked=gpu_problems, out=st.sampled_from(OUT_DTYPES))
@hypothesis.settings(max_examples=20, deadline=None)
def test_results_are_late_if_they_outnumber_the_buffers_of_the_kernel(asked, out):
    asked = dataclasses.replace(asked, out=out)
    saves = 1 + asked.epilogue.save_preactivation
    for config in one_of_each(GEMM_SM90.space(asked, H200), "tile_n", "stages"):
        row = config.tile_n * ITEMSIZE[out]
        rows = config.tile_m // config.tile_consumers
        results = saves * rows * (row + -row % emit.ROW_BYTES)
        staged = buffers(asked, config) * emit.SUBTILE_BYTES
        late = max(results - staged, 0)
        assert late_bytes(asked, config, H200) == late


def test_rows_that_straddle_lines_are_read_twice_unless_partners_share_them():
    def us(side: int, **fields: Any) -> float:
        config = GemmSm90Config(tile_m=128, tile_n=256, stages=4, **fields)
        return modelled_us(problem(n=side, k=side), config, H200)

    alone = us(4088) / us(4096)
    assert alone > us(4088, cluster_m=2) / us(4096, cluster_m=2) > 1


RECORDED = load_benchmark("recorded_spaces").read_space()


@pytest.mark.parametrize("recorded", RECORDED, ids=lambda r: str(r.problem))
def test_the_model_ranks_and_the_heuristic_chooses_as_was_measured(recorded):
    """On an H200 all configs of 8 shapes were timed that were legal then.

    Since then blocks can share k, a consumer can have 128 accumulators, tiles come in
    more widths, consumers can take turns, and few rows are loaded without the rest of
    their slab.
    """
    asked, configs, time_us = recorded
    space = GEMM_SM90.space(asked, H200)
    known = [i for i in map(space.index, configs) if i is not None]
    assert len(known) == len(configs)
    assert all(
        space.config(i).cluster_k > 1
        or space.config(i).accumulators == 128
        or space.config(i).ping_pong
        or space.config(i).tile_n % 64 != 0
        for i in set(range(len(space))) - set(known)
        if asked.m > 64
    )
    chosen = GEMM_SM90.heuristic(asked, H200)
    if asked.m > 64:
        assert time_us[configs.index(chosen)] < 1.08 * time_us.min()
    assert space.modelled_us is not None
    rank: Any = spearmanr(space.modelled_us[known], time_us)
    assert rank.statistic > 0.75


def least_us(asked: GemmProblem) -> float:
    times = GEMM_SM90.space(asked, H200).modelled_us
    assert times is not None
    return times.min()


def test_times_are_microseconds_within_what_the_device_can_do():
    asked = problem()
    best_us = least_us(asked)
    assert 500e6 < asked.flops / best_us < 990e6  # TFLOP/s of dense bfloat16
    streamed = problem(16, 8192, 8192)
    best_us = least_us(streamed)
    assert 2.5e6 < streamed.bytes / best_us < 4.8e6  # bytes a microsecond of memory


def test_the_model_describes_what_shipped_entries_observed():
    seen = [
        (o.time_us, modelled_us(asked, config_of(o), H200), asked.k)
        for path in SHIPPED.rglob("matmul/*.json")
        for entry in [Entry.from_bytes(path.read_bytes())]
        for asked in [GemmProblem.from_json(entry.problem)]
        for o in entry.observations
        if o.variant == "gemm_sm90" and o.time_us is not None
    ]
    time, modelled, depth = np.array(seen).T
    rank: Any = spearmanr(time, modelled)
    assert len(seen) > 20 and rank.statistic > 0.95
    # Those times are of kernels alone; the model's have a launch in them.
    lasting = time > 20.0
    wrong = np.abs(np.log(modelled / time))
    assert wrong[lasting & (depth >= 512)].max() < 0.25
    # Of short sums the epilogue is most of the time, and hides better than modelled.
    assert wrong[lasting & (depth < 512)].max() < 0.4


def config_of(observation: Any) -> GemmSm90Config:
    return GemmSm90Config(**observation.config)


# ---- gemm_cpu ------------------------------------------------------------------------

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


# ---- the policy ----------------------------------------------------------------------


def decision(asked: Any, device: CudaDevice | CpuDevice) -> policy.Decision:
    names = [v.name for v in variants.of(asked.op) if not v.why_not(asked, device)]
    return policy.decide(
        Diagnosis(problem=asked, device=device, candidates=tuple(names), rejected=())
    )


@pytest.mark.parametrize("device", [H200, CPU], ids=lambda d: d.platform)
def test_choices_are_all_spaces_in_order_with_the_heroes_first(device):
    made = decision(problem(), device)
    heroes, rest = made.choices[: len(made.heroes)], made.choices[len(made.heroes) :]
    assert heroes == made.heroes and made.choice in heroes
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
