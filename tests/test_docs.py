"""The documents: their code runs, and they name what there is."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import pathlib
import re
import textwrap
from types import ModuleType

import pytest
from pages import Block, Reader, blocks

import tracea_jax as tracea
from tracea_jax import ops
from tracea_jax.typing import Goal

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
# The README, programs and notebooks have tests of their own.
PAGES = [p for p in sorted(DOCS.rglob("*.md")) if p.parent.name != "examples"]
PAGES.append(ROOT / "CONTRIBUTING.md")


@pytest.fixture
def reader(tmp_path):
    directory = tmp_path / "here"
    directory.mkdir()
    return Reader(directory)


@pytest.mark.pages
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_blocks_of_a_page_run_in_order(page, reader):
    for block in blocks(page):
        reader.read(block)


# --- the pictures ---------------------------------------------------------------------


@pytest.fixture
def pictures(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    return importlib.import_module("pictures")


REDRAW = "the picture is out of date: python docs/pictures.py"


def test_the_picture_of_explain_is_what_it_prints(pictures):
    def without_times(text: str) -> list[str]:
        return re.sub(r"[\d.]+ us( \(.+? to .+?\))?", "# us", text).splitlines()

    drawn = without_times(pictures.description("explain.svg"))
    assert drawn == without_times(pictures.explained()), REDRAW


def test_the_picture_of_programs_is_of_the_results(pictures):
    for name in ("programs-light.svg", "programs-dark.svg"):
        drawn = json.loads(pictures.description(name))
        assert drawn == pictures.measured() != [], REDRAW


def test_the_picture_of_programs_has_the_newest_run_of_each(pictures, tmp_path):
    def ran(device, date, *rows):
        (tmp_path / device).mkdir(exist_ok=True)
        file = tmp_path / device / f"programs_{len(list(tmp_path.rglob('*')))}.json"
        where = {"device": device, "date": date}
        file.write_text(json.dumps({"environment": where, "rows": rows}))

    def row(name, ratio, dtype="bfloat16", effort="none", **other):
        text = f"2 x 2, {dtype}"
        made = {"name": name, "text": text, "wall_ratio": ratio, "effort": effort}
        return made | other

    ran("A", "2026-01-02", row("vit_step", 1.5), row("gpt2_step", 3.0, "float32"))
    ran("A", "2026-01-02", row("vit_step", 1.25), row("gpt2_step", 0.5))
    ran("A", "2026-01-01", row("vit_step", 0.75))
    ran("A", "2026-01-03", row("vit_step", 9.0, effort="quick"))
    ran("A", "2026-01-03", row("vit_step", 9.0, failed="no memory"))
    ran("B", "2026-01-01", *(row(name, 2.0) for name in pictures._NAMES))
    found = pictures.measured(tmp_path)
    assert [r["device"] for r in found] == ["B"] * pictures.MOST_BARS + ["A"] * 3
    assert [(r["program"], r["wall_ratio"]) for r in found if r["device"] == "A"] == [
        ("GPT-2, training step, bfloat16", 0.5),
        ("GPT-2, training step, float32", 3.0),
        ("ViT, training step, bfloat16", 1.25),
    ]
    assert len({r["program"] for r in found if r["device"] == "B"}) == 6


def test_every_measured_program_has_a_name_in_the_picture(pictures):
    files = pictures.RESULTS.glob("*/programs*.json")
    rows = [row for file in files for row in json.loads(file.read_text())["rows"]]
    assert {row["name"] for row in rows} <= set(pictures._NAMES)


def test_the_picture_of_explain_colours_times_only(pictures):
    source = (pictures.OUT / "explain.svg").read_text()
    colours = dict(re.findall(r"\.explain-(r\d+) \{ fill: (#\w+)", source))
    texts = re.findall(r'<text class="explain-(r\d+)"[^>]*>([^<]*)</text>', source)
    plain = colours[texts[0][0]]
    coloured = {text for style, text in texts if colours[style] != plain}
    shown = pictures.description("explain.svg")
    times = {m[0] for m in re.finditer(pictures.TIMES, shown)}
    assert {text.replace("&#160;", " ") for text in coloured} == times != set()


def test_pictures_need_no_other_host(pictures):
    for file in pictures.OUT.glob("*.svg"):
        text = file.read_text()
        assert not re.findall(r"""(?:href|src)=["']\w+:|url\(["']?\w+:""", text)
        assert len(text) < 64 * 1024


# --- the reader of blocks itself ------------------------------------------------------


def block(language: str, text: str, *, follows: bool = True) -> Block:
    return Block(place="page.md:1", language=language, text=text, follows=follows)


def test_blocks_are_found_with_their_languages(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Title\n\n```python\nx = 1\n```\n\n```text\n1\n```\n\nWords.\n\n"
        "````{tab-item} a\n```sh\nls\n```\n````\n\n```text\n2\n```\n"
    )
    found = blocks(page)
    assert [(b.language, b.follows) for b in found] == [
        ("python", False),
        ("text", True),
        ("{tab-item} a", False),
        ("text", True),
    ]
    assert [b.place for b in found] == [f"page.md:{n}" for n in (3, 7, 13, 19)]
    assert found[0].text == "x = 1\n"


def test_names_files_and_exports_stay(reader):
    reader.read(block("python", "x = 1"))
    reader.read(block("python", "# model.py\nraise RuntimeError\n"))
    reader.read(block("python", "import os\nprint(x, os.listdir())"))
    reader.read(block("text", "1 ['model.py']"))
    reader.read(block("sh", "export NAME=word"))
    reader.read(block("sh", "ls; echo $NAME"))
    reader.read(block("text", "...\nword"))


@pytest.mark.parametrize(
    ("before", "wrong", "error"),
    [
        ("print(1)", ("text", "2"), AssertionError),
        ("", ("python", "1 / 0"), ZeroDivisionError),
        ("", ("python", "# Raises ValueError\n1 / 0"), ZeroDivisionError),
        ("", ("python", "# Raises ValueError\n1"), AssertionError),
        ("", ("python", "# Not run here: no\n1 +"), SyntaxError),
        ("", ("sh", "# Not run here: no\nif"), Exception),
        ("", ("sh", "false; true"), AssertionError),
        ("", ("", "x"), AssertionError),
    ],
)
def test_what_is_wrong_is_seen(reader, before, wrong, error):
    reader.read(block("python", before))
    with pytest.raises(error):
        reader.read(block(*wrong))


def test_errors_that_are_announced_can_be_shown(reader):
    reader.read(block("python", "# Raises ZeroDivisionError\n1 / 0"))
    reader.read(block("text", "ZeroDivisionError: ... zero"))


# --- docstrings, as the reference shows them ------------------------------------------


@pytest.fixture
def extension(monkeypatch):
    """Modules of docs/_ext, by name."""
    monkeypatch.syspath_prepend(DOCS / "_ext")
    return importlib.import_module


@pytest.fixture
def code_marked(extension):
    return extension("docstrings").code_marked


def test_code_of_docstrings_is_marked_and_nothing_else(code_marked):
    text = "Does it.\n\n    x = 1\n\n    y = 2\n\nWords\n\nArgs:\n  a: first\n    more."
    assert "\n".join(code_marked(text.split("\n"))) == text.replace(
        "    x", ".. code-block:: python\n\n    x"
    )


def test_code_of_docstrings_is_python(code_marked):
    public = [getattr(tracea, name) for name in dir(tracea)]
    public += [getattr(ops, name) for name in ops.__all__]
    found = 0
    for documented in public:
        lines = code_marked((inspect.getdoc(documented) or "").splitlines())
        for i, line in enumerate(lines):
            if line == ".. code-block:: python":
                rest = itertools.dropwhile(lambda x: not x, lines[i + 1 :])
                code = itertools.takewhile(lambda x: not x or x[0] == " ", rest)
                ast.parse(textwrap.dedent("\n".join(code)))
                found += 1
    assert found > 4


def test_signatures_have_the_annotations_of_the_source(extension):
    def method(self, x: Goal, /, *, how: Goal | None = None) -> tuple[int, ...]:
        return ()

    shown = extension("signatures").as_written(inspect.signature(method))
    assert shown == "(x: Goal, /, *, how: Goal | None = None) -> tuple[int, ...]"


@pytest.mark.parametrize(
    ("name", "page"),
    [
        ("jax.jit", "https://docs.jax.dev/en/latest/_autosummary/jax.jit.html"),
        ("jnp.dot", "https://docs.jax.dev/en/latest/_autosummary/jax.numpy.dot.html"),
        ("jax.export", "https://docs.jax.dev/en/latest/jax.export.html"),
        ("Callable", "collections.abc.html#collections.abc.Callable"),
        ("np.ndarray", "numpy.ndarray.html"),
    ],
)
def test_names_of_other_libraries_have_addresses(extension, name, page):
    assert (extension("links").address(name) or "").endswith(page)


@pytest.mark.parametrize("name", ["jnp", "jax.no_such_name", "Mask", "tracea_jax.tune"])
def test_other_names_have_none(extension, name):
    assert extension("links").address(name) is None


def test_every_public_function_names_the_types_of_its_arguments():
    for name in dir(tracea):
        if inspect.isfunction(function := getattr(tracea, name)):
            for parameter in inspect.signature(function).parameters.values():
                assert parameter.annotation is not parameter.empty, (name, parameter)


# --- what the pages name --------------------------------------------------------------


def text_of(*names: str) -> str:
    return "\n".join((DOCS / name).read_text() for name in names)


def test_the_reference_has_every_public_name():
    found = re.findall(
        r"auto(?!module)\w+:: tracea_jax\.(\w+)$", text_of("api/tracea_jax.md"), re.M
    )
    public = {n: getattr(tracea, n) for n in dir(tracea) if not n.startswith("_")}
    modules = {n for n, value in public.items() if isinstance(value, ModuleType)}
    assert sorted(found) == sorted(public.keys() - modules)
    found = re.findall(r":: tracea_jax\.ops\.(\w+)$", text_of("api/ops.md"), re.M)
    assert sorted(found) == sorted(ops.__all__)


def test_the_settings_page_has_every_setting():
    package = pathlib.Path(tracea.__file__).parent
    sources = "\n".join(file.read_text() for file in package.rglob("*.py"))
    known = {f"TRACEA_{f.name.upper()}" for f in dataclasses.fields(tracea.Options)}
    known |= set(_VARIABLE.findall(sources))
    assert set(_VARIABLE.findall(text_of("settings.md"))) == known
    cmake = (ROOT / "kernels" / "cpu" / "CMakeLists.txt").read_text()
    built = set(re.findall(r"option\((TRACEA_\w+)", cmake))  # options of the build
    for page in PAGES:
        assert set(_VARIABLE.findall(page.read_text())) <= known | built, page


_VARIABLE = re.compile(r"\bTRACEA_[A-Z_]+[A-Z]\b")
