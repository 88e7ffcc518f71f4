"""A laptop: no GPU, and neither cuda-bindings nor NVRTC. What is explained there."""

from __future__ import annotations

import json
import os

import pytest
from processes import run_python

from tracea_jax import device, knowledge
from tracea_jax.tuning.store.environment import environment

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
    from tracea_jax import ops
    from tracea_jax.runtime import nvrtc

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
    print(json.dumps({
        "missing": nvrtc.why_unavailable(),
        "measured": told(layer, "H200", *measured),
        "H100": told(layer, "H100", *measured),
        "ours": told(layer, "H200", *large, implementation="tracea"),
        "cpu": told(layer, "cpu", *measured),
    }))
"""


def on_a_laptop(program: str) -> str:
    return run_python(LAPTOP + program)


@pytest.fixture(scope="module")
def laptop():
    return json.loads(on_a_laptop(PROGRAM))


def test_no_compiler_is_needed_to_tell_what_a_gpu_elsewhere_runs(laptop):
    assert "cuda-bindings is not installed" in laptop["missing"]
    assert laptop["measured"]["variant"] == "gemm_sm90"
    assert laptop["measured"]["origin"] == "shipped"
    assert laptop["H100"]["origin"] == "inherited"
    assert laptop["ours"]["variant"] == "gemm_sm90"
    assert laptop["ours"]["config"]["tile_m"] >= 64
    assert laptop["cpu"]["variant"] == "xla"


@pytest.mark.nvrtc
def test_a_machine_with_a_compiler_says_the_same(laptop):
    there = json.loads(run_python(PROGRAM))
    assert there.pop("missing") is None and laptop["missing"]
    assert there == {name: laptop[name] for name in there}


def test_what_is_compiled_here_needs_a_compiler_here():
    program = """
    import jax
    import tracea_jax as tracea
    from tracea_jax import device, dispatch

    problem = tracea.GemmProblem(m=8192, n=8192, k=8192, lhs="bfloat16",
                                 rhs="bfloat16", out="bfloat16")
    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    with tracea.options(device="H200"):
        tracea.explain(tracea.ops.matmul, device="H200")(x, x)
        plan = dispatch.plan(problem, device.named("H200"))
        exported = jax.export.export(jax.jit(tracea.ops.matmul), platforms=["cuda"])
        text = exported(x, x).mlir_module()
    print(plan)
    print("custom calls:", text.count("tracea"))
    """
    out = on_a_laptop(program)
    assert "8192 bfloat16 nn: xla" in out
    assert "gemm_sm90, gemm_sm80: cuda-bindings is not installed; pip install" in out


def test_a_gpu_elsewhere_is_assumed_to_have_the_compiler_of_the_shipped_answers():
    out = on_a_laptop("""
    from tracea_jax import device
    from tracea_jax.tuning.store.environment import environment

    print(environment(device.named("H200")).key)
    """)
    assert out.strip() in os.listdir(knowledge.SHIPPED)
    assert environment(device.named("A100")).driver  # is assumed of any
