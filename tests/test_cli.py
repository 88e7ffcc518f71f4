"""The tracea command: its output, and its errors for wrong arguments."""

from __future__ import annotations

import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import pytest
from commands import nodes, run
from processes import run_forked

import tracea_jax as tracea
from tracea_jax import cli
from tracea_jax.cli import functions, problems
from tracea_jax.device import local_cpu
from tracea_jax.explain import explain
from tracea_jax.runtime import nvrtc
from tracea_jax.tuning import tuner

pytestmark = pytest.mark.once


def parsed(arguments: str):
    words = arguments.split()
    return cli._parser(words).parse_args(words)


def test_doctor(capsys, cache_dir):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    titles = [line for line in out.splitlines() if line and not line.startswith(" ")]
    cpu = local_cpu().name
    called = ["channel_sums", "group_norm", "max_pool"]
    called += ["matmul", "gated_matmul", "conv2d"]
    called += ["attention", "paged_attention", "elementwise", "cuda_kernel"]
    ops = [f"{op} on {cpu}" for op in called]
    models = "models that choose unmeasured"
    emitted = "kernels that nothing here runs (tracea emit)"
    before = ["versions", "devices", "toolchain"]
    assert titles == [*before, *ops, models, emitted, "caches"]
    assert "gemm_cpu: runs float32, bfloat16, float16" in out
    refused = "cannot run; it runs on NVIDIA GPUs; the device is cpu"
    matmuls = out[out.index(f"\nmatmul on {cpu}") : out.index("\ngated_matmul on")]
    assert matmuls.count(refused) == 1
    assert re.search(rf"gemm_sm90, .*gemm_sm80.*: {refused}", matmuls)
    assert f"directory: {cache_dir} (writable, as a test file showed)" in out
    assert re.search(r"tuned problems: 0\b", out) and "on a miss: heuristic" in out


def test_doctor_tells_how_to_get_a_compiler(capsys, monkeypatch):
    why = "cuda-bindings is not installed; pip install 'tracea_jax[cuda13]'"
    monkeypatch.setattr(nvrtc, "why_unavailable", lambda: why)
    assert f"NVRTC: {why}" in run(capsys, "doctor")[1]


def test_tune_then_list(capsys):
    tuning = "tune matmul 64 64 64 --effort quick --budget-s 2"
    status, out, err = run(capsys, *tuning.split())
    assert (status, err) == (0, "")  # this is no terminal
    choice = r"matmul 64x64x64 float32 nn: (gemm_cpu \[.*\]|xla), \d+\.\d+ us.*"
    first, *_, last = out.splitlines()
    assert re.fullmatch(choice, first)
    assert re.fullmatch(
        r"  untuned .* us, \d+ of \d+ configs? tried, .* ended by: .*", last
    )
    assert "matmul 64x64x64 float32 nn" in run(capsys, "cache", "list")[1]


def test_tune_takes_the_whole_problem(capsys):
    status, out, _ = run(
        capsys,
        *("tune", "matmul", "8", "16", "24", "--batch", "3", "--layout", "nt"),
        *("--dtype", "bfloat16", "--out", "float32", "--precision", "highest"),
        *("--bias", "--activation", "gelu", "--residual", "--effort", "none"),
        *("--budget-s", "0.5", "--seed", "7", "--goal", "throughput"),
    )
    assert status == 0
    problem = "matmul 3x8x16x24 bfloat16->float32 nt bias+gelu+residual highest: "
    assert out.startswith(problem)


QUICKLY = ("--effort", "none", "--budget-s", "0.5")


def test_tune_prints_and_logs_plain_data(capsys, tmp_path):
    log = tmp_path / "log.jsonl"
    how = (*QUICKLY, "--json", "--log", str(log))
    status, out, _ = run(capsys, "tune", *how, "matmul", "8", "16", "24")
    data = json.loads(out)
    assert status == 0 and data["effort"] == "none"
    assert data["rows"][0]["text"] == "matmul 8x16x24 float32 nn"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert {line["problem"]["m"] for line in lines} == {8}
    assert "xla" in {line["variant"] for line in lines}


def test_options_may_stand_before_and_after_the_problem(capsys, tuned_calls):
    for line in (
        "tune --effort quick --seed 3 matmul 8 8 8 --portfolio 0.02",
        "tune matmul 8 8 8 --effort quick --seed 3 --portfolio 0.02",
    ):
        assert run(capsys, *line.split())[0] == 0
    (first, how), (second, same) = tuned_calls
    assert first == second and nodes(first) == [(1, "matmul 8x8x8 float32 nn")]
    assert how == same
    assert (how["effort"], how["seed"], how["portfolio"]) == ("quick", 3, 0.02)
    assert (how["goal"], how["budget_s"], how["log"]) == ("latency", None, None)


def test_a_file_of_problems_is_tuned(capsys, tuned_calls, tmp_path):
    path = tmp_path / "problems.txt"
    gated = tracea.GatedMatmulProblem(m=8, n=16, k=24)
    path.write_text(
        "# of a model\n"
        "matmul 8 16 24 --dtype bfloat16 --bias  # the first layer\n"
        "\n"
        "attention 1 8 8 2 4 --causal --count 3\n"
        f"{json.dumps(gated.to_json())}\n"
        f"{json.dumps({**gated.to_json(), 'count': 4})}\n"
        "matmul 8 16 24 --dtype bfloat16 --bias\n"
    )
    assert run(capsys, "tune", "--file", str(path))[0] == 0
    ((graph, _),) = tuned_calls
    assert nodes(graph) == [
        (2, "matmul 8x16x24 bfloat16 nn bias"),
        (3, "attention 1x8x8 heads 2 dim 4 float32 causal"),
        (5, "gated_matmul 8x16x24 float32 nn silu"),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sort 8 8", "line 2: .*invalid choice: 'sort'"),
        ("conv2 8 8", r"line 2: .*; did you mean 'conv2d'\?"),
        ("matmul 8 8", "line 2: .*required: K"),
        ("matmul 8 8 8 --colour red", "line 2: unrecognized arguments: --colour red"),
        ("matmul 8 8 8 --dtype float33", "line 2: dtype 'float33' is unknown to JAX"),
        ("matmul 8 8 '8", "line 2: No closing quotation"),
        ('{"op": "matmul", "m": 8}', "line 2: .*missing.*'n'"),
        ('{"op": "sort"}', "line 2: op 'sort' must be one of matmul"),
        ("{op: matmul}", "line 2: .*property name"),
        pytest.param('{"op":' * 99_999, "line 2: .*recursion depth", id="deep"),
    ],
)
def test_a_line_that_is_no_problem_is_named(
    capsys, tuned_calls, tmp_path, line, message
):
    path = tmp_path / "problems.txt"
    path.write_text(f"matmul 8 8 8\n{line}\n")
    status, out, err = run(capsys, "tune", "--file", str(path))
    assert (status, out, tuned_calls) == (1, "", [])
    assert re.fullmatch(f"tracea: {re.escape(str(path))}, {message}.*\n", err)


def test_drawing_needs_matplotlib_before_any_work(capsys, tuned_calls, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, *"tune matmul 8 8 8 --plot a.png".split())
    assert (status, tuned_calls) == (1, [])
    assert "needs matplotlib" in err and "pip install 'tracea_jax[bench]'" in err
    status, _, err = run(capsys, *"tune matmul 8 8 8 --plot a.txt".split())
    assert status == 1 and "'a.txt' must end in one of .pdf, .png, .svg" in err


def test_a_drawing_that_cannot_be_written_fails_before_any_work(capsys, tuned_calls):
    line = "tune missing_module:step --plot nowhere/a.png"
    status, _, err = run(capsys, *line.split())
    assert (status, tuned_calls) == (1, [])
    assert "no file can be written there" in err and "nowhere/a.png" in err


def test_a_file_without_problems_is_an_error(capsys, tuned_calls, tmp_path):
    path = tmp_path / "problems.txt"
    path.write_text("# none\n")
    status, _, err = run(capsys, "tune", "--file", str(path))
    assert status == 1 and f"{path} has nothing to tune" in err
    path.write_bytes(b"\xff")
    status, _, err = run(capsys, "tune", "--file", str(path))
    assert status == 1 and f"{path} is no text in UTF-8" in err
    status, _, err = run(capsys, "tune", "--file", str(tmp_path / "missing"))
    assert status == 1 and "No such file" in err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "gated_matmul 8 16 24 --dtype bfloat16 --layout nt",
            "gated_matmul 8x16x24 bfloat16 nt silu",
        ),
        (
            "gated_matmul 8 16 24 --batch 3 --activation gelu --out float32",
            "gated_matmul 3x8x16x24 float32 nn gelu",
        ),
        (
            "attention 2 16 24 4 8 --kv-heads 2 --causal --dtype bfloat16",
            "attention 2x16x24 heads 4/2 dim 8 bfloat16 causal",
        ),
        (
            "attention 1 16 16 4 8 --saves-lse",
            "attention 1x16x16 heads 4 dim 8 float32 &lse",
        ),
        (
            "attention 1 16 16 4 8 --direction backward",
            "attention 1x16x16 heads 4 dim 8 float32 backward",
        ),
        (
            "conv2d 2 9 8 6 3 3 16 --stride 2x1 --padding valid --groups 2",
            "conv2d 2x9x8x6 * 3x3x16 float32 nhwc stride 2x1 groups 2",
        ),
        (
            "conv2d 2 8 8 6 3 3 16 --bias --activation relu --residual --layout NCHW",
            "conv2d 2x8x8x6 * 3x3x16 float32 nchw pad 1,1x1,1 bias+relu+residual",
        ),
        (
            "conv2d 2 8 8 6 3 3 16 --padding 2 --dilation 2 --direction weight_grad",
            "conv2d 2x8x8x6 * 3x3x16 float32 nhwc weight_grad pad 2,2x2,2 dilation 2x2",
        ),
        (
            "elementwise divide 1000 --dtype complex64 --scalar left",
            "elementwise divide 1000 complex64 left scalar",
        ),
    ],
)
def test_every_op_has_problems(arguments, problem):
    args = parsed(f"tune {arguments}")
    assert str(problems.problem_of(args)) == problem
    # No argument of the op is taken for one of the command.
    assert args.called is args.file is None


def test_the_command_tunes_what_the_op_asks():
    args = parsed("tune attention 2 16 24 4 8 --causal")
    x, y = (jax.ShapeDtypeStruct((2, n, 4, 8), "float32") for n in (16, 24))
    (site,) = explain(tracea.ops.attention)(x, y, y, is_causal=True).sites
    assert problems.problem_of(args) == site.problem


def test_another_op_is_tuned_and_listed(capsys):
    how = "--effort none --budget-s 0.3"
    status, out, _ = run(capsys, "tune", *f"attention 1 8 8 2 4 {how}".split())
    assert status == 0 and out.startswith("attention 1x8x8 heads 2 dim 4 float32: ")
    line, *_ = out.splitlines()
    # The cache spells configs out, as they may be of another version.
    answer = line.partition(" [")[0]
    assert answer in run(capsys, "cache", "list")[1]


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("i32[]", (), "int32"),
        ("bool[2,3]", (2, 3), "bool"),
        ("u8[5]", (5,), "uint8"),
        ("bfloat16[7]", (7,), "bfloat16"),
        ("float8_e4m3fn[0]", (0,), "float8_e4m3fn"),
    ],
)
def test_shapes_as_text(text, shape, dtype):
    found = functions.parse(text)
    assert (found.shape, found.dtype.name) == (shape, dtype)


def test_an_empty_cache_is_listed(capsys, cache_dir):
    status, out, err = run(capsys, "cache", "list")
    assert (status, out) == (0, "") and f"0 tuned problems in {cache_dir}" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "required: COMMAND"),
        (("dance",), "invalid choice: 'dance'"),
        (("doctr",), "; did you mean 'doctor'?"),
        (("cache", "lst"), "; did you mean 'list'?"),
        (("tune", "matmull", "8", "8", "8"), "; did you mean 'matmul'?"),
        (("cache",), "required: ACTION"),
        (("tune", "matmul", "64", "64"), "required: K"),
        (("tune", "matmul", "0", "64", "64"), "M: 0 must be an integer of at"),
        (("tune", "matmul", "64", "many", "64"), "N: many must be an integer"),
        (("tune", "conv", "64", "64", "64"), "invalid choice: 'conv'"),
        (("tune", "matmul", "8", "8", "8", "--layout", "xy"), "invalid choice: 'xy'"),
        (("tune",), "give one of OP, MODULE:FUNCTION and --file FILE"),
        (("tune", "--file", "x", "matmul", "8", "8", "8"), "give one of OP"),
        (("tune", "model:"), "invalid choice: 'model:'"),
        (("tune", "attention", "1", "8", "8", "2"), "required: HEAD_DIM"),
        (("tune", *"conv2d 1 8 8 4 3 3 4 --stride 1x2x3".split()), "1x2x3 must be a"),
        (("explain",), "required: MODULE:FUNCTION"),
    ],
)
def test_a_malformed_command_is_answered_with_usage(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "usage: tracea" in err and message in err


def test_the_help_names_every_command(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    commands = "doctor demo tune explain bench cache emit bundle config"
    assert all(re.search(rf"^ +{name} +\w", out, re.M) for name in commands.split())


def test_an_interrupted_tuning_shows_what_it_kept(capsys, monkeypatch):
    """Also where the search itself has caught Ctrl-C."""
    step = tuner.Tuning.step

    def interrupted(tuning, **limits):
        step(tuning, **limits)
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner.Tuning, "step", interrupted)
    line = "tune matmul 24 16 8 --effort quick"
    status, out, err = run(capsys, *line.split())
    assert (status, err) == (130, "") and "ended by: interrupted" in out
    assert "matmul 24x16x8" in run(capsys, "cache", "list")[1]


def test_an_interrupted_command_has_its_own_status(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("tracea_jax.cli.problems.problem_of", interrupted)
    found = run(capsys, *"tune matmul 8 8 8".split())
    assert found == (130, "", "tracea: interrupted\n")


def test_a_gradient_takes_no_epilogue(capsys):
    gradient = "conv2d 1 8 8 4 3 3 4 --direction input_grad --bias".split()
    status, _, err = run(capsys, "tune", *gradient)
    assert status == 1 and "a gradient takes no bias" in err


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
    assert err == (
        "tracea: on_miss='sometimes'; it must be one of heuristic, tune, error (set by "
        "the variable TRACEA_ON_MISS)\n"
    )


def test_the_version_is_that_of_the_installed_package(capsys):
    version = importlib.metadata.version("tracea_jax")
    assert run(capsys, "--version") == (0, f"tracea_jax {version}\n", "")


def test_the_version_does_not_wait_for_jax(tmp_path):
    root = pathlib.Path(__file__).parent.parent
    (tmp_path / "tracea_command").symlink_to(root / "tracea_command")
    program = (
        "import sys, tracea_command; sys.argv = ['tracea', '--version']; "
        "status = tracea_command.main(); "
        "print(status, {'jax', 'numpy', 'tracea_jax'} & {*sys.modules})"
    )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    version = importlib.metadata.version("tracea_jax")
    assert found.stdout == f"tracea_jax {version}\n0 set()\n"
    settings = tomllib.loads((root / "pyproject.toml").read_text())
    assert settings["project"]["scripts"] == {"tracea": "tracea_command:main"}


def test_the_module_is_the_command():
    program = """
        import runpy, sys
        sys.argv = ["tracea", "cache", "list"]
        try:
            runpy.run_module("tracea_jax", run_name="__main__")
        except SystemExit as e:
            print("status", e.code)
    """
    assert run_forked(program) == "status 0\n"
