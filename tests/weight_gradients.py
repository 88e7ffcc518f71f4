"""The gradient of convolutions' weights on a GPU, compared exactly."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax.ops.conv2d import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem


def dense(
    batch: int,
    height: int,
    width: int,
    channels: int,
    out_channels: int,
    kernel: int | tuple[int, int],
    *,
    dtype: str = "bfloat16",
    **fields: Any,
) -> Conv2dProblem:
    taps = kernel if isinstance(kernel, tuple) else (kernel, kernel)
    pads = [((k - 1) // 2, k // 2) for k in taps]
    how: dict[str, Any] = {"padding": (pads[0], pads[1]), "out": "float32"} | fields
    return Conv2dProblem(
        direction="weight_grad",
        batch=batch,
        height=height,
        width=width,
        in_channels=channels,
        out_channels=out_channels,
        kernel_height=taps[0],
        kernel_width=taps[1],
        lhs=dtype,
        rhs=dtype,
        **how,
    )


def exactly(problem: Conv2dProblem) -> tuple[list[jax.Array], np.ndarray]:
    """Operands of small whole numbers, and dw, which has no rounding error."""
    p = problem
    random = np.random.default_rng(0)
    height, width = p.out_size
    x = random.integers(-2, 3, (p.batch, p.height, p.width, p.in_channels))
    dy = random.integers(-2, 3, (p.batch, height, width, p.out_channels))
    groups = p.groups
    inputs, outs = p.in_channels // groups, p.out_channels // groups
    dw = np.zeros((p.kernel_height, p.kernel_width, inputs, p.out_channels))
    for r, s in itertools.product(range(p.kernel_height), range(p.kernel_width)):
        i = np.arange(height) * p.strides[0] + r * p.dilation[0] - p.padding[0][0]
        j = np.arange(width) * p.strides[1] + s * p.dilation[1] - p.padding[1][0]
        rows, columns = ((k >= 0) & (k < n) for k, n in ((i, p.height), (j, p.width)))
        seen = x[:, i[rows]][:, :, j[columns]].reshape(-1, groups, inputs)
        met = dy[:, rows][:, :, columns].reshape(len(seen), groups, outs)
        products = np.einsum("pgc,pgk->cgk", seen.astype(float), met, optimize=True)
        dw[r, s] = products.reshape(inputs, -1)
    return [jnp.asarray(x, jnp.dtype(p.lhs)), jnp.asarray(dy, jnp.dtype(p.lhs))], dw


def check(variant: Any, problem: Conv2dProblem, config: Any = None) -> None:
    """Two runs in buffers full of NaN give the same bits, those of exact sums."""
    device = device_for("cuda")
    assert variant.why_not(problem, device) is None
    config = config or variant.heuristic(problem, device)
    variant.check(problem, config, device)
    choice = Choice(variant=variant.name, config=config)
    run = functools.partial(workload.execute, problem=problem, choice=choice)
    inputs, wanted = exactly(problem)
    poison = [jnp.full(s.shape, jnp.nan, s.dtype) for s in jax.eval_shape(run, *inputs)]
    call = jax.jit(lambda poison, *x: run(*x), donate_argnums=0, keep_unused=True)
    again = [jnp.copy(x) for x in poison]
    (found,), (second,) = call(poison, *inputs), call(again, *inputs)
    np.testing.assert_array_equal(found, second, strict=True)
    exact = wanted.astype(jnp.dtype(problem.out)).astype(float)
    np.testing.assert_array_equal(
        np.asarray(found, float), exact, err_msg=f"{problem} {config}"
    )
