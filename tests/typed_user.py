"""A user's script for pyright (strict) and mypy (strict): never run.

``.ci/typing`` checks it against the installed package, as users have it. What a checker
must refuse has a comment for each of the two; a comment that suppresses nothing is an
error itself, so that none of them can outlive what it shows.
"""

from __future__ import annotations

import contextlib
from typing import assert_type

import jax
import jax.numpy as jnp

import tracea_jax as tracea
from tracea_jax.typing import Activation, Effort, Goal, Implementation, OnMiss

x = jax.random.normal(jax.random.key(0), (8, 16))
w = b = q = x

# --- transform keeps signatures -------------------------------------------------------


@tracea.transform
def layer(x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return x * scale


@tracea.transform(ops=["matmul"], after_grad=True)
def named(x: jax.Array, w: jax.Array) -> tuple[jax.Array, str]:
    return x @ w, "a product"


class Model:
    @tracea.transform
    def __call__(self, x: jax.Array) -> jax.Array:
        return x


assert_type(layer(x, scale=2.0), jax.Array)
assert_type(named(x, w), tuple[jax.Array, str])
assert_type(tracea.transform(named)(x, w), tuple[jax.Array, str])
assert_type(Model()(x), jax.Array)
layer("x")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
layer(x, size=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
named(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tracea.transform(3)  # type: ignore[call-overload]  # pyright: ignore[reportArgumentType]  # noqa: E501

# --- ops ------------------------------------------------------------------------------

relu: Activation = "relu"
ours: Implementation = "gemm_cpu"
assert_type(tracea.ops.matmul(x, w, bias=b, activation=relu), jax.Array)
assert_type(tracea.ops.matmul(x, w, implementation=ours, config={"kc": 64}), jax.Array)
assert_type(tracea.ops.matmul(x, w, precision="highest"), jax.Array)
assert_type(tracea.ops.matmul(x, w, preferred_element_type=jnp.float32), jax.Array)
assert_type(tracea.ops.gated_matmul(x, w, w, activation="silu"), jax.Array)
assert_type(
    tracea.ops.conv2d(q, q, strides=(2, 2), padding=((1, 1), (0, 0))), jax.Array
)
assert_type(tracea.ops.attention(q, q, q, is_causal=True), jax.Array)
both = tracea.ops.attention(q, q, q, return_residual=True)
assert_type(both, tuple[jax.Array, jax.Array])
assert_type(tracea.ops.linear_cross_entropy(x, w, b, layout="nn"), jax.Array)
policy = tracea.ops.remat_policy(jax.checkpoint_policies.dots_saveable)

swish: Activation = "swish"  # type: ignore[assignment]  # pyright: ignore[reportAssignmentType]  # noqa: E501
tracea.ops.matmul(x, w, activation="tanh")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.ops.matmul(x, w, implementation="cublas")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.ops.matmul(x)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
tracea.ops.conv2d(q, q, stride=2)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # noqa: E501
tracea.ops.attention(q, q)  # type: ignore[call-overload]  # pyright: ignore[reportCallIssue]  # noqa: E501


def attend(with_residual: bool) -> None:
    found = tracea.ops.attention(q, q, q, return_residual=with_residual)
    assert_type(found, jax.Array | tuple[jax.Array, jax.Array])


# --- kernels of users -----------------------------------------------------------------

source = 'extern "C" __global__ void f(const float* x, float* y, long long n) {}'
kernel = tracea.cuda_kernel(source, scalars={"n": 3}, grid=(1, 2), reference=jnp.sin)
both_sizes = kernel.space({"BLOCK": (128, 256)}, WIDTH=(1, 2))
result: jax.Array = both_sizes(x, config={"BLOCK": 128, "WIDTH": 2}, a=2.0)
tracea.TensorMap(box=(64, 64), swizzle=128)
tracea.cuda_kernel(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
tracea.cuda_kernel(source, threads=3)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # noqa: E501

# --- explain, tune, doctor ------------------------------------------------------------

explanation = tracea.explain(layer, device="H200")(x)
assert_type(explanation, tracea.Explanation)
assert_type(explanation.ops, dict[str, int])


def told(**step: object) -> None: ...


goal: Goal = "throughput"
effort: Effort = "quick"
report = tracea.tune(layer, x, goal=goal, effort=effort, budget_s=1, progress=False)
assert_type(report, tracea.TuneReport)
assert_type(report.gain, float | None)
problem = tracea.GemmProblem(m=8, n=8, k=8, epilogue=tracea.Epilogue(activation=relu))
tracea.tune(problem, plot="search.png", log=print, progress=told)
tracea.tune(problem, effort="much")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.tune(problem, goal="memory")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.tune(problem, progress="yes")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.tune(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
str(tracea.doctor())

# --- graphs ---------------------------------------------------------------------------

graph = tracea.Graph.from_function(layer, x)
graph.add_matmul(8, 8, 8, dtype="bfloat16", bias=True, activation="gelu", count=32)
graph.add_gated_matmul(8, 8, 8, out=jnp.float32)
graph.add_conv2d(1, 8, 8, 4, 3, 3, 4, strides=2, padding="VALID")
graph.add_attention(1, 8, 8, 2, 16, is_causal=True)
tracea.tune(graph)
for node in graph:
    assert_type(node.count, int)
graph.add_matmul(8, 8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
graph.add_matmul(8, 8, 8, activation="tanh")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
graph.add_attention(1, 8, 8, 2, 16, causal=True)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]  # noqa: E501

# --- settings -------------------------------------------------------------------------

sometimes: OnMiss = "tune"
with tracea.options(on_miss=sometimes, implementation="tracea") as settings:
    assert_type(settings, tracea.Options)
# Ops that a program registers have variants of their own.
tracea.options(implementation="mine", device=None, cache_dir="/x", cache_path=None)
options: contextlib.AbstractContextManager[tracea.Options]
options = tracea.options(cubin_limit=1 << 30)
tracea.options(on_miss="never")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.options(cubin_limit="2 GiB")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]  # noqa: E501
tracea.options(colour="red")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
