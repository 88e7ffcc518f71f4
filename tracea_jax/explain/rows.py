"""The rows of an explanation: sites that are alike, and what was left as it is.

``Explanation`` and ``Site`` put them on their pages; their values are made in ``sites``
and ``rewrite``.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from tracea_jax.diagnosis import Rejection, by_reason
from tracea_jax.page import Column, Row, Table

if TYPE_CHECKING:
    from tracea_jax.dispatch import Plan
    from tracea_jax.explain.sites import Site
    from tracea_jax.rewrite import Miss

_SHOWN = 3  # names of places in a row
_UNNAMED = re.compile(r"(\w+\()*\)*")  # scopes that JAX made and nobody named
T = TypeVar("T")

_SITES = (
    Column("where"),
    Column("problem", "\n  "),
    Column("runs", "\n  "),
    Column("config", " ", is_folded=True),
    Column("origin", ", "),
    Column("", ": ", is_folded=True),
    Column("time", "; ", is_number=True),
    Column("XLA", ", XLA ", is_number=True),
)
_MISSES = (
    Column("where"),
    Column("what", ":\n  "),
    Column("not rewritten as", " is not rewritten as "),
    Column("because", ": "),
)


def of_sites(sites: Sequence[Site]) -> Table:
    """A row for those that differ only in where they are."""
    own = functools.partial(_row, elsewhere=rejected_everywhere(sites))
    rows = tuple(map(own, grouped(sites, _same_row)))
    return Table(columns=_SITES, rows=rows, form="spaced", note_indent=4)


def of_misses(misses: Iterable[Miss]) -> Table:
    """A row for those that differ only in where they are."""
    alike = grouped(misses, lambda miss: (miss.op, miss.what, miss.reason))
    rows = [
        Row((places([m.scope or "-" for m in group]), first.what, first.op, why))
        for group in alike
        for first, why in [(group[0], group[0].reason)]
    ]
    return Table(columns=_MISSES, rows=tuple(rows), title="Left as they are:")


def rejected_everywhere(sites: Iterable[Site]) -> tuple[Rejection, ...]:
    """Rejections that several rows of an op have in common, which are shown once."""
    found: dict[Rejection, None] = {}
    for of_op in grouped(sites, lambda site: site.op):
        rows = [group[0] for group in grouped(of_op, _same_row)]
        if len(rows) > 1:
            first, *others = map(_rejected, rows)
            found |= dict.fromkeys(r for r in first if all(r in o for o in others))
    return tuple(found)


def grouped(items: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Those with equal keys together, in the order of the first ones."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


def places(names: Sequence[str]) -> str:
    """Some of the names, and how many there are."""
    distinct = list(dict.fromkeys(names))
    more = len(distinct) - _SHOWN
    text = ", ".join(distinct[:_SHOWN]) + (", ..." if more > 0 else "")
    return f"{text} ({len(names)})" if len(names) > 1 else text


def place(site: Site) -> str:
    """The scope of a site, or the line it was traced from if nobody named a scope."""
    if not _UNNAMED.fullmatch(site.scope):
        return site.scope
    parts = os.path.basename(site.source), site.scope
    return ", ".join(part for part in parts if part) or "-"


def _same_row(site: Site) -> Hashable:
    known = site.count is not None
    own = site.op, site.problem, site.plan, site.variant, site.reason
    return *own, site.local, known


def _rejected(site: Site) -> tuple[Rejection, ...]:
    return site.plan.rejected if site.plan else ()


def _row(alike: list[Site], *, elsewhere: Sequence[Rejection]) -> Row:
    site = alike[0]
    rejected = [r for r in _rejected(site) if r not in elsewhere]
    return Row(
        cells=(
            places(list(map(place, alike))) + _runs(alike),
            str(site.problem or site.op),
            site.variant or "cannot run",
            *_chosen(site),
            site.reason,
            *_times(site),
        ),
        notes=(
            *map(str, site.local),
            *map(_part, site.parts),
            *(site.plan.warnings if site.plan else ()),
            *(f"not {r}" for r in by_reason(rejected)),
        ),
    )


def _part(plan: Plan) -> str:
    runs = " ".join(filter(None, (plan.variant, plan.config_text)))
    return f"runs {plan.problem}: {runs}, {plan.origin}: {plan.reason}"


def _chosen(site: Site) -> tuple[str, str]:
    """The config and the origin of what runs."""
    if site.variant is None or site.plan is None:
        return "", ""
    return site.plan.config_text, site.plan.origin


def _times(site: Site) -> tuple[str, str]:
    """The time of what runs, and XLA's beside that of another variant."""
    plan = site.plan
    if plan is None or plan.time_us is None:
        return "", ""
    has_xla = plan.xla_us is not None and plan.variant != "xla"
    return f"{plan.time_us:.1f} us", f"{plan.xla_us:.1f} us" if has_xla else ""


def _runs(alike: list[Site]) -> str:
    counts = [site.count for site in alike if site.count is not None]
    if not counts:
        return ", runs in a loop of unknown length"
    return f", {sum(counts)} runs" if sum(counts) > len(alike) else ""
