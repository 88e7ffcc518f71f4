"""Sharded training steps on eight CPU devices: kernels, work and bytes, not times.

    python benchmarks/sharded_steps.py [--only gpt2] [--out DIRECTORY]

The programs and layouts of ``tests/sharded_programs``, each compiled as it is written
and transformed, with kernels of ours demanded. Rows say what one device computes and
sends in a run, and how far the results of the two are apart, relative to the largest
value of each. A run that was stopped goes on where it ended.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests"))
if __name__ == "__main__":  # before JAX is imported
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}

import common
import jax
import numpy as np
from sharded_programs import LAYOUTS, PROGRAMS, spread

import tracea_jax as tracea
from tracea_jax.ops.linear_cross_entropy import chunks

CHUNK_BYTES = 1 << 16  # so that the cross entropies, which are small, have chunks


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--only", default="", help="programs with this in their name")
    args = parser.parse_args()
    rows = common.saved("sharded_steps", args)
    done = {(row["program"], row["layout"]) for row in rows}
    chunks.CHUNK_BYTES = CHUNK_BYTES
    for name, layout in cases():
        if args.only in name and (name, layout) not in done:
            rows.append(measured(name, layout))
            print(rows[-1], flush=True)
            print(common.save("sharded_steps", rows, args))


def cases() -> list[tuple[str, str]]:
    return [
        (name, layout)
        for name, make in PROGRAMS.items()
        for layout in LAYOUTS
        if LAYOUTS[layout].fits(make())
    ]


def measured(name: str, layout: str) -> dict[str, Any]:
    """The row of a program under a layout."""
    program, how = PROGRAMS[name](), LAYOUTS[layout]
    plain = spread(program.step, program, how)
    with tracea.options(implementation="tracea"):
        ours = spread(tracea.transform(program.step), program, how)
    return {
        "program": name,
        "layout": layout,
        "mesh": list(how.shape),
        "plain": plain.work.as_row(),
        "ours": ours.work.as_row(),
        "difference": _difference(ours(), plain()),
    }


def _difference(found: Any, expected: Any) -> float:
    leaves = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(x - y).max() / np.abs(y).max()) for x, y in leaves)


if __name__ == "__main__":
    main()
