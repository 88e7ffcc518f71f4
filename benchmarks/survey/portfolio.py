"""Portfolios: the few configs of each kind of problem that decisions compare.

Of the configs that were measured, the one is taken next that makes the best predicted
time of all problems of the kind least, until another one would save less than
``LEAST``. The default of a variant is one of them where it saves that much more: it
depends on the problem, and finding it may take longer than predicting times.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cases import Case

from tracea_jax import variants
from tracea_jax.model import features
from tracea_jax.model.model import PEERS, Model, OpModel, device_kind
from tracea_jax.variants import Space

LEAST = 0.005  # of the logarithm of the time, of all problems
MOST = 8  # configs of a variant
DEFAULT = None

Portfolio = dict[str, list[Mapping[str, Any] | None]]


def of_kinds(cases: Sequence[Case], op: OpModel) -> dict[str, Portfolio]:
    """The portfolio of each kind that there are problems of."""
    kinds: dict[str, list[Case]] = {}
    for case in cases:
        kinds.setdefault(features.kind(case.problem), []).append(case)
    return {
        kind: {
            name: configs
            for name in sorted(op.variants)
            if (configs := _of_variant(own, op, name))
        }
        for kind, own in sorted(kinds.items())
    }


def _of_variant(cases: Sequence[Case], op: OpModel, name: str) -> list[Any]:
    tried = dict.fromkeys(
        m.choice.config
        for case in cases
        for m in case.measured
        if m.choice.variant == name
    )
    columns: list[Any] = [*tried, DEFAULT]
    times = [t for case in cases if (t := _times(case, op, name, columns)) is not None]
    if not times:
        return []
    chosen = greedy(np.array(times), [*[0.0] * len(tried), LEAST])
    return [
        DEFAULT if columns[i] is DEFAULT else dataclasses.asdict(columns[i])
        for i in chosen
    ]


def greedy(times: np.ndarray, costs: Sequence[float]) -> list[int]:
    """Columns of which some has nearly the least time of each row.

    Args:
      times: logarithms; infinite where a column cannot serve a row. Each row has one
        that is not.
      costs: what a column must save besides ``LEAST``, on average.
    """
    worst = np.where(np.isfinite(times), times, -np.inf).max(axis=1)
    reached = worst + 1.0  # of a row that no column serves yet
    found: list[int] = []
    while len(found) < MOST:
        saved = np.maximum(reached[:, None] - times, 0.0).mean(axis=0) - costs
        if saved.max() < LEAST:
            break
        found.append(int(saved.argmax()))
        reached = np.minimum(reached, times[:, found[-1]])
    return found


def _times(
    case: Case, op: OpModel, name: str, columns: Sequence[Any]
) -> list[float] | None:
    """Predicted times of the configs; None if the variant cannot serve the problem."""
    problem, device = case.problem, case.device
    variant = variants.get(problem.op, name)
    if variant.why_not(problem, device) is not None:
        return None
    default = variant.heuristic(problem, device)
    configs = [default if config is DEFAULT else config for config in columns]
    legal = [variants.is_legal(variant, problem, c, device) for c in configs]
    own = [config for config, of in zip(configs, legal, strict=True) if of]
    own = list(dict.fromkeys(own))
    if not own:
        return None
    space = variants.described(variant, problem, own, device)
    model = Model(device=device_kind(device), ops={problem.op: op})
    peers = [m.choice for m in case.measured if m.choice.variant in PEERS]
    spaces = {**{c.variant: Space.of(c.config) for c in peers}, name: space}
    log_us = model.predict(problem, device, spaces)[name].log_us
    times = dict(zip(own, log_us.tolist(), strict=True))
    return [times.get(config, np.inf) for config in configs]
