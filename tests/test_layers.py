"""Imports go strictly downward, and few modules know JAX, CUDA or the extension."""

from __future__ import annotations

import ast
import functools
import pathlib
import statistics
from collections.abc import Iterator

import pytest

import tracea_jax

pytestmark = pytest.mark.once

# From the bottom to the top. A module may import from those before its own entry and,
# within a package, from the package.
ORDER = (
    "typing",
    "mistakes",
    "logs",
    "schema",
    "page",
    "outputs",
    "catalogue",
    "problem",
    "ir",
    "device",
    "_native",
    "emit",
    "runtime",
    "variants",
    "roofline",
    "model",
    "diagnosis",
    "policy",
    "tuning",
    "_compat",
    "_compat_cudnn",
    "_compat_partition",
    "options",
    "knowledge",
    "dispatch",
    "faults",
    "serving",
    "emission",
    "masks",
    "ops",
    "interop",
    "rewrite",
    "builtin",
    "call",
    "mutable",
    "verdicts",
    "precompile",
    "transform",
    "explain",
    "graph_adds",
    "graph",
    "campaign",
    "survey",
    "doctor",
    "bench",
    "bundle",
    "demo",
    "cli",
    "__main__",
    "__init__",
)
KNOWS_JAX = (
    "cli.functions",
    "_compat",
    "_compat_cudnn",
    "_compat_partition",
    "options",
    "knowledge",
    "dispatch",
    "faults",
    "emission",
    "masks",
    "ops",
    "interop",
    "rewrite",
    "call",
    "mutable",
    "verdicts",
    "transform",
    "explain",
    "graph_adds",
    "bundle",
    "campaign.executions",
    "survey.programs",
    "survey.loaded",
    "doctor",
    "demo",
)

PACKAGE = pathlib.Path(tracea_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


def module(path: pathlib.Path) -> str:
    """Dotted name inside the package, such as "runtime.launch"."""
    name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    return name.removesuffix(".__init__")


@functools.cache
def imports(path: pathlib.Path) -> tuple[str, ...]:
    """Every module that a file imports, also inside functions."""
    return tuple(_imports(path))


def _imports(path: pathlib.Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            assert node.module is not None
            # ``from package import x``: x may be a module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(f"{p}.") for p in prefixes)


def test_every_module_has_a_layer():
    assert FILES
    unknown = {module(f).partition(".")[0] for f in FILES} - set(ORDER)
    assert not unknown, f"{unknown} must be given a place in ORDER"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_imports_go_downward(path):
    own = module(path).partition(".")[0]
    for name in imports(path):
        root, _, rest = name.partition(".")
        if root != "tracea_jax" or not rest:
            continue
        other = rest.partition(".")[0]
        if other not in ORDER:  # a name that the package itself defines
            other = "__init__"
        same = other == own and "." in rest
        lower = ORDER.index(other) < ORDER.index(own)
        assert same or lower, f"{module(path)} must not import {name}"


@pytest.mark.parametrize("path", FILES, ids=module)
def test_few_modules_know_jax_cuda_or_the_extension(path):
    allowed = {
        "jax": (*KNOWS_JAX, "runtime.launch"),
        "jaxlib": (),
        "cuda": ("device", "runtime.nvrtc"),
    }
    for name in imports(path):
        root = name.partition(".")[0]
        if root in allowed:
            assert within(module(path), allowed[root]), f"{module(path)} imports {name}"
        if within(name, ("tracea_jax._native",)):
            assert module(path) == "runtime.launch"
        if within(name, ("jax._src",)):
            assert module(path) in (
                "_compat",
                "_compat_cudnn",
                "_compat_partition",
            ), f"{module(path)} imports {name}"


def test_modules_are_small():
    lines = {module(f): len(f.read_text().splitlines()) for f in FILES}
    assert statistics.median(lines.values()) <= 160
    assert {name: n for name, n in lines.items() if n > 450} == {}


def test_imports_of_modules_have_no_circle():
    """Those that are made when a module is loaded, not inside of functions."""
    names = {module(f) for f in FILES}
    uses = {module(f): _used(f, names) for f in FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in uses[name]:
                visit(other, (*path, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


def _used(path: pathlib.Path, names: set[str]) -> set[str]:
    """The modules that a file imports at its top level, for more than types."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            home = node.module.removeprefix("tracea_jax").removeprefix(".")
            if not node.module.startswith("tracea_jax"):
                continue
            for alias in node.names:
                inner = f"{home}.{alias.name}".removeprefix(".")
                found.add(inner if inner in names else home)
    return {name for name in found if name in names and name} - {module(path)}
