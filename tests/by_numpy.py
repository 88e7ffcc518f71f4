"""Jaxprs evaluated by NumPy: as written, or in float64 with random rounding errors.

Nothing is compiled, so that thousands of programs are compared in minutes. Primitives
of our ops are their references in jnp. Results with random errors, of the size of one
rounding at each equation, show how far roundings may move a result.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import jet
from numerics import array

from tracea_jax.rewrite.evaluate import apply, is_elementwise

_CALLS = ("jit", "pjit", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """How equations are computed.

    Attributes:
      is_wide: whether floats are float64, whatever their dtype is.
      seed: of the errors; None for none.
    """

    is_wide: bool = False
    seed: int | None = None


def evaluated(
    jaxpr: Any, *arguments: Any, arithmetic: Arithmetic = Arithmetic()
) -> list[np.ndarray]:
    """The results of a closed jaxpr."""
    rng = None
    if arithmetic.seed is not None:
        rng = np.random.default_rng(arithmetic.seed)
    evaluator = _Evaluator(is_wide=arithmetic.is_wide, rng=rng)
    with np.errstate(all="ignore"):
        return evaluator.run(jaxpr, [evaluator.taken(x) for x in arguments])


@dataclasses.dataclass(frozen=True)
class _Evaluator:
    is_wide: bool
    rng: Any

    def taken(self, x: Any) -> np.ndarray:
        x = np.asarray(x)
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(np.float64) if self.is_wide and is_float else x

    def run(self, jaxpr: Any, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
        body = getattr(jaxpr, "jaxpr", jaxpr)
        consts = [self.taken(x) for x in getattr(jaxpr, "consts", ())]
        values = dict(zip(body.constvars, consts, strict=True))
        values |= dict(zip(body.invars, arguments, strict=True))

        def read(atom: Any) -> np.ndarray:
            if hasattr(atom, "val"):
                return self.taken(np.asarray(atom.val, atom.aval.dtype))
            return values[atom]

        for eqn in body.eqns:
            results = self.results(eqn, [read(x) for x in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
        return [read(x) for x in body.outvars]

    def results(self, eqn: Any, operands: list[np.ndarray]) -> list[np.ndarray]:
        name = eqn.primitive.name
        if name in _CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            return self.run(inner, operands)
        if eqn.primitive in jet.jet_rules and name.startswith("tracea_"):
            return self.run(reference(eqn), operands)
        if is_elementwise(eqn):
            return [self._elementwise(eqn, operands)]
        if name == "reduce_sum":
            return [self._sum(eqn, *operands)]
        if name in _MOVES:
            return [_MOVES[name](eqn.params, *operands)]
        if name == "dot_general":
            return [self._product(eqn, operands, _dot)]
        if name == "conv_general_dilated":
            return [self._product(eqn, operands, self._by_jax)]
        y = self._by_jax(eqn, *operands)
        found = y if eqn.primitive.multiple_results else [y]
        pairs = zip(found, eqn.outvars, strict=True)
        return [self._near(x, v.aval, np.abs(x)) for x, v in pairs]

    def _by_jax(self, eqn: Any, *operands: np.ndarray) -> Any:
        """The results that JAX computes, in float32 at least if this is wide."""
        params = eqn.params
        given = [
            x.astype(self._narrow(v.aval.dtype))
            for x, v in zip(operands, eqn.invars, strict=True)
        ]
        if self.is_wide and params.get("preferred_element_type") is not None:
            params = {**params, "preferred_element_type": np.dtype("float32")}
        found = eqn.primitive.bind(*map(array, given), **params)
        return jax.tree.map(self.taken, found)

    def _narrow(self, dtype: Any) -> Any:
        is_float = jnp.issubdtype(dtype, jnp.floating)
        return np.dtype("float32") if self.is_wide and is_float else dtype

    def _product(
        self, eqn: Any, operands: list[np.ndarray], multiply: Callable[..., Any]
    ) -> np.ndarray:
        """A sum of products, which is rounded to float32 and to its dtype."""
        aval = eqn.outvars[0].aval
        if not self.is_wide:
            return self._by_jax(eqn, *operands)
        y = multiply(eqn, *operands)
        if self.rng is None:
            return y
        size = multiply(eqn, *map(np.abs, operands))
        f32 = jax.ShapeDtypeStruct(aval.shape, np.dtype("float32"))
        return self._near(self._near(y, f32, 4 * size), aval, np.abs(y))

    def _elementwise(self, eqn: Any, operands: list[np.ndarray]) -> np.ndarray:
        aval, params = eqn.outvars[0].aval, eqn.params
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if self.is_wide and "new_dtype" in params and is_float:
            params = {"new_dtype": np.dtype(np.float64)}
        y = apply(eqn.primitive.name, params, *operands)
        assert y is not None, eqn
        y = np.broadcast_to(y, aval.shape)
        return self._near(y, aval, np.abs(y)) if is_float else y

    def _sum(self, eqn: Any, x: np.ndarray) -> np.ndarray:
        aval, axes = eqn.outvars[0].aval, tuple(eqn.params["axes"])
        if not jnp.issubdtype(aval.dtype, jnp.floating):
            return x.sum(axes, dtype=x.dtype)
        count = math.prod(x.shape[i] for i in axes)
        # The terms are added in some order: as many roundings as a tree is deep.
        size = np.abs(x.astype(np.float64)).sum(axes) * (1 + math.log2(max(count, 1)))
        return self._near(x.sum(axes, dtype=x.dtype), aval, size)

    def _near(self, y: np.ndarray, aval: Any, size: np.ndarray) -> np.ndarray:
        """y with an error relative to a size, of the dtype that the program has."""
        if self.rng is None or not jnp.issubdtype(aval.dtype, jnp.floating):
            return y
        unit = float(jnp.finfo(aval.dtype).eps) / 2
        by = unit * self.rng.choice([-1.0, 0.0, 1.0], y.shape)
        return y + by * np.where(np.isfinite(size), size, 0)


def _dot(eqn: Any, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    contract, batch = eqn.params["dimension_numbers"]
    names = list(range(x.ndim, x.ndim + y.ndim))
    for i, j in zip((*contract[0], *batch[0]), (*contract[1], *batch[1]), strict=True):
        names[int(j)] = int(i)
    own = [i for i in range(x.ndim) if i not in (*contract[0], *batch[0])]
    other = [n for n in names if n >= x.ndim]
    result = [*map(int, batch[0]), *own, *other]
    return np.einsum(x, list(range(x.ndim)), y, names, result)


def _spread(params: Any, x: np.ndarray, *_: Any) -> np.ndarray:
    shape, places = params["shape"], params["broadcast_dimensions"]
    sizes = [1] * len(shape)
    for n, place in zip(x.shape, places, strict=True):
        sizes[int(place)] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def _reshaped(params: Any, x: np.ndarray) -> np.ndarray:
    order = params["dimensions"]
    return (x if order is None else x.transpose(order)).reshape(params["new_sizes"])


def _sliced(params: Any, x: np.ndarray) -> np.ndarray:
    strides = params["strides"] or (1,) * x.ndim
    bounds = (params["start_indices"], params["limit_indices"], strides)
    return x[tuple(map(slice, *bounds))]


_MOVES: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _spread,
    "reshape": _reshaped,
    "squeeze": lambda params, x: x.squeeze(tuple(params["dimensions"])),
    "expand_dims": lambda params, x: np.expand_dims(x, tuple(params["dimensions"])),
    "transpose": lambda params, x: x.transpose(params["permutation"]),
    "slice": _sliced,
    "stop_gradient": lambda params, x: x,
    "name": lambda params, x: x,
    "rev": lambda params, x: np.flip(x, tuple(params["dimensions"])),
    "concatenate": lambda params, *xs: np.concatenate(xs, params["dimension"]),
    "reduce_max": lambda params, x: x.max(tuple(params["axes"]), initial=-np.inf),
}


def reference(eqn: Any) -> Any:
    """The jaxpr of the reference of an op's primitive."""
    key = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    written = jet.jet_rules[eqn.primitive].args[0]  # see ``by_reference``
    return _traced(written, key, tuple(x.aval for x in eqn.invars))


@functools.lru_cache(maxsize=4096)
def _traced(written: Any, params: Any, avals: Any) -> Any:
    return jax.make_jaxpr(functools.partial(written, **dict(params)))(*avals)


# --- judging --------------------------------------------------------------------------

_SEEDS = 6  # of random errors
_DEVIATIONS = 8  # of the largest error seen


def assert_rounded(jaxpr: Any, arguments: Sequence[Any], found: Sequence[Any]) -> None:
    """Asserts that results are a program's, or as near as roundings may be.

    Args:
      jaxpr, arguments: the program.
      found: results of a program that should compute the same.
    """
    expected = evaluated(jaxpr, *arguments)
    if all(
        np.array_equal(x, y, equal_nan=True)
        for x, y in zip(found, expected, strict=True)
    ):
        return
    wide = evaluated(jaxpr, *arguments, arithmetic=Arithmetic(is_wide=True))
    moved = [expected, wide]
    reason: str | None = ""
    for seed in range(_SEEDS):
        arithmetic = Arithmetic(is_wide=True, seed=seed)
        moved.append(evaluated(jaxpr, *arguments, arithmetic=arithmetic))
        reasons = (
            _unlike(y, wide[i], [m[i] for m in moved], aval.dtype)
            for i, (y, aval) in enumerate(zip(found, jaxpr.out_avals, strict=True))
        )
        reason = next(filter(None, reasons), None)
        if reason is None:
            return
    raise AssertionError(reason)


@np.errstate(all="ignore")
def _unlike(found: Any, wide: Any, others: Sequence[Any], dtype: Any) -> str | None:
    """Where a result is no reading of the program, nor near one; None if it is.

    Args:
      found: the result.
      wide: of the program in float64.
      others: the same as written, and with random errors.
      dtype: of the result.
    """
    y, wide, *others = (
        np.asarray(x).astype(np.float64) for x in (found, wide, *others)
    )
    all_of = np.stack(others)
    unit, tiny = float(jnp.finfo(dtype).eps), float(jnp.finfo(dtype).tiny)
    finite = np.isfinite(all_of) & np.isfinite(wide)
    errors = np.where(finite, np.abs(all_of - wide), 0).max(0)
    allowed = _DEVIATIONS * errors + unit * np.abs(wide) + tiny
    near = np.abs(y - wide) <= allowed
    same = (y == all_of).any(0) | (np.isnan(y) & np.isnan(all_of).any(0))
    # A result beyond the dtype's range is infinite, or not where less was rounded.
    largest = float(jnp.finfo(dtype).max)
    beyond = np.isinf(y) & (np.sign(y) * wide + allowed >= largest)
    wrong = ~(near | same | beyond)
    if not wrong.any():
        return None
    i = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    values = [float(m[i]) for m in others]
    return (
        f"{int(wrong.sum())} of {wrong.size} differ; at {tuple(map(int, i))} {y[i]}, "
        f"in float64 {wide[i]}, as written and with errors {values}"
    )
