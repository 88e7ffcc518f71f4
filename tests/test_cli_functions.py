"""The tracea command on a user's functions: MODULE:FUNCTION is tuned and explained."""

from __future__ import annotations

import json
import re
import sys
import textwrap

import pytest
from commands import nodes, run

from tracea_jax.device import local_cpu

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


def test_a_function_is_tuned(capsys, model, tuned_calls):
    status, _, err = run(capsys, "tune", "model:step", "--effort", "quick")
    assert (status, err) == (0, "")
    shapes = ("--args", "f32[4,6]", "f32[6,5]")
    assert run(capsys, "tune", "--budget-s", "9", "model:step", *shapes)[0] == 0
    (graph, how), (other, also) = tuned_calls
    assert nodes(graph) == [(1, "matmul 16x8x8 bfloat16 nn relu")]
    assert nodes(other) == [(1, "matmul 4x5x6 float32 nn relu")]
    assert how["effort"] == "quick" and also["budget_s"] == 9.0
    assert how["race"] and also["race"]
    assert run(capsys, "tune", "--no-race", "model:step")[0] == 0
    assert not tuned_calls[2][1]["race"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("models:step", "cannot import 'models' \\(searched sys.path and "),
        ("model:plain", r"model:plain takes arguments: .*--args .* plain_args\(\)"),
        ("model:step --ops sort", "ops=.*sort.* must be some of"),
        ("model:step --ops conv2d", "model:step has nothing to tune"),
    ],
)
def test_a_function_that_cannot_be_tuned_is_one_line(
    capsys, model, tuned_calls, arguments, message
):
    status, out, err = run(capsys, "tune", *arguments.split())
    assert (status, out, tuned_calls) == (1, "", [])
    assert re.fullmatch(f"tracea: .*{message}.*\n", err)


def test_tuning_a_function_that_fails_shows_where(capsys, model, tuned_calls):
    status, _, err = run(capsys, "tune", "model:fails", "--args", "f32[8]")
    assert status == 1 and "model.py" in err and "ValueError: as models do" in err
    assert err.endswith("tracea: model:fails cannot be traced\n")


def test_explain(capsys, model):
    status, out, err = run(capsys, "explain", "model:step")
    assert (status, err) == (0, "")
    assert out.startswith(f"step on {local_cpu()}\n1 site: 1 matmul; of ")
    assert "\nlayer\n  matmul 16x8x8 bfloat16 nn relu\n" in out
    assert "\n    not gemm_sm90" in out


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
        ("models:step", "cannot import 'models' \\(searched sys.path and "),
        ("broken:step", "module 'broken' cannot be imported: No module named 'surely"),
        ("model:stop", "module 'model' has no 'stop'"),
        ("model:number", "model:number is no function: 3"),
        ("model:plain", r"model:plain takes arguments: .*--args .* plain_args\(\)"),
        ("model:step --args f32(8,8)", "'f32\\(8,8\\)' must be a dtype with sizes"),
        ("model:step --args f33[8]", "dtype 'f33' is unknown to JAX"),
        ("model:step --args f64[8]", "float64 arrays need .* JAX_ENABLE_X64=1"),
        ("model:step --device B200", "'B200' must be one of cpu, H200"),
        (
            "model:step --args f32[4,6] f32[7,5]",
            r"model:step does not take --args f32\[4,6\] f32\[7,5\]: ",
        ),
        (
            "model:step --args f32[4,6]",
            r"model:step does not take --args f32\[4,6\]: .*missing 1 required",
        ),
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


@pytest.mark.parametrize("command", ["explain", "tune", "bench", "bundle --out made"])
def test_shapes_that_a_function_does_not_take_are_one_line(
    capsys, model, tuned_calls, command
):
    words = [*command.split(), "model:step", "--args", "f32[4,6]", "f32[7,5]"]
    status, out, err = run(capsys, *words)
    assert (status, out, tuned_calls) == (1, "", [])
    told = r"tracea: model:step does not take --args f32\[4,6\] f32\[7,5\]: .+\n"
    assert re.fullmatch(told, err)
