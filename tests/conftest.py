"""Fixtures of all tests: isolation from the user's settings, devices, and markers."""

from __future__ import annotations

import dataclasses
import functools
import gc
import importlib
import os
import pathlib
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

# Two processes of tests would compete for the processors with the threads of BLAS.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import hypothesis
import jax
import pytest

# `python -m pytest` puts the source tree first on the path; the installed package is
# meant, whose compiled extension the source tree does not have.
_ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != _ROOT]

# Only TRACEA_CPU_ISA may reach the tests, so that they can be run for every ISA.
for _name in list(os.environ):
    if _name.startswith("TRACEA_") and _name != "TRACEA_CPU_ISA":
        del os.environ[_name]
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

# Several CPU devices, for sharding; programs that do not shard use the first.
jax.config.update("jax_num_cpu_devices", 8)

# A busy machine is no failure, and examples that failed belong into the tests.
hypothesis.settings.register_profile("tracea", deadline=None, database=None)
hypothesis.settings.load_profile("tracea")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--compile",
        action="store_true",
        help="compile all CUDA kernels, and write the record of those that are clean",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Only ``-m gpu`` uses a GPU; all other tests are about CPUs, also where one is."""
    expression = config.option.markexpr
    if "gpu" not in expression or "not gpu" in expression:
        os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
        jax.config.update("jax_platforms", "cpu")
        # Compiling takes most of the time, and what XLA makes of the code around our
        # calls is not tested here. JAX's own tests do the same.
        if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
            jax.config.update("jax_disable_most_optimizations", True)
            os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # for those processes
            if jax.__version_info__ < (0, 11):  # newer ones have no choice of emitters
                flags = os.environ.get("XLA_FLAGS", "")
                fast = "--xla_cpu_use_fusion_emitters=false"  # compiles twice as fast
                os.environ["XLA_FLAGS"] = f"{flags} {fast}".strip()
    else:
        flags = os.environ.get("XLA_FLAGS", "")
        untuned = "--xla_gpu_autotune_level=0"  # XLA's programs are references
        os.environ["XLA_FLAGS"] = f"{flags} {untuned}".strip()
    _compile_once(config)
    if config.getoption("--compile"):
        if hasattr(config, "workerinput"):
            raise pytest.UsageError("--compile writes one record: it goes without -n")
        vars(importlib.import_module("compiled"))["is_recording"] = True


def _compile_once(config: pytest.Config) -> None:
    """A program that an earlier test of this process compiled is read, not compiled.

    JAX's own cache in a directory of this process: JAX does not write it so that others
    could read meanwhile. A program names its kernels by their hashes, so that no test
    finds what another kernel was compiled to.
    """
    directory = tempfile.mkdtemp()
    config.add_cleanup(functools.partial(shutil.rmtree, directory))
    jax.config.update("jax_compilation_cache_dir", directory)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.getoption("--compile") and exitstatus == pytest.ExitCode.OK:
        importlib.import_module("compiled").write_record()


def pytest_collection_finish() -> None:
    """Exempts loaded objects from garbage collection, which JAX keeps busy."""
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def cache_dir(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> pathlib.Path:
    """The cache of this test and of the processes it starts: its own, and empty."""
    directory = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(directory))
    return directory


@pytest.fixture
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each directory that is not trusted is warned of, also if an earlier test was."""
    from tracea_jax.runtime import trust

    monkeypatch.setattr(trust, "_warned", set())


@pytest.fixture
def public() -> Iterator[pathlib.Path]:
    """A directory that other users can reach."""
    path = pathlib.Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """Imports a module of the benchmarks, which import each other by name."""
    monkeypatch.syspath_prepend(_ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def calls_only() -> Iterator[None]:
    """Programs hold calls of our ops alone, not the user's equations beside them.

    For tests of what becomes a call: XLA would run what the user wrote in its place.
    """
    from tracea_jax.ops.common.choice import without_choices

    with without_choices():
        yield


@pytest.fixture
def our_attention(monkeypatch: pytest.MonkeyPatch, calls_only: None) -> None:
    """Attention that XLA would compute as fast keeps primitives of ours: seen here."""
    from tracea_jax.ops.attention import primitives

    monkeypatch.setattr(primitives, "_left_to_xla", lambda *_, **__: False)


@pytest.fixture
def small_chunks(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Cross entropies in chunks of eight columns, as if tiny logits were many."""
    from losses import ROWS

    from tracea_jax.ops.linear_cross_entropy import chunks

    if "large_chunks" not in request.fixturenames:
        monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * ROWS * 8)
        monkeypatch.setattr(chunks, "_ALIGNMENT", 8)


@pytest.fixture
def large_chunks() -> None:
    """As in programs: see ``small_chunks``."""


@pytest.fixture(autouse=True)
def calls_are_free(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiny problems run our kernels, which is what most tests of them are about.

    Otherwise XLA would be tested in their place. Tests of what a call costs ask for
    ``calls_cost``.
    """
    from tracea_jax.variants import cpu_calls

    if "calls_cost" not in request.fixturenames:
        monkeypatch.setattr(cpu_calls, "CALL_NS", 0.0)


@pytest.fixture
def calls_cost() -> None:
    """As in programs: see ``calls_are_free``."""


@pytest.fixture(autouse=True)
def races_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunings measure for milliseconds, in place of seconds: no test is about times."""
    for module, name, short in _short_timings():
        monkeypatch.setattr(module, name, short)


@functools.cache  # every test asks
def _short_timings() -> list[tuple[types.ModuleType, str, Any]]:
    """(module, name of its timing or of the class of timings, short one)."""
    from tracea_jax.campaign import races
    from tracea_jax.tuning import measure, tuner
    from tracea_jax.tuning.lab import local

    bench = importlib.import_module("tracea_jax.bench")  # not the function
    fields = {"slice_s": 1e-3, "settle_s": 0.02, "race_s": 0.05, "patience_s": 0.2}
    fields["cold_s"] = 0.02
    short = functools.partial(measure.Timing, **fields)
    timings = ((races, "TIMING"), (bench, "TIMING"), (bench, "SITE_TIMING"))
    return [
        *((module, "Timing", short) for module in (tuner, local)),
        *(
            (module, name, dataclasses.replace(getattr(module, name), **fields))
            for module, name in timings
        ),
    ]


@pytest.fixture(scope="session")
def c_programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The directory of programs in C and C++ that run bundles: ``capi_programs``."""
    from capi_programs import built

    return built(tmp_path_factory.mktemp("capi"))


@pytest.fixture
def mlp_bundle(tmp_path: pathlib.Path) -> pathlib.Path:
    from bundle_programs import PROGRAMS

    import tracea_jax as tracea

    fn, x, implementation = PROGRAMS["mlp"]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "mlp.tracea")
    return tmp_path / "mlp.tracea"


@pytest.fixture
def tuned_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(graph, arguments) of each call of ``tune``, which measures nothing."""
    from tracea_jax import campaign
    from tracea_jax.campaign import report
    from tracea_jax.device import local_cpu

    calls = []

    def noted(what, *args, ops=None, after_grad=False, **how):
        graph = campaign.graph_of(what, args, ops=ops, after_grad=after_grad)
        calls.append((graph, how))
        return report.TuneReport(
            device=local_cpu(), goal="latency", effort="none", seed=0, rows=()
        )

    monkeypatch.setattr(sys.modules["tracea_jax.campaign"], "tune", noted)
    return calls


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tunings follow a script, the fixture: see ``scripted_tunings``."""
    from scripted_tunings import Scripts

    from tracea_jax import knowledge

    scripts = Scripts()
    monkeypatch.setattr(knowledge, "tuning", scripts.tuning)
    monkeypatch.setattr(knowledge, "open_lab", scripts.open_lab)
    return scripts


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches of functions take real times, of so few runs that they mean nothing."""
    from tracea_jax.tuning.measure import Timing

    bench = importlib.import_module("tracea_jax.bench")
    timing = Timing(slice_s=1e-4, settle_s=1e-3, rounds=3, max_rounds=3, race_s=1e-3)
    monkeypatch.setattr(bench, "TIMING", timing)
    monkeypatch.setattr(bench, "SITE_TIMING", timing)


@pytest.fixture
def optimizations() -> Iterator[None]:
    """XLA as in programs: what it does not fuse needs more memory than any of them."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def without_models(monkeypatch):
    """Rules decide, as on a device for which no model ships."""
    monkeypatch.setattr("tracea_jax.policy.covering", lambda problem, device: None)


@pytest.fixture
def hopper():
    """The GPU that JAX uses; the test is skipped unless gemm_sm90 runs there."""
    from tracea_jax.options import device_for

    device = device_for("cuda")
    if device.arch != "sm_90a":
        pytest.skip(f"{device} is not of the architecture that gemm_sm90 needs")
    return device


def pytest_runtest_setup(item: pytest.Item) -> None:
    needs = {mark.name for mark in item.iter_markers()}
    if "nvrtc" in needs and (why := _no_nvrtc()):
        pytest.skip(why)
    if "gpu" in needs and not _has_gpu():
        pytest.skip("needs an NVIDIA GPU and pytest -m gpu")


@functools.cache
def _no_nvrtc() -> str | None:
    from tracea_jax.runtime import nvrtc

    return nvrtc.why_unavailable()


@functools.cache
def _has_gpu() -> bool:
    try:
        return bool(jax.devices("gpu"))
    except RuntimeError:  # no such backend
        return False
