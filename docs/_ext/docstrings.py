"""Docstrings as they are written here, for Sphinx.

Here an indented paragraph is code, where reStructuredText knows a quotation; what
"Attributes" lists are arguments too; and the first line of a property may have a colon,
which napoleon takes for the end of a type. Loaded by ``docs/conf.py``.
"""

from __future__ import annotations

import re
from typing import Any

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Warns|Yields|Example):$")


def code_marked(lines: list[str]) -> list[str]:
    """The lines of a docstring, with the directive above each paragraph of code."""
    marked: list[str] = []
    inside = is_code = False  # of a section; of a paragraph of code
    for i, line in enumerate(lines):
        if line and not line.startswith(" "):
            inside, is_code = bool(_SECTION.match(line)), False
        begins = line.startswith("    ") and not (inside or is_code)
        if begins and i and not lines[i - 1]:
            marked += [".. code-block:: python", ""]
            is_code = True
        marked.append(line)
    return marked


def _process(app: Any, what: str, name: str, obj: Any, how: Any, lines: Any) -> None:
    lines[:] = code_marked(lines)
    if what == "property":
        lines[:0] = ["..", ""]
    lines[:] = ["Fields:" if line == "Attributes:" else line for line in lines]


def setup(app: Any) -> dict[str, Any]:
    # Before napoleon, which makes fields of the sections.
    app.connect("autodoc-process-docstring", _process, priority=100)
    return {"parallel_read_safe": True}
