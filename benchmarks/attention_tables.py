"""The tables of ``bench_attention``'s results, which ``tables`` puts into pages."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from table_cells import (
    UNMEASURED,
    Results,
    bar_rows,
    bars_table,
    for_each,
    head,
    number,
    table,
)


def rows(results: Results) -> str:
    """One table for each device and suite of ``bench_attention``."""
    found = [
        _rows_table(json.loads(file.read_text()))
        for suite in SUITES
        for file in sorted(results.glob(f"*/attention_{suite}.json"))
    ]
    return "".join(found) or "\n"


OF_CUDNN = ("forward", "backward", "masks", "decode")  # suites beside cuDNN
SUITES = (*OF_CUDNN, "peers")


def _rows_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "attention | passes | ours, us: | TFLOP/s: | cuDNN / ours: | XLA / ours: | "
        "other / ours | the fastest / default: | default",
        map(_cells, result["rows"]),
    )


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "error" in row:
        return row["text"], row["passes"], "failed", *6 * ("-",)
    others = [f"{text} {row[n]:.2f}" for n, text in _OTHERS.items() if n in row]
    return (
        row["text"],
        row["passes"],
        number(row["own_us"], 1),
        number(row["tflops"], 0),
        number(row.get("cudnn"), 2),
        number(row.get("xla"), 2),
        "; ".join(others) or "-",
        number(row["ratio_default"], 2),
        row["default_is"],
    )


_OTHERS = {
    "causal": "cuDNN, causal beside the mask",
    "separate": "documents as a batch",
    "plain": "without it",
    "dense": "all blocks",
    "copy": "of a copy's bandwidth",
    "mosaic": "Pallas Mosaic",
}


def bars(results: Results) -> str:
    """For each device: the bars of groups of attention, and which are met."""
    devices = sorted({file.parent for file in results.glob("*/attention_*.json")})
    return "".join(map(_bars_table, devices)) or "\n"


def _bars_table(device: pathlib.Path) -> str:
    files = [device / f"attention_{suite}.json" for suite in SUITES]
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    found = [row for result in results for row in bar_rows(result, FIGURES)]
    return bars_table(results[-1]["environment"], found) if results else ""


FIGURES = {
    "cudnn_geomean": "cuDNN / ours, geometric mean",
    "cudnn_min": "cuDNN / ours, lowest",
    "default_min": "the fastest / default, lowest",
    "separate_min": "documents as a batch / ours, lowest",
    "plain_min": "without it / ours, lowest",
    "mosaic_min": "Pallas Mosaic / ours, lowest",
    "allowed_min": "1.15 of the share of dense and 5 us / ours, lowest",
    "copy_min": "bandwidth by that of a copy, lowest",
}


def profile(results: Results) -> str:
    """One table for each device: what pipes and warps of kernels do."""
    return for_each(results, "*/attention_profile.json", _profile_table, UNMEASURED)


def _profile_table(result: dict[str, Any]) -> str:
    figures = " | ".join(f"{title}:" for title in _PROFILED.values())
    return table(
        head(result["environment"]),
        f"kernel | {figures} | warps wait for",
        map(_profile_cells, result["rows"]),
    )


def _profile_cells(row: dict[str, Any]) -> tuple[str, ...]:
    waits = ", ".join(f"{what} {n:.1f}" for what, n in row["stalls"].items())
    return row["kernel"], *(number(row[name], 0) for name in _PROFILED), waits


_PROFILED = {
    "tensor": "tensor cores, %",
    "xu": "exponentials, %",
    "alu": "ALU, %",
    "fma": "FMA, %",
    "l1": "shared memory, %",
    "l2": "L2, %",
    "dram": "DRAM, %",
    "issue": "issue slots, %",
    "registers": "registers",
}


def memory(results: Results) -> str:
    """One table for each device: bytes that attention of long sequences takes."""
    return for_each(results, "*/attention_memory.json", _memory_table, UNMEASURED)


def _memory_table(result: dict[str, Any]) -> str:
    return table(
        head(result["environment"]),
        "call | keys: | arguments, MB: | results, MB: | temporary, MB: "
        "| most in use, MB: | scores of 16 bits, MB:",
        map(_memory_cells, result["rows"]),
    )


def _memory_cells(row: dict[str, Any]) -> tuple[str, ...]:
    names = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
    sizes = (row.get(name) for name in (*names, "scores_bytes"))
    megabytes = (number(n and n / 1e6, 1) for n in sizes)
    return f"{row['side']}, {row['passes']}", str(row["length"]), *megabytes
