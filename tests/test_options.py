"""Settings: from the environment and from ``with``, and how they reach jitted code."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
import re
import subprocess
import textwrap
import threading
from typing import Any

import jax
import pytest
from numerics import normal
from processes import forked, run_python

import tracea_jax as tracea
from tracea_jax.ops import matmul
from tracea_jax.options import Options, current, from_environment, publish_epoch

pytestmark = pytest.mark.once


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
        "TRACEA_DETERMINISTIC": "false",
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
        deterministic=False,
    )
    assert from_environment({"TRACEA_DEVICE": ""}) == Options()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "TRACEA_ON_MISS",
            "tuning",
            "on_miss='tuning'.*heuristic, tune, error.*set by .*TRACEA_ON_MISS",
        ),
        ("TRACEA_DEVICE", "H900", "device='H900'.*H200, H100, A100"),
        (
            "TRACEA_IMPLEMENTATION",
            "cublas",
            "implementation='cublas'.*tracea, .*gemm_cpu, .*gemm_sm90, .*xla",
        ),
        ("TRACEA_CUBIN_LIMIT", "2 GiB", "'2 GiB' must be a number of bytes"),
        ("TRACEA_LOG", "warning", "TRACEA_LOG='warning' must be one of info, debug"),
    ],
)
def test_a_wrong_variable_names_the_valid_ones(variable, value, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        from_environment({variable: value})
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        matmul(normal(2, 2), normal(2, 2))


def test_an_unknown_variable_is_warned_of_once_with_the_nearest_name():
    program = """
        import tracea_jax as tracea
        from tracea_jax import ops
        from tracea_jax.options import current

        x = __import__("jax").numpy.ones((3, 3))
        assert (ops.matmul(x, x) == 3).all()
        print(tracea.doctor(), current().implementation)
    """
    given = {"TRACEA_CACHEDIR": "/x", "TRACEA_ZZZ": "1", "TRACEA_IMPLEMENTATION": "xla"}
    result = subprocess.run(
        forked(textwrap.dedent(program), strict=False),
        env={**os.environ, **given},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("xla\n")
    warned = [line for line in result.stderr.splitlines() if "no setting" in line]
    assert len(warned) == 2
    assert "TRACEA_CACHEDIR is no setting" in warned[0]
    assert "did you mean 'TRACEA_CACHE_DIR'?" in warned[0]
    assert "TRACEA_ZZZ is no setting" in warned[1] and "TRACEA_CPU_ISA" in warned[1]
    assert "did you mean" not in warned[1]


def changed(**changes: Any) -> Any:
    """``options``, also with what it does not take."""
    return tracea.options(**changes)


def test_a_wrong_option_names_the_valid_ones():
    with pytest.raises(ValueError, match="on_miss='never'.*heuristic, tune, error"):
        changed(on_miss="never")
    with pytest.raises(ValueError, match="implementation='gemm_cp';.* mean 'gemm_cpu'"):
        changed(implementation="gemm_cp")
    with pytest.raises(TypeError, match="no setting 'colour'; .*on_miss, impl.*_limit"):
        changed(colour="red")
    with pytest.raises(TypeError, match="'on_mis'.*did you mean 'on_miss'"):
        changed(on_mis="tune")
    with pytest.raises(TypeError, match="cache_dir must be a path, not 3"):
        changed(cache_dir=3)
    with pytest.raises(TypeError, match="cache_path must be a path, not a list of 1"):
        changed(cache_path=["/shared"])
    for limit in ("2GiB", -1):
        with pytest.raises(ValueError, match=f"cubin_limit={limit!r} must be a number"):
            changed(cubin_limit=limit)


def test_directories_may_be_paths(tmp_path):
    with changed(cache_dir=tmp_path, cache_path=tmp_path / "more") as settings:
        assert settings.directory == tmp_path
        assert settings.shared == (tmp_path / "more",)
    assert settings == Options(
        cache_dir=str(tmp_path), cache_path=str(tmp_path / "more")
    )


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


def test_a_thread_takes_over_the_options_of_another():
    f, traces = counting()
    a, b = normal(3, 3), normal(3, 3)

    def inside(settings):
        f(a, b)  # as the environment says
        with tracea.options(**dataclasses.asdict(settings)):
            f(a, b)
            return current()

    with tracea.options(implementation="xla") as settings:
        f(a, b)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            assert pool.submit(inside, settings).result() == settings
    assert [t.implementation for t in traces] == ["xla", None]


def test_the_environment_is_for_all_threads(monkeypatch):
    seen = []
    monkeypatch.setenv("TRACEA_IMPLEMENTATION", "xla")
    thread = threading.Thread(target=lambda: seen.append(current().implementation))
    thread.start()
    thread.join()
    assert seen == ["xla"]


def test_the_cache_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Options().directory == tmp_path / "xdg" / "tracea_jax"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Options().directory == pathlib.Path.home() / ".cache" / "tracea_jax"
    (tmp_path / ".tracea").mkdir()
    assert Options().directory == tmp_path / ".tracea"
    assert Options(cache_dir="elsewhere").directory == tmp_path / "elsewhere"
    (tmp_path / ".tracea").rmdir()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its standard
    assert Options().directory == pathlib.Path.home() / ".cache" / "tracea_jax"


def test_a_program_that_goes_elsewhere_keeps_its_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "sub").mkdir()
    names = {"TRACEA_CACHE_DIR": "mine", "TRACEA_CACHE_PATH": "a::b/../c:/d:~/e"}
    before = from_environment(names)
    with changed(cache_dir="./told") as settings:
        monkeypatch.chdir("sub")
        assert current().directory == settings.directory == tmp_path / "told"
    assert before == from_environment(names)
    assert before.directory == tmp_path / "mine"
    ours = tmp_path / "a", tmp_path / "b/../c"
    assert before.shared == (*ours, pathlib.Path("/d"), tmp_path / "home" / "e")


def test_a_path_is_taken_as_it_is_where_the_working_directory_is_gone(
    tmp_path, monkeypatch
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert Options(cache_dir="mine").directory == pathlib.Path("mine")


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
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+)?", tracea.__version__)
