"""The README: its example prints what is shown, and its commands are those of CI."""

from __future__ import annotations

import pathlib
import re
import tomllib

from pages import Reader, blocks

from tracea_jax._compat import UNTESTED_JAX
from tracea_jax.device import local_cpu

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_the_example_prints_what_is_shown(tmp_path):
    directory = tmp_path / "here"
    directory.mkdir()
    _, example, shown = blocks(README)
    assert (example.language, shown.language) == ("python", "text")
    assert example.is_run and shown.follows
    reader = Reader(directory)
    reader.read(example)
    assert "not raced" not in reader.printed
    printed, wanted = outline(reader.printed), outline(shown.text)
    if f", {local_cpu().isa}, " not in shown.text.partition("\n")[0]:
        printed, wanted = problems(printed), problems(wanted)
    assert printed == wanted, "the output is out of date: python docs/example_output.py"


def outline(text: str) -> list[str]:
    """Lines without what depends on a run: places, machines, configs and numbers.

    Of the race of the whole program there is only the beginning of its line.
    """
    for pattern, general in (
        (r"^(\w+) on .*", r"\1 on a machine"),
        (r"^\S+:\d+:\d+ ", "a line "),
        (r" \[.*?\]", ""),
    ):
        text = re.sub(pattern, general, text, flags=re.MULTILINE)
    explained, race, _ = text.partition("whole program: ")
    return [*re.sub(r"\d[\d.]*", "#", explained).splitlines(), race]


def problems(outline: list[str]) -> list[str]:
    """The lines of an outline that do not depend on the kind of processor."""
    found = re.compile(r"  (matmul|attention) |whole program")
    return [line for line in outline if found.match(line)]


def test_the_commands_are_those_of_ci():
    installing, *_ = blocks(README)
    assert installing.language == "sh"
    assert len(commands(installing.text)) == 2
    assert commands(installing.text) <= of_ci()


def commands(text: str) -> set[str]:
    """The lines of a script, without comments."""
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in text.splitlines())
    return {line for line in lines if line}


def of_ci() -> set[str]:
    """Every line that CI runs."""
    scripts = (p for p in (ROOT / ".ci").iterdir() if p.is_file())
    return set().union(*(commands(p.read_text()) for p in scripts))


def test_what_the_readme_links_to_is_there():
    link = re.compile(r"\]\(([^)#]+)" + r'|src(?:set)?="([^"]+)"')
    paths = ["".join(found) for found in link.findall(README.read_text())]
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_versions_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (jax,) = (d for d in project["dependencies"] if d.startswith("jax>"))
    oldest = jax.removeprefix("jax>=").partition(",")[0]
    major, untested = UNTESTED_JAX
    wanted = f"{oldest} to {major}.{untested - 1}"
    python = project["requires-python"].removeprefix(">=")
    for page in (README, ROOT / "docs" / "compatibility.md"):
        text = page.read_text()
        assert wanted in text, page
        assert f"{python} " in text, page
