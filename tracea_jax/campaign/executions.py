"""Whole programs, compiled and run: plain, and with some of their sites on our ops.

What is kept is decided in ``campaign.keep``, and recorded in ``campaign.program``,
which makes these; ``bench`` times them.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import catalogue, knowledge, mutable
from tracea_jax.call import Call
from tracea_jax.campaign.keep import Without
from tracea_jax.explain.sites import devices_of
from tracea_jax.ops.common import choice
from tracea_jax.ops.common.programs import equations_in
from tracea_jax.ops.common.promotion import promoted
from tracea_jax.options import options
from tracea_jax.rewrite import splice
from tracea_jax.rewrite.fewer import noting
from tracea_jax.rewrite.inside import splicing
from tracea_jax.schema import one_line
from tracea_jax.transform import check_ops, made_of, rules_of, transform
from tracea_jax.verdicts import leaving

# Roundings differ, and a program may amplify them. So this only finds what is broken;
# each kernel was compared with float64 when its site was tuned.
TOLERANCE = 0.1  # of the norm of all results


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A function at some arguments, as ``tune`` and ``bench`` are given it.

    Attributes:
      fn: as the user wrote it.
      args: its arguments; flax nnx objects among them stay as they are.
      ops, after_grad: as given to ``transform``.
    """

    fn: Callable[..., Any]
    args: Any
    ops: tuple[str, ...]
    after_grad: bool

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: Any,
        ops: str | Iterable[str] | None,
        after_grad: bool,
    ) -> Program:
        """The program of a function; of a transformed one, of what that was made of."""
        if made := made_of(fn):
            fn, chosen, after_grad = made
        else:
            chosen = check_ops(ops, after_grad)
        return cls(fn=fn, args=args, ops=chosen, after_grad=after_grad)

    @property
    def name(self) -> str:
        """The function's name in reports."""
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        return one_line(name, 200)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Executions]:
        """Executions that can be traced and run while the context lasts."""
        with (
            knowledge.undisturbed(),
            mutable.opened(self.fn, self.args, {}) as (fn, args, kwargs),
        ):
            call, arrays = Call.of(fn, args, kwargs)
            yield Executions(
                fn=fn,
                name=self.name,
                call=call,
                arrays=arrays,
                ops=self.ops,
                after_grad=self.after_grad,
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Executions:
    """A function of arrays at some arguments.

    Attributes:
      fn: traced, and run on ``arrays``, which are never donated.
      name: of the user's function, for people.
      call: the arguments that are no arrays.
      arrays: those that are; random ones for abstract arguments.
      ops, after_grad: as given to ``transform``.
    """

    fn: Callable[..., Any]
    name: str
    call: Call
    arrays: list[Any]
    ops: tuple[str, ...]
    after_grad: bool

    def why_not(self) -> str | None:
        """Why the program cannot be raced against plain, as a phrase."""
        jaxpr = jax.make_jaxpr(self._flat(self.fn))(*self.arrays)
        if jaxpr.effects:
            return "it has effects, which a race would repeat"
        equations = list(equations_in(jaxpr))
        planned = catalogue.planned()
        if any(eqn.primitive in planned for eqn in equations):
            return "it calls our ops itself; pass the function that is transformed"
        spread = [getattr(x, "sharding", None) for x in self.arrays]
        counts = [getattr(sharding, "num_devices", 1) for sharding in spread]
        counts += map(devices_of, equations)
        if jax.process_count() > 1 and max(counts, default=1) > 1:
            return "it runs on several processes; tune it in a program of one"
        return None

    def sites(self) -> tuple[Any, dict[str, list[str]]]:
        """The program with every site taken, and its classes of sites.

        Returns:
          The jaxpr that ``transform`` makes, and by op the names of the classes, those
          with the most sites first.
        """
        counts: dict[str, collections.Counter[str]] = {}

        def note(op: str, name: str) -> None:
            counts.setdefault(op, collections.Counter())[name] += 1

        rules = rules_of(self.ops)
        jaxpr = self._spliced(noting(rules, note))
        classes = {
            op: [name for name, _ in counter.most_common()]
            for op, counter in counts.items()
        }
        return jaxpr, classes

    def _spliced(self, rules: Any) -> Any:
        with options(on_miss="heuristic"):
            with splicing(() if self.after_grad else rules):
                jaxpr = jax.make_jaxpr(self._flat(self.fn))(*self.arrays)
            return splice(jaxpr, rules, [])

    def is_as_written(self, without: Without) -> bool:
        """Tests whether the program without some classes of sites compiles to plain."""
        if without is None:
            return True
        with leaving(without), options(on_miss="heuristic"):
            jaxpr = jax.make_jaxpr(self._flat(self._transformed()))(*self.arrays)
        return choice.is_as_written(jaxpr)

    def filled(self) -> Executions:
        """The same on arrays of random numbers where arguments were abstract."""
        arrays = [_array(x, i) for i, x in enumerate(self.arrays)]
        return dataclasses.replace(self, arrays=arrays)

    def prepare(self, without: Without) -> Execution:
        """Compiles the program without some classes of sites; None is plain."""
        if without is None:
            return Execution(self._compiled(self.fn), self.arrays)
        with leaving(without), options(on_miss="heuristic"):
            return Execution(self._compiled(self._transformed()), self.arrays)

    def _transformed(self) -> Callable[..., Any]:
        return transform(self.fn, ops=self.ops, after_grad=self.after_grad)

    def _compiled(self, fn: Callable[..., Any]) -> Any:
        return jax.jit(self._flat(fn)).lower(*self.arrays).compile()

    def _flat(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        def flat(*arrays: Any) -> Any:
            return self.call.applied(fn, arrays)

        return flat


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """A ``measure.Run`` of a compiled program."""

    compiled: Callable[..., Any]
    arrays: list[Any]

    def __call__(self, count: int) -> None:
        result = None
        for _ in range(count):
            result = self.compiled(*self.arrays)
        jax.block_until_ready(result)

    def results(self) -> list[Any]:
        return jax.tree.leaves(self.compiled(*self.arrays))


def difference(found: list[Any], expected: list[Any]) -> str | None:
    """Description of results that differ too much from those of plain.

    Integers do not count: a rounding may decide which of two entries is the largest.
    """
    error = norm = 0.0
    for x, y in zip(found, expected, strict=True):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            continue
        is_finite = jnp.isfinite(y)
        if bool(jnp.any(is_finite & ~jnp.isfinite(x))):
            return "a result is not finite where plain's is"
        kind = promoted(y.dtype, jnp.float32)
        x, y = (jnp.where(is_finite, z, 0).astype(kind) for z in (x, y))
        scale = jnp.maximum(jnp.abs(y).max(initial=0.0), 1e-30)
        error = math.hypot(error, float(scale * jnp.linalg.norm((x - y) / scale)))
        norm = math.hypot(norm, float(scale * jnp.linalg.norm(y / scale)))
    if error <= TOLERANCE * norm:
        return None
    return f"its results differ from plain's by {error / max(norm, 1e-30):.2g}"


def _array(x: Any, seed: int) -> Any:
    """An argument itself, or a random one of an abstract argument's type."""
    if not isinstance(x, jax.ShapeDtypeStruct):
        return jax.device_put(x) if isinstance(x, np.ndarray | np.generic) else x
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(seed), x.shape or 1).reshape(x.shape)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        made = jnp.zeros(x.shape, x.dtype)
    else:
        made = jax.random.normal(jax.random.key(seed), x.shape).astype(x.dtype)
    return made if x.sharding is None else jax.device_put(made, x.sharding)
