"""The README: each of its blocks runs as it stands, in order, with nothing prepared."""

from __future__ import annotations

import pathlib
import re

from pages import Reader, blocks

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_every_block_runs(tmp_path):
    directory = tmp_path / "here"
    directory.mkdir()
    reader = Reader(directory)
    installing, *others = blocks(README)
    assert [b.language for b in others] == ["python", "python", "sh"]
    assert all(b.is_run for b in others), "no block of the README is an exception"
    for block in others:
        reader.read(block)
    # What installs needs a machine of its own.
    assert installing.language == "sh"
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
