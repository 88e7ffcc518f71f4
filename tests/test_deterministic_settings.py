"""``deterministic`` as a setting, a variable and a flag of XLA, and in reports."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import jax
import pytest
from numerics import normal
from processes import run_forked, run_python

import tracea_jax as tracea
from tracea_jax import verdicts
from tracea_jax.device import NAMED
from tracea_jax.diagnosis import compiled_elsewhere
from tracea_jax.ops import matmul
from tracea_jax.options import current, from_environment
from tracea_jax.runtime.xla_flags import demand_determinism

pytestmark = pytest.mark.once

H100 = NAMED["H100"]
FORBIDDEN = "deterministic=True or a flag of XLA forbids"


@pytest.fixture(autouse=True)
def with_any_toolchain() -> Iterator[None]:
    with compiled_elsewhere():
        yield


# --- settings -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", True), ("true", True), ("True", True), ("0", False), ("false", False)],
)
def test_the_variable(text, value):
    found = from_environment({"TRACEA_DETERMINISTIC": text})
    assert found.deterministic is value
    assert from_environment({"TRACEA_DETERMINISTIC": ""}).deterministic is None


def test_wrong_values_are_errors():
    with pytest.raises(ValueError, match="'maybe' must be True, .*DETERMINISTIC"):
        from_environment({"TRACEA_DETERMINISTIC": "maybe"})
    wrong: dict[str, Any] = {"deterministic": 1}
    with pytest.raises(ValueError, match="deterministic=1 must be True, False or None"):
        tracea.options(**wrong)


def test_each_value_traces_again():
    traces = []

    @jax.jit
    def f(a, b):
        traces.append(current().deterministic)
        return matmul(a, b)

    a = normal(3, 3)
    for value in (None, True, False, True, None):
        with tracea.options(deterministic=value):
            f(a, a)
    assert traces == [None, True, False]


@pytest.mark.parametrize(
    ("flags", "demands"),
    [
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true", True),
        ("  --xla_gpu_deterministic_ops=1 --xla_gpu_autotune_level=0", True),
        ("--xla_gpu_exclude_nondeterministic_ops=TRUE", True),
        ('--xla_gpu_deterministic_ops="true"', True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops --xla_gpu_deterministic_ops=0", False),
        ("--xla_gpu_deterministic_ops=0\t--xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_deterministic_ops_not=1 --xla_dump_to='/a b", False),
        ("--xla_dump_to=xla_gpu_deterministic_ops", False),
    ],
)
def test_flags_of_xla(flags, demands):
    assert demand_determinism({"XLA_FLAGS": flags}) is demands


def test_flags_of_xla_in_a_file(tmp_path):
    file = tmp_path / "flags"
    file.write_text("--xla_gpu_deterministic_ops=true\n--xla_gpu_autotune_level=0\n")
    assert demand_determinism({"XLA_FLAGS": str(file)})
    assert not demand_determinism({"XLA_FLAGS": str(tmp_path / "none")})


def test_a_flag_of_xla_is_obeyed_in_a_fresh_process():
    program = """
        import tracea_jax as tracea
        from tracea_jax.options import current

        found = [current().determinism]
        with tracea.options(deterministic=False):
            found.append(current().determinism)
        print(*found)
    """
    flag = "--xla_gpu_deterministic_ops=true"
    assert run_python(program, XLA_FLAGS=flag).split() == ["True", "True"]
    assert run_forked(program, TRACEA_DETERMINISTIC="1").split() == ["True", "False"]


# --- what people see ------------------------------------------------------------------


def test_explain_marks_what_may_differ():
    args = [jax.ShapeDtypeStruct((2, 128, 4, 64), "bfloat16")] * 3

    def explained() -> Any:
        return tracea.explain(jax.nn.dot_product_attention, device="H100")(*args)

    found = explained()
    (site,) = found.sites
    assert site.variant == "cudnn" and "cuDNN" in site.may_vary
    assert f"bits may differ from run to run: {site.may_vary}" in str(found)
    assert json.loads(json.dumps(found.to_json()))["sites"][0]["may_vary"]
    with tracea.options(deterministic=True):
        strict = explained()
    (site,) = strict.sites
    assert site.may_vary is None and site.to_json()["may_vary"] is None
    assert "bits may differ" not in str(strict).replace(site.reason, "")
    assert "not cudnn: cuDNN does not say" in str(strict)


def test_doctor_says_so_too(monkeypatch):
    module = importlib.import_module("tracea_jax.doctor")
    monkeypatch.setattr(module, "_devices", lambda: [H100])

    def reasons() -> list[str]:
        (said,) = (s for s in tracea.doctor().variants if s.variant == "cudnn")
        return said.reasons

    assert any("bits may differ from run to run: cuDNN" in r for r in reasons())
    with tracea.options(deterministic=True):
        assert any(FORBIDDEN in r for r in reasons())


def test_a_race_of_a_program_holds_for_its_determinism():
    jaxpr = jax.make_jaxpr(lambda x: x + 1)(1.0)

    def key() -> Any:
        return verdicts.problem_of(jaxpr, ("matmul",), False)

    usual = key()
    with tracea.options(deterministic=True):
        strict = key()
    assert usual != strict and "deterministic" not in usual.to_json()
    assert type(strict).from_json(strict.to_json()) == strict
    with tracea.options(deterministic=False):
        assert key() == usual
