"""explain shows the choice and the reason that lowering has for a site."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tracea_jax as tracea
from tracea_jax import _compat_cudnn, _compat_partition, device, serving
from tracea_jax.explain import explain
from tracea_jax.explain.sites import Site, sites
from tracea_jax.ops import attention, conv2d, matmul
from tracea_jax.options import current, device_for
from tracea_jax.problem import GemmProblem
from tracea_jax.runtime import cubins, nvrtc
from tracea_jax.serving import Request, serve
from tracea_jax.variants import Inline, kernels_in
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

pytestmark = pytest.mark.once

H200 = device.NAMED["H200"]
OURS = re.compile(r"@tracea_\w+_v1|@__cudnn")


def arrays(*shapes: tuple[Any, ...], dtype: str = "float32", **how: Any) -> list:
    return [jax.ShapeDtypeStruct(shape, dtype, **how) for shape in shapes]


def site_of(f: Any, *args: Any, target: device.Device) -> Site:
    """The only site of a function, explained for a device."""
    (site,) = sites(jax.make_jaxpr(f)(*args), target, current())
    return site


def lowered(f: Any, *args: Any, platform: str = "cpu") -> str:
    traced = jax.jit(lambda *args: f(*args)).trace(*args)  # a new function every time
    return traced.lower(lowering_platforms=(platform,)).as_text()


def product(x, w, **how):
    return matmul(x, w, **how)


# --- where XLA serves -----------------------------------------------------------------


def test_symbolic_shapes():
    (rows,) = export.symbolic_shape("rows")
    args = arrays((rows, 8), (8, 8))
    (site,) = explain(product)(*args).sites
    assert (site.variant, site.reason) == ("xla", serving.SYMBOLIC)
    assert not OURS.search(lowered(product, *args))
    with tracea.options(implementation="tracea"):
        (site,) = explain(product)(*args).sites
        with pytest.raises(tracea.Unsupported) as refused:
            lowered(product, *args)
    assert site.variant is None and site.reason == str(refused.value)


def test_partitioned_arrays(monkeypatch):
    monkeypatch.setattr(_compat_partition, "why_not", lambda: "it is gone")
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    args = arrays((8, 8), (8, 8), sharding=NamedSharding(mesh, P("d")))
    (site,) = explain(product)(*args).sites
    assert (site.variant, site.reason) == ("xla", serving.PARTITIONED)
    assert not OURS.search(lowered(product, *args))
    with tracea.options(implementation="gemm_cpu"):
        (site,) = explain(product)(*args).sites
        with pytest.raises(tracea.Unsupported) as refused:
            lowered(product, *args)
    assert site.variant is None and site.reason == str(refused.value)


def test_arrays_that_a_rule_splits():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    args = arrays((8, 8), (8, 8), sharding=NamedSharding(mesh, P("d")))
    with tracea.options(implementation="gemm_cpu"):
        (site,) = explain(product)(*args).sites
    assert site.variant == "gemm_cpu" and site.reason.startswith(serving.SPLIT)
    with tracea.options(implementation="xla"):
        (site,) = explain(product)(*args).sites
    assert site.variant == "xla" and serving.SPLIT not in site.reason


def test_a_platform_without_kernels():
    args = arrays((8, 8), (8, 8))
    site = site_of(product, *args, target=device_for("tpu"))
    assert site.variant == "xla"
    assert site.reason == "there are no kernels for tpu (tpu)"
    assert not OURS.search(lowered(product, *args, platform="tpu"))


@pytest.mark.parametrize("how", [{}, {"implementation": "tracea"}])
def test_a_case_that_no_kernel_takes(how):
    def f(x, w):
        return product(x, w, **how)

    args = arrays((8, 8), (8, 8), dtype="int32")
    site = site_of(f, *args, target=device_for("cpu"))
    if how:
        with pytest.raises(tracea.Unsupported) as refused:
            lowered(f, *args)
        assert site.variant is None and site.reason == str(refused.value)
        return
    assert (site.variant, site.reason) == ("xla", "no other variant can run it")
    assert not OURS.search(lowered(f, *args))


def test_where_the_plan_is_xla_or_ours(calls_cost):
    for shapes in (((33, 65), (65, 129)), ((256, 256), (256, 256))):
        args = arrays(*shapes)
        site = site_of(product, *args, target=device_for("cpu"))
        assert (site.variant != "xla") == bool(OURS.search(lowered(product, *args)))


def test_a_library_that_is_not_there(monkeypatch, without_models):
    args = arrays((2, 256, 4, 64), (2, 256, 2, 64), (2, 256, 2, 64), dtype="bfloat16")

    def demanded(*args):
        return attention(*args, implementation="cudnn")

    with tracea.options(device="H200"):
        assert site_of(attention, *args, target=H200).variant == "cudnn"
        assert OURS.search(lowered(attention, *args, platform="cuda"))
        monkeypatch.setattr(_compat_cudnn, "unavailable", lambda: "it is on holiday")
        site = site_of(attention, *args, target=H200)
        with pytest.warns(UserWarning, match="attention .*left to XLA: it is on hol"):
            assert not OURS.search(lowered(attention, *args, platform="cuda"))
        assert site.variant == "xla"
        assert site.reason == "cudnn was chosen and cannot run: it is on holiday"
        site = site_of(demanded, *args, target=H200)
        with pytest.raises(tracea.Unsupported) as refused:
            lowered(demanded, *args, platform="cuda")
        assert site.variant is None and site.reason == str(refused.value)


@pytest.mark.nvrtc
def test_a_kernel_that_did_not_compile_before():
    problem = GemmProblem(
        m=64, n=64, k=64, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    config = GEMM_SM90.heuristic(problem, H200)
    (kernel,) = kernels_in(GEMM_SM90.call(problem, config, H200))
    args = arrays((64, 64), (64, 64), dtype="bfloat16")
    cubins._memory.clear()  # another test may have compiled this very kernel

    def ours(x, w):
        return product(x, w, implementation="gemm_sm90")

    def given(x, w):
        return product(x, w, config=config)

    with tracea.options(device="H200"):
        assert site_of(ours, *args, target=H200).variant == "gemm_sm90"
        failure = "the assembler gave up\nline 1"
        cubins.record_failure(current().directory, kernel, "compile_error", failure)
        site = site_of(ours, *args, target=H200)
        with pytest.warns(UserWarning, match="left to XLA: the assembler gave up"):
            assert not OURS.search(lowered(ours, *args, platform="cuda"))
        assert site.variant == "xla" and site.plan is None
        assert "gemm_sm90 was chosen and cannot run: the assembler" in site.reason
        assert "line 1" not in site.reason
        site = site_of(given, *args, target=H200)
        with pytest.raises(nvrtc.CompileError, match="the assembler gave up") as e:
            lowered(given, *args, platform="cuda")
        assert site.variant is None and site.reason == str(e.value)


@pytest.mark.nvrtc
def test_a_failure_counts_only_as_long_as_the_kernel_is_missing(tmp_path):
    problem = GemmProblem(
        m=64, n=64, k=64, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    config = GEMM_SM90.heuristic(problem, H200)
    (kernel,) = kernels_in(GEMM_SM90.call(problem, config, H200))
    cubins._memory.clear()
    own, shared = tmp_path / "own", tmp_path / "shared"
    assert cubins.known_failure(kernel, own) is None
    cubins.record_failure(own, kernel, "timeout", "it took too long")
    known = cubins.known_failure(kernel, own, (shared,))
    assert known is not None and known.kind == "timeout"
    assert cubins.known_failure(kernel, None) is None
    cubins.get_or_compile(kernel, shared)
    cubins._memory.clear()
    assert cubins.known_failure(kernel, own, (shared,)) is None


# --- what else decides ----------------------------------------------------------------


def test_a_default_that_is_another_ops_variant_demands_nothing():
    (rows,) = export.symbolic_shape("rows")
    x, w = arrays((rows, 8, 8, 4), (3, 3, 4, 4))
    with tracea.options(implementation="gemm_cpu"):
        (site,) = explain(conv2d)(x, w).sites
        assert (site.variant, site.reason) == ("xla", serving.SYMBOLIC)
        assert not OURS.search(lowered(conv2d, x, w))


def test_a_plan_that_is_an_error_is_lowerings_error():
    args = arrays((8, 8), (8, 8))
    with tracea.options(on_miss="error"):
        site = site_of(product, *args, target=device_for("cpu"))
        with pytest.raises(LookupError) as missed:
            lowered(product, *args)
    assert site.variant is None and site.reason == missed.value.args[0]


def test_nothing_is_compiled_unless_it_is_asked_for(monkeypatch):
    def never(*args):
        raise AssertionError("explain compiles nothing")

    monkeypatch.setattr(cubins, "get_or_compile", never)
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: None)
    request = Request(
        op="matmul",
        problem=GemmProblem(
            m=4096, n=4096, k=4096, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
        ),
        implementation="gemm_sm90",
        config=None,
    )
    found = serve(request, H200)
    assert found.variant == "gemm_sm90" and found.cubins == ()
    assert len(kernels_in(found.call)) == 1 and not found.is_xla
    error = serve(request, H200, compiles=True).error
    assert isinstance(error, AssertionError), error


def test_whose_equations_run():
    """XLA's own rule runs what people write; a variant's rule runs the variant's."""

    def written(x, w):
        return jax.nn.silu(x @ w) * (x @ w)

    def ours(x, w):
        return tracea.ops.gated_matmul(x, w, w, implementation="gated_unfused")

    x, w = jnp.ones((16, 24)), jnp.ones((24, 8))
    request = Request(
        op="matmul",
        problem=GemmProblem(m=16, n=8, k=24),
        implementation="xla",
        config=None,
    )
    assert serve(request, device_for("cpu")).call == Inline(rule="xla")
    with tracea.options(implementation="xla"):
        text = lowered(tracea.transform(written), x, w)
    assert not OURS.search(text) and text.count("stablehlo.dot_general") == 2
    text = lowered(ours, x, w)
    assert len(OURS.findall(text)) == 2 and "dot_general" not in text
