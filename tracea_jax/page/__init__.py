"""Pages: what values look like to people, on a terminal and in a notebook.

A page is plain text in cells, made once by the value it belongs to; ``str``, ``repr``
and ``_repr_html_`` are renderings of it. This module has pages and their text;
``page.html`` writes the same as HTML. What is said, each value decides: those of
explain, doctor, dispatch, verdicts, graph, campaign, bench, masks and tile graphs
make pages.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Literal

from tracea_jax.page import html
from tracea_jax.page.picture import Picture as Picture


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
      name: its head, in HTML and in aligned text.
      before: what stands before its cells in text that is not aligned. An empty cell
        is left out with it.
      is_number: whether its cells are set to the right.
      is_folded: whether HTML shows its cells only where a row is unfolded.
    """

    name: str
    before: str = ""
    is_number: bool = False
    is_folded: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The cells of a row, one for each column, and notes, each on a line of its own.

    HTML shows the notes where the row is unfolded.
    """

    cells: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows below a title.

    Attributes:
      columns, rows: of the table.
      title: a line; HTML folds the table below it. Without one the table stands alone.
      form: how text sets the rows: "lines", one after the other; "spaced", with a line
        between them; "aligned", cells below the names of their columns.
      note_indent: spaces before the notes in text.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    title: str = ""
    form: Literal["lines", "spaced", "aligned"] = "lines"
    note_indent: int = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Page:
    """Paragraphs, each of one line or more, tables and pictures, in order."""

    parts: tuple[str | Table | Picture, ...]

    def __str__(self) -> str:
        texts = map(_text, self.parts)
        return "\n\n".join(text for text in texts if text)


class Printable(abc.ABC):
    """A value whose text, ``repr`` and HTML are those of its page.

    A dataclass that derives from it is made with ``repr=False``.
    """

    __slots__ = ()

    @property
    @abc.abstractmethod
    def page(self) -> Page:
        """The page that shows the value."""

    def __str__(self) -> str:
        return str(self.page)

    def __repr__(self) -> str:
        return str(self.page)

    def _repr_html_(self) -> str:
        return html.of_page(self.page)


# --- text -----------------------------------------------------------------------------


def _text(part: str | Table | Picture) -> str:
    if isinstance(part, Picture):
        return part.text
    return part if isinstance(part, str) else _table(part)


def _table(table: Table) -> str:
    if table.form == "aligned":
        lines = _aligned(table)
    else:
        lines = [_line(table, row) for row in table.rows]
        if table.title:
            lines = [f"  {line}".replace("\n", "\n  ") for line in lines]
    rows = ("\n\n" if table.form == "spaced" else "\n").join(lines)
    return "\n".join(text for text in (table.title, rows) if text)


def _line(table: Table, row: Row) -> str:
    cells = zip(table.columns, row.cells, strict=True)
    text = "".join(f"{column.before}{cell}" for column, cell in cells if cell)
    return "\n".join([text, *(" " * table.note_indent + note for note in row.notes)])


def _aligned(table: Table) -> list[str]:
    rows = [[column.name for column in table.columns], *(r.cells for r in table.rows)]
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    notes = [(), *(row.notes for row in table.rows)]
    lines: list[str] = []
    for cells, below in zip(rows, notes, strict=True):
        padded = [
            cell.rjust(width) if column.is_number else cell.ljust(width)
            for column, cell, width in zip(table.columns, cells, widths, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
        lines += [" " * table.note_indent + note for note in below]
    return lines
