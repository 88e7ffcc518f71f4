"""matmul in several processes: export, compilation cache, kernels, tuned answers."""

from __future__ import annotations

import json
import re
import sys

import jax
import numpy as np
import pytest
from jax import export
from numerics import exact, normal
from processes import run_forked, run_python

import tracea_jax as tracea
from tracea_jax.ops import export_checks, matmul

# --- programs that are serialised -----------------------------------------------------


def block(x, w, bias):
    return matmul(x, w, bias=bias, activation="gelu")


def block_arguments():
    return normal(6, 5), normal(5, 4), normal(4)


def exported(f, *shapes, **how):
    return export.export(jax.jit(f), disabled_checks=export_checks(), **how)(*shapes)


def test_an_exported_program_runs_in_a_new_process(tmp_path):
    args = block_arguments()
    with tracea.options(implementation="gemm_cpu"):
        program = exported(block, *args, platforms=["cpu"])
        gradients = exported(jax.grad(lambda *a: block(*a).sum(), (0, 1, 2)), *args)
        without_list = export.export(jax.jit(block), platforms=["cpu"])(*args)
    assert without_list.mlir_module() == program.mlir_module()
    assert "tracea_cpu_gemm_v1" in program.mlir_module()
    (tmp_path / "program").write_bytes(program.serialize())
    (tmp_path / "gradients").write_bytes(gradients.serialize())
    np.savez(tmp_path / "args.npz", *args)
    run_forked(
        """
        import pathlib, sys
        import numpy as np
        import tracea_jax
        from jax import export

        here = pathlib.Path(sys.argv[1])
        args = np.load(here / "args.npz").values()
        results = []
        for name in "program", "gradients":
            program = export.deserialize(bytearray((here / name).read_bytes()))
            results.append(program.call(*args))
        np.savez(here / "results.npz", results[0], *results[1])
        """,
        str(tmp_path),
    )
    y, *found = np.load(tmp_path / "results.npz").values()
    exact(*args, "gelu").assert_near(y)
    expected = jax.grad(lambda *a: jax.nn.gelu(a[0] @ a[1] + a[2]).sum(), (0, 1, 2))(
        *args
    )
    for x, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(x, wanted, rtol=1e-5, atol=1e-5)


def test_symbolic_shapes_are_left_to_xla():
    b, k = export.symbolic_shape("b, k")
    shapes = (
        jax.ShapeDtypeStruct((b, 3, k), "float32"),
        jax.ShapeDtypeStruct((k, 4), "float32"),
        jax.ShapeDtypeStruct((4,), "float32"),
    )
    program = exported(block, *shapes)
    assert "tracea_cpu_gemm" not in program.mlir_module()
    for size in (1, 2, 5):
        args = normal(size, 3, size + 1), normal(size + 1, 4), normal(4)
        exact(*args, "gelu").assert_near(program.call(*args))
    with pytest.raises(tracea.Unsupported, match="'gemm_cpu'.*the shapes are symbolic"):
        exported(lambda *a: matmul(*a[:2], implementation="gemm_cpu"), *shapes)


# --- JAX's persistent compilation cache -----------------------------------------------

_CACHED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from tracea_jax.ops import matmul

    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=(24, 24)).astype("float32") for _ in range(2))
    small = dict(kc=8, nc=16, tasks=1)
    programs = {
        "relu": (dict(activation="relu"), np.maximum(a @ b, 0)),
        "twice": (dict(residual=a @ b, config=small), 2 * (a @ b)),
        "bias": (dict(bias=b[0]), a @ b + b[0]),
        "none": (dict(config=small), a @ b),
    }
    for name in sys.argv[1:]:
        arguments, expected = programs[name]
        f = jax.jit(lambda a, b: matmul(a, b, implementation="gemm_cpu", **arguments))
        np.testing.assert_allclose(f(a, b), expected, rtol=1e-4, atol=1e-4)
    print(sum(event == "/jax/compilation_cache/cache_hits" for event in hits))
"""


def test_the_compilation_cache_never_gives_another_kernel(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first = run_python(_CACHED, "relu", "twice", "bias", "none", **settings)
    second = run_python(_CACHED, "none", "bias", "twice", "relu", **settings)
    assert (int(first), int(second)) == (0, 4)


# --- CUDA kernels, lowered without a GPU ----------------------------------------------

_LOWERED = """
    import json, re, sys
    import jax, jax.numpy as jnp
    import tracea_jax as tracea
    from tracea_jax.runtime import nvrtc

    compiled = []
    compile = nvrtc.compile
    nvrtc.compile = lambda kernel: compiled.append(kernel.entry) or compile(kernel)
    operations = {
        "product": dict(),
        "gelu": dict(activation="gelu"),
        "residual": dict(residual=jnp.zeros((256, 384), jnp.bfloat16)),
    }
    x = jax.ShapeDtypeStruct((256, 512), "bfloat16")
    w = jax.ShapeDtypeStruct((512, 384), "bfloat16")
    keys = {}
    for name in sys.argv[1:]:
        def f(x, w):
            return tracea.ops.matmul(x, w, **operations[name])
        with tracea.options(device="H200", implementation="gemm_sm90"):
            text = jax.jit(f).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        (keys[name],) = re.findall(r'kernel_key = "([0-9a-f]{64})"', text)
    print(json.dumps({"keys": keys, "compiled": len(compiled)}))
"""


@pytest.mark.nvrtc
def test_kernels_have_one_identity_in_all_processes(tmp_path):
    """A second process compiles nothing, unless its cache is elsewhere."""
    first = json.loads(run_python(_LOWERED, "product", "gelu", "residual"))
    second = json.loads(run_python(_LOWERED, "gelu", "product"))
    elsewhere = {"TRACEA_CACHE_DIR": str(tmp_path)}
    alone = json.loads(run_python(_LOWERED, "residual", "product", **elsewhere))
    assert len(set(first["keys"].values())) == 3
    assert second["keys"].items() < first["keys"].items()
    assert alone["keys"].items() < first["keys"].items()
    assert [x["compiled"] for x in (first, second, alone)] == [3, 0, 2]


@pytest.mark.nvrtc
def test_an_exported_program_carries_its_kernels():
    args = (
        jax.ShapeDtypeStruct((64, 64), "bfloat16"),
        jax.ShapeDtypeStruct((64, 128), "bfloat16"),
        jax.ShapeDtypeStruct((128,), "bfloat16"),
    )
    with tracea.options(device="H200", implementation="tracea"):
        program = exported(block, *args, platforms=["cuda", "cpu"])
    text = program.mlir_module()
    assert "tracea_cpu_gemm_v1" in text and "tracea_cuda_launch_v1" in text
    assert re.search(r'cubin = "[A-Za-z0-9+/=]{1000,}"', text)
    # The other half of the program runs here.
    values = [normal(*x.shape, dtype=x.dtype) for x in args]
    again = export.deserialize(program.serialize())
    exact(*values, activation="gelu").assert_near(again.call(*values))


# --- tuned answers --------------------------------------------------------------------


def test_a_second_process_finds_the_tuned_answer():
    problem = tracea.GemmProblem(m=16, n=24, k=8)
    entry = tracea.tune(problem, effort="none", budget_s=1).entry
    plan = run_forked(
        """
        import tracea_jax as tracea
        from tracea_jax.dispatch import plan
        from tracea_jax.options import device_for
        found = plan(tracea.GemmProblem(m=16, n=24, k=8), device_for("cpu"))
        print(found.origin, found.variant, found.time_us)
        """
    )
    time_us, _ = entry.best.decisive
    assert plan.split() == ["tuned", entry.best.variant, str(time_us)]


# --- importing ------------------------------------------------------------------------


def test_importing_the_package_imports_little():
    program = """
        import sys
        import jax
        before = set(sys.modules)
        import tracea_jax
        print(*(set(sys.modules) - before))
    """
    loaded = set(run_python(program).split())
    assert {"tracea_jax", "tracea_jax._native"} <= loaded
    roots = {name.partition(".")[0] for name in loaded - set(sys.stdlib_module_names)}
    assert not roots & {"scipy", "hypothesis", "cuda", "numpy", "matplotlib"}
    assert "tracea_jax.ops" not in loaded and "tracea_jax.tuning" not in loaded
