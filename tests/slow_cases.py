"""Parameters of tests, of which the default run takes a few and slow tests the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_unless(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases as parameters, marked ``slow`` unless they are kept in the default run.

    Args:
      kept: some of the cases.
      cases: all of them; a tuple has a value for each of several arguments.

    Raises:
      ValueError: if a kept one is none of the cases.
    """
    every = list(cases)
    if unknown := [case for case in kept if case not in every]:
        raise ValueError(f"{unknown} are none of the cases")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if case in kept else [pytest.mark.slow],
        )
        for case in every
    ]
