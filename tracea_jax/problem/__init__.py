"""Problems of ops: frozen, hashable descriptions that name no implementation.

A problem carries everything that may influence which kernel runs and nothing else; it
is the key of the tuning cache, the argument of every ``why_not`` and what ``explain``
prints. Problems of the built-in ops are here; which ops there are, ``catalogue`` knows.
"""

from __future__ import annotations

from typing import Any

from tracea_jax import catalogue
from tracea_jax.problem.attention import AttentionProblem
from tracea_jax.problem.base import Problem
from tracea_jax.problem.channel_sums import ChannelSumsProblem
from tracea_jax.problem.conv2d import Conv2dProblem
from tracea_jax.problem.elementwise import ElementwiseProblem
from tracea_jax.problem.epilogue import (
    ACTIVATIONS,
    ITEMSIZE,
    Activation,
    BiasKind,
    Epilogue,
    ResidualOp,
    check_activation,
)
from tracea_jax.problem.gemm import GatedMatmulProblem, GemmProblem, Layout
from tracea_jax.problem.group_norm import GroupNormProblem
from tracea_jax.problem.max_pool import MaxPoolProblem
from tracea_jax.problem.paged_attention import PagedAttentionProblem
from tracea_jax.schema import check_types


def problem_from_json(data: dict[str, Any]) -> Problem:
    """The problem that ``to_json`` describes.

    Raises:
      ValueError: on an op or a field that this version does not know, and on a value
        of another type than its field's.
    """
    op = catalogue.get(data.get("op"))
    try:
        problem = op.problem.from_json(data)
    except (TypeError, AttributeError, RecursionError) as e:
        raise ValueError(f"no {op.name} problem: {e}") from e
    check_types(problem)
    return problem


__all__ = [
    "ACTIVATIONS",
    "ITEMSIZE",
    "Activation",
    "AttentionProblem",
    "ChannelSumsProblem",
    "BiasKind",
    "Conv2dProblem",
    "ElementwiseProblem",
    "Epilogue",
    "GatedMatmulProblem",
    "GemmProblem",
    "GroupNormProblem",
    "Layout",
    "MaxPoolProblem",
    "PagedAttentionProblem",
    "Problem",
    "ResidualOp",
    "check_activation",
    "problem_from_json",
]
