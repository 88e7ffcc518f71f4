"""Kernels compiled in several processes before a test runs them one by one."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Sequence

from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.lab.ahead import Ahead
from tracea_jax.tuning.lab.compile_pool import CompilePool


@contextlib.contextmanager
def compiled_ahead(
    problem: Problem, choices: Sequence[Choice], device: Device
) -> Iterator[None]:
    """All choices' kernels are in the test's cache when the body begins."""
    pool = CompilePool(pathlib.Path(os.environ["TRACEA_CACHE_DIR"]))
    with contextlib.closing(Ahead(pool, device)) as ahead:
        ahead.start(problem, choices)
        for choice in choices:
            ahead.wait(problem, choice)
        yield
