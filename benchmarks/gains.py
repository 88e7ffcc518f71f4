"""The table of the README that says what to expect: whole programs, by kind.

Each cell has the lowest and the highest ratio of wall-clock times, plain JAX by
transformed, of the programs of that kind which ``bench_programs`` and ``bench_models``
ran untuned. Of a program that ran several times on a device, the newest run counts, and
of several on one day the slowest.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Iterator

from table_cells import table

# The kinds of programs, by their names in the result files.
_KINDS = {
    "training a Transformer": r"gpt2_step|vit_step|llama_block_step|"
    r"Llama block, \w+, forward\+backward|block forward\+backward",
    "running a Transformer": r"Llama block, \w+, forward|block forward",
    "decoding tokens": r"llama_decode .*",
    "training a convolutional network": r"(resnet50|convnext|efficientnet)_step|"
    r"unet_block(_\d+)?_step|ResNet block, \w+, forward\+backward",
    "running a convolutional network": r"(resnet50|efficientnet)_inference|"
    r"unet_block(_\d+)?|ResNet block, \w+, forward",
    "training an MLP": r"gelu MLP.* step, transform|gelu MLP, \w+, step, transform",
}
# Programs whose ops are called by hand: nothing is transformed.
_BY_HAND = r"gelu MLP.* step, ops|gelu MLP, \w+, step, ops"
_COLUMNS = {
    "CPU, float32": ("cpu", "float32"),
    "CPU, bfloat16": ("cpu", "bfloat16"),
    "H100 or H200, bfloat16": ("gpu", "bfloat16"),
}


def gains(results: pathlib.Path) -> str:
    """The table: a row for each kind of program, a column for devices and dtypes."""
    found: dict[tuple[str, tuple[str, str]], list[float]] = {}
    for (kind, place), ratio in _newest(results):
        found.setdefault((kind, place), []).append(ratio)
    titles = ["your program", *(f"{column}:" for column in _COLUMNS)]
    rows = [
        (kind, *(_cell(found.get((kind, place), [])) for place in _COLUMNS.values()))
        for kind in _KINDS
    ]
    return table("", " | ".join(titles), rows).strip() + "\n"


def kind_of(program: str) -> str | None:
    """The kind of a program; None where its ops are called by hand.

    Raises:
      ValueError: if no kind has such programs.
    """
    for kind, names in _KINDS.items():
        if re.fullmatch(names, program):
            return kind
    if re.fullmatch(_BY_HAND, program):
        return None
    raise ValueError(f"no kind of programs has {program!r}: add it to gains._KINDS")


def _newest(
    results: pathlib.Path,
) -> Iterator[tuple[tuple[str, tuple[str, str]], float]]:
    """The kind, the place and the ratio of each program and device."""
    runs: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    files = [*results.glob("*/programs*.json"), *results.glob("*/models*.json")]
    for file in files:
        result = json.loads(file.read_text())
        where = result["environment"]
        for row in result["rows"]:
            # Every program names its dtype but those of GPUs, which are bfloat16.
            words = f"{row['name']} {row.get('text', '')}"
            dtype = "float32" if "float32" in words else "bfloat16"
            if row.get("effort", "none") == "none" and "failed" not in row:
                key = (file.parent.name, row["name"], dtype)
                runs.setdefault(key, []).append((where["date"], row["wall_ratio"]))
    for (device, program, dtype), dated in sorted(runs.items()):
        if kind := kind_of(program):
            last = max(date for date, _ in dated)
            ratio = min(ratio for date, ratio in dated if date == last)
            place = "gpu" if device.startswith("nvidia") else "cpu"
            yield (kind, (place, dtype)), ratio


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return "-"
    low, high = f"{min(ratios):.1f}", f"{max(ratios):.1f}"
    return low if low == high else f"{low} to {high}"
