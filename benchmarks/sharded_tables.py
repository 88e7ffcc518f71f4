"""Tables of the results of ``sharded_steps`` and ``sharded_layers``; see ``tables``."""

from __future__ import annotations

import re
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
    return for_each(results, "*/sharded_steps.json", _steps)


def _steps(result: dict[str, Any]) -> str:
    where = result["environment"]
    return table(
        f"\njax {where['versions']['jax']}, {where['date']}:\n",
        "program | layout | kernels: | products of XLA: | Mflop a device, plain: | "
        "ours: | KiB sent, plain: | ours: | plain moves | ours moves",
        map(_cells, result["rows"]),
    )


def layers(results: Results) -> str:
    """A row for each number of devices and layout, likewise."""
    return for_each(results, "*/sharded_layers.json", _layers)


def _layers(result: dict[str, Any]) -> str:
    where = result["environment"]
    return table(
        f"\njax {where['versions']['jax']}, {where['date']}:\n",
        "devices: | layout | kernels: | problems: | products of XLA: "
        "| Tflop a device, plain: | ours: | MB sent, plain: | ours: | ours moves",
        map(_of_layer, result["rows"]),
    )


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


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
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
