"""Signatures with the annotations that the source has, for Sphinx.

autodoc would evaluate them, and show ``Implementation`` as the thirty words that it
stands for. ``links`` finds what the names mean. Loaded by ``docs/conf.py``.
"""

from __future__ import annotations

import inspect
from typing import Any


class _Source(str):
    """An annotation that is shown as it was written."""

    def __repr__(self) -> str:
        return str(self)


def as_written(signature: inspect.Signature) -> str:
    """The text of a signature, without the quotes of annotations and without self."""
    parameters = [
        p.replace(annotation=_shown(p.annotation))
        for p in signature.parameters.values()
        if p.name != "self"
    ]
    returned = _shown(signature.return_annotation)
    return str(signature.replace(parameters=parameters, return_annotation=returned))


def _shown(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _process(
    app: Any, what: str, name: str, obj: Any, options: Any, signature: Any, result: Any
) -> tuple[str, str] | None:
    if signature is None or what not in ("function", "method", "class"):
        return None
    arguments, arrow, returned = as_written(inspect.signature(obj)).partition(" -> ")
    return arguments, returned if arrow and what != "class" else ""


def setup(app: Any) -> dict[str, Any]:
    app.connect("autodoc-process-signature", _process)
    return {"parallel_read_safe": True}
