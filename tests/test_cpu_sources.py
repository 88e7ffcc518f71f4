"""The sources of CPU kernels: what may include what, and that no circle forms."""

from __future__ import annotations

import graphlib
import pathlib
import re

import pytest

from tracea_jax.emit import sources

pytestmark = pytest.mark.once

ROOT = sources.directory().parent / "cpu"
FILES = sorted(p for p in ROOT.rglob("*") if p.suffix in (".h", ".cc"))
MAY_INCLUDE = {
    "common": {"common"},
    "tile": {"common"},
    "gemm": {"common", "gemm"},
    "attention": {"common", "attention"},
    "elementwise": {"common", "elementwise"},
    "conv2d": {"common", "gemm", "conv2d"},  # some convolutions are plain products
    "calls": {"calls", "common", "gemm", "attention", "elementwise", "conv2d"},
}


def name(path: pathlib.Path) -> str:
    return path.relative_to(ROOT).as_posix()


def includes(path: pathlib.Path) -> list[str]:
    return re.findall(r'^#include "(.+)"', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_operations_include_what_is_shared_and_their_own(path):
    for included in includes(path):
        assert (ROOT / included).is_file(), f"{name(path)} includes {included}"
        folder = name(path).partition("/")[0]
        assert included.partition("/")[0] in MAY_INCLUDE[folder]


def test_no_includes_form_a_circle():
    graph = {name(path): includes(path) for path in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # or raises graphlib.CycleError
    assert "conv2d/walk_impl.h" in graph["conv2d/vectors_impl.h"]
