"""Sharded steps in several processes: caches, executables, and one program in all."""

from __future__ import annotations

import json
import pathlib

import pytest
from processes import run_python
from test_agreement import together

TESTS = str(pathlib.Path(__file__).parent)

_STEP = f"""
    import hashlib, json, pickle, sys
    import jax, numpy as np
    sys.path.insert(0, {TESTS!r})
    import sharded_programs
    import tracea_jax as tracea
    from tracea_jax.variants import cpu_calls

    cpu_calls.CALL_NS = 0.0  # kernels serve tiny products
    events = []
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name))

    def digest(step):  # the text is longer than what a pipe holds
        return hashlib.sha256(step.as_text().encode()).hexdigest()

    def count(name):
        return events.count("/jax/compilation_cache/" + name)

    def lowered(name):
        program = sharded_programs.PROGRAMS[name]()
        layout = sharded_programs.LAYOUTS["DPxTP"]
        return sharded_programs.lowered(
            tracea.transform(program.step), program, layout
        )
"""

_CACHED = (
    _STEP
    + """
    step, state, batch = lowered("mlp")
    compiled = step.compile()
    loss, _ = compiled(state, batch)
    print(json.dumps({
        "text": digest(step),
        "work": str(sharded_programs.measured(compiled.as_text())),
        "loss": float(loss),
        "compiled": count("cache_misses"),
        "found": count("cache_hits"),
    }))
"""
)


def test_a_second_process_compiles_nothing(tmp_path):
    settings = {
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    # Neither hashes nor directories are those of the first process.
    first, second = (
        json.loads(
            run_python(
                _CACHED,
                PYTHONHASHSEED=seed,
                TRACEA_CACHE_DIR=str(tmp_path / seed),
                **settings,
            )
        )
        for seed in ("1", "2")
    )
    assert first.pop("compiled") > 0 and second.pop("compiled") == 0
    assert first.pop("found") == 0 and second.pop("found") > 0
    assert first == second
    assert " 5 kernels, 0 left" in first["work"]


@pytest.mark.slow
def test_an_executable_runs_in_another_process(tmp_path):
    path = str(tmp_path / "executable")
    save = (
        _STEP
        + """
    from jax.experimental import serialize_executable
    step, state, batch = lowered("llama")
    compiled = step.compile()
    with open(sys.argv[1], "wb") as file:
        pickle.dump(serialize_executable.serialize(compiled), file)
    print(float(compiled(state, batch)[0]))
    """
    )
    load = (
        _STEP
        + """
    from jax.experimental import serialize_executable
    with open(sys.argv[1], "rb") as file:
        compiled = serialize_executable.deserialize_and_load(*pickle.load(file))
    program = sharded_programs.PROGRAMS["llama"]()
    state, batch = sharded_programs.placed(
        program, sharded_programs.LAYOUTS["DPxTP"]
    )
    calls = sharded_programs.measured(compiled.as_text()).calls
    print(float(compiled(state, batch)[0]), count("cache_misses"), calls)
    """
    )
    eight = {"JAX_NUM_CPU_DEVICES": "8"}
    loss = run_python(save, path, **eight)
    elsewhere = str(tmp_path / "elsewhere")
    found, compiled, calls = run_python(
        load, path, TRACEA_CACHE_DIR=elsewhere, **eight
    ).split()
    assert float(found) == float(loss)
    assert (compiled, calls) == ("0", "23")


@pytest.mark.slow
def test_two_processes_lower_and_compile_one_program(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    monkeypatch.setenv("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "gloo")
    program = (
        _STEP
        + """
    step, state, batch = lowered("llama")
    compiled = step.compile()
    print(json.dumps([
        len(jax.devices()), jax.local_device_count(), digest(step),
        str(sharded_programs.measured(compiled.as_text())),
        float(compiled(state, batch)[0]),
    ]))
    """
    )
    first, second = together(program, str(tmp_path / "one"), str(tmp_path / "other"))
    assert first == second and first[:2] == [8, 4]
    assert " 23 kernels, 0 left" in first[3]
    alone = json.loads(
        run_python(
            _STEP
            + """
    program = sharded_programs.PROGRAMS["llama"]()
    print(float(sharded_programs.alone(program.step, program)()[0]))
    """
        )
    )
    assert first[4] == pytest.approx(alone, rel=1e-5)
