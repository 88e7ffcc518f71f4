"""Random convolutions of mixed dtypes with the steps that follow them in models.

A seed gives a program. The program runs as written, and in float64 to judge results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numerics import array

DTYPES = ("float32", "bfloat16", "float16")
SPECIAL = (0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-38, 1e-30, 1e30, 3e38)
# Taps that lie in the padding are multiplied with its zeros, or not at all.
FINITE = (0.0, -0.0, 1e-40, -1e-38, 1e-30)
FLOORS = (0.0, 1e-9, 1e-12, 1e-30, 1.2e-38, 0.5)
NUMBERS = (0.5, -1.0, 3.0, 0.1, 1e-7, 1e-30, 1e25, 0.0)

Cast = Callable[[str], str]


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """One step, ``function(cast, y, *operands)``, with its captured operands or ()."""

    name: str
    function: Callable[..., Any]
    operands: tuple[Any, ...] = ()
    captured: bool = False


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Program:
    """A convolution of x and w and its steps; arguments are x, w and operands."""

    seed: int
    x: Any
    w: Any
    how: dict[str, Any]
    steps: tuple[Step, ...]

    @property
    def arguments(self) -> list[Any]:
        own = [x for step in self.steps if not step.captured for x in step.operands]
        return [self.x, self.w, *own]

    def __call__(self, *arguments: Any) -> Any:
        return self.run(lambda dtype: dtype, *arguments)

    def run(self, cast: Cast, x: Any, w: Any, *rest: Any) -> Any:
        """The result with dtypes mapped by ``cast``."""
        preferred = self.how["preferred_element_type"]
        how = {**self.how, "preferred_element_type": preferred and cast(preferred)}
        y = lax.conv_general_dilated(x, w, **how)
        pending = list(rest)
        for step in self.steps:
            if step.captured:
                own = [a.astype(cast(a.dtype.name)) for a in step.operands]
            else:
                own = [pending.pop(0) for _ in step.operands]
            y = step.function(cast, y, *own)
        return y

    def __repr__(self) -> str:
        x, w = (f"{a.dtype}{list(a.shape)}" for a in (self.x, self.w))
        steps = [
            f"{s.name}{[str(a.dtype) for a in s.operands]}{'!' * s.captured}"
            for s in self.steps
        ]
        return f"Program({self.seed}, {x}, {w}, {self.how}, {steps})"


def program(seed: int) -> Program:
    """The program of a seed."""
    return _Maker(np.random.default_rng(seed)).program(seed)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "relu": jax.nn.relu,
    "where": lambda y: jnp.where(y > 0, y, 0),
    "tanh": jnp.tanh,
}
# Of special values too: see ``value_programs``.
SMOOTH = {"gelu": jax.nn.gelu, "silu": jax.nn.silu}
NORMS: dict[str, Callable[..., Any]] = {
    "scale first": lambda y, m, v, s, b, e: (y - m) * (s * lax.rsqrt(v + e)) + b,
    "scale last": lambda y, m, v, s, b, e: (y - m) * lax.rsqrt(v + e) * s + b,
    "division": lambda y, m, v, s, b, e: s * ((y - m) / jnp.sqrt(v + e)) + b,
    "power": lambda y, m, v, s, b, e: (y - m) * (v + e) ** -0.5 * s + b,
    "no shift": lambda y, m, v, s, b, e: y / jnp.sqrt(v + e) * s,
}
OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda y, c: y + c,
    "sub": lambda y, c: y - c,
    "rsub": lambda y, c: c - y,
    "mul": lambda y, c: y * c,
    "div": lambda y, c: y / c,
}


class _Maker:
    """Parts of a program, drawn by one generator of random numbers."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def pick(self, values: Any) -> Any:
        return list(values)[self.rng.integers(len(values))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def normal(
        self, *shape: int, dtype: str, special: float = 0.0, of: Any = SPECIAL
    ) -> jax.Array:
        """Standard normal numbers, with that chance some special ones among them."""
        a = self.rng.standard_normal(shape).astype("float32")
        if a.size and self.chance(special):
            for _ in range(self.rng.integers(1, 3)):
                a.flat[self.rng.integers(a.size)] = self.pick(of)
        with np.errstate(all="ignore"):
            return array(a.astype(jnp.dtype(dtype)))

    def program(self, seed: int) -> Program:
        dtype = self.pick(DTYPES)
        special = 0.5 if self.chance(0.4) else 0.0
        layout = self.pick(["NHWC", "NHWC", "NCHW"])
        size = [int(n) for n in self.rng.integers(3, 8, 2)]
        kernel = [int(n) for n in self.rng.integers(1, 4, 2)]
        inputs, outputs = self.pick([1, 2, 3, 4]), self.pick([1, 2, 4, 5, 8])
        x = self.normal(2, *size, inputs, dtype=dtype, special=special)
        shape = *kernel, inputs, outputs
        w = self.normal(*shape, dtype=dtype, special=special / 3, of=FINITE)
        numbers = (layout, "HWIO" if layout == "NHWC" else "OIHW", layout)
        if layout == "NCHW":
            x, w = x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)
        low, high = ([int(n) for n in self.rng.integers(0, 2, 2)] for _ in range(2))
        how = dict(
            window_strides=self.pick([(1, 1), (1, 1), (2, 2), (1, 2)]),
            padding=self.pick(["SAME", "SAME", "VALID", [tuple(low), tuple(high)]]),
            rhs_dilation=self.pick([(1, 1), (1, 1), (2, 1)]),
            dimension_numbers=numbers,
            preferred_element_type=self.pick([None, None, "float32"]),
        )
        if "VALID" == how["padding"] or isinstance(how["padding"], list):
            how["rhs_dilation"] = (1, 1)
        y = jax.eval_shape(lambda x, w: lax.conv_general_dilated(x, w, **how), x, w)
        self.shape, self.special = y.shape, special
        self.channels = numbers[2].index("C")
        steps = [self.step() for _ in range(self.rng.integers(1, 7))]
        return Program(seed, x, w, how, tuple(steps))

    def step(self) -> Step:
        makers = (
            *(self.on_channels,) * 3,
            *(self.norm,) * 2,
            *(self.cast,) * 2,
            *(self.activation,) * 2,
            *(self.number, self.floor, self.residual, self.negated),
        )
        return self.pick(makers)()

    def each(self, special: float) -> Any:
        """One number for each channel, in the shape that broadcasts to the result."""
        shape = [1] * 4
        shape[self.channels] = self.shape[self.channels]
        if self.channels == 3 and self.chance(0.7):
            shape = shape[3:]
        return self.normal(*shape, dtype=self.pick(DTYPES), special=special)

    def on_channels(self) -> Step:
        name = self.pick(OPERATIONS)
        function = OPERATIONS[name]
        c = self.each(0.5 if name in ("mul", "div") else self.special)
        return Step(name, lambda _, y, c: function(y, c), (c,), self.chance(0.5))

    def norm(self) -> Step:
        name, epsilon = self.pick(NORMS), self.pick([1e-5, 1e-5, 1e-3, 1e-38, 0.0])
        # What is unknown is supposed to be a batch norm's, see ``rewrite.scales``.
        captured = self.chance(0.5)
        moments = [self.each(captured * self.special / 2) for _ in range(4)]
        moments[1] = array(np.abs(np.asarray(moments[1])))
        norm = NORMS[name]

        def function(_: Cast, y: Any, *moments: Any) -> Any:
            return norm(y, *moments, epsilon)

        name = f"{name} {epsilon:g}"
        return Step(name, function, tuple(moments), captured)

    def cast(self) -> Step:
        dtype = self.pick(DTYPES)
        return Step(dtype, lambda cast, y: y.astype(cast(dtype)))

    def activation(self) -> Step:
        functions = ACTIVATIONS if self.special else ACTIVATIONS | SMOOTH
        name = self.pick(functions)
        return Step(name, lambda _, y: functions[name](y))

    def number(self) -> Step:
        name, number = self.pick(OPERATIONS), self.pick(NUMBERS)
        function = OPERATIONS[name]
        return Step(f"{name} {number:g}", lambda _, y: function(y, number))

    def floor(self) -> Step:
        floor, name = self.pick(FLOORS), self.pick(["max", "log max", "1 / max"])
        after = {"max": lambda y: y, "log max": jnp.log, "1 / max": lambda y: 1 / y}
        function = after[name]
        return Step(f"{name} {floor:g}", lambda _, y: function(jnp.maximum(y, floor)))

    def residual(self) -> Step:
        r = self.normal(*self.shape, dtype=self.pick(DTYPES), special=self.special)
        return Step("residual", lambda _, y, r: y + r, (r,))

    def negated(self) -> Step:
        return Step("negated", lambda _, y: -y)
