"""``precision=`` as lax understands it, in one canonical hashable form."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


def canonical_precision(precision: Any) -> Any:
    """What ``lax.dot_general`` makes of ``precision``, JAX's default applied.

    Returns:
      None, a pair of ``lax.Precision``, or a dot algorithm.

    Raises:
      ValueError: lax's own, on an unknown precision.
    """
    default = jax.config.jax_default_matmul_precision  # pyright: ignore[reportAttributeAccessIssue]
    return _canonical(precision, default)


@functools.lru_cache(maxsize=256)
def _canonical(precision: Any, default: str | None) -> Any:
    # dot_general's own parsing, read back from a traced equation.
    def dot(x: jax.Array) -> jax.Array:
        return jax.lax.dot(x, x, precision=precision)

    x = jax.ShapeDtypeStruct((1, 1), jnp.float32)
    return jax.make_jaxpr(dot)(x).eqns[0].params["precision"]


def precision_name(precision: Any) -> str:
    """A canonical precision as ``GemmProblem`` names it."""
    if precision is None:
        return "default"
    if isinstance(precision, tuple) and not isinstance(precision, jax.lax.DotAlgorithm):
        names = dict.fromkeys(p.name.lower() for p in precision)
        return ",".join(names)
    return getattr(precision, "name", None) or str(precision)


def precision_from_name(name: str) -> Any:
    """The inverse of ``precision_name``.

    Raises:
      ValueError: on a name that ``precision_name`` gives to no level and no preset.
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
