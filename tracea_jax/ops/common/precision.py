"""``precision=`` as lax understands it, in one canonical hashable form.

Canonical forms are parameters of primitives; their names are fields of problems. What a
precision means to a kernel is decided in ``variants``. Callers: the ops' primitives and
workloads, and ``building``.
"""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp

from tracea_jax.mistakes import shown
from tracea_jax.ops.common.typed import config, lax, make_jaxpr


def canonical_precision(precision: Any) -> Any:
    """The form that ``lax.dot_general`` gives ``precision``; None is JAX's default.

    Returns:
      None, a pair of ``lax.Precision``, or a dot algorithm.

    Raises:
      ValueError: on an unknown precision, with the words of lax.
    """
    try:
        return _canonical(precision, config.jax_default_matmul_precision)
    except (TypeError, ValueError) as e:
        raise ValueError(f"precision={shown(precision)} is not possible: {e}") from e


@functools.lru_cache(maxsize=256)
def _canonical(precision: Any, default: str | None) -> Any:
    # Tracing an equation makes dot_general parse the precision.
    def dot(x: jax.Array) -> jax.Array:
        return lax.dot(x, x, precision=precision)

    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return make_jaxpr(dot)(x).eqns[0].params["precision"]


def precision_name(precision: Any) -> str:
    """The name of a canonical precision in problems such as ``GemmProblem``."""
    if precision is None:
        return "default"
    if isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm):
        levels = cast("tuple[jax.lax.Precision, ...]", precision)
        return ",".join(dict.fromkeys(p.name.lower() for p in levels))
    return getattr(precision, "name", None) or str(precision)


def precision_from_name(name: str) -> Any:
    """The inverse of ``precision_name``.

    Raises:
      ValueError: on a name that belongs to no level and to no preset.
    """
    if name == "default":
        return None
    levels = jax.lax.Precision.__members__
    parts = [part.upper() for part in name.split(",")]
    if all(part in levels for part in parts):
        return levels[parts[0]], levels[parts[-1]]
    presets = jax.lax.DotAlgorithmPreset.__members__
    if name not in presets:
        valid = ", ".join([*(level.lower() for level in levels), *presets])
        raise ValueError(f"precision {name!r} is unknown; it must be one of {valid}")
    return presets[name]
