"""The cases of ``bench_matmul``, their groups, and the bars that groups are held to.

Ratios are XLA's time by ours. Every group has bars; a bar names a figure of the group's
rows, and how large or small it must be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tracea_jax.problem import Epilogue, GatedMatmulProblem, GemmProblem

Row = dict[str, Any]
Sizes = tuple[int, int, int]  # m, n, k

GELU = Epilogue(bias="row", activation="gelu")
SILU = Epilogue(bias="row", activation="silu", residual=True)

LLAMA_70B = {  # n, k of the products of one layer of Llama 3 70B
    "qkv": (10240, 8192),
    "o": (8192, 8192),
    "gate/up": (28672, 8192),
    "down": (8192, 28672),
}
FIGURES = {  # of a group, as they are printed
    "own_geomean": "our kernels, geometric mean",
    "own_min": "our kernels, lowest",
    "default_geomean": "tuned default, geometric mean",
    "default_min": "tuned default, lowest",
    "copy_fraction_min": "bandwidth by that of a copy, lowest",
    "error_by_xla_max": "error by XLA's, highest",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a problem, and the group that it is judged in.

    Attributes:
      is_quick: whether a quick run has the case, too.
    """

    group: str
    problem: GemmProblem | GatedMatmulProblem
    is_quick: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """The limit of one figure of a group.

    Attributes:
      figure: one of ``FIGURES``.
      limit: the lowest value that is good enough; with ``is_upper`` the highest.
    """

    figure: str
    limit: float
    is_upper: bool = False

    def is_met(self, value: float | None) -> bool:
        """Returns whether the value is good enough; an unknown value is not."""
        if value is None:
            return False
        return value <= self.limit if self.is_upper else value >= self.limit


def _bars(**limits: float) -> tuple[Bar, ...]:
    return tuple(Bar(figure=name, limit=limit) for name, limit in limits.items())


BARS: dict[str, tuple[Bar, ...]] = {
    "large": _bars(own_geomean=1.0, own_min=0.95, default_min=0.98),
    "fused": _bars(own_geomean=1.1, default_min=1.0),
    "unaligned": _bars(own_geomean=3.5, default_geomean=3.5),
    "f32 highest": (
        *_bars(own_min=2.2, default_min=2.2),
        Bar(figure="error_by_xla_max", limit=2.0, is_upper=True),
    ),
    "tf32": _bars(own_min=0.95, default_min=0.98),
    "fp8": _bars(own_min=0.95, default_min=0.98),
    "small": _bars(own_geomean=1.1, default_min=0.98),
    "skinny": _bars(own_geomean=1.0, default_min=0.98, copy_fraction_min=0.9),
}


# --- cases ----------------------------------------------------------------------------


def suite(quick: bool) -> list[Case]:
    """The cases; those of one group are consecutive."""
    makers = (_large, _fused, _unaligned, _single, _fp8, _small, _skinny)
    cases = [case for make in makers for case in make()]
    return [case for case in cases if case.is_quick or not quick]


def _large() -> Iterator[Case]:
    for dtype in ("bfloat16", "float16"):
        is_first = dtype == "bfloat16"
        for size in (2048, 4096, 8192):
            quick = is_first and size > 2048
            yield _case("large", _square(size), dtype, quick)
        for m in (512, 4096):
            for name, (n, k) in LLAMA_70B.items():
                quick = is_first and (m, name) == (512, "o")
                yield _case("large", (m, n, k), dtype, quick)
        for layout in ("nt", "tn", "tt"):  # "nn" is among the squares
            yield _case("large", _square(4096), dtype, layout=layout)


def _fused() -> Iterator[Case]:
    for sizes in (_square(8192), (4096, 14336, 4096), (512, 4096, 4096)):
        quick = sizes == (512, 4096, 4096)
        for epilogue in (GELU, SILU):
            yield _case("fused", sizes, "bfloat16", quick, epilogue=epilogue)
        m, n, k = sizes
        gated = GatedMatmulProblem(m=m, n=n, k=k, **_dtypes("bfloat16"))
        yield Case(group="fused", problem=gated, is_quick=quick)


def _unaligned() -> Iterator[Case]:
    for sizes in ((4095, 4097, 4099), (1000, 1000, 1001), (8191, 8193, 2047)):
        yield _case("unaligned", sizes, "bfloat16", sizes[0] == 4095)


def _single() -> Iterator[Case]:
    for size in (2048, 8192):
        quick = size == 2048
        yield _case("f32 highest", _square(size), "float32", quick, precision="highest")
    for size in (2048, 8192):
        yield _case("tf32", _square(size), "float32", size == 2048)


def _fp8() -> Iterator[Case]:
    for size in (2048, 8192):
        dtypes = {**_dtypes("float8_e4m3fn"), "out": "bfloat16"}
        m, n, k = _square(size)
        problem = GemmProblem(m=m, n=n, k=k, **dtypes, layout="nt")
        yield Case(group="fp8", problem=problem, is_quick=size == 2048)


def _small() -> Iterator[Case]:
    for size in (128, 256, 512, 1024):
        yield _case("small", _square(size), "bfloat16", size in (128, 1024))
    batched = {"batch": 64, "lhs_batched": True, "rhs_batched": True}
    yield _case("small", (1024, 1024, 128), "bfloat16", True, **batched)


def _skinny() -> Iterator[Case]:
    for m in (1, 4, 16, 64):
        for name, (n, k) in LLAMA_70B.items():
            quick = (m, name) in ((1, "o"), (16, "gate/up"))
            yield _case("skinny", (m, n, k), "bfloat16", quick)


def _case(
    group: str, sizes: Sizes, dtype: str, is_quick: bool = False, **fields: Any
) -> Case:
    m, n, k = sizes
    problem = GemmProblem(m=m, n=n, k=k, **_dtypes(dtype), **fields)
    return Case(group=group, problem=problem, is_quick=is_quick)


def _square(size: int) -> Sizes:
    return size, size, size


def _dtypes(dtype: str) -> dict[str, Any]:
    return {"lhs": dtype, "rhs": dtype, "out": dtype}


# --- figures --------------------------------------------------------------------------


def summary(
    rows: Sequence[Row],
    bars: Mapping[str, Sequence[Bar]] = BARS,
    figures: Iterable[str] = FIGURES,
) -> list[Row]:
    """The figures of each group that has bars and rows, and which bars are met.

    A figure is None if no row has its values. A bar is met only if every row of the
    group has a value: a case that failed, or that no kernel of ours takes, is a miss.
    """
    groups = dict.fromkeys(r["group"] for r in rows if r["group"] in bars)
    return [
        _summed(g, [r for r in rows if r["group"] == g], bars[g], figures)
        for g in groups
    ]


def _summed(
    group: str, rows: Sequence[Row], limits: Sequence[Bar], names: Iterable[str]
) -> Row:
    values = {name: _values(name, rows) for name in names}
    figures = {
        name: _FOLDS[name.rpartition("_")[2]](found) if found else None
        for name, found in values.items()
    }
    bars = [
        {
            **dataclasses.asdict(bar),
            "value": figures[bar.figure],
            "is_met": len(values[bar.figure]) == len(rows)
            and bar.is_met(figures[bar.figure]),
        }
        for bar in limits
    ]
    return {
        "group": group,
        "cases": len(rows),
        "failed": sum("error" in row for row in rows),
        "without_own": sum("error" not in r and r["own_us"] is None for r in rows),
        **figures,
        "bars": bars,
    }


def geomean(values: Iterable[float]) -> float:
    """The geometric mean of positive numbers."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs))


_FOLDS = {"geomean": geomean, "min": min, "max": max}


def _values(figure: str, rows: Sequence[Row]) -> list[float]:
    what = {"own": "ratio_own", "default": "ratio_default"}
    name = figure.rpartition("_")[0]
    found = (row.get(what.get(name, name)) for row in rows)
    return [value for value in found if value is not None]
