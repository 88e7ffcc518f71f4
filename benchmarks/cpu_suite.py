"""The cases of ``bench_cpu`` and their bars: XLA's time divided by ours."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from matmul_suite import GELU, geomean

from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GemmProblem,
    Problem,
)

Row = dict[str, Any]

RELU = Epilogue(bias="row", activation="relu")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row.

    Attributes:
      group: the part of the table that the row is in; a group in ``GEOMEANS`` also has
        a bar for its geometric mean.
      must, stretch: the ratio that the row must reach, and an ambitious one.
      is_quick: whether a quick run has the row, too.
    """

    group: str
    problem: Problem
    must: float
    stretch: float | None = None
    is_quick: bool = False


GEOMEANS = {  # of the ratios of a group: must, stretch
    "conv2d f32": (1.25, 1.6),
    "conv2d bf16": (5.0, 9.0),
}
TORCH = (1.0, 1.15)  # geometric mean over all rows of torch's time divided by ours
PEAK = (0.75, 0.85)  # part of the measured peak that large f32 products reach
GELU_COST = (0.08, 0.03)  # part of a product's time that a fused GELU adds
MEMORY_MB = (64.0, 16.0)  # memory of a long attention, besides inputs and outputs


def suite(quick: bool) -> list[Case]:
    """The cases; those of one group are consecutive."""
    makers = (_products, _skinny, _dots, _gradients, _fused, _convolutions, _attentions)
    cases = [case for make in makers for case in make()]
    return [case for case in cases if case.is_quick or not quick]


def _products() -> Iterator[Case]:
    goals = {
        "float32": ((1.7, 2.3), (1.1, 1.3), *[(1.05, 1.15)] * 3),
        "bfloat16": ((3.0, 5.0), (2.3, 4.0), (1.5, 2.0), (1.4, 1.8), (1.5, 2.0)),
    }
    for dtype, bars in goals.items():
        for size, (must, stretch) in zip(
            (256, 512, 1024, 2048, 4096), bars, strict=True
        ):
            problem = _gemm((size, size, size), dtype)
            yield _case(f"matmul {_short(dtype)}", problem, must, stretch, size == 1024)


def _skinny() -> Iterator[Case]:
    goals = {
        "float32": ((1.15, 1.5), (2.3, 3.0), (1.6, 2.2), (1.15, 1.4)),
        "bfloat16": ((10.0, 20.0), (1.7, 2.3), (1.1, 2.0), (1.15, 2.0)),
    }
    for dtype, bars in goals.items():
        for m, (must, stretch) in zip((1, 4, 16, 64), bars, strict=True):
            problem = _gemm((m, 4096, 4096), dtype)
            yield _case(f"few rows {_short(dtype)}", problem, must, stretch, m == 1)


def _dots() -> Iterator[Case]:
    """Products whose weights are stored by output, as in many models; few outputs."""
    for dtype in ("float32", "bfloat16"):
        for m in (1, 16):
            problem = _gemm((m, 4096, 4096), dtype, layout="nt")
            yield _case(f"few rows, B^T {_short(dtype)}", problem, 1.0, None, m == 1)
        for n in (1, 8):
            problem = _gemm((4096, n, 4096), dtype)
            yield _case(f"few columns {_short(dtype)}", problem, 1.0, None, n == 1)


def _gradients() -> Iterator[Case]:
    """Gradients of two layers: of weights, x^T @ dy, and of inputs, dy @ w^T."""
    for dtype in ("float32", "bfloat16"):
        for sizes in ((768, 3072, 2048), (3072, 768, 2048)):
            problem = _gemm(sizes, dtype, layout="tn")
            quick = sizes[0] == 768
            yield _case(f"weights' gradient {_short(dtype)}", problem, 1.0, None, quick)
        for sizes in ((2048, 768, 3072), (2048, 3072, 768)):
            problem = _gemm(sizes, dtype, layout="nt")
            quick = sizes[1] == 768
            yield _case(f"inputs' gradient {_short(dtype)}", problem, 1.0, None, quick)


def _fused() -> Iterator[Case]:
    goals = {
        "float32": {"gelu": (1.08, 1.2), "relu": (1.08, 1.2)},
        "bfloat16": {"gelu": (2.5, 4.0), "relu": (1.6, 2.5)},
    }
    for dtype, bars in goals.items():
        for epilogue in (GELU, RELU):
            must, stretch = bars[epilogue.activation]
            for sizes in ((512, 3072, 768), (1024,) * 3, (2048,) * 3):
                problem = _gemm(sizes, dtype, epilogue=epilogue)
                group = f"matmul+bias+{epilogue.activation} {_short(dtype)}"
                yield _case(group, problem, must, stretch, sizes[0] == 1024)


def _convolutions() -> Iterator[Case]:
    """The convolutions of a residual network that the table of goals lists."""
    shapes = (  # batch, size, channels in and out, kernel, stride
        (1, 56, 64, 64, 3, 1),
        (8, 56, 64, 64, 3, 1),
        (8, 28, 128, 128, 3, 1),
        (8, 14, 256, 256, 3, 1),
        (8, 7, 512, 512, 3, 1),
        (8, 56, 64, 128, 3, 2),
        (8, 56, 256, 64, 1, 1),
        (2, 224, 3, 64, 7, 2),
    )
    for dtype, must in (("float32", 0.95), ("bfloat16", 2.0)):
        for batch, size, ins, outs, kernel, stride in shapes:
            total = max(kernel - stride, 0) if size % stride == 0 else kernel - 1
            pads = (total // 2, total - total // 2)  # "SAME"
            problem = Conv2dProblem(
                batch=batch,
                height=size,
                width=size,
                in_channels=ins,
                out_channels=outs,
                kernel_height=kernel,
                kernel_width=kernel,
                strides=(stride, stride),
                padding=(pads, pads),
                **_dtypes(dtype),
            )
            quick = (batch, size) == (8, 28)
            yield _case(f"conv2d {_short(dtype)}", problem, must, None, quick)


def _attentions() -> Iterator[Case]:
    goals = {
        ("float32", False): ((1.8, 2.5), (3.2, 4.5), (3.2, 5.0)),
        ("float32", True): ((2.2, 3.0), (5.5, 8.0), (6.0, 8.0)),
        ("bfloat16", False): ((3.0, 4.0), (4.0, 7.0), (4.5, 8.0)),
        ("bfloat16", True): ((4.0, 6.0), (10.0, 17.0), (12.0, 18.0)),
    }
    for (dtype, is_causal), bars in goals.items():
        for length, (must, stretch) in zip((512, 1024, 4096), bars, strict=True):
            problem = AttentionProblem(
                batch=1,
                q_len=length,
                kv_len=length,
                heads=8,
                kv_heads=8,
                head_dim=64,
                dtype=dtype,
                is_causal=is_causal,
                scale=64**-0.5,
            )
            causal = "causal " if is_causal else ""
            group = f"attention {causal}{_short(dtype)}"
            yield _case(group, problem, must, stretch, length == 512)


def _gemm(sizes: tuple[int, ...], dtype: str, **fields: Any) -> GemmProblem:
    m, n, k = sizes
    return GemmProblem(m=m, n=n, k=k, **_dtypes(dtype), **fields)


def _dtypes(dtype: str) -> dict[str, Any]:
    return {"lhs": dtype, "rhs": dtype, "out": dtype}


def _short(dtype: str) -> str:
    return {"float32": "f32", "bfloat16": "bf16"}[dtype]


def _case(
    group: str, problem: Problem, must: float, stretch: float | None, is_quick: bool
) -> Case:
    return Case(
        group=group, problem=problem, must=must, stretch=stretch, is_quick=is_quick
    )


# --- figures --------------------------------------------------------------------------


def summary(rows: Sequence[Row]) -> list[Row]:
    """The figures of several rows: {"name", "value", "must", "stretch", "is_upper"}.

    A figure is left out unless all of its rows are there.
    """
    measured = [r for r in rows if "error" not in r]
    return [
        *_geomeans(measured),
        *_of("against torch, geometric mean", _known(measured, "ratio_torch"), TORCH),
        *_of("of the f32 peak, large products, lowest", _peaks(measured), PEAK, min),
        *_gelu_cost(measured),
        *_of(
            "tuned by default configs, geometric mean", _gains(measured), (1.07, 1.15)
        ),
    ]


def _geomeans(rows: Sequence[Row]) -> Iterator[Row]:
    for group, goals in GEOMEANS.items():
        own = [r for r in rows if r["group"] == group]
        yield from _of(f"{group}, geometric mean", _known(own, "ratio"), goals)


def _of(name: str, values: list[float], goals: Any, fold: Any = geomean) -> list[Row]:
    if not values:
        return []
    must, stretch = goals
    return [_figure(name, fold(values), must, stretch)]


def _gelu_cost(rows: Sequence[Row]) -> list[Row]:
    """Part of a product's time that GELU adds, from the rates of equal shapes."""
    plain = {_sizes(r): r for r in rows if r["group"] == "matmul bf16"}
    fused = [r for r in rows if r["group"] == "matmul+bias+gelu bf16"]
    costs = [
        r["ours_us"] / plain[_sizes(r)]["ours_us"] - 1
        for r in fused
        if _sizes(r) in plain
    ]
    if not costs:
        return []
    name = "time that a fused GELU adds to a bf16 product, median"
    return [_figure(name, statistics.median(costs), *GELU_COST, is_upper=True)]


def memory(growth_mb: float) -> Row:
    """The figure of a long attention's memory."""
    name = "MB that attention over 16384 tokens takes beside inputs and outputs"
    return _figure(name, growth_mb, *MEMORY_MB, is_upper=True)


def _figure(
    name: str, value: float, must: float, stretch: float, is_upper: bool = False
) -> Row:
    return {
        "name": name,
        "value": value,
        "must": must,
        "stretch": stretch,
        "is_upper": is_upper,
    }


def _sizes(row: Row) -> tuple[int, ...]:
    return tuple(row["problem"][name] for name in "mnk")


def _peaks(rows: Sequence[Row]) -> list[float]:
    large = [r for r in rows if r["group"] == "matmul f32" and _sizes(r)[0] >= 1024]
    return _known(large, "of_peak")


def _gains(rows: Sequence[Row]) -> list[float]:
    return _known(rows, "ratio_tuned")


def _known(rows: Sequence[Row], name: str) -> list[float]:
    return [r[name] for r in rows if r.get(name) is not None]
