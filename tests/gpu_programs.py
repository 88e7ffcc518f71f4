"""Programs that GPU tests run in processes of their own: python gpu_programs.py NAME

The processes have other XLA flags than the tests, or run under a checking tool.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from spaces import one_of_each

from tracea_jax import ops, variants
from tracea_jax.campaign import local_device
from tracea_jax.ops.gated_matmul import workload as gated_workload
from tracea_jax.ops.matmul import workload as matmul_workload
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GatedMatmulProblem, GemmProblem, Problem


def capture() -> None:
    """Prints the graph and kernel launches of 5 calls of a loop of 10 products."""
    x = jax.random.normal(jax.random.key(0), (256, 256), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (256, 256), jnp.bfloat16) / 16

    @jax.jit
    def loop(x, w):
        for _ in range(10):
            x = ops.matmul(x, w, activation="relu", implementation="gemm_sm90")
        return x

    expected = x
    for _ in range(10):
        expected = jax.nn.relu(expected @ w)
    for _ in range(3):
        result = jax.block_until_ready(loop(x, w))
    difference = float(jnp.abs(result - expected).astype(jnp.float32).max())
    scale = float(jnp.abs(expected).astype(jnp.float32).max())
    assert difference <= 0.05 * scale, (difference, scale)
    counts: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(5):
                jax.block_until_ready(loop(x, w))
        (path,) = pathlib.Path(directory).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    counts["graphs"] += event.name.startswith("cuGraphLaunch")
                    on_device = plane.name.startswith("/device:GPU")
                    counts["kernels"] += on_device and "gemm_sm90" in event.name
    print(f"graphs={counts['graphs']} kernels={counts['kernels']}")


FULL = Epilogue(bias="row", activation="gelu", residual=True, save_preactivation=True)
GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)


def product(m: int, n: int, k: int, dtype: str, **fields: Any) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype, **fields}
    return GemmProblem(m=m, n=n, k=k, **fields)


def paths() -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    """Variants, problems, and the fields of whose values a config each is run."""
    small: dict[str, Any] = {"batch": 2, "lhs_batched": True, "epilogue": FULL}
    clusters = ("consumers", "cluster_m", "cluster_n", "cluster_k")
    yield "gemm_sm90", product(136, 200, 200, "bfloat16", **small), clusters
    yield "gemm_sm90", product(136, 200, 200, "bfloat16", layout="nt"), clusters
    wide = product(136, 200, 200, "bfloat16", layout="tt", **small | {"out": "float32"})
    yield "gemm_sm90", wide, clusters
    yield "gemm_sm90", product(136, 324, 200, "bfloat16", layout="nt"), ("tile_n",)
    gradient = {"layout": "nt", "epilogue": GRADIENT}
    yield "gemm_sm90", product(137, 200, 200, "bfloat16", **gradient), clusters
    added = {"layout": "nt", "epilogue": Epilogue(activation="silu", residual=True)}
    yield "gemm_sm90", product(137, 200, 200, "bfloat16", **added), clusters
    # Consumers that take turns: some have a tile more than their partners.
    for fields in ({"epilogue": FULL}, gradient, added):
        yield "gemm_sm90", product(1032, 4616, 72, "bfloat16", **fields), ("ping_pong",)
    yield "gemm_sm90", product(17, 201, 200, "bfloat16", layout="nt"), ()
    yield "gemm_sm90", product(200, 136, 100, "float32", layout="nt"), ()
    bytes_ = product(72, 136, 208, "float8_e4m3fn", out="bfloat16", layout="nt")
    yield "gemm_sm90", bytes_, ()
    # Rounds of whole tiles before the last ones are shared.
    yield "gemm_sm90", product(700, 960, 200, "bfloat16"), ("cluster_k",)
    yield "gemm_sm90_padded", product(131, 201, 77, "bfloat16", epilogue=FULL), ()
    exact = product(136, 200, 72, "float32", precision="highest", epilogue=FULL)
    yield "gemm_sm90_split", exact, ()
    yield "gemm_sm80", product(131, 201, 77, "float32", **small), ()
    yield "gemm_sm80", product(72, 136, 200, "float16", layout="tt"), ("stages",)
    gated = GatedMatmulProblem(
        m=136, n=200, k=200, lhs="bfloat16", rhs="bfloat16", out="bfloat16",
        save_products=True,
    )  # fmt: skip
    yield "gated_sm90", gated, ("tile_n",)


def every_path() -> None:
    """One small case of every code path of the kernels, checked; for the sanitizers."""
    device = local_device()
    for name, problem, fields in paths():
        bench: Any = gated_workload if name == "gated_sm90" else matmul_workload
        variant = variants.get(problem.op, name)
        inputs = [
            jax.device_put(np.asarray(x).astype(x.dtype))
            for x in host_operands(bench.operands, problem)
        ]
        judge = bench.judge(problem, device, inputs, 0)
        space = variant.space(problem, device)
        usual = [variant.heuristic(problem, device)]
        for config in one_of_each(space, *fields) if fields else usual:
            choice = Choice(variant=name, config=config)
            run = jax.jit(
                lambda *x, b=bench, p=problem, c=choice: b.execute(
                    *x, problem=p, choice=c
                )
            )
            error = judge(run(*inputs))
            assert error <= 1.0, (str(problem), str(config), error)
            print(f"ok {name} {problem} {config}", flush=True)


def host_operands(operands: Any, problem: Problem) -> list[np.ndarray]:
    """Random operands made on the host: no kernel but ours shall run."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return [np.asarray(x) for x in operands(problem, seed=0)]


if __name__ == "__main__":
    {"capture": capture, "every_path": every_path}[sys.argv[1]]()
