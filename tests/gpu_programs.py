"""Programs that GPU tests run in processes of their own: python gpu_programs.py NAME

They start under other XLA flags, or under a checking tool, than the tests themselves.
"""

from __future__ import annotations

import collections
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from spaces import one_of_each

from tracea_jax import ops
from tracea_jax.ops import matmul_bench as bench
from tracea_jax.policy import Choice
from tracea_jax.problem import Epilogue, GemmProblem, Layout
from tracea_jax.tune import local_device
from tracea_jax.variants.gemm_sm90 import GEMM_SM90


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


def every_path() -> None:
    """One small case of every code path of the kernels, checked; for the sanitizers."""
    device = local_device()
    full = Epilogue(
        bias="row", activation="gelu", residual=True, save_preactivation=True
    )
    cases: tuple[tuple[str, Layout, Epilogue], ...] = (
        ("bfloat16", "nn", full),
        ("float32", "tt", full),
        ("bfloat16", "nt", Epilogue()),
    )
    for out, layout, epilogue in cases:
        problem = GemmProblem(
            batch=2,
            m=136,
            n=200,
            k=200,
            lhs="bfloat16",
            rhs="bfloat16",
            out=out,
            layout=layout,
            lhs_batched=True,
            epilogue=epilogue,
        )
        space = GEMM_SM90.space(problem, device)
        for config in one_of_each(space, "consumers", "cluster_m", "cluster_n"):
            choice = Choice(variant="gemm_sm90", config=config)
            inputs = [
                jax.device_put(np.asarray(x).astype(x.dtype))
                for x in _host_operands(problem)
            ]
            run = jax.jit(
                lambda *x, p=problem, c=choice: bench.execute(*x, problem=p, choice=c)
            )
            y = run(*inputs)[0]
            error = bench.judge(problem, device, inputs, 0)([y])
            assert error <= 1.0, (str(problem), str(config), error)
            print(f"ok {problem} {config}", flush=True)


def _host_operands(problem: GemmProblem) -> list[np.ndarray]:
    """Random operands made on the host: no kernel but ours shall run."""
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        return [np.asarray(x) for x in bench.operands(problem, seed=0)]


if __name__ == "__main__":
    {"capture": capture, "every_path": every_path}[sys.argv[1]]()
