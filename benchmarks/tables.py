"""Writes measured tables into the README and docs/: python benchmarks/tables.py

The function NAME makes the table between the markers <!-- table: NAME --> and
<!-- end --> from the result files, and between <!-- table: NAME MACHINES --> from those
of some machines (``Selected``). A test compares the pages with the files.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
import pathlib
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import attention_tables
import cpu_tables
import gains
import sharded_tables
import survey_tables
from table_cells import (
    MACHINES,
    UNMEASURED,
    Results,
    Selected,
    bar_cells,
    bar_rows,
    bars_table,
    for_each,
    head,
    number,
    table,
)

ROOT = pathlib.Path(__file__).resolve().parent
DOCS = ROOT.parent / "docs"
PAGES = (
    ROOT.parent / "README.md",
    *sorted((DOCS / "benchmarks").glob("*.md")),
    DOCS / "howto" / "sharding.md",
)
MARKED = re.compile(
    r"(<!-- table: (?P<table>\w+)(?: (?P<machines>\w+))? -->\n).*?(<!-- end -->)",
    re.DOTALL,
)


def rendered(page: str, results: pathlib.Path) -> str:
    """The text of a page with every marked table generated again."""

    def made(marked: re.Match[str]) -> str:
        machines = marked["machines"]
        chosen = Selected(results, machines) if machines else results
        return marked[1] + TABLES[marked["table"]](chosen) + marked[4]

    return MARKED.sub(made, page)


def headline(results: Results) -> str:
    """One table: a row for each op on each kind of machine."""
    rows = []
    for machines, name in MACHINES.items():
        kinds = _kinds(_devices(Selected(results, machines)))
        for op in dict.fromkeys(kind.op for kind in kinds):
            ratios = list(itertools.chain(*(kinds[k] for k in kinds if k.op == op)))
            peers = " or ".join(dict.fromkeys(k.peer for k in kinds if k.op == op))
            rows.append((name, _OPS[op], peers, *_summed(ratios)))
    titles = "machine | ops | compared with | cases: | geometric mean: | lowest:"
    return table("", titles, rows).strip() + "\n"


_OPS = {"matmul": "matmul", "conv2d": "convolution", "attention": "attention"}


def kinds(results: Results) -> str:
    """One table for each machine: a row for each kind of problem."""
    return "".join(map(_kinds_table, _devices(results))) or "\n"


def _devices(results: Results) -> list[pathlib.Path]:
    """The directories of machines whose ops were measured."""
    found = {f.parent for name in _COMPARED for f in results.glob(f"*/{name}.json")}
    return sorted(found)


def _kinds_table(device: pathlib.Path) -> str:
    """The kinds of a device's result files; the newest file dates the table."""
    files = [device / f"{name}.json" for name in _COMPARED]
    environments = [
        json.loads(file.read_text())["environment"] for file in files if file.exists()
    ]
    return table(
        head(max(environments, key=operator.itemgetter("date"))),
        "problems | compared with | cases: | geometric mean: | lowest:",
        (
            (f"{kind.op}, {kind.text}", kind.peer, *_summed(ratios))
            for kind, ratios in _kinds([device]).items()
        ),
    )


def _kinds(devices: Sequence[pathlib.Path]) -> dict[_Kind, list[float]]:
    """The ratios of each kind of problem, on all devices together."""
    ratios: dict[_Kind, list[float]] = {}
    for (name, compared), device in itertools.product(_COMPARED.items(), devices):
        file = device / f"{name}.json"
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
        for row in rows:
            if (ratio := compared.ratio(row)) is not None:
                ratios.setdefault(compared.kind(row), []).append(ratio)
    return ratios


@dataclasses.dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of problem, and the implementation that it is compared with."""

    op: str
    text: str
    peer: str = "XLA"


def _summed(ratios: Sequence[float]) -> tuple[str, str, str]:
    """Number of ratios, their geometric mean, and the lowest."""
    mean = statistics.geometric_mean(ratios) if ratios else None
    return str(len(ratios)), number(mean, 2), number(min(ratios, default=None), 2)


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """Columns by which rows of a result file enter the tables of kinds.

    Attributes:
      kind: (row) -> its kind of problem.
      ratio: (row) -> the peer's time by ours with the default choice, if it has one.
    """

    kind: Callable[[Row], _Kind]
    ratio: Callable[[Row], float | None]


def _cpu_kind(row: Row) -> _Kind:
    problem = row["problem"]
    return _Kind(problem["op"], problem.get("dtype") or problem["lhs"])


def _attention_ratio(row: Row) -> float | None:
    us = row.get("us", {})
    return us["cudnn"] / us["default"] if {"cudnn", "default"} <= us.keys() else None


_ATTENTION = _Compared(
    kind=lambda row: _Kind("attention", row["group"], "cuDNN"), ratio=_attention_ratio
)
_CONV2D = _Compared(
    kind=lambda row: _Kind("conv2d", row["group"]),
    ratio=lambda row: row.get("ratio_default"),
)
_COMPARED = {  # by result file
    "cpu": _Compared(kind=_cpu_kind, ratio=lambda row: row.get("ratio")),
    "matmul": _Compared(
        kind=lambda row: _Kind("matmul", row["group"]),
        ratio=lambda row: row.get("ratio_default"),
    ),
    **{f"attention_{suite}": _ATTENTION for suite in attention_tables.OF_CUDNN},
    "conv2d": _CONV2D,
    # Groups that newer runs did not measure.
    "conv2d_earlier": _CONV2D,
    "conv2d_earliest": _CONV2D,
}


def matmul(results: Results) -> str:
    """One table for each device that has results of ``bench_matmul``."""
    return for_each(results, "*/matmul.json", _matmul_table)


def _matmul_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "group | problem | kernel | ours, us: | XLA, us: | XLA / ours: | "
        "XLA / default:",
        map(_matmul_cells, result["rows"]),
    )


def _matmul_cells(row: dict[str, Any]) -> tuple[str, ...]:
    problem = row["text"].removeprefix("matmul ")
    if "error" in row:
        return row["group"], problem, "failed", "-", "-", "-", "-"
    return (
        row["group"],
        problem,
        row["variant"] or "-",
        number(row["own_us"], 1),
        number(row["xla_us"], 1),
        number(row["ratio_own"], 2),
        number(row["ratio_default"], 2),
    )


def conv2d(results: Results) -> str:
    """One table for each device that has results of ``bench_conv2d``."""
    return for_each(results, "*/conv2d*.json", _conv2d_table, UNMEASURED)


def _conv2d_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "group | problem | fastest kernel | its us: | XLA, us: | XLA / it: | "
        "XLA / default:",
        map(_conv2d_cells, result["rows"]),
    )


def _conv2d_cells(row: dict[str, Any]) -> tuple[str, ...]:
    problem = row["text"].removeprefix("conv2d ")
    if "error" in row:
        return row["group"], problem, "failed", *4 * ("-",)
    return (
        row["group"],
        problem,
        row["best"] or "-",
        number(row["own_us"], 1),
        number(row["times_us"]["xla"], 1),
        number(row["ratio_own"], 2),
        number(row["ratio_default"], 2),
    )


def conv2d_bars(results: Results) -> str:
    """For each device: the bars of groups of convolutions, and which are met."""
    return for_each(results, "*/conv2d*.json", _conv2d_bars_table, UNMEASURED)


def _conv2d_bars_table(result: dict[str, Any]) -> str:
    return bars_table(result["environment"], bar_rows(result, _FIGURES))


def bars(results: Results) -> str:
    """For each device with results: the bars of groups of cases, and which are met."""
    tables = [
        _bars_table(file.parent) for file in sorted(results.glob("*/matmul.json"))
    ]
    return "".join(tables) or "\n"


def _bars_table(device: pathlib.Path) -> str:
    """Bars of ``bench_matmul``'s groups and of rows of ``bench_models``."""
    products = json.loads((device / "matmul.json").read_text())
    rows = bar_rows(products, _FIGURES)
    for file in sorted(device.glob("models*.json")):
        for row in json.loads(file.read_text())["rows"]:
            if (limit := row.get("bar")) is not None:
                value = row["ratio"]
                bar = {"limit": limit, "value": value, "is_met": value >= limit}
                rows.append(bar_cells("training", row["name"], bar))
    return bars_table(products["environment"], rows)


_FIGURES = {
    "own_geomean": "XLA / ours, geometric mean",
    "own_min": "XLA / ours, lowest",
    "default_geomean": "XLA / default, geometric mean",
    "default_min": "XLA / default, lowest",
    "copy_fraction_min": "bandwidth by that of a copy, lowest",
    "error_by_xla_max": "error by XLA's, highest",
}


def untuned(results: Results) -> str:
    """A line for each origin, of each device with results of ``bench_untuned``."""
    return for_each(results, "*/untuned.json", _untuned_table)


def _untuned_table(result: dict[str, Any]) -> str:
    origins: dict[str, list[Row]] = {}
    for row in sorted(result["rows"], key=operator.itemgetter("origin")):
        origins.setdefault(row["origin"], []).append(row)
    return table(
        head(result["environment"]),
        "origin of the plan | products: | a kernel of ours: "
        "| XLA / ours of these, geometric mean: | lowest: | below 0.98:",
        itertools.starmap(_untuned_cells, origins.items()),
    )


def _untuned_cells(origin: str, rows: Sequence[Row]) -> tuple[str, ...]:
    ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
    below = sum(ratio < 0.98 for ratio in ratios)
    return origin, str(len(rows)), *_summed(ratios), str(below)


def choices(results: Results) -> str:
    """The choices by default against XLA, over random problems."""
    return table(
        "",
        "machine | drawn | problems: | XLA / default, geometric mean: | lowest: "
        "| below 0.97:",
        (
            _choices_cells(json.loads(file.read_text()), ratio, text)
            for name, (ratio, text) in _CHOICES.items()
            for file in sorted(results.glob(f"*/{name}.json"))
        ),
    )


def _choices_cells(result: dict[str, Any], ratio: str, text: str) -> tuple[str, ...]:
    ratios = [row[ratio] for row in result["rows"]]
    drawn, below = f"{text}, seed {result['seed']}", sum(r < 0.97 for r in ratios)
    return result["environment"]["device"], drawn, *_summed(ratios), str(below)


# Result file -> the ratio of its rows that counts, and the kind of its problems.
_CHOICES = {
    "choices": ("ratio", "tiny problems of every op, nothing tuned"),
    "choices_fused": ("ratio_default", "products with epilogues, nothing tuned"),
    "choices_tuned": (
        "ratio_default",
        "products of a tuning, answers of a new process",
    ),
}


def models(results: Results) -> str:
    """One table for each device that has results of ``bench_models``."""
    return for_each(results, "*/models*.json", _models_table)


def _models_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "model | ours, us: | plain JAX, us: | plain / ours: | wall-clock:",
        map(_models_cells, result["rows"]),
    )


def _models_cells(row: Row) -> tuple[str, ...]:
    times = (number(row[name], 1) for name in ("ours_us", "plain_us"))
    ratios = (number(row[name], 2) for name in ("ratio", "wall_ratio"))
    return row["name"], *times, *ratios


def programs(results: Results) -> str:
    """One table for each device that has results of ``bench_programs``."""
    return for_each(results, "*/programs*.json", _programs_table)


def _programs_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "program | tuning | ours, us: | plain JAX, us: | plain / ours: | "
        "wall-clock: | inside / ours: | memory, ours / plain: | goals",
        map(_programs_cells, result["rows"]),
    )


def _programs_cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = f"{row['name']}, {row['text']}"
    if "failed" in row:
        return name, row["effort"], "failed", *6 * ("-",)
    goals = [_goal(bar) for bar in row["bars"]]
    return (
        name,
        row["effort"],
        number(row["us"]["ours"], 1),
        number(row["us"]["plain"], 1),
        number(row["ratio"], 2),
        number(row["wall_ratio"], 2),
        number(row.get("inside_ratio"), 2),
        number(row["memory_ratio"], 2),
        "; ".join(goals) or "-",
    )


def _goal(bar: dict[str, Any]) -> str:
    """ "plain / ours >= 1.28: met"."""
    sign = "<=" if bar["is_upper"] else ">="
    met = "met" if bar["is_met"] else "missed"
    return f"{_PROGRAM_FIGURES[bar['figure']]} {sign} {bar['limit']:.3g}: {met}"


_PROGRAM_FIGURES = {
    "ratio": "plain / ours",
    "wall_ratio": "wall-clock",
    "inside_ratio": "inside / ours",
    "memory_ratio": "memory",
}


def tuner(results: pathlib.Path) -> str:
    """Means over the spaces of F(n), for the methods that ``bench_tuner`` compares."""
    rows = json.loads((results / "replay" / "tuner.json").read_text())["rows"]
    scores = {(r["method"], r["space"]): r for r in rows if "seeds" in r}
    counts = ("16", "32", "64", "96")
    columns = " | ".join(["search", *(f"{count}:" for count in counts)])
    fractions = [
        (text, scores[method, space]["fraction"]) for method, space, text in _SEARCHES
    ]
    return table(
        "",
        columns,
        ((text, *(number(f[n], 3) for n in counts)) for text, f in fractions),
    )


_SEARCHES = (
    ("ours", "mean", "ours, nothing known"),
    ("ours, fresh seeds", "mean", "ours, seeds not used when it was made"),
    ("random", "mean", "random"),
    ("kernel_tuner adaptive_tabu_greywolf", "mean", "adaptive_tabu_greywolf"),
    ("kernel_tuner genetic_algorithm", "mean", "genetic_algorithm"),
    ("kernel_tuner bayes_opt", "mean", "bayes_opt"),
    ("best of kernel_tuner", "mean", "best of 12 for each space and n"),
    ("ours, analytic model", "gemm_rtx3090", "ours with an analytic model, GEMM only"),
)


TABLES = {
    "attention": attention_tables.rows,
    "attention_bars": attention_tables.bars,
    "attention_profile": attention_tables.profile,
    "attention_memory": attention_tables.memory,
    "gains": gains.gains,
    "headline": headline,
    "kinds": kinds,
    "choices": choices,
    "matmul": matmul,
    "conv2d": conv2d,
    "conv2d_bars": conv2d_bars,
    "bars": bars,
    "untuned": untuned,
    "cpu": cpu_tables.kernels,
    "elementwise": cpu_tables.elementwise,
    "torch": cpu_tables.torch,
    "models": models,
    "programs": programs,
    "sharded_steps": sharded_tables.steps,
    "sharded_layers": sharded_tables.layers,
    "sharded_on_gpus": sharded_tables.on_gpus,
    "rings": sharded_tables.rings,
    "survey": survey_tables.regret,
    "survey_elsewhere": survey_tables.elsewhere,
    "survey_judged": survey_tables.judged,
    "tuner": tuner,
}


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(), ROOT / "results"))


if __name__ == "__main__":
    main()
