"""Products on a GPU without tuning: choices against recorded times of XLA."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib

import pytest

import tracea_jax as tracea
from tracea_jax.device import NAMED
from tracea_jax.dispatch import plan
from tracea_jax.problem import Epilogue, GemmProblem
from tracea_jax.variants import gemm_xla_model

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
RESULTS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks/results"
DRAWN = [
    row
    for name in ("choices_fitted", "choices_fused")  # the latter held back
    for row in json.loads((RESULTS / f"nvidia_h200/{name}.json").read_text())["rows"]
]
ROWS = [row for row in DRAWN if "error" not in row]
SILU = GemmProblem(
    m=4096,
    n=4096,
    k=1024,
    lhs="bfloat16",
    rhs="bfloat16",
    out="bfloat16",
    epilogue=Epilogue(activation="silu"),
)


@pytest.fixture(autouse=True, scope="module")
def nothing_tuned(tmp_path_factory):
    with tracea.options(cache_dir=tmp_path_factory.mktemp("empty")):
        yield


def ratio(row):
    """XLA's time by that of what runs by default, as measured."""
    problem = GemmProblem.from_json(row["problem"])
    return 1.0 if plan(problem, H200).variant == "xla" else row["ratio_own"]


@pytest.mark.parametrize("row", ROWS, ids=[row["text"] for row in ROWS])
def test_the_default_was_not_measured_to_be_slower_than_xla(row):
    assert ratio(row) >= 0.97


def test_defaults_gain_more_than_the_rule_by_flops_did():
    """Compares with the defaults of the time when the rule was fitted."""
    fitted = [row for row in ROWS if "seed" in row]
    before = math.fsum(math.log(row["ratio_default"]) for row in fitted)
    assert math.fsum(math.log(ratio(row)) for row in fitted) > before


@pytest.mark.parametrize("epilogue", [Epilogue(), SILU.epilogue])
def test_odd_rows_are_padded_whatever_the_epilogue(epilogue):
    odd = dataclasses.replace(SILU, n=4095, k=127, epilogue=epilogue)
    assert plan(odd, H200).variant == "gemm_sm90_padded"
    shallow = dataclasses.replace(odd, n=8, k=4095)
    assert plan(shallow, H200).variant == "xla"


def test_a_product_that_xla_fuses_has_nothing_to_lose():
    for epilogue in (Epilogue(), Epilogue(bias="row", activation="relu")):
        fused = dataclasses.replace(SILU, epilogue=epilogue)
        assert not gemm_xla_model.loses_to(0.1, fused)


def test_a_wide_bias_is_added_by_a_second_kernel_of_xla():
    wide = Epilogue(bias="row", activation="relu", bias_dtype="float32")
    assert gemm_xla_model.loses_to(0.1, dataclasses.replace(SILU, epilogue=wide))
    narrow = dataclasses.replace(SILU, epilogue=wide, out="float32")
    assert not gemm_xla_model.loses_to(0.1, narrow)


def test_a_second_kernel_costs_xla_what_it_moves():
    """Ours may be the slower, the more of the whole the second kernel is."""

    def limit_us(problem):
        times = (1.1**i for i in range(120))
        return max(us for us in times if gemm_xla_model.loses_to(us, problem))

    plain = limit_us(SILU)
    added = dataclasses.replace(SILU.epilogue, residual=True)
    assert limit_us(dataclasses.replace(SILU, epilogue=added)) > plain
    deep = dataclasses.replace(SILU, k=32768)
    assert not gemm_xla_model.loses_to(0.1, deep)  # the pass is 1 % of it
