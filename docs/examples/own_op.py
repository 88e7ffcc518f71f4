"""An op of your own that the package finds, explains, tunes and remembers: (x @ a) @ b.

    python own_op.py                     # plain against transformed
    tracea explain own_op:project        # what each site runs on, and why

    x: (m, k), a: (k, r), b: (r, n), all float32

XLA multiplies in the order that is written. x @ (a @ b) is the same product, with less
work where x has many rows and b few columns. This file says so in one record: a problem
(what is asked), a variant (one more way to answer), a primitive (what JAX sees), and a
rule (how programs write it). The variant here is JAX code; docs/ARCHITECTURE.md has the
ways of kernels in C++ and CUDA.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import side_by_side
from jax.interpreters import ad, batching

import tracea_jax as tracea
from tracea_jax import catalogue
from tracea_jax.device import Device
from tracea_jax.ops.common import arguments, bench, lowering
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.rewrite import Match, Rule
from tracea_jax.rewrite.view import View
from tracea_jax.variants import XLA, Call, Inline, Space

# --- the problem: all that decides which implementation is best -----------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChainProblem(Problem):
    m: int
    k: int
    r: int
    n: int

    op = "chain"
    extents = ("m", "k", "r", "n")
    operand_dtypes = ("float32",)

    @property
    def flops(self) -> int:
        """Operations of the cheaper order."""
        return min(self.left_flops, self.right_flops)

    @property
    def left_flops(self) -> int:
        return 2 * self.m * self.r * (self.k + self.n)

    @property
    def right_flops(self) -> int:
        return 2 * self.k * self.n * (self.r + self.m)

    @property
    def bytes(self) -> int:
        m, k, r, n = self.m, self.k, self.r, self.n
        return 4 * (m * k + k * r + r * n + m * n)

    @classmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        return {"": cls(m=1024, k=256, r=256, n=16)}

    def to_json(self) -> dict[str, Any]:
        return {"op": self.op, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ChainProblem:
        return cls(**{k: v for k, v in data.items() if k != "op"})

    def __str__(self) -> str:
        return f"chain {self.m}x{self.k}x{self.r}x{self.n} float32"


# --- the variant: x @ (a @ b) ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoConfig:
    """There is nothing to choose."""


@dataclasses.dataclass(frozen=True, slots=True)
class RightFirst:
    """The methods are those of ``variants.base.Variant``."""

    name: str = "right_first"
    config_type: type = NoConfig
    sources: tuple[str, ...] = ()

    def why_not(self, problem: ChainProblem, device: Device) -> str | None:
        if problem.right_flops >= problem.left_flops:
            return "multiplying a and b first is more work"
        return None

    def check(self, problem: ChainProblem, config: NoConfig, device: Device) -> None:
        """Every config is legal."""

    def space(self, problem: ChainProblem, device: Device) -> Space:
        return Space.of(NoConfig())

    def heuristic(self, problem: ChainProblem, device: Device) -> NoConfig:
        return NoConfig()

    def expects_to_win(self, problem: ChainProblem, device: Device) -> bool:
        return 2 * problem.right_flops < problem.left_flops

    def call(self, problem: ChainProblem, config: NoConfig, device: Device) -> Call:
        return Inline(rule="right_first")


# --- the primitive: what it means, and its derivatives --------------------------------


def reference(x: Any, a: Any, b: Any, **_: Any) -> list[jax.Array]:
    return [(x @ a) @ b]


def right_first(x: Any, a: Any, b: Any, **_: Any) -> list[jax.Array]:
    return [x @ (a @ b)]


def problem_of(avals: Sequence[Any], **_: Any) -> ChainProblem:
    (m, k), (r, n) = avals[0].shape, avals[2].shape
    return ChainProblem(m=m, k=k, r=r, n=n)


chain_p = lowering.primitive("chain", reference)
PLANNED = lowering.register(
    "chain", chain_p, problem_of, reference, right_first=right_first
)


def chain(x: Any, a: Any, b: Any, *, implementation: Any = None, config: Any = None):
    (y,) = chain_p.bind(x, a, b, implementation=implementation, config=config)
    return y


def _jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    # The derivative is written in plain products, which transform finds in their turn.
    _, tangent = jax.jvp(
        lambda *operands: reference(*operands)[0],
        primals,
        tuple(map(ad.instantiate_zeros, tangents)),
    )
    return chain_p.bind(*primals, **params), [tangent]


def _batch(operands: Any, dims: Any, **params: Any) -> Any:
    return jax.vmap(reference, in_axes=tuple(dims))(*operands), [0]


ad.primitive_jvps[chain_p] = _jvp
batching.primitive_batchers[chain_p] = _batch

# --- how transform finds it: a product whose only use is the left of another ----------

_MATRICES = (((1,), (0,)), ((), ()))


def _match(view: View, index: int) -> Match | str | None:
    first = view.eqns[index]
    user = view.sole_consumer(first.outvars[0])
    if user is None or view.eqns[user].primitive.name != "dot_general":
        return None
    second = view.eqns[user]
    if second.invars[0] is not first.outvars[0]:
        return None
    for eqn in (first, second):
        if eqn.params["dimension_numbers"] != _MATRICES:
            return "its operands are no matrices as they are multiplied"
        if any(v.aval.dtype != jnp.float32 for v in (*eqn.invars, *eqn.outvars)):
            return "it is not in float32"
    return Match(
        root=user,
        equations=frozenset({index, user}),
        operands=(*first.invars, second.invars[1]),
        site=chain,
    )


# --- how tuning runs it, and judges results against float64 ---------------------------


def _operands(problem: ChainProblem, seed: int) -> list[jax.Array]:
    p = problem
    shapes = (p.m, p.k), (p.k, p.r), (p.r, p.n)
    return bench.random_normal([(shape, "float32") for shape in shapes], seed)


def _execute(*operands: Any, problem: Any, choice: Choice) -> list[jax.Array]:
    return chain_p.bind(*operands, **bench.forced(choice))


def _judge(problem: Any, device: Device, operands: Any, seed: int) -> bench.Judge:
    x, a, b = (np.asarray(operand, np.float64) for operand in operands)
    allowed = (np.abs(x) @ np.abs(a)) @ np.abs(b) * 16 * bench.unit_roundoff("float32")

    def error(results: list[jax.Array]) -> float:
        worst = float((np.abs(np.asarray(results[0]) - x @ a @ b) / allowed).max())
        return worst if np.isfinite(worst) else float("inf")

    return error


WORKLOAD = bench.Workload(
    check=lambda problem: None,
    operands=_operands,
    execute=_execute,
    ragged=lambda problem: ChainProblem(m=37, k=29, r=31, n=3),
    judge=_judge,
)

# --- the record -----------------------------------------------------------------------


def build(m: int, k: int, r: int, n: int, *, dtype: Any = "float32") -> ChainProblem:
    """For ``Graph.add_chain`` and ``tracea tune chain M K R N``."""
    return ChainProblem(m=m, k=k, r=r, n=n)


catalogue.register(
    catalogue.Op(
        name="chain",
        summary="(x @ a) @ b, in the order that needs less work",
        problem=ChainProblem,
        variants=(RightFirst(), XLA),
        primitives=(PLANNED,),
        bench=functools.partial(bench.OpBench, WORKLOAD),
        build=build,
        arguments=tuple(map(arguments.size, "mkrn")),
        rules=(Rule(op="chain", anchors=frozenset({"dot_general"}), match=_match),),
    )
)

# --- a program that knows nothing of all this -----------------------------------------


def project(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.tanh(x @ a @ b)


def project_args() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (2048, 512), (512, 512), (512, 16)
    return tuple(
        jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, shape in zip(keys, shapes, strict=True)
    )


def main() -> None:
    options = side_by_side.arguments(__doc__, steps=100, budget_s=20.0)
    inputs = project_args()
    print(tracea.explain(project)(*inputs), end="\n\n")
    plain, fast = jax.jit(project), jax.jit(tracea.transform(project))
    calls = [inputs] * options.steps
    print(side_by_side.compare(plain, fast, calls, name="rows"), end="\n\n")
    print(tracea.tune(project, *inputs, effort="quick", budget_s=options.budget_s))


if __name__ == "__main__":
    main()
