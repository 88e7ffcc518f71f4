"""The examples of the documents run, print what they promise, and are right."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from processes import forked

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
# The steps that show it, and the function that ``tracea explain`` is told.
TRAINING = {
    "gpt": (4, "train_step"),
    "vit": (18, "train_step"),
    "resnet": (5, "train_step"),
    "lora": (4, "tune_step"),
    "documents": (8, "train_step"),
}
OTHERS = {"llama": (8, "decode"), "own_op": (3, "project")}
SCRIPTS = TRAINING | OTHERS
MODULES = {"corpus", "digits", "side_by_side"}
# Sizes as they are written, and smaller ones, at which a script takes seconds.
SIZES = {
    "gpt": ("= 192, 6, 3, 128, 8", "= 64, 2, 1, 32, 8"),
    "vit": ("= 128, 4, 3, 2, 64", "= 64, 2, 1, 2, 32"),
    "resnet": ("= (32, 64, 128), 64", "= (8, 16), 32"),
    "documents": ("= 128, 384, 4, 2, 256, 4", "= 64, 128, 2, 1, 64, 4"),
    "llama": ("= 512, 1536, 4, 8, 2\n", "= 64, 128, 2, 4, 2\n"),
    "own_op": ("budget_s=20.0", "budget_s=1.0"),
}
PYTHON = (sys.executable, "-W", "error")


def run(*command: str, directory: pathlib.Path = EXAMPLES) -> str:
    """The output of a command."""
    done = subprocess.run(
        command,
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_comparison(name: str, out: str) -> None:
    both = re.findall(r"^(plain|transformed) +[\d.]+ ms(.*)$", out, re.MULTILINE)
    assert [side for side, _ in both] == ["plain", "transformed"] * (len(both) // 2)
    assert out.count("results agree") == len(both) // 2 >= 1
    courses = re.findall(r"loss ([\d.]+) -> ([\d.]+)", out)
    assert len(courses) == (2 if name in TRAINING else 0)
    assert all(float(last) < float(first) for first, last in courses)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_compares_plain_with_transformed(name):
    steps, _ = SCRIPTS[name]
    check_comparison(name, run(*PYTHON, f"{name}.py", "--steps", str(steps)))


# Importing JAX and its libraries takes seconds too: one process runs all scripts.
ALL = """
import json, runpy, sys

for name, steps in json.loads(sys.argv[1]).items():
    print(f"\f{name}")
    sys.argv = [f"{name}.py", "--steps", str(steps)]
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.pages
def test_scripts_of_small_sizes_compare_plain_with_transformed(tmp_path):
    directory = tmp_path / "docs" / "examples"
    directory.mkdir(parents=True)
    for text in ("README.md", "LICENSE", "CONTRIBUTING.md", "docs/ARCHITECTURE.md"):
        (tmp_path / text).symlink_to(ROOT / text)
    for path in EXAMPLES.glob("*.py"):
        written, smaller = SIZES.get(path.stem, ("", ""))
        source = path.read_text()
        assert not written or source.count(written) == 1, path
        path = directory / path.name
        path.write_text(source.replace(written, smaller) if written else source)
    steps = json.dumps({name: steps for name, (steps, _) in SCRIPTS.items()})
    found = run(*PYTHON, "-c", ALL, steps, directory=directory)
    outputs = dict(part.split("\n", 1) for part in found.split("\f")[1:])
    assert outputs.keys() == SCRIPTS.keys()
    for name, out in outputs.items():
        check_comparison(name, out)


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_function_to_explain_has_arguments(name):
    _, function = SCRIPTS[name]
    text = (EXAMPLES / f"{name}.py").read_text()
    assert f"def {function}(" in text and f"def {function}_args()" in text
    assert f"tracea explain {name}:" in text


@pytest.mark.parametrize(
    "target", ["llama:decode", pytest.param("lora:tune_step", marks=pytest.mark.slow)]
)
def test_a_function_can_be_explained_from_the_shell(target):
    out = run(*forked("", "explain", target))
    assert re.match(rf"{target.partition(':')[2]} on .*\n[1-9]\d* sites: ", out)


@pytest.mark.pages
@pytest.mark.filterwarnings("default")  # those of what runs notebooks are not ours
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda p: p.stem)
def test_a_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:  # an answer from a shorter search will do
        cell.source = cell.source.replace("budget_s=20", "budget_s=2")
    client = NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()  # cells assert what they show
    assert all(cell.execution_count for cell in notebook.cells if "outputs" in cell)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", ())]
    told = "".join(out.text for out in outputs if out.get("name") == "stderr")
    assert "Warning" not in told


def test_everything_is_tested():
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == SCRIPTS.keys() | MODULES
    assert len(list(EXAMPLES.glob("*.ipynb"))) == 2
