"""A complete op outside of the package: y = s * (x @ w), with the record that adds it.

    s: a number, x: (m, k), w: (k, n), y: (m, n), all of one dtype

Its own variant multiplies an operand with s, which is less work than multiplying the
product if that is the larger one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from tracea_jax import variants
from tracea_jax.catalogue import Op
from tracea_jax.device import CpuDevice, Device
from tracea_jax.ops.common import arguments, building, lowering
from tracea_jax.ops.common.bench import (
    Judge,
    OpBench,
    Workload,
    check_dtype,
    forced,
    random_normal,
    unit_roundoff,
)
from tracea_jax.policy import Choice
from tracea_jax.problem import ITEMSIZE, Problem
from tracea_jax.rewrite import Match, Rule
from tracea_jax.rewrite.view import View
from tracea_jax.variants import XLA, Call, Inline, Space

# --- the problem ----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatmulProblem(Problem):
    """y = s * (x @ w), x: (m, k), w: (k, n)."""

    m: int
    n: int
    k: int
    dtype: str = "float32"

    op = "scaled_matmul"
    extents = ("m", "n", "k")

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return (self.dtype,)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        elements = self.m * self.k + self.k * self.n + self.m * self.n
        return elements * ITEMSIZE.get(self.dtype, 4)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {"": cls(m=1024, n=1024, k=64, dtype=dtype)}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ScaledMatmulProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        return f"scaled_matmul {self.m}x{self.n}x{self.k} {self.dtype}"


# --- its own variant ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EarlyConfig:
    """Which operand is scaled: "x" or "w"."""

    operand: str

    def __str__(self) -> str:
        return self.operand


@dataclasses.dataclass(frozen=True, slots=True)
class Early:
    """Scales an operand; the methods are ``variants.base.Variant``'s."""

    name: str = "early"
    config_type: type = EarlyConfig
    sources: tuple[str, ...] = ()

    def why_not(self, problem: ScaledMatmulProblem, device: Device) -> str | None:
        if not isinstance(device, CpuDevice):
            return f"it runs on CPUs; the device is {device.platform}"
        if problem.dtype != "float32":
            return f"operands of dtype {problem.dtype}; it takes float32"
        return None

    def check(
        self, problem: ScaledMatmulProblem, config: EarlyConfig, device: Device
    ) -> None:
        if config.operand not in ("x", "w"):
            raise ValueError(f"operand={config.operand!r} must be x or w")

    def space(self, problem: ScaledMatmulProblem, device: Device) -> Space:
        return Space.of(EarlyConfig(operand="x"), EarlyConfig(operand="w"))

    def heuristic(self, problem: ScaledMatmulProblem, device: Device) -> EarlyConfig:
        return EarlyConfig(operand="x" if problem.m <= problem.n else "w")

    def expects_to_win(self, problem: ScaledMatmulProblem, device: Device) -> bool:
        return problem.k < min(problem.m, problem.n)

    def call(
        self, problem: ScaledMatmulProblem, config: EarlyConfig, device: Device
    ) -> Call:
        return Inline(rule=f"early_{config.operand}")


EARLY = Early()

# --- what JAX sees --------------------------------------------------------------------


def scaled_matmul(
    s: Any, x: Any, w: Any, *, implementation: str | None = None, config: Any = None
) -> jax.Array:
    """s * (x @ w) on the best implementation there is."""
    variants.check_implementation("scaled_matmul", implementation)
    config = tuple(sorted(config.items())) if isinstance(config, dict) else config
    operands = jnp.asarray(s, x.dtype), x, w
    return _bind(*operands, implementation=implementation, config=config)


def reference(s: Any, x: Any, w: Any, **_: Any) -> list[jax.Array]:
    return [s * (x @ w)]


def _early_x(s: Any, x: Any, w: Any, **_: Any) -> list[jax.Array]:
    return [(s * x) @ w]


def _early_w(s: Any, x: Any, w: Any, **_: Any) -> list[jax.Array]:
    return [x @ (s * w)]


def problem_of(avals: Sequence[Any], **_: Any) -> ScaledMatmulProblem:
    _, x, w = avals
    return ScaledMatmulProblem(
        m=x.shape[0], n=w.shape[1], k=x.shape[1], dtype=x.dtype.name
    )


scaled_matmul_p = lowering.primitive("tracea_scaled_matmul", reference)
PLANNED = lowering.register(
    "scaled_matmul",
    scaled_matmul_p,
    problem_of,
    reference,
    early_x=_early_x,
    early_w=_early_w,
)


def _bind(*operands: Any, **params: Any) -> jax.Array:
    (y,) = scaled_matmul_p.bind(*lowering.align_varying_axes(operands), **params)
    return y


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    """y' = s' (x @ w) + s (x' @ w) + s (x @ w')."""
    terms = []
    for i, tangent in enumerate(tangents):
        if not isinstance(tangent, ad.Zero):
            operands = [*primals[:i], tangent, *primals[i + 1 :]]
            terms.append(_bind(*operands, **params))
    return [_bind(*primals, **params)], [functools.reduce(jnp.add, terms)]


def _transpose(cts: Any, *operands: Any, **params: Any) -> list[Any]:
    """Linear in each operand: one of them is unknown."""
    (i,) = [i for i, x in enumerate(operands) if ad.is_undefined_primal(x)]

    def of_unknown(value: Any) -> Any:
        s, x, w = [value if j == i else a for j, a in enumerate(operands)]
        return reference(s, x, w)[0]

    aval = operands[i].aval
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    (gradient,) = jax.linear_transpose(of_unknown, shape)(cts[0])
    return [gradient if j == i else None for j in range(3)]


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    f = jax.vmap(functools.partial(reference, **params), in_axes=tuple(dims))
    return f(*operands), [0]


ad.primitive_jvps[scaled_matmul_p] = _jvp
ad.primitive_transposes[scaled_matmul_p] = _transpose
batching.primitive_batchers[scaled_matmul_p] = _batch

# --- how it is measured ---------------------------------------------------------------


def _check(problem: ScaledMatmulProblem) -> None:
    check_dtype(problem.dtype)


def _operands(problem: ScaledMatmulProblem, seed: int) -> list[jax.Array]:
    p = problem
    return random_normal([(s, p.dtype) for s in ((), (p.m, p.k), (p.k, p.n))], seed)


def _execute(
    *inputs: jax.Array, problem: ScaledMatmulProblem, choice: Choice
) -> list[jax.Array]:
    return [_bind(*inputs, **forced(choice))]


def _ragged(problem: ScaledMatmulProblem) -> ScaledMatmulProblem:
    return dataclasses.replace(problem, m=13, n=17, k=11)


def _judge(
    problem: ScaledMatmulProblem, device: Device, inputs: list[jax.Array], seed: int
) -> Judge:
    s, x, w = (np.asarray(a, np.float64) for a in inputs)
    bound = abs(s) * (np.abs(x) @ np.abs(w)) * 8 * unit_roundoff(problem.dtype)

    def error(results: list[jax.Array]) -> float:
        found = np.asarray(results[0], np.float64)
        worst = float((np.abs(found - s * (x @ w)) / bound).max())
        return worst if np.isfinite(worst) else float("inf")

    return error


WORKLOAD = Workload(
    check=_check, operands=_operands, execute=_execute, ragged=_ragged, judge=_judge
)

# --- how it is found in programs ------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A call of the primitive in place of the equations."""

    def __call__(self, s: Any, x: Any, w: Any) -> jax.Array:
        return _bind(s, x, w, implementation=None, config=None)


def _match(view: View, index: int) -> Match | str | None:
    """The product at an equation, if a scalar variable is all it is multiplied with."""
    product = view.eqns[index].outvars[0]
    consumer = view.sole_consumer(product)
    if consumer is None or view.eqns[consumer].primitive.name != "mul":
        return None
    first, second = view.eqns[consumer].invars
    scale = second if first is product else first
    if scale.aval.shape or scale.aval.dtype != product.aval.dtype:
        return None
    numbers = view.eqns[index].params["dimension_numbers"]
    if numbers != (((1,), (0,)), ((), ())):
        return "its operands are no matrices as they are multiplied"
    return Match(
        root=consumer,
        equations=frozenset({index, consumer}),
        operands=(scale, *view.eqns[index].invars),
        site=Site(),
    )


RULE = Rule(op="scaled_matmul", anchors=frozenset({"dot_general"}), match=_match)

# --- the record -----------------------------------------------------------------------


def build(m: int, n: int, k: int, *, dtype: Any = "float32") -> ScaledMatmulProblem:
    """s * (x @ w), x: (m, k), w: (k, n)."""
    m, n, k = building.sizes(m=m, n=n, k=k)
    name = building.array(dtype, ()).dtype.name
    return ScaledMatmulProblem(m=m, n=n, k=k, dtype=name)


SCALED_MATMUL = Op(
    name="scaled_matmul",
    summary="s * (x @ w)",
    problem=ScaledMatmulProblem,
    variants=(EARLY, XLA),
    primitives=(PLANNED,),
    bench=functools.partial(OpBench, WORKLOAD),
    build=build,
    arguments=tuple(map(arguments.size, "mnk")),
    rules=(RULE,),
)
