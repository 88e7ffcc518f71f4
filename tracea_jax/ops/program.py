"""The record of whole programs, by which what is known of them is read and kept.

Programs call no such op. They are found in ``verdicts`` and raced in ``campaign``.
"""

from __future__ import annotations

from typing import Any, NoReturn

from tracea_jax.catalogue import Op
from tracea_jax.problem.program import ProgramProblem
from tracea_jax.variants import XLA
from tracea_jax.variants.program import SPLICED


def _bench(problem: Any, device: Any) -> NoReturn:
    raise ValueError(f"{problem} is measured by tune(function, *args) only")


PROGRAM = Op(
    name="program",
    summary="a whole program with some of its sites on our ops",
    problem=ProgramProblem,
    variants=(SPLICED, XLA),
    primitives=(),
    bench=_bench,
    build=ProgramProblem,
    arguments=(),
    is_called=False,
)
