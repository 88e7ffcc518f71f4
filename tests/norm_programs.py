"""Random programs with a norm: statistics, factors and biases in all orders.

A seed gives a program. It normalises over groups, channels, pixels, images or any other
dimensions, by formulas of several spellings or by a module of flax. Factors are
vectors, numbers, arrays or products of these, inside of the product with the inverse
deviation or after it. Values in between may be used again, and be of other dtypes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numerics import array

SIZES = (1, 2, 3, 4, 5, 7)
CHANNELS = (1, 2, 3, 4, 6, 8, 12)
FLOATS = ("float32", "float32", "float32", "bfloat16", "float16")
# Squares of larger numbers overflow otherwise in a kernel, see docs/semantics.md.
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, 1e4, -3e4, 1e15, -1e18, -1e-20)
EPSILONS = (1e-5, 1e-5, 1e-3, 1e-12, 1.0, 0.0)
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "gelu_exact": lambda y: jax.nn.gelu(y, approximate=False),
    "max": lambda y: jnp.maximum(y, 0),
}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class NormProgram:
    """A function of arrays that is the same for the same seed.

    Attributes:
      seed: of it.
      arguments: x, then vectors and other arrays.
      is_constant: whether all entries of x are equal. Without an epsilon, roundings
        would decide whether a norm is NaN.
    """

    seed: int
    arguments: tuple[Any, ...]
    is_constant: bool

    def __call__(self, *arguments: Any) -> Any:
        epsilons = EPSILONS[:-1] if self.is_constant else EPSILONS
        return _Writer(self.seed, arguments, epsilons).results()

    def __repr__(self) -> str:
        arguments = [f"{a.dtype}{list(a.shape)}" for a in self.arguments]
        return f"NormProgram({self.seed}, {arguments})"


def norm_program(seed: int) -> NormProgram:
    """The program of a seed."""
    rng = np.random.default_rng([seed, 1])
    rank = rng.choice([2, 3, 4], p=[0.25, 0.25, 0.5])
    shape = (*(int(rng.choice(SIZES)) for _ in range(rank - 1)),)
    shape = (*shape, int(rng.choice(CHANNELS)))
    special, dtype = rng.random() < 0.25, rng.choice(FLOATS)
    is_mixed = rng.random() < 0.3

    def made(*shape: int, spread: float, centre: float) -> Any:
        x = centre + spread * rng.standard_normal(shape)
        if special and x.size and rng.random() < 0.5:
            for _ in range(int(rng.integers(1, 3))):
                x.flat[rng.integers(x.size)] = rng.choice(SPECIAL)
        with np.errstate(all="ignore"):
            own = rng.choice(FLOATS) if is_mixed else dtype
            return array(x.astype("float32").astype(own))

    centre = float(rng.choice([0.0, 0.0, 1.0, 30.0]))
    spread = float(rng.choice([1.0, 1.0, 100.0, 0.0]))
    x = made(*shape, spread=spread, centre=centre)
    c = shape[-1]
    vectors = [made(c, spread=0.5, centre=1.0) for _ in range(4)]
    others = [made(*shape, spread=0.5, centre=1.0), made(spread=0.5, centre=1.5)]
    return NormProgram(seed, (x, *vectors, *others), is_constant=spread == 0)


class _Writer:
    """Writes the program of one generator of random numbers on tracers."""

    def __init__(
        self, seed: int, arguments: Sequence[Any], epsilons: Sequence[float]
    ) -> None:
        self.epsilons = epsilons
        self.rng = np.random.default_rng([seed, 2])
        self.x, *self.vectors, self.whole, self.number = arguments
        self.shape = self.x.shape
        self.kept: list[Any] = []  # values in between
        self.is_usual = self.chance(0.7)  # most spellings are no site

    def pick(self, values: Any) -> Any:
        values = list(values)
        return values[self.rng.integers(len(values))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def results(self) -> list[Any]:
        y = self.from_flax() if self.chance(0.15) else self.by_hand()
        y = self.steps(y, self.pick([0, 1, 1, 2, 3]))
        if self.is_usual or self.chance(0.4):
            y = y.astype(self.x.dtype)
        if self.chance(0.4):
            y = ACTIVATIONS[self.pick(ACTIVATIONS)](y)
        if self.chance(0.1):
            y = y + self.x.reshape(y.shape)
        return [y, self.pick(self.kept)] if self.kept and self.chance(0.12) else [y]

    # --- norms ------------------------------------------------------------------------

    def from_flax(self) -> Any:
        """A norm by a module of flax, with parameters of the program."""
        c = self.shape[-1]
        groups = self.pick([n for n in range(1, c + 1) if c % n == 0])
        how: dict[str, Any] = {"dtype": self.pick([None, self.x.dtype, "float32"])}
        how["epsilon"] = self.pick(self.epsilons)
        kind = self.pick([nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.InstanceNorm])
        params = {"scale": self.vectors[0]}
        if kind is nn.GroupNorm:
            how["num_groups"] = groups
        if kind is not nn.RMSNorm:
            params["bias"] = self.vectors[1]
        how["use_fast_variance"] = self.chance(0.5)
        if kind is nn.InstanceNorm and len(self.shape) < 3:
            kind = nn.LayerNorm
        return kind(**how).apply({"params": params}, self.x)

    def by_hand(self) -> Any:
        x = self.x
        if self.is_usual or self.chance(0.6):
            x = x.astype("float32" if self.is_usual else self.pick(FLOATS))
        x, axes = self.viewed(x)
        if not axes:
            axes = (x.ndim - 1,)
        mean = self.mean(x, axes)
        variance = self.variance(x, mean, axes)
        d = x - mean
        if self.chance(0.05):  # root mean square
            variance, d = self.mean(jnp.square(x), axes), x
        if not self.is_usual or self.chance(0.1):
            self.kept += [mean, variance, d]
        d = self.steps(d, self.pick([0, 0, 0, 0, 1]), scales=True)
        y = self.normalised(d, variance + self.epsilon())
        if not self.is_usual or self.chance(0.1):
            self.kept.append(y)
        y = y if self.chance(0.3) else y.reshape(self.shape)
        return y.astype(self.x.dtype) if self.chance(0.3) else y

    def viewed(self, x: Any) -> tuple[Any, tuple[int, ...]]:
        """x in a shape that has the groups, and the dimensions of a mean."""
        *lead, c = self.shape
        groups = self.pick([n for n in range(1, c + 1) if c % n == 0])
        rank = len(self.shape)
        kinds = ["group", "group", "group", "layer", "image", "instance", "batch"]
        match self.pick(kinds if self.is_usual else [*kinds, "?", "?"]):
            case "group" if self.chance(0.5):
                pixels = math.prod(lead[1:])
                return x.reshape(lead[0], pixels, groups, c // groups), (1, 3)
            case "group":
                x = x.reshape(*lead, groups, c // groups)
                return x, (*range(1, rank - 1), rank)
            case "layer":
                return x, (rank - 1,)
            case "image":
                return x, tuple(range(1, rank))
            case "instance":
                return x, tuple(range(1, rank - 1))
            case "batch":
                return x, tuple(range(rank - 1))
            case _:
                some = tuple(i for i in range(rank) if self.chance(0.5))
                return x, some

    def mean(self, x: Any, axes: tuple[int, ...]) -> Any:
        keeps = self.chance(0.7)
        count = math.prod(x.shape[i] for i in axes)
        match self.pick(["mean", "mean", "over", "times"]):
            case "mean":
                mean = x.mean(axes, keepdims=keeps)
            case "over":
                mean = x.sum(axes, keepdims=keeps) / count
            case _:
                mean = x.sum(axes, keepdims=keeps) * jnp.asarray(1 / count, x.dtype)
        return mean if keeps else jnp.expand_dims(mean, axes)

    def variance(self, x: Any, mean: Any, axes: tuple[int, ...]) -> Any:
        match self.pick(["square", "product", "power", "var", "moments", "moments"]):
            case "square":
                return self.mean(jnp.square(x - mean), axes)
            case "product":
                d = x - mean
                return self.mean(d * d, axes)
            case "power":
                return self.mean((x - self.mean(x, axes)) ** 2, axes)
            case "var":
                return x.var(axes, keepdims=True)
        variance = self.mean(x * x, axes) - mean * mean
        return jnp.maximum(variance, 0) if self.chance(0.7) else variance

    def epsilon(self) -> Any:
        return abs(self.number) if self.chance(0.05) else self.pick(self.epsilons)

    def normalised(self, d: Any, v: Any) -> Any:
        spellings = ["rsqrt", "rsqrt", "inside", "inside", "div"]
        match self.pick(spellings + ["inverse", "pow"] * (not self.is_usual)):
            case "rsqrt":
                return d * lax.rsqrt(v)
            case "inside":
                factor = lax.rsqrt(v)
                for _ in range(self.pick([1, 1, 2])):
                    factor = self.product(factor, self.factor(d.shape))
                return self.product(d, factor)
            case "div":
                return d / jnp.sqrt(v)
            case "inverse":
                return d * (1 / jnp.sqrt(v))
        return d * v**-0.5

    # --- factors and biases -----------------------------------------------------------

    def steps(self, y: Any, count: int, *, scales: bool = False) -> Any:
        for _ in range(count):
            c = self.factor(y.shape)
            match self.pick(
                ["mul", "mul", "mul"] + ["add", "sub", "div"] * (not scales)
            ):
                case "mul":
                    y = self.product(y, c)
                case "add":
                    y = y + c if self.chance(0.7) else c + y
                case "sub":
                    y = y - c
                case _:
                    y = y / c
            if self.chance(0.1):
                y = y.astype(self.pick(FLOATS))
            if self.chance(0.1) and not scales:
                y = y.reshape(self.shape)
            if self.chance(0.2):
                self.kept.append(y)
        return y

    def product(self, a: Any, b: Any) -> Any:
        return a * b if self.chance(0.7) else b * a

    def factor(self, shape: tuple[int, ...], depth: int = 2) -> Any:
        """Something that broadcasts to a shape."""
        kinds = ["vector"] * 7 + ["number", "known", "whole", "pixel", "kept"]
        if depth:
            kinds += ["product"] * 7 + ["quotient", "quotient", "sum", "root", "half"]
        match self.pick(kinds):
            case "vector":
                return self.vector(shape)
            case "number":
                return self.number
            case "known":
                return self.pick([2.0, 0.125, -1.0, 0.0, 1.0])
            case "whole":
                return self.whole.reshape(shape)
            case "pixel":
                return self.whole.reshape(shape)[..., :1]
            case "kept" if self.kept:
                value = self.pick(self.kept)
                if _broadcasts(value.shape, shape):
                    return value
                return self.vector(shape)
            case "product":
                return self.product(*(self.factor(shape, depth - 1) for _ in range(2)))
            case "quotient":
                return self.factor(shape, depth - 1) / self.vector(shape)
            case "sum":
                return 1 + self.factor(shape, depth - 1)
            case "root":
                return lax.rsqrt(jnp.square(self.vector(shape)) + 1e-3)
            case "half":
                return self.vector(shape).astype(self.pick(FLOATS))
        return self.vector(shape)

    def vector(self, shape: tuple[int, ...]) -> Any:
        """A vector of all channels, whichever dimensions of a shape these are."""
        vector, c = self.pick(self.vectors), self.shape[-1]
        if self.chance(0.05):
            vector = vector.astype(self.pick(FLOATS))
        if shape[-1] == c:
            return vector
        if len(shape) > 1 and shape[-2] * shape[-1] == c:
            return vector.reshape(shape[-2:])
        return self.number


def _broadcasts(small: tuple[int, ...], large: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(small, large) == large
    except ValueError:
        return False
