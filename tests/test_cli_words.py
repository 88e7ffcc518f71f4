"""The words of the command line: help, short names of dtypes, and hints in errors."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import tracea_jax as tracea
from tracea_jax import catalogue, cli
from tracea_jax.cli import functions, problems


def err_of(capsys, *arguments: str) -> str:
    """The error message of a command that fails, without the usage."""
    try:
        status = cli.main(arguments)
    except SystemExit as e:
        status = e.code
    err = capsys.readouterr().err
    assert status in (1, 2), err
    return err


# --- help -----------------------------------------------------------------------------


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """The parser of ``tune`` and those of the ops below it, by name."""
    top = cli._parser(["tune"])
    (commands,) = (a.choices for a in top._actions if isinstance(a.choices, dict))
    tune = commands["tune"]
    yield "tune", tune
    (ops,) = (a.choices for a in tune._actions if isinstance(a.choices, dict))
    yield from ops.items()


@pytest.mark.parametrize("name", ["tune", *catalogue.names()])
def test_every_argument_has_a_help(name):
    for action in dict(parsers())[name]._actions:
        assert action.help or isinstance(action.choices, dict), action.dest


@pytest.mark.parametrize("op", catalogue.names())
def test_the_help_of_an_option_names_its_default(op):
    parser = dict(parsers())[op]
    text = " ".join(parser.format_help().split())
    defaults = {
        a.flag: a.how["default"]
        for a in catalogue.get(op).arguments
        if a.how.get("default") not in (None, False)
    }
    assert "(default float32)" in text and "(default latency)" in text
    for flag, default in defaults.items():
        shown = "1x1" if default == (1, 1) else default
        found = re.search(rf" {flag} \S+ [^()]*\(default {shown}\)", text)
        assert found, (flag, text)


def test_the_help_of_sizes(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["tune", "matmul", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert " M rows of the left operand" in out
    assert " N columns of the right operand" in out
    assert " K columns of the left operand, which are summed over" in out


# --- dtypes ---------------------------------------------------------------------------

SHORT = {
    "bf16": "bfloat16",
    "BF16": "bfloat16",
    "f16": "float16",
    "fp16": "float16",
    "half": "float16",
    "f32": "float32",
    "fp32": "float32",
    "fp8": "float8_e4m3fn",
    "e4m3": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "f8_e4m3fn": "float8_e4m3fn",
    "f8e4m3fn": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "f8e5m2": "float8_e5m2",
    "bfloat16": "bfloat16",
}


@pytest.mark.parametrize(("short", "dtype"), SHORT.items())
def test_short_names_of_dtypes(short, dtype):
    words = ["tune", "matmul", "8", "4", "16", "--dtype", short, "--out", "bf16"]
    args = cli._parser(words).parse_args(words)
    problem = problems.problem_of(args)
    assert isinstance(problem, tracea.GemmProblem)
    assert (problem.lhs, problem.rhs, problem.out) == (dtype, dtype, "bfloat16")
    graph = tracea.Graph()
    graph.add_matmul(8, 4, 16, dtype=short, out="bf16")
    assert [node.problem for node in graph] == [problem]
    assert functions.parse(f"{short}[3]").dtype == np.dtype(dtype)


def test_a_command_takes_a_short_name(capsys):
    command = "tune matmul 16 16 16 --dtype bf16 --effort none --budget-s 1"
    assert cli.main(command.split()) == 0
    assert "matmul 16x16x16 bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "meant"), [("bfloat", "bfloat16"), ("flaot32", "float32"), ("xyz", None)]
)
def test_an_unknown_dtype_names_others(capsys, wrong, meant):
    err = err_of(capsys, "tune", "matmul", "8", "8", "8", "--dtype", wrong)
    assert f"dtype '{wrong}' is unknown to JAX; it is a name such as float32" in err
    assert ("did you mean" in err) == (meant is not None)
    assert meant is None or f"did you mean '{meant}'?" in err


def test_sizes_may_be_integers_of_numpy():
    graph = tracea.Graph()
    graph.add_matmul(*np.array([8, 4, 16]))
    assert [node.problem for node in graph] == [tracea.GemmProblem(m=8, n=4, k=16)]


# --- functions ------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "words_model", raising=False)
    (tmp_path / "words_model.py").write_text(
        "import jax.numpy as jnp\n"
        "number = jnp.ones((64, 64))\n"
        "def step(x, w):\n    return x @ w\n"
    )
    (tmp_path / "words_broken.py").write_text("def step(:\n")
    (tmp_path / "words_raises.py").write_text("raise RuntimeError('no weights')\n")


@pytest.mark.parametrize("command", ["explain", "tune"])
@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "words_model.py:step",
            "names a file; write MODULE:FUNCTION: words_model:step",
        ),
        ("./words_model.py:step", "names a file; .*: words_model:step\n"),
        ("models/vit.py:step", "names a file; .*: models.vit:step\n"),
        ("/models/vit.py:step", "names a file; write MODULE:FUNCTION\n"),
        ("words_model:stepp", "has no 'stepp'; did you mean 'step'"),
        ("words_model:number", r"is no function: an array float32\[64,64\]\n"),
        ("words_modle:step", "cannot import 'words_modle'"),
        (
            "words_broken:step",
            "SyntaxError.*module 'words_broken' cannot be imported\n",
        ),
        ("words_raises:step", "no weights.*module 'words_raises' cannot be imported"),
    ],
)
def test_a_function_that_is_not_there(capsys, model, command, target, message):
    assert re.search(f"(?s){message}", err_of(capsys, command, target))


def test_a_file_without_a_function(capsys, model):
    err = err_of(capsys, "explain", "words_model.py")
    assert "names a file; write MODULE:FUNCTION: words_model:FUNCTION" in err


@pytest.mark.parametrize("between", [" ", ",", ", "])
def test_shapes_may_be_separated_by_commas(capsys, model, between):
    shapes = between.join(("f32[8,16]", "f32[16,4]"))
    assert cli.main(["explain", "words_model:step", "--args", shapes]) == 0
    assert "matmul 8x4x16 float32" in capsys.readouterr().out
