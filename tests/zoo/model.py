"""The zoo's description of a model, and random parameters of any shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numerics import array

Program = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """An architecture as its users write it, and what a rewrite has to find in it.

    Attributes:
      name: of the test.
      build: gives (fn, args); fn is a pure function whose first argument holds the
        parameters, args are random.
      sites: how many sites of which op a rewrite makes. An attention is the two
        products with the softmax between them; two products of one operand, one of
        them activated, that are multiplied are a gated_matmul; every other
        product of floats is a matmul; every convolution over images is a conv2d. What a
        scan repeats counts once.
      misses: how many dot_general and conv_general_dilated stay, by name, ...
      why_missed: ... and why.
      outputs_within, gradients_within: errors in float32 that rounding explains,
        relative to the largest entry.
      narrow: whether operands and parameters in bfloat16 make it compute in bfloat16,
        and make sense.
      exact: name of the same model in float32, where fn itself rounds to bfloat16.
    """

    name: str
    build: Callable[[], Program]
    sites: Mapping[str, int]
    misses: Mapping[str, int] = dataclasses.field(default_factory=dict)
    why_missed: str = ""
    outputs_within: float = 1e-5
    gradients_within: float = 5e-5
    narrow: bool = True
    exact: str | None = None


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Standard normal float32."""
    rng = np.random.default_rng([seed, *shape])
    return array(rng.standard_normal(shape).astype("float32"))


def tokens(batch: int, length: int, vocabulary: int) -> jax.Array:
    """Random token numbers, (batch, length)."""
    rng = np.random.default_rng([batch, length, vocabulary])
    return jnp.asarray(rng.integers(0, vocabulary, (batch, length)), jnp.int32)


def random_like(shapes: Any) -> Any:
    """Random parameters, none of them zero, for a tree of anything with a shape.

    Weights have their inputs in all dimensions but the last; names that tell of a
    scale or a variance are given numbers around one.
    """
    rng = np.random.default_rng(0)

    def leaf(path: Any, like: Any) -> jax.Array:
        name, shape = jax.tree_util.keystr(path), tuple(like.shape)
        x = rng.standard_normal(shape)
        if "var" in name:
            x = 0.5 + np.abs(x)
        elif "scale" in name:
            x = 1 + 0.1 * x
        elif len(shape) < 2:
            x = 0.1 * x
        else:
            x = x * math.sqrt(2 / math.prod(shape[:-1]))
        return array(x.astype("float32"))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def floats(**shapes: tuple[int, ...]) -> dict[str, jax.ShapeDtypeStruct]:
    """Named float32 shapes, for ``random_like``."""
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}


def linen_program(module: Any, *inputs: Any) -> Program:
    """A flax linen module as (fn, args): fn(variables, *inputs)."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), *inputs)
    return module.apply, (random_like(shapes), *inputs)
