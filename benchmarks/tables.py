"""Writes measured tables into the README and docs/: python benchmarks/tables.py

The function NAME makes the table between the markers <!-- table: NAME --> and
<!-- end --> from the result files; a test compares the pages with the files.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

import attention_tables
import cpu_tables
from table_cells import (
    UNMEASURED,
    bar_line,
    bar_lines,
    bars_table,
    for_each,
    head,
    number,
)

ROOT = pathlib.Path(__file__).resolve().parent
PAGES = (ROOT.parent / "README.md", ROOT.parent / "docs" / "benchmarks.md")
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str, results: pathlib.Path) -> str:
    """The text of a page with every marked table generated again."""
    return _MARKED.sub(lambda m: m[1] + TABLES[m[2]](results) + m[3], page)


def headline(results: pathlib.Path) -> str:
    """One table for each machine: each kind of problem in a line."""
    found = {f.parent for name in _HEADLINES for f in results.glob(f"*/{name}.json")}
    return "".join(_headline_table(device) for device in sorted(found)) or "\n"


def _headline_table(device: pathlib.Path) -> str:
    """The kinds of a device's result files; the newest file dates the table."""
    ratios: dict[tuple[str, str], list[float]] = {}
    environments = []
    for name, compared in _HEADLINES.items():
        file = device / f"{name}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        environments.append(result["environment"])
        for row in result["rows"]:
            if (ratio := compared.ratio(row)) is not None:
                ratios.setdefault((compared.kind(row), compared.peer), []).append(ratio)
    lines = [
        head(max(environments, key=operator.itemgetter("date"))),
        "| problems | peer | cases | peer / ours, geometric mean | lowest |",
        "|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {kind} | {peer} | {len(found)} | {statistics.geometric_mean(found):.2f} "
        f"| {min(found):.2f} |"
        for (kind, peer), found in ratios.items()
    ]
    return "\n".join(lines) + "\n\n"


Row = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """How the rows of a result file enter the headline.

    Attributes:
      kind: of a row's problem, in words.
      ratio: the peer's time by that of what runs by default; None if the row has none.
    """

    kind: Callable[[Row], str]
    ratio: Callable[[Row], float | None]
    peer: str = "XLA"


def _cpu_kind(row: Row) -> str:
    problem = row["problem"]
    return f"{problem['op']}, {problem.get('dtype') or problem['lhs']}"


def _attention_ratio(row: Row) -> float | None:
    us = row.get("us", {})
    return us["cudnn"] / us["default"] if {"cudnn", "default"} <= us.keys() else None


_ATTENTION = _Compared(
    kind=lambda row: f"attention, {row['group']}", ratio=_attention_ratio, peer="cuDNN"
)
_CONV2D = _Compared(
    kind=lambda row: f"conv2d, {row['group']}",
    ratio=lambda row: row.get("ratio_default"),
)
_HEADLINES = {  # by result file
    "cpu": _Compared(kind=_cpu_kind, ratio=lambda row: row.get("ratio")),
    "matmul": _Compared(
        kind=lambda row: f"matmul, {row['group']}",
        ratio=lambda row: row.get("ratio_default"),
    ),
    **{f"attention_{suite}": _ATTENTION for suite in attention_tables.OF_CUDNN},
    "conv2d": _CONV2D,
    "conv2d_earlier": _CONV2D,  # groups that the newest run did not measure
}


def matmul(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_matmul``."""
    return for_each(results, "*/matmul.json", _matmul_table)


def _matmul_table(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| group | problem | kernel | ours, us | XLA, us | XLA / ours "
        "| XLA / default |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(_matmul_cells(row))} |" for row in result["rows"]]
    return "\n".join(lines) + "\n\n"


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


def conv2d(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_conv2d``."""
    return for_each(results, "*/conv2d*.json", _conv2d_table, UNMEASURED)


def _conv2d_table(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| group | problem | fastest kernel | its us | XLA, us | XLA / it "
        "| XLA / default |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(_conv2d_cells(row))} |" for row in result["rows"]]
    return "\n".join(lines) + "\n\n"


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


def conv2d_bars(results: pathlib.Path) -> str:
    """For each device: the bars of groups of convolutions, and which are met."""
    return for_each(results, "*/conv2d*.json", _conv2d_bars_table, UNMEASURED)


def _conv2d_bars_table(result: dict[str, Any]) -> str:
    return bars_table(result["environment"], bar_lines(result, _FIGURES))


def bars(results: pathlib.Path) -> str:
    """For each device with results: the bars of groups of cases, and which are met."""
    tables = [
        _bars_table(file.parent) for file in sorted(results.glob("*/matmul.json"))
    ]
    return "".join(tables) or "\n"


def _bars_table(device: pathlib.Path) -> str:
    """Bars of ``bench_matmul``'s groups and of rows of ``bench_models``."""
    products = json.loads((device / "matmul.json").read_text())
    lines = bar_lines(products, _FIGURES)
    for file in sorted(device.glob("models*.json")):
        for row in json.loads(file.read_text())["rows"]:
            if (limit := row.get("bar")) is not None:
                value = row["ratio"]
                bar = {"limit": limit, "value": value, "is_met": value >= limit}
                lines.append(bar_line("training", row["name"], bar))
    return bars_table(products["environment"], lines)


_FIGURES = {
    "own_geomean": "XLA / ours, geometric mean",
    "own_min": "XLA / ours, lowest",
    "default_geomean": "XLA / default, geometric mean",
    "default_min": "XLA / default, lowest",
    "copy_fraction_min": "bandwidth by that of a copy, lowest",
    "error_by_xla_max": "error by XLA's, highest",
}


def untuned(results: pathlib.Path) -> str:
    """A line for each origin, of each device with results of ``bench_untuned``."""
    return for_each(results, "*/untuned.json", _untuned_table)


def _untuned_table(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| origin of the plan | products | a kernel of ours | XLA / ours of these, "
        "geometric mean | lowest | below 0.98 |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for origin in sorted({row["origin"] for row in result["rows"]}):
        rows = [row for row in result["rows"] if row["origin"] == origin]
        ratios = [row["ratio"] for row in rows if row["ratio"] is not None]
        mean = statistics.geometric_mean(ratios) if ratios else None
        below = sum(ratio < 0.98 for ratio in ratios)
        lines.append(
            f"| {origin} | {len(rows)} | {len(ratios)} | {number(mean, 2)} "
            f"| {number(min(ratios, default=None), 2)} | {below} |"
        )
    return "\n".join(lines) + "\n\n"


def choices(results: pathlib.Path) -> str:
    """The choices by default against XLA, over random problems."""
    lines = [
        "",
        "| machine | drawn | problems | XLA / default, geometric mean | lowest "
        "| below 0.97 |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, (ratio, text) in _CHOICES.items():
        for file in sorted(results.glob(f"*/{name}.json")):
            result = json.loads(file.read_text())
            ratios = [row[ratio] for row in result["rows"]]
            lines.append(
                f"| {result['environment']['device']} | {text}, seed {result['seed']} "
                f"| {len(ratios)} | {statistics.geometric_mean(ratios):.2f} "
                f"| {min(ratios):.2f} | {sum(r < 0.97 for r in ratios)} |"
            )
    return "\n".join(lines) + "\n\n"


# Result file -> the ratio of its rows that counts, and the kind of its problems.
_CHOICES = {
    "choices": ("ratio", "tiny problems of every op, nothing tuned"),
    "choices_fused": ("ratio_default", "products with epilogues, nothing tuned"),
    "choices_tuned": (
        "ratio_default",
        "products of a tuning, answers of a new process",
    ),
}


def models(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_models``."""
    return for_each(results, "*/models*.json", _models_table)


def _models_table(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| model | ours, us | plain JAX, us | plain / ours | wall-clock |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r['name']} | {r['ours_us']:.1f} | {r['plain_us']:.1f} "
        f"| {r['ratio']:.2f} | {r['wall_ratio']:.2f} |"
        for r in result["rows"]
    ]
    return "\n".join(lines) + "\n\n"


def programs(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_programs``."""
    return for_each(results, "*/programs*.json", _programs_table)


def _programs_table(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| program | tuning | ours, us | plain JAX, us | plain / ours | wall-clock "
        "| inside / ours | memory, ours / plain | goals |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    lines += [f"| {' | '.join(_programs_cells(row))} |" for row in result["rows"]]
    return "\n".join(lines) + "\n\n"


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


def cpu(results: pathlib.Path) -> str:
    """The rows and the figures of each machine that has results of ``bench_cpu``."""
    return for_each(results, "*/cpu.json", _cpu_tables)


def _cpu_tables(result: dict[str, Any]) -> str:
    lines = [
        head(result["environment"]),
        "| group | problem | kernel | ours, us | XLA / ours | goal | oneDNN / ours "
        "| torch / ours |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    lines += [f"| {' | '.join(_cpu_cells(row))} |" for row in result["rows"]]
    lines += ["", "| figure | measured | goal | met |", "|---|---:|---:|---|"]
    for figure in result["figures"]:
        value, must, name = figure["value"], figure["must"], figure["name"]
        is_met = value <= must if figure["is_upper"] else value >= must
        sign = "<=" if figure["is_upper"] else ">="
        met = "yes" if is_met else "no"
        lines.append(f"| {name} | {value:.2f} | {sign} {must:.2f} | {met} |")
    return "\n".join(lines) + "\n\n"


def _cpu_cells(row: dict[str, Any]) -> tuple[str, ...]:
    problem = row["text"].partition(" ")[2]
    goal = f"{row['must']:.2f}"
    if "error" in row:
        return row["group"], problem, "failed", "-", "-", goal, "-", "-"
    return (
        row["group"],
        problem,
        row["variant"],
        number(row["ours_us"], 1),
        number(row["ratio"], 2),
        goal,
        number(row["ratio_onednn"], 2),
        number(row["ratio_torch"], 2),
    )


def tuner(results: pathlib.Path) -> str:
    """Means over the spaces of F(n), for the methods that ``bench_tuner`` compares."""
    rows = json.loads((results / "replay" / "tuner.json").read_text())["rows"]
    scores = {(r["method"], r["space"]): r for r in rows if "seeds" in r}
    counts = ("16", "32", "64", "96")
    lines = [f"| search | {' | '.join(counts)} |", "|---|" + "---:|" * len(counts)]
    for method, space, text in _SEARCHES:
        fraction = scores[method, space]["fraction"]
        numbers = " | ".join(f"{fraction[n]:.3f}" for n in counts)
        lines.append(f"| {text} | {numbers} |")
    return "\n" + "\n".join(lines) + "\n\n"


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
    "headline": headline,
    "choices": choices,
    "matmul": matmul,
    "conv2d": conv2d,
    "conv2d_bars": conv2d_bars,
    "bars": bars,
    "untuned": untuned,
    "cpu": cpu,
    "elementwise": cpu_tables.elementwise,
    "torch": cpu_tables.torch,
    "models": models,
    "programs": programs,
    "tuner": tuner,
}


def main() -> None:
    for page in PAGES:
        page.write_text(rendered(page.read_text(), ROOT / "results"))


if __name__ == "__main__":
    main()
