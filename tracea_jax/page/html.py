"""Pages as HTML: tables that fold, for notebooks.

Colours are those of whatever shows the page, so that it is readable in light and dark;
nothing is loaded from elsewhere, and all text is escaped. Caller: ``page.Printable``.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from typing import TYPE_CHECKING

from tracea_jax.page.picture import Picture

if TYPE_CHECKING:
    from tracea_jax.page import Page, Row, Table

_STYLE = """\
.tracea {overflow-x: auto; color: inherit}
.tracea p {margin: .4em 0}
.tracea table {border-collapse: collapse; margin: .4em 0; color: inherit}
.tracea th, .tracea td {text-align: left; vertical-align: top; padding: .2em .7em;
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, .4); background: none;
  color: inherit; white-space: normal}
.tracea .number {text-align: right; white-space: nowrap;
  font-variant-numeric: tabular-nums}
.tracea summary {cursor: pointer}
.tracea ul {margin: .2em 0; padding-left: 1.2em}"""


def of_page(page: Page) -> str:
    """The page as one element, with a style that concerns nothing else."""
    parts = (_part(part) for part in page.parts if part)
    return "\n".join(
        ['<div class="tracea">', f"<style>\n{_STYLE}\n</style>", *parts, "</div>"]
    )


def _part(part: str | Table | Picture) -> str:
    if isinstance(part, str):
        return _paragraph(part)
    if isinstance(part, Picture):
        return f"<pre>{html.escape(part.text)}</pre>"
    return _table(part)


def _paragraph(text: str) -> str:
    return f"<p>{'<br>'.join(map(html.escape, text.splitlines()))}</p>"


def _table(table: Table) -> str:
    folds = any(_folded(table, row) for row in table.rows)
    shown = [i for i in range(len(table.columns)) if _is_shown(table, i)]
    columns = [table.columns[i] for i in shown]
    rows = [_row(table, row, shown, folds) for row in table.rows]
    if any(column.name for column in columns):
        heads = [_cell("th", html.escape(c.name), c.is_number) for c in columns]
        rows.insert(0, "".join([*heads, "<th></th>" * folds]))
    body = "\n".join(f"<tr>{cells}</tr>" for cells in rows)
    text = f"<table>\n{body}\n</table>"
    if not table.title:
        return text
    title = html.escape(table.title.removesuffix(":"))
    return f"<details open><summary>{title}</summary>\n{text}\n</details>"


def _is_shown(table: Table, i: int) -> bool:
    """Returns whether a column says anything where rows are folded."""
    return not table.columns[i].is_folded and any(row.cells[i] for row in table.rows)


def _row(table: Table, row: Row, shown: list[int], folds: bool) -> str:
    cells = [
        _cell("td", html.escape(row.cells[i].strip()), table.columns[i].is_number)
        for i in shown
    ]
    items = "".join(f"<li>{html.escape(text)}</li>" for text in _folded(table, row))
    if items:
        more = f"<details><summary>more</summary><ul>{items}</ul></details>"
        cells.append(f"<td>{more}</td>")
    elif folds:
        cells.append("<td></td>")
    return "".join(cells)


def _folded(table: Table, row: Row) -> list[str]:
    """The texts that are seen where the row is unfolded."""

    def cells() -> Iterator[str]:
        for column, cell in zip(table.columns, row.cells, strict=True):
            if column.is_folded and cell:
                yield f"{column.name}: {cell}" if column.name else cell

    return [*cells(), *row.notes]


def _cell(tag: str, content: str, is_number: bool) -> str:
    kind = ' class="number"' if is_number else ""
    return f"<{tag}{kind}>{content}</{tag}>"
