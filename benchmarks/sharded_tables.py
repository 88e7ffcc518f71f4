"""Tables of the results of benchmarks on several devices; see ``tables``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from table_cells import Results, for_each, table

_NAMES = {
    "mlp": "MLP",
    "llama": "Llama block",
    "gpt2": "GPT-2",
    "vit": "ViT",
    "resnet": "ResNet",
    "cross_entropy": "head and loss",
    "rows": "image rows",
}


def steps(results: Results) -> str:
    """A row for each program and layout: work and bytes of one device."""
    columns = (
        "program | layout | kernels: | products of XLA: | Mflop a device, plain: | "
        "ours: | KiB sent, plain: | ours: | plain moves | ours moves"
    )
    table_of = functools.partial(_table, columns=columns, cells=_of_step)
    return for_each(results, "*/sharded_steps.json", table_of)


def layers(results: Results) -> str:
    """A row for each number of devices and layout: work and bytes of one device."""
    columns = (
        "devices: | layout | kernels: | problems: | products of XLA: "
        "| Tflop a device, plain: | ours: | MB sent, plain: | ours: | ours moves"
    )
    table_of = functools.partial(_table, columns=columns, cells=_of_layer)
    return for_each(results, "*/sharded_layers.json", table_of)


def on_gpus(results: Results) -> str:
    """A row for each program and layout: milliseconds of a step on two GPUs."""
    columns = (
        "program | layout | kernels: | MiB sent, plain: | ours: | ms, plain: | ours: "
        "| ratio: | bar, ms:"
    )
    table_of = functools.partial(_table, columns=columns, cells=_on_gpus)
    return for_each(results, "*/sharded.json", table_of)


def rings(results: Results) -> str:
    """A row for each way to compute attention to a sequence on two GPUs."""
    columns = "program | GPUs: | tokens: | ms: | Tflop/s: | times one GPU:"
    table_of = functools.partial(_table, columns=columns, cells=of_ring)
    return for_each(results, "*/ring_attention.json", table_of)


def _table(
    result: dict[str, Any], columns: str, cells: Callable[..., tuple[str, ...]]
) -> str:
    where = result["environment"]
    device = f"{where['device']}, " if where["driver"] else ""
    title = f"\n{device}jax {where['versions']['jax']}, {where['date']}:\n"
    return table(title, columns, map(cells, result["rows"]))


def _of_layer(row: dict[str, Any]) -> tuple[str, ...]:
    plain, ours = row["plain"], row["ours"]
    return (
        str(row["devices"]),
        row["layout"],
        *(str(ours[name]) for name in ("kernels", "problems", "left")),
        *(f"{side['flops'] / 1e12:.2f}" for side in (plain, ours)),
        *(f"{side['sent'] / 1e6:.0f}" for side in (plain, ours)),
        re.sub(r"/[\d.]+k", "", ours["moved"]),
    )


def _of_step(row: dict[str, Any]) -> tuple[str, ...]:
    plain, ours = row["plain"], row["ours"]
    return (
        _NAMES.get(row["program"], row["program"]),
        _NAMES.get(row["layout"], row["layout"]),
        str(ours["kernels"]),
        str(ours["left"]),
        *(f"{side['flops'] / 1e6:.2f}" for side in (plain, ours)),
        *(f"{side['sent'] / 1024:.0f}" for side in (plain, ours)),
        *(side["moved"] for side in (plain, ours)),
    )


def _on_gpus(row: dict[str, Any]) -> tuple[str, ...]:
    plain, ours = row["plain"], row["ours"]
    is_one = row["layout"] == "one device"
    return (
        row["program"],
        row["layout"],
        str(sum(ours["kernels"].values())),
        *(f"{side['sent'] / 2**20:.0f}" for side in (plain, ours)),
        *(f"{side['ms']:.2f}" for side in (plain, ours)),
        f"{plain['ms'] / ours['ms']:.2f}",
        "-" if is_one else f"{row['bar_ms']:.2f}",
    )


def of_ring(row: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a row of ``ring_attention``, whose own table has them, too."""
    return (
        row["program"],
        str(row["devices"]),
        str(row["tokens"] or "-"),
        f"{row['ms']:.2f}",
        "-" if row["tflops"] is None else f"{row['tflops']:.0f}",
        "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
    )
