"""Settings: from the environment and from ``with``, and how they reach jitted code."""

from __future__ import annotations

import pathlib
import re
import threading
from typing import Any

import jax
import pytest
from numerics import normal
from processes import run_python

import tracea_jax as tracea
from tracea_jax.ops import matmul
from tracea_jax.options import Options, current, from_environment, publish_epoch


def test_defaults():
    assert from_environment({}) == Options()
    assert Options().on_miss == "heuristic" and Options().implementation is None


def test_the_environment_sets_every_option():
    given = {
        "TRACEA_ON_MISS": "error",
        "TRACEA_IMPLEMENTATION": "tracea",
        "TRACEA_DEVICE": "A100",
        "TRACEA_CACHE_DIR": "/somewhere",
        "TRACEA_CACHE_PATH": "/shared:/more",
        "TRACEA_CUBIN_LIMIT": "1000000",
        "TRACEA_CPU_ISA": "avx2",  # belongs to the device profile
        "TRACEA_LOG": "info",  # of the process
        "HOME": "/root",
    }
    assert from_environment(given) == Options(
        on_miss="error",
        implementation="tracea",
        device="A100",
        cache_dir="/somewhere",
        cache_path="/shared:/more",
        cubin_limit=1_000_000,
    )
    assert from_environment({"TRACEA_DEVICE": ""}) == Options()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("TRACEA_ON_MISS", "tuning", "on_miss='tuning'.*heuristic, tune, error"),
        ("TRACEA_DEVICE", "H900", "device='H900'.*H200, H100, A100"),
        (
            "TRACEA_IMPLEMENTATION",
            "cublas",
            "implementation='cublas'.*tracea, .*gemm_cpu, .*gemm_sm90, .*xla",
        ),
        ("TRACEA_CUBIN_LIMIT", "2 GiB", "'2 GiB' must be a number of bytes"),
        ("TRACEA_LOG", "warning", "TRACEA_LOG='warning' must be one of info, debug"),
        ("TRACEA_CACHEDIR", "/x", "TRACEA_CACHEDIR is no setting.*TRACEA_CACHE_DIR"),
    ],
)
def test_a_wrong_variable_names_the_valid_ones(variable, value, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        from_environment({variable: value})
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        matmul(normal(2, 2), normal(2, 2))


def test_a_wrong_option_names_the_valid_ones():
    wrong: Any = {"on_miss": "never"}
    unknown: Any = {"colour": "red"}
    with (
        pytest.raises(ValueError, match="on_miss='never'.*heuristic, tune, error"),
        tracea.options(**wrong),
    ):
        pass
    with pytest.raises(TypeError, match="colour"), tracea.options(**unknown):
        pass


def test_options_nest_and_end():
    with tracea.options(on_miss="error") as outer:
        with tracea.options(implementation="xla") as inner:
            assert (
                current()
                == inner
                == Options(
                    on_miss="error", implementation="xla", cache_dir=outer.cache_dir
                )
            )
        assert current() == outer
        with pytest.raises(RuntimeError), tracea.options(implementation="tracea"):
            raise RuntimeError
        assert current() == outer
    assert current() == from_environment()


def test_options_belong_to_their_thread():
    seen = []
    with tracea.options(implementation="xla"):
        thread = threading.Thread(target=lambda: seen.append(current().implementation))
        thread.start()
        thread.join()
    assert seen == [None]


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Options().directory == tmp_path / "xdg" / "tracea_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Options().directory == pathlib.Path.home() / ".cache" / "tracea_jax"
    (tmp_path / ".tracea").mkdir()
    assert Options().directory == tmp_path / ".tracea"
    assert Options(cache_dir="elsewhere").directory == pathlib.Path("elsewhere")


# --- jitted functions -----------------------------------------------------------------


def counting():
    """A jitted product and the list that grows with each of its traces."""
    traces = []

    @jax.jit
    def f(a, b):
        traces.append(current())
        return matmul(a, b)

    return f, traces


def test_other_options_trace_again_and_the_same_do_not():
    f, traces = counting()
    a, b = normal(3, 3), normal(3, 3)

    def is_ours():
        return "tracea_cpu_gemm_v1" in f.lower(a, b).as_text()

    assert is_ours() and len(traces) == 1
    for _ in range(2):
        with tracea.options(implementation="xla"):
            assert not is_ours()
        with tracea.options(implementation="gemm_cpu"):
            assert is_ours()
    assert is_ours()
    assert [t.implementation for t in traces] == [None, "xla", "gemm_cpu"]


def test_an_argument_outranks_the_option():
    a = normal(3, 3)
    with tracea.options(implementation="xla"):
        f = jax.jit(lambda a: matmul(a, a, implementation="gemm_cpu"))
        assert "tracea_cpu_gemm_v1" in f.lower(a).as_text()


def test_a_published_epoch_traces_again_in_every_thread():
    f, traces = counting()
    a, b = normal(3, 3), normal(3, 3)
    f(a, b)
    publish_epoch()
    thread = threading.Thread(target=f, args=(a, b))
    thread.start()
    thread.join()
    assert len(traces) == 2
    f(a, b)
    assert len(traces) == 2


def test_tuning_reaches_a_function_that_is_already_jitted():
    f, traces = counting()
    a, b = normal(16, 24), normal(24, 8)
    first = f(a, b)
    tracea.tune(tracea.GemmProblem(m=16, n=8, k=24), effort="none", budget_s=0.5)
    with tracea.options(on_miss="error"):  # there is an answer now
        second = f(a, b)
    assert abs(first - second).max() < 1e-5
    f(a, b)
    assert len(traces) == 3


# --- the package ----------------------------------------------------------------------


def test_functions_are_not_shadowed_by_modules_of_their_name():
    program = """
        import tracea_jax as tracea
        import tracea_jax.options, tracea_jax.campaign
        import tracea_jax.diagnosis, tracea_jax.doctor
        from tracea_jax.options import Options
        from tracea_jax import ops

        with tracea.options(on_miss="error") as options:
            assert options == Options(on_miss="error", cache_dir=options.cache_dir)
        assert callable(tracea.tune) and callable(tracea.doctor)
        assert tracea.ops is ops and "ops" in dir(tracea) and "Plan" in dir(tracea)
        for name in dir(tracea):
            getattr(tracea, name)
        try:
            tracea.nothing
        except AttributeError as e:
            print(e)
    """
    assert "no attribute 'nothing'" in run_python(program)


def test_the_version_is_the_packages():
    import importlib.metadata

    assert tracea.__version__ == importlib.metadata.version("tracea_jax")
    assert re.fullmatch(r"\d+\.\d+\.\d+", tracea.__version__)
