"""conv2d_cpu through XLA: every direction, ISA, config, epilogue; poisoned results."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import convolutions
import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from conv2d_runs import (
    DIRECTIONS,
    FULL,
    ISAS,
    SMALL,
    all_directions,
    call_of,
    compare,
    conv,
    expected,
    operands,
    run_all,
    run_and_check,
)
from numerics import normal
from processes import run_forked
from spaces import one_of_each

from tracea_jax.device import CPU_ISAS, local_cpu
from tracea_jax.ops import conv2d
from tracea_jax.problem import Conv2dProblem, Epilogue
from tracea_jax.runtime.launch import cpu_isa
from tracea_jax.variants.conv2d_cpu import (
    CONV2D_CPU,
    Conv2dCpuConfig,
)
from tracea_jax.variants.cpu import DTYPES

pytestmark = pytest.mark.once


@pytest.mark.parametrize("isa", ISAS)
def test_every_isa_in_every_direction(isa):
    changes: tuple[dict[str, Any], ...] = (
        {"channels": (32, 37), "strides": (1, 2), "epilogue": FULL},
        {"channels": (5, 70), "kernel": (3, 5), "padding": ((2, 0), (1, 3))},
        {"channels": (38, 38), "groups": 38, "strides": (2, 1), "epilogue": FULL},
    )
    run_and_check(
        *(
            problem
            for dtype, change in itertools.product(DTYPES, changes)
            for problem in all_directions(conv(dtype=dtype, **change))
        ),
        isa=isa,
    )


WIDEST = CONV2D_CPU.space(conv((8, 56, 56), (512, 512)), local_cpu())


def test_every_config_at_one_awkward_shape():
    problems = all_directions(conv((1, 7, 9), (131, 283), epilogue=FULL))
    for dtype in ("float32", "bfloat16"):
        cases = [dataclasses.replace(p, lhs=dtype, rhs=dtype) for p in problems]
        inputs = [operands(problem, 0) for problem in cases]
        configs = one_of_each(WIDEST, "kc", "nc")
        runs = [
            (problem, given, config, cpu_isa())
            for problem, given in zip(cases, inputs, strict=True)
            for config in configs
        ]
        exact = {
            problem: expected(problem, x)
            for problem, x in zip(cases, inputs, strict=True)
        }
        for (problem, *_), found in zip(runs, run_all(runs), strict=True):
            compare(exact[problem], found)


SIZES = ((1, 1, 1), (1, 1, 40), (2, 7, 3), (3, 5, 13), (1, 2, 31), (2, 16, 16))
CHANNELS = ((1, 1), (3, 64), (16, 15), (48, 33), (64, 31), (17, 97))
GEOMETRIES: tuple[dict[str, Any], ...] = (
    {},
    {"kernel": (1, 1), "padding": ((0, 0), (0, 0))},
    {"kernel": (1, 1), "padding": ((0, 0), (0, 0)), "strides": (2, 3)},
    {"kernel": (7, 7), "padding": ((3, 3), (2, 4)), "strides": (2, 2)},
    {"kernel": (2, 4), "padding": ((0, 3), (5, 0)), "dilation": (3, 2)},
    {
        "kernel": (3, 2),
        "padding": ((2, 2), (4, 4)),
        "dilation": (2, 3),
        "strides": (4, 2),
    },
    {"kernel": (1, 3), "padding": ((-1, 2), (3, -1)), "strides": (1, 3)},
    {"kernel": (5, 5), "padding": ((9, 4), (4, 9))},
)


@pytest.mark.parametrize("number", range(len(GEOMETRIES)))
def test_one_config_at_every_awkward_shape(number):
    def problem(i: int) -> Conv2dProblem:
        channels = CHANNELS[(number * 5 + i) % len(CHANNELS)]
        dtype = DTYPES[i % 3]
        size = SIZES[(number + i) % len(SIZES)]
        return conv(size, channels, dtype=dtype, epilogue=FULL, **GEOMETRIES[number])

    run_and_check(*itertools.chain(*(all_directions(problem(i)) for i in range(9))))


@pytest.mark.parametrize("groups", [2, 24])
def test_groups(groups):
    cases = itertools.product(((1, 1), (1, 2), (5, 17)), ((1, 1), (2, 1)))
    problems = [
        conv(
            (2, 6, 5),
            (inputs * groups, outputs * groups),
            groups=groups,
            strides=strides,
            epilogue=FULL,
        )
        for (inputs, outputs), strides in cases
    ]
    run_and_check(*itertools.chain(*map(all_directions, problems)))


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_at_odd_depths(isa):
    """Where words are pairs, some span taps, and some lack their second element."""
    changes: tuple[dict[str, Any], ...] = (
        {"size": (1, 1, 1), "channels": (1, 4), "kernel": (1, 1)},
        {"size": (1, 5, 7), "channels": (1, 33), "kernel": (3, 5)},
        {"size": (2, 15, 17), "channels": (3, 64), "kernel": (7, 7), "strides": (2, 2)},
        {"size": (3, 7, 5), "channels": (3, 40), "dilation": (2, 3)},
        {"channels": (15, 34), "strides": (2, 1)},
        {"channels": (33, 31), "kernel": (1, 1), "padding": ((0, 0), (0, 0))},
        {"channels": (9, 21), "groups": 3},
        {"channels": (6, 44), "groups": 2, "strides": (1, 2)},
        {"size": (1, 3, 31), "channels": (34, 18), "groups": 2},
        {"size": (1, 3, 60), "channels": (66, 70), "padding": ((0, 0), (0, 0))},
    )
    problems = (conv(dtype="bfloat16", epilogue=FULL, **change) for change in changes)
    run_and_check(*itertools.chain(*map(all_directions, problems)), isa=isa)


@pytest.mark.skipif("avx512_bf16" not in ISAS, reason="the processor has no VDPBF16PS")
def test_pairs_of_bfloat16_are_multiplied_where_they_fit():
    """VDPBF16PS adds a pair's products one by one, but not in their order."""

    def pairs_are_multiplied(direction: str = "forward", **changes: Any) -> bool:
        how = {"dtype": "bfloat16", "out": "float32", **changes}
        problem = conv(direction=direction, **how)
        inputs = operands(problem)
        config = Conv2dCpuConfig(kc=4096, nc=64, tasks=1)
        runs = [(problem, inputs, config, isa) for isa in ("avx512_bf16", "avx512")]
        (pairs,), (vectors,) = run_all(runs)
        return not np.array_equal(pairs, vectors)

    for direction in DIRECTIONS:
        assert pairs_are_multiplied(direction, channels=(16, 32))
        assert not pairs_are_multiplied(direction, dtype="float16")
        assert not pairs_are_multiplied(direction, channels=(16, 16), groups=16)
        odd = pairs_are_multiplied(direction, channels=(15, 33))
        assert odd == (direction != "input_grad")


def test_depthwise():
    problems = [
        conv(
            size,
            (channels, channels),
            (3, 5),
            dtype,
            padding=((1, 1), (2, 2)),
            groups=channels,
            epilogue=FULL,
        )
        for channels in (1, 15, 70, 300)
        for dtype, size in zip(DTYPES, SIZES[1:], strict=False)
    ]
    run_and_check(*itertools.chain(*map(all_directions, problems)))


def test_nothing_to_do():
    problems = [
        conv((0, 4, 4)),
        conv(channels=(0, 5)),
        conv(channels=(5, 0)),
        conv((2, 0, 4)),
        conv((1, 2, 2), padding=((0, 0), (0, 0))),  # no window fits
        conv(kernel=(0, 3), padding=((0, 0), (1, 1))),
    ]
    run_and_check(*itertools.chain(*map(all_directions, problems)))


def test_every_epilogue():
    flags = [False, True]
    cases = itertools.product(numerics.ACTIVATIONS, flags, flags, ("none", "row"))
    epilogues = [
        dataclasses.replace(
            Epilogue(), bias=b, activation=a, residual=r, save_preactivation=s
        )
        for a, r, s, b in cases
    ]
    run_and_check(*(conv(epilogue=epilogue) for epilogue in epilogues))
    depthwise = conv(channels=(19, 19), groups=19)
    run_and_check(*(dataclasses.replace(depthwise, epilogue=e) for e in epilogues))


def test_every_dtype_beside_every_other():
    problems = [
        conv(
            dtype=dtype,
            out=out,
            epilogue=dataclasses.replace(FULL, bias_dtype=other, residual_dtype=other),
        )
        for dtype, out, other in itertools.product(DTYPES, DTYPES, DTYPES)
    ]
    run_and_check(*itertools.chain(*map(all_directions, problems)))


@pytest.mark.parametrize("along", ["height", "width"])
def test_windows_that_see_some_taps_or_none(along):
    # So far apart, or so far outside, that windows have one or two taps in the image,
    # or none. 32 channels are read as they are.
    def turned(across: Any, along_it: Any) -> tuple[Any, Any]:
        return (along_it, across) if along == "height" else (across, along_it)

    run_and_check(
        *(
            each
            for size, dilation, padding in (
                (5, 4, (9, 3)),
                (5, 6, (20, 8)),
                (9, 5, (6, 6)),
                (40, 13, (13, 13)),
            )
            for channels in ((32, 20), (5, 40))
            for dtype in ("float32", "bfloat16")
            for each in all_directions(
                conv(
                    (2, *turned(19, size)),
                    channels,
                    dtype=dtype,
                    dilation=turned(1, dilation),
                    padding=turned((1, 1), padding),
                    epilogue=FULL,
                )
            )
        )
    )


def test_more_pieces_of_a_line_than_are_kept():
    for channels in ((1, 20), (2, 20), (3, 20)):
        problem = conv(
            (2, 20, 23),
            channels,
            kernel=(9, 9),
            dilation=(1, 2),
            padding=((4, 4), (8, 8)),
            epilogue=FULL,
        )
        config = dataclasses.replace(SMALL, kc=256)
        run_and_check(*all_directions(problem), config=config)


@pytest.mark.parametrize("channels", [5, 32])
@pytest.mark.parametrize("along", ["height", "width"])
def test_taps_outside_are_passed_over_in_all_tasks_alike(along, channels):
    # Zeros times infinity would be NaN.
    problem = conv((3, 8, 15), (channels, 20))
    lhs, rhs = operands(problem)
    lhs = jnp.abs(lhs) + 1
    first, axis = ((0, 1), 1) if along == "height" else ((1, 0), 2)
    rhs = jnp.abs(rhs).at[first].set(jnp.inf)
    runs = [
        (problem, [lhs, rhs], dataclasses.replace(SMALL, tasks=tasks), cpu_isa())
        for tasks in (1, 2, 7, 64)
    ]
    for (found,) in run_all(runs):
        lines = np.moveaxis(np.asarray(found), axis, 0)
        assert np.isfinite(lines[0]).all() and np.isposinf(lines[1:]).all()


def test_tasks_do_not_change_bits():
    for dtype in ("float32", "bfloat16"):
        problem = conv((3, 8, 15), (32, 83), dtype=dtype, strides=(1, 2), epilogue=FULL)
        for each in all_directions(problem):
            inputs = operands(each, 0)
            first, *rest = run_all(
                [
                    (each, inputs, dataclasses.replace(SMALL, tasks=tasks), cpu_isa())
                    for tasks in (1, 2, 7, 64)
                ]
            )
            for other in rest:
                for a, b in zip(first, other, strict=True):
                    np.testing.assert_array_equal(a, b)


def test_threads_do_not_change_bits():
    program = """
        import hashlib, jax, jax.numpy as jnp, numpy as np
        from tracea_jax.ops import conv2d
        rng = np.random.default_rng(0)
        for dtype in "float32", "bfloat16":
            x, w = (
                jnp.asarray(rng.normal(size=s), dtype)
                for s in ((2, 30, 31, 35), (3, 3, 35, 70))
            )
            @jax.jit
            def f(x, w):
                y = conv2d(x, w, strides=2, implementation="conv2d_cpu")
                return (y.astype("float32") ** 2).sum(), y
            grads, y = jax.grad(f, (0, 1), has_aux=True)(x, w)
            for a in (y, *grads):
                print(hashlib.sha256(np.asarray(a)).hexdigest())
    """
    one, many = (run_forked(program, NPROC=count) for count in ("1", "5"))
    assert one == many and len(set(one.split())) == 6


def test_derivatives_of_the_op_use_it():
    x, w, bias, residual = convolutions.arguments(stride=2, size=(9, 8))
    how: dict[str, Any] = {"strides": (2, 2), "activation": "gelu"}

    def ours(x, w, bias, residual):
        y = conv2d(x, w, bias=bias, residual=residual, **how, implementation="tracea")
        return (y**2).sum()

    def plain(*args):
        return (convolutions.plain(*args, **how) ** 2).sum()

    gradients = jax.jit(jax.grad(ours, (0, 1, 2, 3)))
    lowered = gradients.lower(x, w, bias, residual).as_text()
    assert lowered.count("tracea_cpu_conv2d_v1") == 3
    wanted = jax.jit(jax.grad(plain, (0, 1, 2, 3)))(x, w, bias, residual)
    for a, b in zip(gradients(x, w, bias, residual), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("seed", range(3))
def test_random_geometry(seed):
    rng = random.Random(seed)

    def pair(*choices: Any) -> tuple[Any, Any]:
        return rng.choice(choices), rng.choice(choices)

    def some() -> Conv2dProblem:
        groups, inputs, outputs = rng.choice(
            [(1, 3, 5), (1, 16, 33), (1, 32, 64), (2, 16, 8), (2, 3, 3), (7, 1, 1)]
        )
        return conv(
            (rng.randint(1, 3), rng.randint(1, 12), rng.randint(1, 36)),
            (groups * inputs, groups * outputs),
            pair(1, 2, 3, 5),
            rng.choice(DTYPES),
            padding=pair((0, 0), (1, 1), (2, 0), (0, 7), (-1, 2), (3, -2)),
            strides=pair(1, 2, 3),
            dilation=pair(1, 2, 3),
            groups=groups,
            epilogue=FULL,
        )

    run_and_check(*itertools.chain(*(all_directions(some()) for _ in range(15))))


def test_the_handler_refuses_what_is_not_its_own():
    problem = conv((1, 4, 5), (4, 6), (3, 3))
    call = call_of(problem, SMALL, cpu_isa())
    result = jax.ShapeDtypeStruct((1, 4, 5, 6), jnp.float32)
    kernel = jax.ffi.ffi_call(call.target, [result])

    def run(x=(1, 4, 5, 4), w=(3, 3, 4, 6), **attributes):
        attributes = {**dict(call.attributes), **attributes}
        return jax.block_until_ready(kernel(jnp.zeros(x), jnp.zeros(w), **attributes))

    run()
    for change, message in (
        ({"isa": "mmx"}, f"isa is 'mmx'.*{', '.join(CPU_ISAS)}"),
        ({"abi": 9}, "abi 9.*clear the compilation cache"),
        ({"direction": "back"}, "'back'.*forward, input_grad, weight_grad"),
        ({"activation": "swish"}, "'swish'.*none, relu, gelu, gelu_exact, silu"),
        ({"direction": "input_grad", "activation": "relu"}, "a gradient has neither"),
        ({"bias": True}, "2 operands.*takes 3 operands"),
        ({"stride_width": 0}, "stride_width=0 must be 1 or more"),
        ({"kc": 1.5}, "'kc'.*wrong type"),
        ({"groups": 3}, "groups=3 must divide the 4 channels"),
        ({"w": (3, 3, 5, 6)}, r"w has shape \(3, 3, 5, 6\).*ask for \(3, 3, 4, 6\)"),
        ({"x": (1, 4, 5)}, r"x has shape \(1, 4, 5\); its rank must be 4"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match=f"(?s){message}"):
            run(**change)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("channels", [3, 4, 32])
def test_numbers_that_are_not_finite_stay_in_their_windows(channels, dtype):
    x = normal(1, 6, 6, channels, dtype=dtype).at[0, 2, 3, 1].set(jnp.nan)
    w = normal(3, 3, channels, 8, dtype=dtype, seed=1)
    y = np.asarray(conv2d(x, w, implementation="conv2d_cpu"))
    seen = np.zeros((6, 6), bool)
    seen[1:4, 2:5] = True
    lost = np.isnan(y.astype(np.float32)).reshape(6, 6, 8)
    np.testing.assert_array_equal(lost.all(-1), seen)
    np.testing.assert_array_equal(lost.any(-1), seen)
