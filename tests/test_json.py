"""JSON for tools: valid, with the keys that docs/json.md names."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import textwrap
from typing import Any

import pytest
from processes import forked
from synthetic_bench import PROBLEM, entry

import tracea_jax as tracea
from tracea_jax.doctor import ModelInUse
from tracea_jax.tuning.answers.knowledge import Knowledge

pytestmark = pytest.mark.once

DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "json.md"

MODEL = """
    import jax, jax.numpy as jnp

    def step(x, w):
        return jax.nn.relu(x @ w), x.astype(int) @ w.astype(int)

    def step_args():
        return jnp.ones((16, 8)), jnp.ones((8, 8))
"""


def printed(*arguments: str, **how: Any) -> str:
    """The output of the command in a process of its own."""
    command = forked("", *arguments, strict=False)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, **how)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def documented() -> dict[str, set[str]]:
    """The keys of each table in the document, by its title."""
    found: dict[str, set[str]] = {}
    for part in re.split(r"\n##+ ", DOCUMENT.read_text())[1:]:
        title, _, text = part.partition("\n")
        heads = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
        found[title] = set(re.findall(r"`(\w+)`", " ".join(heads)))
    return found


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    return tmp_path


def test_the_doctor_tells_what_is_documented(documented):
    data = json.loads(printed("doctor", "--json"))
    assert data == tracea.doctor(json=True) == tracea.doctor().to_json()
    assert set(data) == documented["doctor"]
    assert set(data["toolchain"]) == documented["doctor: toolchain"]
    assert set(data["caches"]) == documented["doctor: caches"]
    assert {*data["variants"][0]} == documented["doctor: a variant"]
    assert {*data["elsewhere"][0]} == documented["doctor: elsewhere"]
    fields = {field.name for field in dataclasses.fields(ModelInUse)}
    assert fields == documented["doctor: a model"]
    assert all({*model} == fields for model in data["models"])
    cpu = data["devices"][0]
    assert cpu["platform"] == "cpu" and cpu["cores"] >= 1
    (said,) = [v for v in data["variants"] if v["variant"] == "gemm_cpu"]
    assert said["op"] == "matmul" and said["device"] == cpu["name"]
    assert said["runs"]["aligned"] == ["float32", "bfloat16", "float16"]
    assert data["caches"]["on_miss"] == "heuristic"


def test_explain_tells_what_is_documented(documented, model):
    data = json.loads(printed("explain", "model:step", "--json", cwd=model))
    assert set(data) == documented["explain"]
    (site,), (miss,) = data["sites"], data["misses"]
    assert set(site) == documented["explain: a site"]
    assert set(miss) == {"op", "scope", "what", "reason"}


def test_a_bench_tells_what_is_documented(documented, model):
    shapes = ("--args", "f32[256,256]", "f32[256,256]")  # XLA serves smaller ones
    how = (*shapes, "--budget-s", "0.5", "--json", "found.json")
    assert "matmul 256x256x256" in printed("bench", "model:step", *how, cwd=model)
    data = json.loads((model / "found.json").read_text())
    assert set(data) == documented["bench"]
    (site,) = data["sites"]
    assert set(site) == documented["bench: a site"]
    assert set(data["whole"]["timed"]) == documented["bench: timed"]
    assert set(data["load"]) == {"average", "cores"}
    assert set(data["versions"]) == set(tracea.doctor(json=True)["versions"])


def test_the_cache_lists_what_is_documented(documented, cache_dir):
    empty = {"directory": str(cache_dir), "entries": []}
    assert json.loads(printed("cache", "list", "--json")) == empty
    recorded = entry()
    Knowledge(cache_dir).own.record(recorded)
    data = json.loads(printed("cache", "list", "--json"))
    (listed,) = data["entries"]
    assert set(data) == documented["cache list"]
    assert set(listed) == documented["cache list: an entry"]
    assert listed["problem"] == PROBLEM.to_json() and listed["text"] == str(PROBLEM)
    assert listed["config"] == recorded.best.config and listed["is_known"] is True
    assert (listed["time_us"], listed["xla_us"], listed["ratio"]) == (10.0, 15.0, 1.5)
    assert listed["environment"] == recorded.environment.to_json()
    assert listed["environment_key"] == recorded.environment.key
    assert listed["written"] == recorded.written


def test_entries_of_other_versions_are_listed_too(cache_dir):
    import dataclasses

    from tracea_jax.tuning.store.records import Best

    gone = Best(variant="gemm_gone", config={"size": 3})
    Knowledge(cache_dir).own.record(dataclasses.replace(entry(), best=gone))
    (listed,) = json.loads(printed("cache", "list", "--json"))["entries"]
    assert listed["variant"] == "gemm_gone" and listed["is_known"] is False
    assert listed["time_us"] is None and listed["config"] == {"size": 3}
