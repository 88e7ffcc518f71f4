"""Public values as text in a shell, and as HTML in a notebook."""

from __future__ import annotations

import html.parser
import re

import jax
import jax.numpy as jnp
import pytest
from IPython.core.formatters import DisplayFormatter
from numerics import normal
from program_races import ARGUMENTS, Script, layers

import tracea_jax as tracea
from tracea_jax.page import Column, Page, Printable, Row, Table
from tracea_jax.variants import cpu_calls

pytestmark = pytest.mark.once

VOID = ("br", "meta", "link", "img", "hr", "input")
HOSTILE = "<script>alert('x')</script> & \"quoted\""


class Read(html.parser.HTMLParser):
    """HTML as a browser reads it: its texts, and the tags around the one at hand.

    Attributes:
      texts: what is shown, by the tag that it is in.
      tags: every tag, with its attributes.
    """

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"{self.open} not closed"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        if data.strip():
            self.texts.append((self.open[-1], data.strip()))

    @property
    def shown(self) -> str:
        return "\n".join(text for tag, text in self.texts if tag != "style")

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def model(x, w):
    with jax.named_scope("first"):
        y = jax.nn.relu(x @ w)
    with jax.named_scope("<b>second"):
        return y[:8] @ w


def explained() -> tracea.Explanation:
    return tracea.explain(model)(normal(16, 16), normal(16, 16, seed=1))


def plan() -> tracea.Plan:
    found = explained().sites[0].plan
    assert found is not None
    return found


SMALL = tracea.GemmProblem(m=8, n=8, k=8)
LARGER = tracea.GemmProblem(m=16, n=8, k=8)


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """A report of a function whose whole program raced, and its verdict."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(cpu_calls, "CALL_NS", 0.0)  # kernels serve tiny sites
        Script({None: 100.0, (): 80.0, ("conv2d",): 90.0, ("matmul",): 95.0}).install(
            patch
        )
        return tracea.tune(layers, *ARGUMENTS)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The reports of one problem, and of two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACEA_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        graphs = tracea.Graph([SMALL]), tracea.Graph([SMALL, LARGER])
        return [tracea.tune(graph, effort="none", budget_s=0.3) for graph in graphs]


def test_a_page_is_text_and_html():
    table = Table(
        columns=(
            Column("name"),
            Column("why", ": ", is_folded=True),
            Column("us", ", ", is_number=True),
        ),
        rows=(
            Row(("one", "because", "1.5"), ("a note", "another")),
            Row(("two", "", "12.25")),
        ),
        title="things:",
    )
    page = Page(("first\nsecond", table))
    assert str(page) == (
        "first\nsecond\n\n"
        "things:\n  one: because, 1.5\n    a note\n    another\n  two, 12.25"
    )
    read = Read(Shown(page)._repr_html_())
    assert [text for tag, text in read.texts if tag == "th"] == ["name", "us"]
    assert [text for tag, text in read.texts if tag == "td"] == [
        *("one", "1.5", "two", "12.25")
    ]
    assert [text for tag, text in read.texts if tag == "li"] == [
        *("why: because", "a note", "another")
    ]
    assert [text for tag, text in read.texts if tag == "summary"] == ["things", "more"]
    assert [text for tag, text in read.texts if tag == "p"] == ["first", "second"]
    rows = [name for name, _ in read.tags if name in ("tr", "td", "th")]
    assert rows.count("tr") == 3 and len(rows) == 3 * 4  # each row has every cell


def test_html_leaves_out_what_is_empty():
    columns = (Column("name"), Column("us", is_number=True))
    table = Table(columns=columns, rows=(Row(("one", "")), Row(("two", ""))))
    read = Read(Shown(Page((table,)))._repr_html_())
    assert [text for tag, text in read.texts if tag != "style"] == [
        "name",
        "one",
        "two",
    ]
    assert (read.count("th"), read.count("td")) == (1, 2)
    nameless = Table(columns=(Column(""), Column("")), rows=(Row(("a", "b")),))
    read = Read(Shown(Page((nameless,)))._repr_html_())
    assert (read.count("th"), read.count("tr"), read.count("td")) == (0, 1, 2)
    nothing = Table(columns=columns, rows=(), title="0 problems")
    assert str(Page((nothing,))) == "0 problems"
    assert "0 problems" in Read(Shown(Page((nothing,)))._repr_html_()).shown


def test_aligned_text_has_heads():
    table = Table(
        columns=(Column("name"), Column("us", is_number=True), Column("")),
        rows=(Row(("a longer name", "1.5", "x"), ("noted",)), Row(("b", "12.25", ""))),
        form="aligned",
    )
    assert str(Page((table,))).splitlines() == [
        "name              us",
        "a longer name    1.5  x",
        "  noted",
        "b              12.25",
    ]


class Shown(Printable):
    def __init__(self, page: Page) -> None:
        self._page = page

    @property
    def page(self) -> Page:
        return self._page


def test_html_is_escaped_and_loads_nothing():
    table = Table(
        columns=(Column(HOSTILE), Column(HOSTILE, is_folded=True)),
        rows=(Row((HOSTILE, HOSTILE), (HOSTILE,)),),
        title=HOSTILE,
    )
    source = Shown(Page((HOSTILE, table)))._repr_html_()
    read = Read(source)
    assert read.count("script") == 0
    assert len([text for _, text in read.texts if HOSTILE in text]) == 6
    allowed = {"div", "style", "p", "br", "details", "summary", "table", "tr", "th"}
    assert {tag for tag, _ in read.tags} <= {*allowed, "td", "ul", "li"}
    assert {name for _, own in read.tags for name in own} <= {"class", "open"}
    assert "://" not in source and "url(" not in source and "@import" not in source


def test_html_has_the_colours_around_it():
    """It sets no text or background colour, so it is readable in light and dark."""
    source = Shown(Page((Table(columns=(Column("a"),), rows=(Row(("b",)),)),)))
    style = dict(Read(source._repr_html_()).texts)["style"]
    assert set(re.findall(r"color: (\w+)", style)) == {"inherit"}
    assert set(re.findall(r"background: (\w+)", style)) == {"none"}
    assert not re.search("#[0-9a-f]{3}", style)


def test_public_values_are_their_text(raced, tuned):
    values = [
        *(explained(), explained().sites[0], plan(), tracea.doctor(), SMALL),
        *(*tuned, tuned[0].rows[0]),
        *(tracea.Graph([SMALL, LARGER]), raced, raced.whole, raced.whole.verdict),
    ]
    for value in values:
        assert repr(value) == str(value) != ""
        assert "object at 0x" not in repr(value)
        assert max(map(len, repr(value).splitlines())) < 400
    assert repr(SMALL) == "matmul 8x8x8 float32 nn"
    assert repr(plan()).startswith("matmul 16x16x16 float32 nn relu: ")


def test_public_values_are_tables_in_a_notebook(raced, tuned):
    graph = tracea.Graph([SMALL, LARGER])
    told = {
        "explanation": (explained(), ["first", "<b>second", "16x16x16", "8x16x16"]),
        "site": (explained().sites[1], ["<b>second", "matmul 8x16x16 float32 nn"]),
        "plan": (plan(), ["matmul 16x16x16 float32 nn relu", "not gemm_sm90"]),
        "doctor": (tracea.doctor(), ["jax", "gemm_cpu", "attention_cpu", "on a miss"]),
        "one": (tuned[0], [str(SMALL), "ended by"]),
        "several": (tuned[1], [str(SMALL), str(LARGER), "tuned us"]),
        "graph": (graph, ["2 problems, 2 runs", str(SMALL), str(LARGER)]),
    }
    for name, (value, words) in told.items():
        read = Read(value._repr_html_())
        assert read.count("table") >= 1, name
        assert not (missing := [w for w in words if w not in read.shown]), missing
    assert Read(explained()._repr_html_()).count("details") == 2  # a row for each site
    assert "whole program: 1.25x as fast as plain" in Read(raced._repr_html_()).shown
    assert "1.25x as fast as plain" in Read(raced.whole.verdict._repr_html_()).shown


def test_html_says_what_the_text_says():
    """Every word of the text, but for what only joins them."""
    explanation = explained()
    shown = Read(explanation._repr_html_()).shown
    for site in explanation.sites:
        assert site.scope in shown and str(site.problem) in shown
        assert site.reason in shown and site.plan is not None
        assert all(r.reason in shown for r in site.plan.rejected)
    assert "Left as they are" not in shown
    double = tracea.explain(lambda x: x @ x)(jnp.ones((4, 4), "int32"))
    (miss,) = double.misses
    read = Read(double._repr_html_())
    assert "Left as they are" in read.shown and miss.reason in read.shown


def test_a_transformed_function_names_the_function():
    def step(x):
        return x

    assert repr(tracea.transform(step)) == "<transform of step>"
    assert repr(tracea.transform(step, ops="matmul")) == (
        "<transform of step, ops=('matmul',)>"
    )
    late = repr(tracea.transform(jax.jit(step), after_grad=True))
    assert late.startswith("<transform of step") and "after_grad" in late


def test_ipython_shows_them_without_print():
    """A shell shows ``repr``; a notebook takes the HTML beside it."""
    data, _ = DisplayFormatter().format(plan())
    assert data["text/html"].startswith("<div")
    assert data["text/plain"] == str(plan())
