"""Tables of the results of benchmarks on several devices; see ``tables``."""

from __future__ import annotations

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


def _tables(
    file: str, columns: str, cells: Callable[[dict[str, Any]], tuple[str, ...]]
) -> Callable[[Results], str]:
    """Makes a table of each results file of this name.

    Args:
      file: name of the results files, of every device.
      columns: as in ``table_cells.table``.
      cells: of a row of the results.
    """

    def table_of(result: dict[str, Any]) -> str:
        where = result["environment"]
        device = f"{where['device']}, " if where["driver"] else ""
        title = f"\n{device}jax {where['versions']['jax']}, {where['date']}:\n"
        return table(title, columns, map(cells, result["rows"]))

    return lambda results: for_each(results, f"*/{file}.json", table_of)


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


# A row for each program and layout: work and bytes of one device.
steps = _tables(
    "sharded_steps",
    "program | layout | kernels: | products of XLA: | Mflop a device, plain: | "
    "ours: | KiB sent, plain: | ours: | plain moves | ours moves",
    _of_step,
)
# A row for each number of devices and layout: work and bytes of one device.
layers = _tables(
    "sharded_layers",
    "devices: | layout | kernels: | problems: | products of XLA: "
    "| Tflop a device, plain: | ours: | MB sent, plain: | ours: | ours moves",
    _of_layer,
)
# A row for each program and layout: milliseconds of a step on two GPUs.
on_gpus = _tables(
    "sharded",
    "program | layout | kernels: | MiB sent, plain: | ours: | ms, plain: | ours: "
    "| ratio: | bar, ms:",
    _on_gpus,
)
# A row for each way to compute attention to a sequence on two GPUs.
rings = _tables(
    "ring_attention",
    "program | GPUs: | tokens: | ms: | Tflop/s: | times one GPU:",
    of_ring,
)
