"""The table of sharded steps, of the results of ``sharded_steps``; see ``tables``."""

from __future__ import annotations

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
