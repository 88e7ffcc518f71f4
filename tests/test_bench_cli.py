"""tracea bench: tables, data and pictures from the command line."""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import sys
import textwrap

import pytest
from processes import run_forked
from report_ratios import checked_text

from tracea_jax import cli
from tracea_jax.device import local_cpu

pytestmark = pytest.mark.once

MODULE = importlib.import_module("tracea_jax.bench")
MODEL = """
    import jax, jax.numpy as jnp

    def step(x, w):
        return jax.nn.relu(x @ w)

    def step_args():
        return jnp.ones((16, 8)), jnp.ones((8, 8))

    def fails(x):
        raise RuntimeError("as models do")
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(textwrap.dedent(MODEL))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("model", None)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["bench", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_function_is_timed_from_the_command_line(capsys, model, quick):
    status, out, err = run(capsys, "model:step", "--budget-s", "3")
    head, *lines = out.splitlines()
    assert status == 0 and head == f"step on {local_cpu()}"
    (whole,) = [line for line in lines if line.startswith("whole program: ")]
    assert whole.startswith("whole program: plain ") and "against itself" in whole
    assert checked_text(out) <= 3
    assert "matmul 16x8x8 float32 nn relu" in out
    assert err.splitlines() == [
        "1/2 whole program",
        "2/2 matmul 16x8x8 float32 nn relu",
    ]
    shapes = ("--args", "f32[4,6]", "f32[6,5]")
    assert "matmul 4x5x6 float32 nn relu" in run(capsys, "model:step", *shapes)[1]
    assert "no sites" in run(capsys, "model:step", "--ops", "conv2d")[1]


@pytest.mark.parametrize("budget", ["0", "-1", "nan"])
def test_a_budget_that_is_no_time_is_refused(capsys, model, budget):
    status, out, err = run(capsys, "model:step", "--budget-s", budget)
    assert (status, out) == (1, "") and "must be positive seconds" in err


def test_the_data_and_the_picture_are_written(capsys, model, quick):
    files = ("--json", "found.json", "--plot", "found.png")
    status, out, err = run(capsys, "model:step", *files)
    assert status == 0 and err.endswith("written: found.json\ndrawn: found.png\n")
    data = json.loads(pathlib.Path("found.json").read_text())
    assert data["function"] == "step" and data["whole"]["timed"]["ratio"] > 0
    (site,) = data["sites"]
    assert site["text"] == "matmul 16x8x8 float32 nn relu" and site["count"] == 1
    assert site["timed"]["ours_us"] > 0 and site["variant"] in out
    assert pathlib.Path("found.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("model:step --plot missing/a.png", ".*'missing/a.png'"),
        ("model:step --json missing/a.json", ".*'missing/a.json'"),
        ("model:step --json .", ".*Is a directory.*"),
        ("model:step --plot a.txt", "'a.txt' must end in one of .*"),
        ("model:stop", r"module 'model' has no 'stop'; did you mean 'step'\?"),
        ("models:step", "there is no module 'models', in .* or else"),
        ("model:step --ops sort", "ops=.*sort.* must be some of .*"),
    ],
)
def test_what_cannot_be_done_is_one_line_before_any_work(
    capsys, model, monkeypatch, arguments, message
):
    monkeypatch.setattr(MODULE, "measured", None)
    status, out, err = run(capsys, *arguments.split())
    assert (status, out) == (1, "")
    assert re.fullmatch(f"tracea: {message}\n", err)
    assert [path.name for path in model.iterdir() if path.suffix != ".py"] in (
        [],
        ["__pycache__"],
    )


def test_a_picture_needs_matplotlib_before_any_work(capsys, model, monkeypatch):
    monkeypatch.setattr(MODULE, "measured", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, _, err = run(capsys, "model:step", "--plot", "a.png")
    assert status == 1
    assert "needs matplotlib" in err and "pip install 'tracea_jax[bench]'" in err


def test_an_error_of_the_function_shows_where_it_is(capsys, model):
    status, _, err = run(capsys, "model:fails", "--args", "f32[8]")
    assert status == 1 and "model.py" in err and "RuntimeError: as models do" in err
    assert err.endswith("tracea: model:fails cannot be traced\n")


def test_importing_the_package_imports_no_matplotlib():
    program = """
        import sys
        import tracea_jax as tracea
        tracea.bench, tracea.BenchReport
        import tracea_jax.bench.plot
        print("matplotlib" in sys.modules)
    """
    assert run_forked(program) == "False\n"
