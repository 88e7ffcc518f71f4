"""A laptop: no GPU, and neither cuda-bindings nor NVRTC. What is explained there."""

from __future__ import annotations

import json
import os

import pytest
from processes import run_python

from tracea_jax import knowledge

pytestmark = pytest.mark.once

# As if nothing of the name "cuda" were installed.
LAPTOP = """
    import sys

    class NothingOfCuda:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "cuda":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NothingOfCuda())
"""
PROGRAM = """
    import json

    import jax
    import tracea_jax as tracea
    from tracea_jax import device, dispatch, ops
    from tracea_jax.runtime import nvrtc
    from tracea_jax.tuning.store.environment import environment

    def layer(x, w, r):
        return ops.matmul(x, w, residual=r)

    def struct(*shape):
        return jax.ShapeDtypeStruct(shape, "bfloat16")

    def told(fn, device, *args, **settings):
        with tracea.options(**settings):
            (site,) = tracea.explain(fn, device=device)(*args).to_json()["sites"]
        return {k: site[k] for k in ("variant", "config", "origin", "reason")}

    measured = struct(256, 4096), struct(4096, 4096), struct(256, 4096)
    large = struct(8192, 8192), struct(8192, 8192), struct(8192, 8192)
    told = {
        "missing": nvrtc.why_unavailable(),
        "measured": told(layer, "H200", *measured),
        "H100": told(layer, "H100", *measured),
        "ours": told(layer, "H200", *large, implementation="tracea"),
        "cpu": told(layer, "cpu", *measured),
        "environment": environment(device.named("H200")).key,
    }
    with tracea.options(device="H200"):
        (site,) = tracea.explain(layer)(*measured).sites
        plan = dispatch.plan(site.problem, device.named("H200"))
        exported = jax.export.export(jax.jit(layer), platforms=["cuda"])
        told["plan"] = str(plan)
        told["custom calls"] = exported(*measured).mlir_module().count("custom_call")
    print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def laptop():
    return json.loads(run_python(LAPTOP + PROGRAM))


def test_no_compiler_is_needed_to_tell_what_a_gpu_elsewhere_runs(laptop):
    assert "cuda-bindings is not installed" in laptop["missing"]
    assert laptop["measured"]["variant"] == "gemm_sm90"
    assert laptop["measured"]["origin"] == "shipped"
    assert laptop["H100"]["origin"] == "inherited"
    assert laptop["ours"]["variant"] == "gemm_sm90"
    assert laptop["ours"]["config"]["tile_m"] >= 64
    assert laptop["cpu"]["variant"] in ("xla", "gemm_cpu")


@pytest.mark.nvrtc
def test_a_machine_with_a_compiler_says_the_same(laptop):
    there = json.loads(run_python(PROGRAM))
    for name in ("measured", "H100", "ours", "cpu"):
        assert there[name] == laptop[name]
    assert there["missing"] is None
    assert "gemm_sm90 [" in there["plan"] and there["custom calls"] == 1


def test_what_is_compiled_here_needs_a_compiler_here(laptop):
    assert laptop["plan"].startswith("matmul 256x4096x4096 bfloat16 nn residual: xla")
    reason = "gemm_sm90, gemm_sm80: cuda-bindings is not installed; pip install"
    assert reason in laptop["plan"]
    assert laptop["custom calls"] == 0


def test_a_gpu_elsewhere_has_the_compiler_of_the_answers_that_ship(laptop):
    assert laptop["environment"] in os.listdir(knowledge.SHIPPED)
