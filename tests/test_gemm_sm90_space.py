"""The search space of gemm_sm90, and its model of time."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import pathlib
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from scipy.stats import spearmanr
from spaces import one_of_each
from spaces_of_products import H200, accepts, problem
from tile_order import raster

import tracea_jax
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.emit.gemm_sm90_kernel import OUT_DTYPES
from tracea_jax.problem import ITEMSIZE, Epilogue, GemmProblem
from tracea_jax.tuning.store.records import Entry
from tracea_jax.variants import gemm_sm90_space as sm90
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_model import late_bytes, modelled_us
from tracea_jax.variants.space import first_refusal

pytestmark = pytest.mark.once
SHIPPED = pathlib.Path(tracea_jax.__file__).parent / "data" / "tuned"


def load_benchmark(name: str) -> Any:
    path = pathlib.Path(__file__).resolve().parent.parent / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- the formulas of one config and of columns agree ----------------------------------

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


def order_of_tiles(asked: GemmProblem, config: GemmSm90Config) -> tuple[Any, ...]:
    return order_in_grid(emit.tile_grid(asked, config), config.raster_band)


@functools.cache  # many configs have the same grid
def order_in_grid(grid: tuple[int, int, int], band: int) -> tuple[Any, ...]:
    m_tiles, n_tiles, batch = grid
    count = m_tiles * n_tiles * batch
    return tuple(raster(i, m_tiles, n_tiles, band) for i in range(count))


@pytest.mark.parametrize("shape", [(3000, 1500, 64), (700, 2600, 64), (2600, 128, 64)])
def test_a_band_that_is_left_out_walks_as_one_that_is_kept(shape):
    asked, device = problem(*shape), dataclasses.replace(H200, sm_count=24)
    kept = set(GEMM_SM90.space(asked, device).configs())
    bands = sm90.GRID["raster_band"]
    compared = 0
    for config in kept:
        usual = {
            order_of_tiles(asked, c)
            for band in bands
            if (c := dataclasses.replace(config, raster_band=band)) in kept
        }
        alone = emit.tile_count(asked, config) <= 24 // config.cluster_size
        for band in bands:
            other = dataclasses.replace(config, raster_band=band)
            if other not in kept and not alone:
                assert order_of_tiles(asked, other) in usual
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


# --- the model ------------------------------------------------------------------------


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
