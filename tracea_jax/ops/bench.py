"""Running one matmul problem by choice: what the tuner measures and verifies with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import dispatch
from tracea_jax.device import CudaDevice, Device
from tracea_jax.ops import epilogue as epilogues
from tracea_jax.ops.matmul import matmul_p, split
from tracea_jax.ops.precision import precision_from_name
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning import measure

_MAX_INPUT_SETS = 32


@dataclasses.dataclass(frozen=True, slots=True)
class MatmulBench:
    """``measure.Bench`` for one matmul problem on one local device."""

    problem: GemmProblem
    device: Device

    def __post_init__(self) -> None:
        for dtype in (self.problem.lhs, self.problem.rhs, self.problem.out):
            _check_dtype(dtype)
        precision_from_name(self.problem.precision)

    def prepare(self, choice: Choice) -> measure.Run:
        """Compiles the choice for random inputs; see ``measure.Bench``."""
        sets = [operands(self.problem, self._jax_device, s) for s in range(self._sets)]
        run = functools.partial(execute, problem=self.problem, choice=choice)
        many = _compiled(lambda sets: [run(*x)[0] for x in sets], sets)
        one = many if len(sets) == 1 else _compiled(lambda x: run(*x)[0], sets[0])
        arguments = sets if len(sets) == 1 else sets[0]

        def executions(count: int) -> None:
            result = None
            for _ in range(count // len(sets)):
                result = many(sets)
            for _ in range(count % len(sets)):
                result = one(arguments)
            jax.block_until_ready(result)

        return executions

    @property
    def _sets(self) -> int:
        """Input sets that one compiled call works through.

        On a GPU enough of them leave the L2 cache and hide the dispatch of the call; on
        a CPU calls are cheap and caches stay warm.
        """
        if not isinstance(self.device, CudaDevice):
            return 1
        wanted = 1 + 2 * self.device.l2_bytes / max(1, self.problem.bytes)
        return int(min(max(wanted, 2), _MAX_INPUT_SETS))

    def verify(self, choice: Choice, seed: int = 0) -> measure.Verification:
        """Compares with float64 on fresh inputs, at the shape and at a ragged one."""
        for problem in (self.problem, ragged(self.problem)):
            result = self._verify(problem, choice, seed)
            if not result.ok:
                return result
        return result

    def _verify(self, problem: GemmProblem, choice: Choice, seed: int) -> Any:
        inputs = operands(problem, self._jax_device, seed + 7919)
        run = functools.partial(execute, problem=problem, choice=choice)
        first, second = _poisoned(run, inputs), _poisoned(run, inputs)
        worst = max(
            relative_error(problem, self.device, inputs, first[0], "y", seed),
            relative_error(problem, self.device, inputs, first[1], "z", seed)
            if problem.epilogue.save_preactivation
            else 0.0,
        )
        same = all(
            bool(jnp.array_equal(a, b, equal_nan=True))
            for a, b in zip(first, second, strict=True)
        )
        return measure.Verification(
            max_rel_error=worst,
            tolerance=1.0,
            ok=bool(worst <= 1.0) and same,
            repeatable=same,
            message=f"{worst:.3g} of the error bound at {problem}",
        )

    @property
    def _jax_device(self) -> Any:
        platform = {"cuda": "gpu"}.get(self.device.platform, self.device.platform)
        return jax.local_devices(backend=platform)[0]


def _check_dtype(name: str) -> None:
    try:
        jnp.dtype(name)
    except TypeError as e:
        raise ValueError(f"dtype {name!r} is unknown to JAX") from e


def _compiled(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    return jax.jit(function).lower(arguments).compile()


def execute(
    *inputs: jax.Array, problem: GemmProblem, choice: Choice
) -> list[jax.Array]:
    """The problem's primitive, forced to one choice."""
    return matmul_p.bind(
        *inputs,
        layout=problem.layout,
        out=jnp.dtype(problem.out),
        precision=precision_from_name(problem.precision),
        epilogue=problem.epilogue,
        implementation=choice.variant,
        config=None if choice.variant == "xla" else choice.config,
    )


def operands(problem: GemmProblem, device: Any, seed: int) -> list[jax.Array]:
    """Random normal operands of a problem, in the primitive's order."""
    p, epilogue = problem, problem.epilogue
    lhs = (p.m, p.k) if p.layout[0] == "n" else (p.k, p.m)
    rhs = (p.k, p.n) if p.layout[1] == "n" else (p.n, p.k)
    batched = p.lhs_batched or p.rhs_batched
    batch = (p.batch,) if batched else ()
    shapes: list[tuple[tuple[int, ...], str]] = [
        ((*(batch if p.lhs_batched else ()), *lhs), p.lhs),
        ((*(batch if p.rhs_batched else ()), *rhs), p.rhs),
    ]
    if epilogue.bias != "none":
        own = batch if epilogue.bias == "batched_row" else ()
        shapes.append(((*own, p.n), epilogue.bias_dtype or p.out))
    if epilogue.residual:
        shapes.append(((*batch, p.m, p.n), epilogue.residual_dtype or p.out))
    with jax.default_device(device):
        keys = jax.random.split(jax.random.key(seed), len(shapes))
        return [
            jax.random.normal(key, shape, jnp.float32).astype(dtype)
            for key, (shape, dtype) in zip(keys, shapes, strict=True)
        ]


def ragged(problem: GemmProblem) -> GemmProblem:
    """A small problem of the same kind that divides no tile but keeps the alignment."""

    def tail(size: int, base: int) -> int:
        step = next(s for s in (8, 4, 2, 1) if size % s == 0)
        return base + step

    return dataclasses.replace(
        problem,
        batch=min(problem.batch, 3),
        m=tail(problem.m, 264),
        n=tail(problem.n, 392),
        k=tail(problem.k, 192),
    )


def relative_error(
    problem: GemmProblem,
    device: Device,
    inputs: list[jax.Array],
    result: jax.Array,
    which: str,
    seed: int,
) -> float:
    """The largest error against float64, in units of the bound that rounding allows.

    A row from every band of 64 is compared, all columns. With e the unit roundoff of
    the products' operands and E the output's:

        |error| <= E |exact| + 4 sqrt(k) e (|A| |B| + |bias| + |residual|)

    Not-a-number anywhere in the result counts as infinite.
    """
    host = np.asarray(result.astype(jnp.float32), np.float64)
    host = host.reshape(problem.batch, problem.m, problem.n)
    if not np.isfinite(host).all():
        return float("inf")
    rng = np.random.default_rng(seed)
    starts = np.arange(0, problem.m, 64)
    rows = np.minimum(starts + rng.integers(0, 64, starts.size), problem.m - 1)
    rows = np.unique(np.concatenate([rows, [0, problem.m - 1]]))
    worst = 0.0
    for b in np.unique([0, problem.batch // 2, problem.batch - 1]):
        exact, scale = _exact_rows(problem, inputs, b, rows, which)
        bound = _unit(problem.out) * np.abs(exact)
        bound += 4 * np.sqrt(problem.k + 1) * _operand_unit(problem, device) * scale
        error = np.abs(host[b, rows] - exact)
        worst = max(worst, float((error / np.maximum(bound, 1e-30)).max()))
    return worst


def _exact_rows(problem, inputs, b, rows, which):
    """(float64 results, sums of magnitudes) of some rows of batch b."""
    lhs, rhs, bias, residual = split(inputs, problem.epilogue)
    lhs, rhs = (_f64(x[b] if x.ndim == 3 else x) for x in (lhs, rhs))
    lhs = (lhs if problem.layout[0] == "n" else lhs.T)[rows]
    rhs = rhs if problem.layout[1] == "n" else rhs.T
    exact, scale = lhs @ rhs, np.abs(lhs) @ np.abs(rhs)
    if bias is not None:
        bias = _f64(bias[b] if bias.ndim == 2 else bias)
        exact, scale = exact + bias, scale + np.abs(bias)
    if which == "y":
        exact = _ACTIVATIONS_F64[problem.epilogue.activation](exact)
        if residual is not None:
            residual = _f64(residual.reshape(-1, problem.m, problem.n)[b])[rows]
            exact, scale = exact + residual, scale + np.abs(residual)
    return exact, scale


def _f64(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _erf(x: np.ndarray) -> np.ndarray:
    from scipy import special  # slow to import, and only verification needs it

    return special.erf(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


_ACTIVATIONS_F64: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": lambda z: z,
    "relu": lambda z: np.maximum(z, 0),
    "gelu": lambda z: z * _sigmoid(2 * np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)),
    "gelu_exact": lambda z: z * 0.5 * (1 + _erf(z / np.sqrt(2))),
    "silu": lambda z: z * _sigmoid(z),
}


def _unit(dtype: str) -> float:
    """Unit roundoff of a floating-point dtype."""
    return float(jnp.finfo(dtype).eps) / 2


def _operand_unit(problem: GemmProblem, device: Device) -> float:
    """Unit roundoff of the products, with what the precision lets the device do."""
    if problem.lhs == problem.rhs == "float64":
        return _unit("float64")
    wide = "float32" in (problem.lhs, problem.rhs)
    if wide and problem.precision != "highest" and device.platform != "cpu":
        return 2.0**-11  # TF32
    return _unit("float32")


def _poisoned(run: Callable[..., Any], inputs: list[jax.Array]) -> list[jax.Array]:
    """The results, computed into donated buffers that hold nothing but NaN."""
    shapes = jax.eval_shape(run, *inputs)
    with jax.default_device(next(iter(inputs[0].devices()))):
        poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in shapes]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    return call(poison, *inputs)


dispatch.BENCHES["matmul"] = MatmulBench
assert set(_ACTIVATIONS_F64) == set(epilogues.ACTIVATION_FUNCTIONS)
