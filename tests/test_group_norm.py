"""Group norms without a GPU: the op, what kernels refuse, and that they compile."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads
from numerics import normal
from spaces import one_of_each

from tracea_jax import variants
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.diagnosis import diagnose
from tracea_jax.emit.layer_norm import LayerNormConfig
from tracea_jax.ops.group_norm.primitive import bind
from tracea_jax.ops.group_norm.workload import GROUP_NORM
from tracea_jax.options import device_for
from tracea_jax.policy import Choice, decide
from tracea_jax.problem import ACTIVATIONS, GroupNormProblem, problem_from_json
from tracea_jax.runtime import nvrtc
from tracea_jax.variants.base import kernels_in
from tracea_jax.variants.group_norm_sm90 import GROUP_NORM_SM90
from tracea_jax.variants.layer_norm import LAYER_NORM

pytestmark = pytest.mark.once

A100, H200 = NAMED["A100"], NAMED["H200"]
CPU = CpuDevice(name="cpu", isa="avx2", cores=8)
UNET = GroupNormProblem(
    images=8, pixels=4096, channels=320, groups=32, activation="silu", dtype="bfloat16"
)
ROWS = GroupNormProblem(images=4096, pixels=1, channels=96, groups=1, dtype="bfloat16")
DIRECTIONS: Any = ("forward", "gradients")


# ---- the op --------------------------------------------------------------------------


def test_a_problem_is_plain_data():
    problem = dataclasses.replace(UNET, direction="gradients")
    assert problem_from_json(problem.to_json()) == problem
    assert str(problem) == (
        "group_norm gradients 8x4096x320 of 32 groups bfloat16 parameters float32 silu"
    )
    with pytest.raises(ValueError, match="groups=3 must divide the 320 channels"):
        dataclasses.replace(UNET, groups=3)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_reference_is_the_formula_in_float64(direction):
    choice = Choice(variant="xla", config=None)
    problems = [
        GroupNormProblem(
            images=3,
            pixels=31,
            channels=24,
            groups=6,
            activation=activation,
            direction=direction,
        )
        for activation in ACTIVATIONS
    ]
    inputs = [GROUP_NORM.operands(problem, 1) for problem in problems]

    @jax.jit
    def run(inputs):
        return [
            GROUP_NORM.execute(*x, problem=problem, choice=choice)
            for problem, x in zip(problems, inputs, strict=True)
        ]

    for problem, x, results in zip(problems, inputs, run(inputs), strict=True):
        error = GROUP_NORM.judge(problem, device_for("cpu"), x, 1)
        assert error(results) < 1
        for i, y in enumerate(results):  # the judge sees what is wrong
            wrong = [*results]
            wrong[i] = y + 1e-2
            assert error(wrong) > 1


def arguments(shape=(2, 5, 8)):
    return normal(*shape), normal(shape[-1], seed=1), normal(shape[-1], seed=2)


norm = functools.partial(bind, groups=2, epsilon=1e-3, activation="silu")


def test_derivatives_of_first_and_second_order():
    f = jax.jit(norm)
    check_grads(f, arguments(), 1, modes=["fwd", "rev"], atol=2e-2, rtol=2e-2)
    check_grads(f, arguments(), 2, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_gradients_of_some_operands():
    x, scale, bias = arguments()
    whole = jax.grad(lambda *a: jnp.sum(norm(*a) ** 2), (0, 1, 2))(x, scale, bias)
    one = jax.grad(lambda *a: jnp.sum(norm(*a) ** 2), 1)(x, scale, bias)
    np.testing.assert_allclose(one, whole[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(1, None, None), (0, 0, None)])
def test_vmap_is_a_loop(axes):
    (x, scale, bias), size = arguments(), 3
    args = [
        v if axis is None else jnp.stack([v * (i + 1) for i in range(size)], axis)
        for v, axis in zip((x, scale, bias), axes, strict=True)
    ]
    f = jax.jit(jax.grad(lambda *a: jnp.sum(norm(*a) ** 2), (0, 1, 2)))
    for g in (jax.jit(norm), f):
        found = jax.jit(jax.vmap(g, axes))(*args)
        each = [
            g(
                *(
                    v if a is None else v.take(i, a)
                    for v, a in zip(args, axes, strict=True)
                )
            )
            for i in range(size)
        ]
        wanted = jax.tree.map(lambda *v: jnp.stack(v), *each)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
            found,
            wanted,
        )


def test_empty_images_and_no_variance():
    x, scale, bias = arguments((0, 5, 8))
    assert norm(x, scale, bias).shape == (0, 5, 8)
    y = norm(jnp.full((2, 5, 8), 3.0), scale, bias)
    np.testing.assert_allclose(y[1, 2], jax.nn.silu(bias), rtol=2e-5)


# ---- the kernels ---------------------------------------------------------------------


def test_every_kernel_says_why_it_cannot_serve():
    asked = (
        (GROUP_NORM_SM90, UNET, CPU, "the device is cpu"),
        (GROUP_NORM_SM90, UNET, A100, "clusters of blocks exist since sm_90"),
        (GROUP_NORM_SM90, dataclasses.replace(UNET, dtype="float64"), H200, "float64"),
        (GROUP_NORM_SM90, dataclasses.replace(UNET, images=0), H200, "empty"),
        (
            GROUP_NORM_SM90,
            dataclasses.replace(UNET, channels=20, groups=5),
            H200,
            "20 channels; it takes multiples of 8",
        ),
        (
            GROUP_NORM_SM90,
            dataclasses.replace(UNET, channels=8192, groups=1),
            H200,
            "groups of 8192 channels",
        ),
        (LAYER_NORM, ROWS, CPU, "the device is cpu"),
        (LAYER_NORM, UNET, H200, "4096 pixels and 32 groups"),
        (LAYER_NORM, dataclasses.replace(ROWS, channels=2048), H200, "2048 channels"),
    )
    for variant, problem, device, words in asked:
        why = variant.why_not(problem, device)
        assert why and words in why, (problem, device)
    assert GROUP_NORM_SM90.why_not(UNET, H200) is None
    assert LAYER_NORM.why_not(ROWS, A100) is None


def test_defaults_are_what_was_measured():
    def default(device, **changes):
        problem = dataclasses.replace(UNET, **changes)
        return decide(diagnose(problem, device)).choice.variant

    for direction in DIRECTIONS:
        assert default(H200, direction=direction) == "group_norm_sm90"
    assert default(CPU) == default(A100) == "xla"
    for changes in ({"pixels": 1}, {"pixels": 2**16}, {"images": 0}):
        assert default(H200, **changes) == "xla"
    assert default(H200, dtype="float32") == "xla"
    rows = {"pixels": 1, "groups": 1, "images": 2**20}
    for direction in DIRECTIONS:
        assert default(H200, **rows, direction=direction) == "layer_norm"
    assert default(A100, **rows) == "xla"
    for changes in ({"channels": 768}, {"images": 4096}, {"dtype": "float32"}):
        assert default(H200, **{**rows, **changes}) == "xla"
    wide = dataclasses.replace(UNET, **{**rows, "channels": 768})
    assert diagnose(wide, H200).candidates[0] == "layer_norm"


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_config_of_a_space_is_legal(direction):
    for variant, problem in ((GROUP_NORM_SM90, UNET), (LAYER_NORM, ROWS)):
        problem = dataclasses.replace(problem, direction=direction)
        space = variant.space(problem, H200)
        assert space.index(variant.heuristic(problem, H200)) is not None
        for config in space.configs():
            variant.check(problem, config, H200)
    config = GROUP_NORM_SM90.heuristic(UNET, H200)
    for changes in ({"slab": 20}, {"cluster": 3}, {"threads": 1024}, {"slab": 5120}):
        with pytest.raises(ValueError, match=next(iter(changes))):
            wrong = dataclasses.replace(config, **changes)
            GROUP_NORM_SM90.check(UNET, wrong, H200)


def test_large_blocks_leave_threads_fewer_registers():
    gradients = dataclasses.replace(ROWS, direction="gradients")
    large = LayerNormConfig(lanes=4, threads=512)
    LAYER_NORM.check(gradients, large, H200)
    activated = dataclasses.replace(gradients, activation="relu")
    LAYER_NORM.check(activated, dataclasses.replace(large, threads=256), H200)
    with pytest.raises(ValueError, match="take 184 registers of a thread; 512 threads"):
        LAYER_NORM.check(activated, large, H200)


def compiled(variant: Any, problem: GroupNormProblem, config: Any, device: Any) -> None:
    for kernel in kernels_in(variant.call(problem, config, device)):
        cubin = nvrtc.compile(kernel)
        assert cubin.stack_bytes == cubin.spill_bytes == 0, kernel.entry


@pytest.mark.nvrtc
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_defaults_compile_without_spilling(direction):
    for variant, problem, device in (
        (GROUP_NORM_SM90, UNET, H200),
        (LAYER_NORM, ROWS, A100),
    ):
        problem = dataclasses.replace(problem, direction=direction)
        compiled(variant, problem, variant.heuristic(problem, device), device)


@pytest.mark.slow
@pytest.mark.nvrtc
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_exact", "silu"])
def test_every_kind_of_kernel_compiles_without_spilling(activation, dtype, direction):
    changes: Any = {"activation": activation, "dtype": dtype, "direction": direction}
    for variant, problem, fields in (
        (GROUP_NORM_SM90, UNET, ("threads", "keeps")),
        (LAYER_NORM, ROWS, ("lanes", "threads")),
    ):
        problem = dataclasses.replace(problem, **changes)
        for config in one_of_each(variant.space(problem, H200), *fields):
            compiled(variant, problem, config, H200)


def test_both_are_variants_of_the_op():
    names = [variant.name for variant in variants.of("group_norm")]
    assert names == ["layer_norm", "group_norm_sm90", "xla"]
