"""Links to JAX, NumPy and Python, and the names of types in signatures, for Sphinx.

The addresses are known here, so that a build needs no network. Code such as
``jax.jit`` in a text becomes a link too. A type of ours that the reference documents
under another name, as ``TensorMap``, is linked there; one that it does not document is
only text. A name that nothing has is left to Sphinx, which warns. Loaded by
``docs/conf.py``.
"""

from __future__ import annotations

import builtins
import importlib
import operator
import re
import sys
from typing import Any

JAX = "https://docs.jax.dev/en/latest/"
# The parts of JAX whose names have pages of their own.
_JAX_PARTS = ("jax", "jax.numpy", "jax.lax", "jax.nn", "jax.typing")
_JAX_PAGES = {
    "jax.export": "jax.export.html",
    "jax.experimental.jet": "jax.experimental.jet.html",
    "jax.numpy": "jax.numpy.html",
    "jax.nn": "jax.nn.html",
    "jax.lax.PrecisionLike": "_autosummary/jax.lax.Precision.html",
}
_SHORT = {"jnp": "jax.numpy", "lax": "jax.lax", "np": "numpy"}
# The names of annotations, in full.
_TYPES = {
    "ArrayLike": "jax.typing.ArrayLike",
    "DTypeLike": "jax.typing.DTypeLike",
    "PrecisionLike": "jax.lax.PrecisionLike",
    "Callable": "collections.abc.Callable",
    "Iterable": "collections.abc.Iterable",
    "Mapping": "collections.abc.Mapping",
    "Sequence": "collections.abc.Sequence",
    "Path": "pathlib.Path",
    "AbstractContextManager": "contextlib.AbstractContextManager",
}


def address(name: str) -> str | None:
    """The page of a name of JAX, NumPy or Python; None if it is none of these."""
    name = _in_full(name)
    module, _, last = name.rpartition(".")
    if name in _JAX_PAGES:
        return JAX + _JAX_PAGES[name]
    if module in _JAX_PARTS and hasattr(importlib.import_module(module), last):
        return f"{JAX}_autosummary/{name}.html"
    if name == "numpy.ndarray":
        return f"https://numpy.org/doc/stable/reference/generated/{name}.html"
    if module in ("collections.abc", "contextlib", "os", "pathlib"):
        return f"https://docs.python.org/3/library/{module}.html#{name}"
    return None


def _in_full(name: str) -> str:
    """The name from its module on: jax.numpy.dot for jnp.dot."""
    name = _TYPES.get(name, name)
    first, dot, rest = name.partition(".")
    return _SHORT.get(first, first) + dot + rest if dot else name


def _missing(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A node for a reference that Sphinx cannot resolve, or None."""
    name = node["reftarget"]
    if node.get("refdomain") != "py":
        return None
    if url := address(name):
        return _link(url, content)
    for own in _own(name):
        found = env.domains["py"].objects.get(own)
        if found is not None:
            return _inside(app, node["refdoc"], found, content)
    return content if _is_ours(name) else None


def _link(url: str, content: Any) -> Any:
    from docutils import nodes

    return nodes.reference("", "", content, internal=False, refuri=url)


def _inside(app: Any, page: str, found: Any, content: Any) -> Any:
    from sphinx.util.nodes import make_refnode

    return make_refnode(app.builder, page, found.docname, found.node_id, content)


def _own(name: str) -> list[str]:
    """The names that the reference may have for one of ours."""
    last = name.rpartition(".")[2]
    places = ("tracea_jax", "tracea_jax.typing", "tracea_jax.masks")
    return [f"{place}.{last}" for place in places]


def _is_ours(name: str) -> bool:
    """Whether the package has the name, in full or as one of its modules knows it."""
    module, _, last = name.rpartition(".")
    if hasattr(sys.modules.get(module), last):
        return True
    ours = [m for n, m in sys.modules.items() if n.split(".")[0] == "tracea_jax"]
    return any(_has(m, name) for m in ours)


def _has(holder: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(holder)
    except AttributeError:
        return False
    return True


def _show_builtins(app: Any, tree: Any) -> None:
    """Leaves types such as ``bytes`` without a link, as attributes have their names."""
    from sphinx.addnodes import pending_xref

    for node in list(tree.findall(pending_xref)):
        if hasattr(builtins, node.get("reftarget", "")):
            node.replace_self(node.children)


def _link_code(app: Any, tree: Any, page: str) -> None:
    """Makes links of code in a text that is a name of JAX."""
    from docutils import nodes

    for code in list(tree.findall(nodes.literal)):
        name = _in_full(code.astext().removesuffix("()"))
        if isinstance(code.parent, nodes.reference | nodes.title):
            continue
        if re.fullmatch(r"jax(\.\w+)+", name) and (url := address(name)):
            code.replace_self(_link(url, code.deepcopy()))


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", _show_builtins)
    app.connect("missing-reference", _missing)
    app.connect("doctree-resolved", _link_code)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
