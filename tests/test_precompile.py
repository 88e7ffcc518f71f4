"""Kernels of a program are compiled in processes before their calls are lowered."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import pytest
from numerics import normal

import tracea_jax as tracea
from tracea_jax import precompile
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.tuning.lab import compile_pool

ARGS = normal(256, 192), normal(192, 320), normal(192, 320), normal(320, 64)


@pytest.fixture(autouse=True)
def two_processes(monkeypatch):
    monkeypatch.setattr(compile_pool, "default_workers", lambda: 2)
    monkeypatch.setattr(cubins, "_memory", {})


def program(x, up, gate, down):
    """A gated product and one of other operand types: two kernels at least."""
    x, up, gate, down = (a.astype(jnp.bfloat16) for a in (x, up, gate, down))
    y = jax.nn.silu(x @ gate) * (x @ up)
    return y @ down, jnp.tanh(y.astype(jnp.float32) @ down.astype(jnp.float32))


def lowered(**settings):
    with tracea.options(device="H100", implementation="tracea", **settings):
        traced = jax.jit(tracea.transform(program)).trace(*ARGS)
        return traced.lower(lowering_platforms=("cuda",)).as_text()


def ended():
    """Waits for the threads that end the processes."""
    for thread in threading.enumerate():
        if thread.daemon and thread.name.endswith("(close)"):
            thread.join()


@pytest.mark.nvrtc
def test_processes_compile_what_the_cache_lacks(monkeypatch, cache_dir):
    submitted = []
    submit = compile_pool.CompilePool.submit

    def noted(self, kernel):
        submitted.append(nvrtc.key(kernel))
        return submit(self, kernel)

    monkeypatch.setattr(compile_pool.CompilePool, "submit", noted)
    with monkeypatch.context() as here:
        here.setattr(nvrtc, "compile", None)  # only others compile
        first = lowered()
    assert first.count("kernel_key") == len(submitted) == len(set(submitted)) >= 2
    stored = {file.stem for file in cache_dir.rglob("*.cubin")}
    assert stored == set(submitted)
    ended()
    cubins._memory.clear()
    assert lowered() == first
    assert len(submitted) == len(stored), "nothing is compiled twice"


@pytest.mark.nvrtc
def test_lowering_compiles_what_processes_cannot(monkeypatch, tmp_path):
    expected = lowered()
    ended()
    monkeypatch.setattr(cubins, "_memory", {})

    class Broken(compile_pool.Worker):
        def __init__(self, *args, **kwargs):
            raise OSError("no process can be started")

    monkeypatch.setattr(compile_pool, "Worker", Broken)
    assert lowered(cache_dir=tmp_path) == expected
    ended()
    assert not cubins._expected


@pytest.mark.parametrize("settings", [{}, {"device": "cpu"}])
def test_programs_of_cpus_start_no_process(monkeypatch, settings):
    def never(*args, **kwargs):
        raise AssertionError("a pool")

    monkeypatch.setattr(precompile, "CompilePool", never)
    with tracea.options(**settings):
        jax.jit(tracea.transform(program)).lower(*ARGS)
