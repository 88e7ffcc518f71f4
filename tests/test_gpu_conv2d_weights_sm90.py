"""conv2d_weights_sm90 on a GPU: poisoned results, every entry compared exactly."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import compiled_ahead
from spaces import one_of_each

from tracea_jax.ops.conv2d import workload
from tracea_jax.options import device_for
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem
from tracea_jax.variants.conv2d_weights_sm90 import CONV2D_WEIGHTS_SM90

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu():
    device = device_for("cuda")
    if why := CONV2D_WEIGHTS_SM90.why_not(dense(1, 5, 5, 8, 8, 3), device):
        pytest.skip(why)
    return device


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


AWKWARD = {
    "one pixel": dense(1, 1, 1, 8, 8, 1),
    "prime": dense(3, 13, 11, 40, 72, 3),
    "slabs over taps": dense(2, 9, 17, 200, 136, 3),
    "rectangular": dense(2, 7, 30, 64, 64, (1, 5)),
    "padding beyond the kernel": dense(2, 5, 4, 64, 8, 3, padding=((5, 6), (4, 7))),
    "cropped": dense(2, 9, 8, 64, 64, 3, padding=((-1, -2), (-2, 1))),
    "steps": dense(3, 13, 14, 64, 128, 3, strides=(2, 2)),
    "uneven steps": dense(2, 30, 29, 8, 64, 3, strides=(3, 4)),
    "dilated": dense(2, 20, 21, 64, 64, 3, dilation=(2, 3), padding=((2, 2), (3, 3))),
    "dilated with steps": dense(1, 20, 21, 64, 64, 3, dilation=(2, 3), strides=(2, 2)),
    "many images": dense(131, 5, 5, 64, 64, 3),
}


def exactly(problem: Conv2dProblem) -> tuple[list[jax.Array], np.ndarray]:
    """Operands of small whole numbers, and dw, which has no rounding error."""
    p = problem
    random = np.random.default_rng(0)
    height, width = p.out_size
    x = random.integers(-2, 3, (p.batch, p.height, p.width, p.in_channels))
    dy = random.integers(-2, 3, (p.batch, height, width, p.out_channels))
    dw = np.zeros((p.kernel_height, p.kernel_width, p.in_channels, p.out_channels))
    for r, s in itertools.product(range(p.kernel_height), range(p.kernel_width)):
        i = np.arange(height) * p.strides[0] + r * p.dilation[0] - p.padding[0][0]
        j = np.arange(width) * p.strides[1] + s * p.dilation[1] - p.padding[1][0]
        rows, columns = ((k >= 0) & (k < n) for k, n in ((i, p.height), (j, p.width)))
        seen = x[:, i[rows]][:, :, j[columns]].reshape(-1, p.in_channels)
        met = dy[:, rows][:, :, columns].reshape(-1, p.out_channels)
        dw[r, s] = seen.T.astype(float) @ met
    return [jnp.asarray(x, jnp.dtype(p.lhs)), jnp.asarray(dy, jnp.dtype(p.lhs))], dw


def check(problem: Conv2dProblem, config: Any = None) -> None:
    """Two runs in buffers full of NaN give the same bits, those of exact sums."""
    device = device_for("cuda")
    assert CONV2D_WEIGHTS_SM90.why_not(problem, device) is None
    config = config or CONV2D_WEIGHTS_SM90.heuristic(problem, device)
    CONV2D_WEIGHTS_SM90.check(problem, config, device)
    choice = Choice(variant="conv2d_weights_sm90", config=config)
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


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_shapes(name):
    check(AWKWARD[name])


def test_every_kind_of_config():
    problem = dense(3, 19, 17, 72, 200, 3)
    space = CONV2D_WEIGHTS_SM90.space(problem, device_for("cuda"))
    fields = ("tile_m", "tile_n", "consumers_m", "consumers_n", "stages")
    configs = one_of_each(space, *fields)
    choices = [Choice(variant="conv2d_weights_sm90", config=c) for c in configs]
    with compiled_ahead(problem, choices, device_for("cuda")):
        for config in configs:
            check(problem, config)


@pytest.mark.parametrize("parts", [1, 2, 7])
def test_parts(parts):
    problem = dense(2, 16, 17, 64, 64, 3)
    config = CONV2D_WEIGHTS_SM90.heuristic(problem, device_for("cuda"))
    check(problem, dataclasses.replace(config, parts=parts))


@pytest.mark.parametrize("out", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype, out):
    problem = dense(2, 14, 13, 64, 64, 3, dtype=dtype, out=out)
    check(problem)
    inputs = workload.operands(problem, seed=1)
    config = CONV2D_WEIGHTS_SM90.heuristic(problem, device_for("cuda"))
    choice = Choice(variant="conv2d_weights_sm90", config=config)
    results = workload.execute(*inputs, problem=problem, choice=choice)
    assert workload.error(problem, device_for("cuda"), inputs, results, 0) <= 1
