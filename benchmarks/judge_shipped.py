"""Lets kernel times judge shipped answers: python benchmarks/judge_shipped.py RESULTS

RESULTS is a file that ``bench_choices.py shipped`` wrote. For each row, the shipped
entry gets both kernel times. Where ours is not clearly lower, XLA becomes the answer
and our kernel the runner-up. Entries of other problems stay as they are; no device is
needed.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import pathlib
from typing import Any

from tune_layers import slim

from tracea_jax import knowledge
from tracea_jax.runtime import trust
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.records import Best, Entry
from tracea_jax.tuning.verdict import CLEARLY


def judged(entry: Entry, row: dict[str, Any]) -> Entry:
    """The entry with the answer that the row's kernel times leave."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")
    if row["ratio_default"] >= 1 + CLEARLY:
        times = {"kernel_us": row["default_us"], "xla_kernel_us": row["xla_us"]}
        best = dataclasses.replace(entry.best, **times)
        return slim(dataclasses.replace(entry, best=best, written=now))
    before = entry.best
    best = Best(
        variant="xla",
        config={},
        time_us=before.xla_us,
        xla_us=before.xla_us,
        ratio=1.0,
        runner_up={
            "variant": before.variant,
            "config": before.config,
            "code": before.code,
            "time_us": before.time_us,
        },
        cold_us=before.xla_cold_us,
        xla_cold_us=before.xla_cold_us,
        goal=before.goal,
        kernel_us=row["xla_us"],
        xla_kernel_us=row["xla_us"],
    )
    return slim(dataclasses.replace(entry, best=best, verified={}, written=now))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--data", type=pathlib.Path, default=knowledge.SHIPPED)
    args = parser.parse_args()
    results = json.loads(args.results.read_text())
    rows = {json.dumps(r["problem"], sort_keys=True): r for r in results["rows"]}
    device, store = results["environment"]["device"], Store(args.data, read_only=True)
    left_to_xla = count = 0
    for name in list(store.names()):
        entry = store.read(name, complete=True)
        assert entry is not None
        row = rows.get(json.dumps(entry.problem, sort_keys=True))
        is_raced = row is not None and row.get("variant") == entry.best.variant
        if not is_raced or row is None or entry.environment.device != device:
            continue
        after = judged(entry, row)
        trust.write_atomically(store.path(name), after.to_bytes(), mode=0o644)
        count += 1
        left_to_xla += after.best.variant == "xla"
    print(f"{count} answers judged, {left_to_xla} of them left to XLA")


if __name__ == "__main__":
    main()
