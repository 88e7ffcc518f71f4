"""Random products, convolutions and attention of every dtype and special value.

A seed gives a program: what it begins with, and steps that cast between all dtypes,
work on bits, clamp with small constants, and use captured arrays of floats, integers
and booleans. It runs as it is written, or is read in another way: with other roundings,
by which results are judged.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from value_draws import DTYPES, INTEGERS, Draws
from value_readings import (
    BITS,
    CLAMPED,
    COMPARISONS,
    FLOATS,
    INVERSE,
    OPERATIONS,
    SHIFTS,
    SMOOTH,
    Reading,
    applied,
    convert,
    is_float,
    near_product,
    promoted,
)

# Of scores: one that is below what masked ones are filled with would be as if masked.
SMALL = (0.0, -0.0, 1e-40, -1e-38, 1e-30)
FLOORS = (0.0, -0.0, 1e-45, 1.2e-38, 1e-30, 1e-12, 1e-9, 1e-8, 1e-3, 0.5, 6.0, -1.0)
NUMBERS = (0.5, -1.0, 3.0, 0.1, 1e-7, 1e25, 0.0, -0.0, 1.0, 2.0)
FILLS = (-1e9, -1e4, -1e30, float(np.finfo(np.float32).min), -np.inf)

M, K, N = 4, 6, 5  # of products; T and H of attention
T, H = 6, 4


Step = Callable[[Reading, Any], Any]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A start, ``start(reading, *arguments)``, and the steps on its result.

    Attributes:
      seed: of it.
      arguments: arrays.
      names: of the start and of the steps.
      unit: of the roundings that it may have.
      is_exact: whether its products have no rounding.
    """

    seed: int
    arguments: tuple[Any, ...]
    start: Callable[..., Any]
    steps: tuple[Step, ...]
    names: tuple[str, ...]
    unit: float
    is_exact: bool

    def __call__(self, *arguments: Any) -> Any:
        return self.read(Reading(), *arguments)

    def read(self, reading: Reading, *arguments: Any) -> Any:
        with np.errstate(all="ignore"):  # JAX converts numbers with NumPy
            y = self.start(reading, *map(reading.of, arguments))
            for step in self.steps:
                y = step(reading, y)
        return y

    def readings(self) -> list[Any] | None:
        """Other results than the program's, which differ by roundings only.

        None if they may differ by the order of sums that overflow, too.
        """
        unit = self.unit
        how = [Reading(is_wide=True)]
        how += [Reading(is_wide=True, shift=s * unit) for s in (1, -1)]
        how += [Reading(shift=unit, seed=s) for s in range(3)]
        results = [self.read(reading, *self.arguments) for reading in how]
        return None if any(any(r.overflows) for r in how) else results

    def __repr__(self) -> str:
        arguments = [f"{a.dtype}{list(a.shape)}" for a in self.arguments]
        return f"Program({self.seed}, {arguments}, {list(self.names)})"


@np.errstate(all="ignore")
def program(seed: int) -> Program:
    """The program of a seed."""
    return _Maker(seed).program()


class _Maker(Draws):
    """The program of one generator of random numbers."""

    # -- programs

    def program(self) -> Program:
        kinds = [self.product, self.product, self.gated, self.attention, self.attention]
        kinds.append(self.convolution)
        name, start, arguments, shape = self.pick(kinds)()
        self.shape = shape
        made = [self.step() for _ in range(self.rng.integers(0, 6))]
        units = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
        unit = max((units[n] for n in self.narrow), default=2.0**-21)
        return Program(
            seed=self.seed,
            arguments=arguments,
            start=start,
            steps=tuple(step for _, step in made),
            names=(name, *(n for n, _ in made)),
            unit=unit,
            is_exact=self.is_exact and not self.narrow,
        )

    def summed(self, reading: Reading, multiply: Any, x: Any, w: Any) -> Any:
        """A product that may be rounded otherwise; exact ones are not."""
        if self.is_exact and not self.special and not self.narrow:
            return multiply(x, w)
        return near_product(reading, multiply, x, w)

    def product(self) -> Any:
        x, w = self.array(M, K), self.array(K, N)
        out = self.pick([None, None, "float32"])

        def start(reading: Reading, x: Any, w: Any) -> Any:
            preferred = reading.dtype(out or x.dtype)
            multiply = functools.partial(jnp.matmul, preferred_element_type=preferred)
            return self.summed(reading, multiply, x, w)

        return f"product {out}", start, (x, w), (M, N)

    def gated(self) -> Any:
        x, a, b = self.array(M, K), self.array(K, N), self.array(K, N)
        name = self.pick(["relu", "max", "where >", "min", "silu", "gelu", "swish"])

        def start(reading: Reading, x: Any, a: Any, b: Any) -> Any:
            gate, up = (self.summed(reading, jnp.matmul, x, w) for w in (a, b))
            return applied(reading, name, gate) * up

        return f"gated {name}", start, (x, a, b), (M, N)

    def convolution(self) -> Any:
        x, w = self.array(1, 6, 5, 2), self.array(3, 2, 2, N)
        # With weights times -1, a sum that is zero is no negative zero.
        self.keeps_zeros = False
        out = self.pick([None, None, "float32"])
        # No padding: zeros that are multiplied with special weights are as XLA likes.
        how = dict(
            window_strides=(1, self.pick([1, 2])),
            padding="VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )

        def start(reading: Reading, x: Any, w: Any) -> Any:
            preferred = reading.dtype(out or x.dtype)
            f = functools.partial(
                lax.conv_general_dilated, preferred_element_type=preferred, **how
            )
            return self.summed(reading, f, x, w)

        shape = jax.eval_shape(lambda: start(Reading(), x, w)).shape
        return f"convolution {out}", start, (x, w), shape

    # -- steps

    @property
    def inverse(self) -> tuple[str, ...]:
        """The function that tells zeros apart, where their signs are kept."""
        return tuple(INVERSE) * self.keeps_zeros

    def step(self) -> tuple[str, Step]:
        makers = (
            *(self.operation,) * 4,
            *(self.clamp,) * 3,
            *(self.function,) * 3,
            *(self.cast,) * 3,
            *(self.bits, self.selection, self.gate, self.again, self.number),
        )
        return self.pick(makers)()

    def operand(self) -> Any:
        """A captured array that broadcasts to the value."""
        shape = list(self.shape)
        kind = self.pick(["row", "row", "whole", "column", "one"])
        if kind != "whole":
            shape[:-1] = [1] * (len(shape) - 1)
        if kind == "row" and self.chance(0.7):
            shape = shape[-1:]
        elif kind == "column":
            shape[-1], shape[-2] = 1, self.shape[-2]
        elif kind == "one":
            shape[-1] = 1
        dtype = self.pick(["float32", self.dtype, self.dtype, *DTYPES[:-2]])
        return self.array(*shape, dtype=self.used(dtype))

    def operation(self) -> tuple[str, Step]:
        name, c = self.pick(OPERATIONS), self.operand()
        f = OPERATIONS[name]

        def step(reading: Reading, y: Any) -> Any:
            return f(*promoted(reading, y, reading.of(c)))

        return f"{name} {c.dtype}{list(c.shape)}", step

    def number(self) -> tuple[str, Step]:
        name, c = self.pick(OPERATIONS), self.pick(NUMBERS)
        f = OPERATIONS[name]
        return f"{name} {c}", lambda _, y: f(y, c) if is_float(y) else y

    def clamp(self) -> tuple[str, Step]:
        floor = self.pick(FLOORS)
        after = self.pick([None, "log", "root", *self.inverse])
        top = self.pick([None, None, np.inf, 1e4, 3e38])

        def step(reading: Reading, y: Any) -> Any:
            if not is_float(y):
                return y
            y = jnp.maximum(y, floor) if top is None else jnp.clip(y, floor, top)
            return y if after is None else applied(reading, after, y)

        return f"clamp {floor} {top} {after}", step

    def function(self) -> tuple[str, Step]:
        name = self.pick(
            [*CLAMPED, *SMOOTH, "gelu", "silu", "relu", "max", "exact gelu"]
        )

        def step(reading: Reading, y: Any) -> Any:
            return applied(reading, name, y) if is_float(y) else y

        return name, step

    def cast(self) -> tuple[str, Step]:
        dtype = self.used(self.pick(DTYPES))
        if dtype == "bool" and not (self.sums_exactly and self.is_exact):
            dtype = "int8"  # a sum that cancels is zero, or just not
        back = self.pick([None, "float32", "float32", self.dtype])
        back = "float32" if back is None and dtype not in FLOATS else back

        def step(reading: Reading, y: Any) -> Any:
            y = convert(y, reading.dtype(dtype))
            return y if back is None else convert(y, reading.dtype(back))

        return f"to {dtype} {back}", step

    def bits(self) -> tuple[str, Step]:
        dtype = self.pick(INTEGERS)
        shape = self.pick([(), self.shape[-1:]])
        c = self.array(*shape, dtype=dtype)
        f = self.pick([*BITS, *SHIFTS])
        by_pattern = self.chance(0.3)

        def step(reading: Reading, y: Any) -> Any:
            if by_pattern and y.dtype == jnp.float32:
                magnitude = lax.bitcast_convert_type(y, jnp.int32) & 0x7FFFFFFF
                return lax.bitcast_convert_type(magnitude, jnp.float32)
            x = convert(y, dtype)
            return convert(f(x, jnp.broadcast_to(c, x.shape)), "float32")

        return f"{f.__name__} {dtype} {by_pattern}", step

    def selection(self) -> tuple[str, Step]:
        other = self.pick([0.0, 1.0, -np.inf, np.nan, -1e9])
        mask = self.mask(self.shape[-2], self.shape[-1], 2)

        def step(reading: Reading, y: Any) -> Any:
            return jnp.where(mask(), y, other) if is_float(y) else y

        return f"select {other}", step

    def gate(self) -> tuple[str, Step]:
        compare, c = self.pick(COMPARISONS), self.pick([0, 0.5, -0.0])
        dtype = self.pick([None, "int8", "int32", "float32"])

        def step(reading: Reading, y: Any) -> Any:
            if not is_float(y):
                return y
            keep = compare(y, c)
            keep = keep if dtype is None else keep.astype(dtype).astype(y.dtype)
            return y * keep

        return f"gate {compare.__name__} {c} {dtype}", step

    def again(self) -> tuple[str, Step]:
        """Another product with captured weights, of floats or integers."""
        columns = self.pick([N, N, 3])
        dtype = self.pick([self.dtype, self.dtype, "float32", "int8", "bool"])
        w = self.array(self.shape[-1], columns, dtype=dtype)
        self.shape = (*self.shape[:-1], columns)

        def step(reading: Reading, y: Any) -> Any:
            y = y if is_float(y) else convert(y, "float32")
            v = convert(reading.of(w), y.dtype)
            return near_product(reading, jnp.matmul, y, v)

        return f"again {dtype}", step

    # -- attention

    def attention(self) -> Any:
        heads = self.pick([(), (), (2,)])
        self.sums_exactly = False
        q = self.array(*heads, T, H, special=(*SMALL, np.nan))
        k, v = self.array(*heads, T, H, special=SMALL), self.array(*heads, T, H)
        softmax = self.pick([jax.nn.softmax, jax.nn.softmax, _by_hand, _unshifted])
        # Without a shift, exponential functions may overflow, or all vanish.
        count = 0 if softmax is _unshifted else self.rng.integers(0, 3)
        change = [self.score() for _ in range(count)]
        masking, of_p = self.masking(), [self.weight(heads)] * self.chance(0.3)
        at_last = [self.score()] * (self.chance(0.3) and softmax is not _unshifted)

        def start(reading: Reading, q: Any, k: Any, v: Any) -> Any:
            turned = jnp.swapaxes(k, -1, -2)
            s = self.summed(reading, jnp.matmul, q, turned)
            for f in (*(f for _, f in change), masking, *(f for _, f in at_last)):
                s = f(reading, s)
            p = reading.near(softmax(s))
            for _, f in of_p:
                p = f(reading, p)
            v = convert(v, jnp.result_type(p, v))
            p = convert(p, v.dtype)
            return near_product(reading, jnp.matmul, p, v)

        names = [n for n, _ in (*change, *at_last, *of_p)]
        return f"attention {softmax.__name__} {names}", start, (q, k, v), (*heads, T, H)

    def score(self) -> tuple[str, Step]:
        kind = self.pick(["scale", "scale", "cast", "clamp", "bias", "integer bias"])
        if kind == "cast":
            self.shape = (T, T)
            return self.cast()
        if kind == "clamp":
            floor = self.pick(FLOORS)
            return f"clamp {floor}", lambda _, s: jnp.maximum(s, floor)
        if kind == "scale":
            c = self.pick([0.5, 0.25, 1.0, -1.0, 1e-3, 0.0])
            return f"times {c}", lambda _, s: s * c
        dtype = "int8" if kind == "integer bias" else self.dtype
        bias = self.array(T, T, dtype=dtype, special=SMALL)

        def step(reading: Reading, s: Any) -> Any:
            return reading.near(jnp.add(*promoted(reading, s, reading.of(bias))))

        return kind, step

    def weight(self, heads: tuple[int, ...]) -> tuple[str, Step]:
        """A step on probabilities: casts and masks of any dtype."""
        kind = self.pick(["cast", "cast", "mask", "heads"])
        if kind == "cast":
            return self.cast()
        shape = (T, T) if kind == "mask" else (*(heads or (1,)), 1, 1)
        mask = self.array(*shape, dtype=self.pick(["bool", "int8", "int32", "float32"]))

        def step(reading: Reading, p: Any) -> Any:
            out = p * convert(mask, p.dtype)
            return out.reshape(p.shape)

        return f"{kind} {mask.dtype}", step

    def masking(self) -> Step:
        mask, fill = self.mask(T, T, 3), self.pick(FILLS)
        form = self.pick(["none", "where", "added", "number", "cast"])

        def step(reading: Reading, s: Any) -> Any:
            s = s if is_float(s) else convert(s, "float32")
            if form == "none":
                return s
            # A query sees itself, so that no sum is empty.
            seen = mask() | jnp.asarray(np.eye(T, dtype=bool))
            low = max(fill, float(jnp.finfo(s.dtype).min))
            match form:
                case "where":
                    return jnp.where(seen, s, low)
                case "added":
                    return s + jnp.where(seen, 0.0, low).astype(s.dtype)
                case "number":
                    low = max(low, -1e9)
                    low = -6e4 if s.dtype == jnp.float16 else low
                    return s + (1.0 - seen.astype(s.dtype)) * low
            return jnp.where(seen.astype("int32") == 0, low, s)

        return step


def _by_hand(s: Any) -> Any:
    e = jnp.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def _unshifted(s: Any) -> Any:
    e = jnp.exp(s)
    return e / e.sum(-1, keepdims=True)
