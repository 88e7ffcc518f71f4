"""Tables of what models of surveys decide, by ``benchmarks/survey/fit.py``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from table_cells import Results, for_each, table

_COLUMNS = (
    "problems | surveyed: | decided by | model, geomean: | under 0.97: | under 0.90: "
    "| rules, geomean: | rules, under 0.97: | fastest measured:"
)


def regret(results: Results) -> str:
    """For each device and kind of problem, the cost of decisions on held-out ones."""
    return for_each(results, "*/survey.json", _device)


def _device(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {v}" for name, v in result["versions"].items())
    above = f"\n{result['device']}, {versions}:\n"
    return table(above, _COLUMNS, _rows(result["ops"]))


def judged(results: Results) -> str:
    """For each device, the shipped model and the rules on problems no fit has seen."""
    return for_each(results, "*/survey_judged.json", _judged)


def _judged(result: dict[str, Any]) -> str:
    seeds = ", ".join(map(str, result["seeds"]))
    above = f"\n{result['device']}, seeds {seeds}:\n"
    columns = (
        "problems | drawn: | model, geomean: | under 0.97: | under 0.90: "
        "| rules, geomean: | rules, under 0.97: | rules, under 0.90:"
    )
    return table(above, columns, itertools.starmap(_group, result["groups"].items()))


def _group(name: str, of: Mapping[str, Any]) -> tuple[str, ...]:
    cells = (
        (f"{side['geomean']:.2f}", *(f"{share:.1%}" for share in side["under"]))
        for side in (of["model"], of["today"])
    )
    return name, str(of["model"]["problems"]), *itertools.chain(*cells)


def elsewhere(results: Results) -> str:
    """For each GPU without a survey, the ratios of the model that serves it."""
    return for_each(results, "*/survey_elsewhere.json", _served)


def _served(result: dict[str, Any]) -> str:
    above = f"\n{result['device']}, model of {result['surveyed']}:\n"
    cells = (_cells(op, "model", of) for op, of in result["ops"].items())
    return table(above, _COLUMNS.replace("surveyed:", "tuned:"), cells)


def _rows(ops: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for op, of in ops.items():
        yield _cells(f"**{op}, all**", "as installed", of["all"])
        for kind, summaries in of["kinds"].items():
            decides = "model" if kind in of["decided"] else "rules"
            yield _cells(kind, decides, summaries)


def _cells(name: str, decides: str, of: Mapping[str, Any]) -> tuple[str, ...]:
    model, rules = of["model"], of.get("today")
    return (
        name,
        str(model["problems"]),
        decides,
        f"{model['geomean']:.2f}",
        *(f"{share:.1%}" for share in model["under"]),
        *(
            (f"{rules['geomean']:.2f}", f"{rules['under'][0]:.1%}")
            if rules
            else ("-", "-")
        ),
        f"{of['oracle']['geomean']:.2f}",
    )
