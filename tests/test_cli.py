"""The tracea command: what it prints, and what it answers to mistakes."""

from __future__ import annotations

import functools
import io
import re

import pytest
from processes import run_python

from tracea_jax import cli
from tracea_jax.device import local_cpu
from tracea_jax.runtime import nvrtc
from tracea_jax.tuning import measure


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    """(exit status, output, error output) of the command."""
    try:
        status = cli.main(arguments)
    except SystemExit as e:  # argparse
        assert isinstance(e.code, int)
        status = e.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_doctor(capsys, cache_dir):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    cpu = local_cpu().name
    assert titles == ["versions", "devices", "toolchain", f"matmul on {cpu}", "caches"]
    assert "gemm_cpu: runs float32, bfloat16, float16" in out
    assert "gemm_sm90: cannot run; it runs on NVIDIA GPUs" in out
    assert f"directory: {cache_dir} (writable)" in out
    assert re.search(r"tuned problems: 0\b", out) and "on a miss: heuristic" in out


def test_doctor_tells_how_to_get_a_compiler(capsys, monkeypatch):
    why = "cuda-bindings is not installed; pip install 'tracea_jax[cuda13]'"
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: why)
    assert f"NVRTC: {why}" in run(capsys, "doctor")[1]


def test_tune_then_list(capsys):
    tuning = (
        "tune",
        "matmul",
        "64",
        "64",
        "64",
        "--effort",
        "quick",
        "--budget-s",
        "2",
    )
    status, out, err = run(capsys, *tuning)
    assert status == 0
    assert re.fullmatch(
        r"matmul 64x64x64 float32 nn: (gemm_cpu \[.*\]|xla), \d+\.\d us.*\n", out
    )
    assert "done" in err.splitlines()[-1]
    assert run(capsys, "cache", "list")[1] == f"{local_cpu().name}: {out}"


def test_tune_takes_the_whole_problem(capsys):
    status, out, _ = run(
        capsys,
        *("tune", "matmul", "8", "16", "24", "--batch", "3", "--layout", "nt"),
        *("--dtype", "bfloat16", "--out", "float32", "--precision", "highest"),
        *("--bias", "--activation", "gelu", "--residual", "--effort", "none"),
        *("--budget-s", "0.5", "--seed", "7"),
    )
    assert status == 0
    problem = "matmul 3x8x16x24 bfloat16->float32 nt bias+gelu+residual highest: "
    assert out.startswith(problem)


def test_an_empty_cache_is_listed(capsys, cache_dir):
    status, out, err = run(capsys, "cache", "list")
    assert (status, out) == (0, "") and f"0 tuned problems in {cache_dir}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: COMMAND"),
        (("dance",), "invalid choice: 'dance'"),
        (("cache",), "required: ACTION"),
        (("tune", "matmul", "64", "64"), "required: K"),
        (("tune", "matmul", "0", "64", "64"), "M: 0 must be at least 1"),
        (("tune", "matmul", "64", "many", "64"), "N: invalid _positive value: 'many'"),
        (("tune", "conv", "64", "64", "64"), "invalid choice: 'conv'"),
        (("tune", "matmul", "8", "8", "8", "--layout", "xy"), "invalid choice: 'xy'"),
    ],
)
def test_a_malformed_command_is_answered_with_usage(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "usage: tracea" in err and message in err


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--activation", "swish"), "'swish' is unknown.*none, relu, gelu"),
        (("--effort", "heroic"), "effort='heroic' must be one of none, quick"),
        (("--budget-s", "-1"), "budget_s=-1.0 must be positive"),
        (("--dtype", "float99"), "dtype 'float99' is unknown to JAX"),
        (("--precision", "bogus"), "precision 'bogus' is unknown.*default, high"),
    ],
)
def test_a_wrong_value_is_one_line(capsys, option, message):
    status, out, err = run(capsys, "tune", "matmul", "8", "8", "8", *option)
    assert (status, out) == (1, "")
    assert re.fullmatch(f"tracea: .*{message}.*\n", err)


def test_a_wrong_variable_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("TRACEA_ON_MISS", "sometimes")
    status, _, err = run(capsys, "cache", "list")
    assert status == 1
    assert (
        err == "tracea: on_miss='sometimes'; it must be one of heuristic, tune, error\n"
    )


def test_demo(capsys, monkeypatch):
    from tracea_jax import demo

    sizes = demo.Sizes(tokens=24, width=16, hidden=32, dtype="float32")
    monkeypatch.setitem(demo.SIZES, "cpu", sizes)
    tune, tuned = demo.tune, []

    def briefly(problem, *, budget_s, **how):
        tuned.append((problem, budget_s))
        return tune(problem, **{**how, "effort": "none"}, budget_s=0.3)

    monkeypatch.setattr(demo, "tune", briefly)
    timing = functools.partial(measure.Timing, race_s=0.2)
    monkeypatch.setattr(demo.measure, "Timing", timing)
    status, out, _ = run(capsys, "demo", "--budget-s", "7")
    assert status == 0
    assert tuned == [(problem, 7.0) for problem in demo.problems(sizes)]
    assert "24 tokens, 16 -> 32, float32" in out and "(correct)" in out
    rows = [line for line in out.splitlines() if re.search(r" \d+\.\d\d  ", line)]
    names = [row.split("  ")[0] for row in rows]
    assert names == ["gelu(x@w1+b1)", "h@w2+b2+x", "block"]


def test_a_demo_that_computes_wrongly_fails(capsys, monkeypatch):
    from tracea_jax import demo

    def outcome(error):
        return demo.Outcome(
            device=local_cpu(),
            sizes=demo.SIZES["cpu"],
            rows=(),
            error=error,
            plain_error=1e-6,
        )

    monkeypatch.setattr(demo, "demo", lambda progress, budget_s: outcome(1.5e-6))
    assert run(capsys, "demo")[0] == 0
    monkeypatch.setattr(demo, "demo", lambda progress, budget_s: outcome(1e-3))
    status, out, _ = run(capsys, "demo")
    assert status == 1 and "(WRONG)" in out


def test_the_module_is_the_command():
    program = """
        import runpy, sys
        sys.argv = ["tracea", "cache", "list"]
        try:
            runpy.run_module("tracea_jax", run_name="__main__")
        except SystemExit as e:
            print("status", e.code)
    """
    assert run_python(program) == "status 0\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_is_one_line_that_changes():
    stream = Terminal()
    progress = cli.Progress(stream)
    for done, message in ((0, "a long message"), (1, "short")):
        progress._last_s = 0.0  # as if time had passed
        progress(phase="sweep", done=done, total=2, best_us=None, message=message)
    progress(phase="done", done=1, total=1, best_us=1.25, message="")
    progress.close()
    assert stream.getvalue().count("\n") == 1
    _, first, second, last = stream.getvalue().split("\r")
    assert first == "sweep 0/2, a long message"
    assert second == "sweep 1/2, short".ljust(len(first))  # covers what was there
    assert last.rstrip() == "done, best 1.2 us"


def test_progress_elsewhere_is_at_most_a_line_a_second():
    stream = io.StringIO()
    progress = cli.Progress(stream)
    for done in range(100):
        progress(phase="race", done=done, total=100, best_us=2.0, message="")
    progress.close()
    assert stream.getvalue().startswith("race 0/100, best 2.0 us\n")
    assert stream.getvalue().count("\n") < 50
