"""Tables from CPUs: of kernels, of elementwise functions, of models of PyTorch.

Of the results of ``bench_cpu``, ``bench_elementwise`` and ``bench_torch``; see
``tables``.
"""

from __future__ import annotations

from typing import Any

from table_cells import UNMEASURED, Results, for_each, head, number, table


def kernels(results: Results) -> str:
    """The rows and the figures of each machine that has results of ``bench_cpu``."""
    return for_each(results, "*/cpu.json", _kernels)


def _kernels(result: dict[str, Any]) -> str:
    rows = table(
        head(result["environment"]),
        "group | problem | kernel | ours, us: | XLA / ours: | goal: | oneDNN / ours: "
        "| torch / ours:",
        map(_kernel_cells, result["rows"]),
    )
    columns = "figure | measured: | goal: | met"
    figures = table("", columns, map(_figure_cells, result["figures"]))
    return rows.removesuffix("\n") + figures


def _kernel_cells(row: dict[str, Any]) -> tuple[str, ...]:
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


def _figure_cells(figure: dict[str, Any]) -> tuple[str, ...]:
    value, must, is_upper = figure["value"], figure["must"], figure["is_upper"]
    goal = f"{'<=' if is_upper else '>='} {must:.2f}"
    is_met = value <= must if is_upper else value >= must
    return figure["name"], f"{value:.2f}", goal, "yes" if is_met else "no"


def _head(result: dict[str, Any], more: str = "") -> str:
    """The line above a table; the load says whether others used the machine."""
    line = head(result["environment"]).rstrip().removesuffix(":")
    return f"{line}{more}, load {result['load']:.1f}:\n"


def elementwise(results: Results) -> str:
    """One table for each device that has results of ``bench_elementwise``."""
    return for_each(results, "*/elementwise.json", _elementwise, UNMEASURED)


def _elementwise(result: dict[str, Any]) -> str:
    return table(
        _head(result),
        "function | elements: | dtype | a new array: ours, us: | XLA, us: | "
        "numpy, us: | a given one: ours, us: | XLA, us: | numpy, us: | "
        "XLA / ours: | numpy / ours:",
        map(_elementwise_cells, result["rows"]),
    )


def _elementwise_cells(row: dict[str, Any]) -> tuple[str, ...]:
    peers = ("tracea", "xla", "numpy")
    times = [f"{name}{how}_us" for how in ("", "_into") for name in peers]
    return (
        row["function"],
        str(row["size"]),
        row["dtype"],
        *(number(row.get(time), 1) for time in times),
        *(number(row.get(f"{name}_ratio"), 2) for name in peers[1:]),
    )


def torch(results: Results) -> str:
    """One table for each device that has results of ``bench_torch``."""
    return for_each(results, "*/torch.json", _torch, UNMEASURED)


def _torch(result: dict[str, Any]) -> str:
    return table(
        _head(result, f", torch {result['torch']} with {result['threads']} threads"),
        "run | dtype | images | patched, ms: | torch, ms: | torch / patched:",
        map(_torch_cells, result["rows"]),
    )


def _torch_cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["kind"],
        row["dtype"],
        f"{row['batch']} x {row['size']} x {row['size']}",
        number(row["tracea_ms"], 1),
        number(row["torch_ms"], 1),
        number(row["ratio"], 2),
    )
