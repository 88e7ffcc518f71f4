"""Memory of attention on long sequences: the suite "memory".

One sequence, causal, 8 heads of 128 columns. A row has the bytes that XLA plans for the
compiled call, and the most that the process had in use when it had run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attention_sides
import common
import jax
from matmul_suite import Row

LENGTHS = (16384, 32768, 65536)
HEADS = 8
PASSES = ("forward", "both")
XLA_PLANNED = 16384  # compiled, not run


def rows() -> list[Row]:
    """The smallest first: the most in use is that of the whole process."""
    found = sorted(_ours(), key=lambda row: row["planned_bytes"])
    for row in found:
        run = row.pop("run")
        jax.block_until_ready(run())
        stats = jax.local_devices()[0].memory_stats() or {}
        row["peak_bytes"] = stats.get("peak_bytes_in_use")
    # Compiling takes memory too, where XLA tries what is fast.
    xla = [_row("xla", "xla", XLA_PLANNED, passes) for passes in PASSES]
    for row in xla:
        del row["run"]
    return [*found, *xla]


def _ours() -> Iterator[Row]:
    for length in LENGTHS:
        for passes in PASSES:
            yield _row("ours", attention_sides.OURS, length, passes)


def _row(side: str, implementation: str, length: int, passes: str) -> Row:
    problem = attention_sides.problem_of(length, 128, batch=1, heads=HEADS)
    attend = attention_sides.ours(implementation, is_causal=True)

    def both(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        o, pull = jax.vjp(attend, q, k, v)
        return o, pull(o)

    shape = jax.ShapeDtypeStruct((1, length, HEADS, 128), "bfloat16")
    function: Callable[..., Any] = attend if passes == "forward" else both
    executable = jax.jit(function).lower(shape, shape, shape).compile()
    planned: Any = executable.memory_analysis()
    inputs, outputs = planned.argument_size_in_bytes, planned.output_size_in_bytes
    temporary = planned.temp_size_in_bytes
    return {
        "side": side,
        "passes": passes,
        "length": length,
        "text": str(problem).removeprefix("attention ") + " causal",
        "argument_bytes": inputs,
        "output_bytes": outputs,
        "temporary_bytes": temporary,
        "planned_bytes": inputs + outputs + temporary,
        "scores_bytes": HEADS * length * length * 2,
        "run": lambda: executable(*attention_sides.operands(problem)),
    }


def render(rows: Sequence[Row]) -> str:
    head = (
        "call",
        "keys",
        "arguments",
        "results",
        "temporary",
        "most in use",
        "scores",
    )
    sizes = ("argument_bytes", "output_bytes", "temporary_bytes", "peak_bytes")
    cells = [
        (
            f"{row['side']}, {row['passes']}",
            str(row["length"]),
            *(_mb(row.get(name)) for name in (*sizes, "scores_bytes")),
        )
        for row in rows
    ]
    return common.table(head, cells)


def _mb(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.1f} MB"
