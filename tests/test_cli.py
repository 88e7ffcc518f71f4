"""The tracea command: what it prints, and what it answers to mistakes."""

from __future__ import annotations

import io
import json
import re
import sys
import textwrap

import jax
import pytest
from processes import run_python

import tracea_jax as tracea
from tracea_jax import cli
from tracea_jax.cli import functions, problems
from tracea_jax.device import local_cpu
from tracea_jax.explain import explain
from tracea_jax.runtime import nvrtc


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
    ops = [f"{op} on {cpu}" for op in ("matmul", "gated_matmul", "conv2d", "attention")]
    assert titles == ["versions", "devices", "toolchain", *ops, "caches"]
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
    ],
)
def test_every_op_has_problems(arguments, problem):
    args = cli._parser().parse_args(["tune", *arguments.split()])
    assert str(problems.problem_of(args)) == problem


def test_the_command_tunes_what_the_op_asks():
    args = cli._parser().parse_args("tune attention 2 16 24 4 8 --causal".split())
    x, y = (jax.ShapeDtypeStruct((2, n, 4, 8), "float32") for n in (16, 24))
    (site,) = explain(tracea.ops.attention)(x, y, y, is_causal=True).sites
    assert problems.problem_of(args) == site.problem


def test_another_op_is_tuned_and_listed(capsys):
    how = "--effort none --budget-s 0.3"
    status, out, _ = run(capsys, "tune", *f"attention 1 8 8 2 4 {how}".split())
    assert status == 0 and out.startswith("attention 1x8x8 heads 2 dim 4 float32: xla")
    assert out in run(capsys, "cache", "list")[1]


MODEL = """
    import jax, jax.numpy as jnp

    def step(x, w):
        with jax.named_scope("layer"):
            return jax.nn.relu(x @ w)

    def step_args():
        return jax.ShapeDtypeStruct((16, 8), jnp.bfloat16), jnp.ones((8, 8), "bfloat16")

    def free():
        return jnp.ones((8, 8)) @ jnp.ones((8, 8))

    def plain(x):
        return x @ x

    class Model:
        @staticmethod
        def apply(x):
            return x @ x

    def fails(x):
        raise ValueError("as models do")

    number = 3
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    """A module of the user's in the current directory."""
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "broken.py").write_text("import surely_not_installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("model", "broken"):
        sys.modules.pop(name, None)


def test_explain(capsys, model):
    status, out, err = run(capsys, "explain", "model:step")
    assert (status, err) == (0, "")
    assert out.startswith(f"step on {local_cpu()}\n1 site: 1 matmul; of ")
    assert "\nlayer\n  matmul 16x8x8 bfloat16 nn relu\n" in out
    assert "\n    not gemm_sm90: " in out


def test_explain_takes_shapes(capsys, model):
    shapes = ("--args", "f32[4,6]", "f32[6,5]")
    status, out, _ = run(capsys, "explain", "model:step", *shapes)
    assert status == 0 and "matmul 4x5x6 float32 nn relu" in out
    out = run(capsys, "explain", "model:Model.apply", "--args", "bf16[3,3]")[1]
    assert "matmul 3x3x3 bfloat16" in out
    assert "matmul 8x8x8 float32" in run(capsys, "explain", "model:free")[1]
    out = run(capsys, "explain", "model:step", "--ops", "conv2d")[1]
    assert "no sites" in out


def test_explain_for_another_device_as_data(capsys, model):
    status, out, _ = run(capsys, "explain", "model:step", "--device", "H200", "--json")
    data = json.loads(out)
    assert status == 0 and data["device"]["name"] == "NVIDIA H200"
    (site,) = data["sites"]
    assert site["scope"] == "layer" and site["problem"]["m"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("model", "'model' must be MODULE:FUNCTION, such as model:step"),
        ("models:step", "there is no module 'models', in .* or else"),
        ("broken:step", "module 'broken' cannot be imported: No module named 'surely"),
        ("model:stop", "module 'model' has no 'stop'"),
        ("model:number", "model:number is no function: 3"),
        ("model:plain", r"model:plain takes arguments: .*--args .* plain_args\(\)"),
        ("model:step --args f32(8,8)", "'f32\\(8,8\\)' must be a dtype with sizes"),
        ("model:step --args f33[8]", "dtype 'float33' is unknown to JAX"),
        ("model:step --args f64[8]", "float64 arrays need .* JAX_ENABLE_X64=1"),
        ("model:step --device B200", "'B200' is no device; .* cpu, H200"),
        ("model:step --ops sort", "ops=.*sort.* must be some of"),
    ],
)
def test_what_cannot_be_explained_is_one_line(capsys, model, arguments, message):
    status, out, err = run(capsys, "explain", *arguments.split())
    assert (status, out) == (1, "")
    assert re.fullmatch(f"tracea: .*{message}.*\n", err)


def test_an_error_of_the_model_shows_where_it_is(capsys, model):
    status, _, err = run(capsys, "explain", "model:fails", "--args", "f32[8]")
    assert status == 1 and "model.py" in err and "ValueError: as models do" in err
    assert err.endswith("tracea: model:fails cannot be traced\n")


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
        (("cache",), "required: ACTION"),
        (("tune", "matmul", "64", "64"), "required: K"),
        (("tune", "matmul", "0", "64", "64"), "M: 0 must be at least 1"),
        (("tune", "matmul", "64", "many", "64"), "N: invalid _positive value: 'many'"),
        (("tune", "conv", "64", "64", "64"), "invalid choice: 'conv'"),
        (("tune", "matmul", "8", "8", "8", "--layout", "xy"), "invalid choice: 'xy'"),
        (("tune",), "required: OP"),
        (("tune", "attention", "1", "8", "8", "2"), "required: HEAD_DIM"),
        (("tune", *"conv2d 1 8 8 4 3 3 4 --stride 1x2x3".split()), "1x2x3 must be a"),
        (("explain",), "required: MODULE:FUNCTION"),
    ],
)
def test_a_malformed_command_is_answered_with_usage(capsys, arguments, message):
    status, _, err = run(capsys, *arguments)
    assert status == 2 and "usage: tracea" in err and message in err


def test_a_gradient_takes_no_epilogue(capsys):
    gradient = "conv2d 1 8 8 4 3 3 4 --direction input_grad --bias".split()
    status, _, err = run(capsys, "tune", *gradient)
    assert status == 1 and "a gradient takes no --bias" in err


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
