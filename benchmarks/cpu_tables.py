"""Tables of elementwise functions and of models of PyTorch, from CPUs.

Of the results of ``bench_elementwise`` and ``bench_torch``; see ``tables``.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

from table_cells import UNMEASURED, head, number


def _head(result: dict[str, Any], more: str = "") -> str:
    """The line above a table; the load says whether others used the machine."""
    line = head(result["environment"]).rstrip().removesuffix(":")
    return f"{line}{more}, load {result['load']:.1f}:\n"


def elementwise(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_elementwise``."""
    files = sorted(results.glob("*/elementwise.json"))
    found = "".join(_elementwise(json.loads(f.read_text())) for f in files)
    return found or UNMEASURED


def _elementwise(result: dict[str, Any]) -> str:
    lines = [
        _head(result),
        "| function | elements | dtype | a new array: ours, us | XLA, us | numpy, us "
        "| a given one: ours, us | XLA, us | numpy, us | XLA / ours | numpy / ours |",
        "|---|---:|---|" + "---:|" * 8,
    ]
    lines += [f"| {' | '.join(_elementwise_cells(row))} |" for row in result["rows"]]
    return "\n".join(lines) + "\n\n"


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


def torch(results: pathlib.Path) -> str:
    """One table for each device that has results of ``bench_torch``."""
    files = sorted(results.glob("*/torch.json"))
    return "".join(_torch(json.loads(f.read_text())) for f in files) or UNMEASURED


def _torch(result: dict[str, Any]) -> str:
    lines = [
        _head(result, f", torch {result['torch']} with {result['threads']} threads"),
        "| run | dtype | images | patched, ms | torch, ms | torch / patched |",
        "|---|---|---|---:|---:|---:|",
    ]
    for row in result["rows"]:
        cells = (
            row["kind"],
            row["dtype"],
            f"{row['batch']} x {row['size']} x {row['size']}",
            number(row["tracea_ms"], 1),
            number(row["torch_ms"], 1),
            number(row["ratio"], 2),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"
