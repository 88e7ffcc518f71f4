"""conv2d_product: convolutions whose windows do not overlap, as matrix products."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numerics import normal
from slow_cases import slow_unless
from transformed import filled, jit

import tracea_jax as tracea
from tracea_jax import dispatch
from tracea_jax.device import NAMED, CpuDevice, OtherDevice, local_cpu
from tracea_jax.diagnosis import compiled_elsewhere
from tracea_jax.ops import conv2d
from tracea_jax.ops.common.programs import calls_in
from tracea_jax.ops.conv2d import workload
from tracea_jax.ops.conv2d.directions import ROLES
from tracea_jax.ops.conv2d.primitive import as_product
from tracea_jax.policy import Choice
from tracea_jax.problem import Conv2dProblem, Epilogue, GemmProblem
from tracea_jax.variants import Inline
from tracea_jax.variants.conv2d_product import (
    CONV2D_PRODUCT,
    ProductConfig,
    product_of,
)

pytestmark = pytest.mark.once

CHOICE = Choice(variant="conv2d_product", config=ProductConfig())
H200, CPU = NAMED["H200"], CpuDevice(name="cpu", isa="avx2", cores=2)
ours = functools.partial(conv2d, implementation="conv2d_product")
Sizes = tuple[int, int]


def conv(
    kernel: Sizes = (1, 1),
    strides: Sizes = (1, 1),
    size: Sizes = (7, 9),
    dtype: str = "float32",
    **fields: Any,
) -> Conv2dProblem:
    fields = {"batch": 2, "in_channels": 5, "out_channels": 6, **fields}
    return Conv2dProblem(
        **dict(zip(("height", "width"), size, strict=True)),
        **dict(zip(("kernel_height", "kernel_width"), kernel, strict=True)),
        strides=strides,
        **{"lhs": dtype, "rhs": dtype, "out": dtype, **fields},
    )


BIASED = Epilogue(bias="row", activation="gelu", save_preactivation=True)
ADDED = Epilogue(bias="row", residual=True)
RESIDUAL = Epilogue(
    bias="row", activation="relu", residual=True, save_preactivation=True
)
PRODUCTS = {
    "pixels": conv(epilogue=BIASED),
    "padded pixels": conv(padding=((1, 2), (0, 1)), epilogue=RESIDUAL),
    "strided pixels": conv(strides=(2, 3), epilogue=ADDED),
    "dilated pixels": conv(dilation=(2, 2)),
    "patches": conv((4, 4), (4, 4), (8, 12), epilogue=RESIDUAL),
    "cropped patches": conv((2, 2), (2, 2), padding=((-1, 0), (0, -1))),
    "padded patches": conv((2, 3), (2, 3), padding=((1, 2), (0, 1)), epilogue=BIASED),
    "gaps": conv((2, 2), (3, 4), epilogue=BIASED),
    "whole image": conv((7, 9), (1, 1), epilogue=BIASED),
    "whole padded image": conv((9, 9), (3, 1), padding=((1, 1), (0, 0))),
    "rows": conv((1, 9), (1, 1), epilogue=ADDED),
    "one row": conv((1, 3), (2, 3), (1, 9)),
    "one of each": conv(size=(1, 1), batch=1, in_channels=1, out_channels=1),
}


def directions_of(problem: Conv2dProblem) -> list[Conv2dProblem]:
    plain = dataclasses.replace(problem, epilogue=Epilogue())
    gradients = list(ROLES)[1:]
    return [problem, *(dataclasses.replace(plain, direction=d) for d in gradients)]


def executed(problem: Conv2dProblem) -> Any:
    return functools.partial(workload.execute, problem=problem, choice=CHOICE)


# --- values ---------------------------------------------------------------------------


def checked(problems: list[Conv2dProblem]) -> str:
    """The program of the problems, whose results are compared with float64."""
    inputs = [workload.operands(problem, seed=1) for problem in problems]

    def run(inputs):
        return [executed(p)(*x) for p, x in zip(problems, inputs, strict=True)]

    lowered = jit(run).lower(inputs)
    found = lowered.compile()(inputs)
    for problem, x, results in zip(problems, inputs, found, strict=True):
        assert workload.error(problem, local_cpu(), x, results, 0) <= 1, problem
    return lowered.as_text()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.slow] * bool((i + 2 * j) % 4))
        for i, name in enumerate(PRODUCTS)
        for j, layout in enumerate(("nhwc", "nchw"))
    ],
)
def test_each_direction_is_one_product(name, layout):
    problems = directions_of(dataclasses.replace(PRODUCTS[name], layout=layout))
    assert "stablehlo.convolution" not in checked(problems)
    for problem in problems:
        # It is the problem whose answer explain, tune and the policy look at.
        jaxpr = jax.make_jaxpr(product_in(problem))(*workload.operands(problem, seed=1))
        asked = [planned.problem_of(x, **how) for planned, x, how in calls_in(jaxpr)]
        assert asked == [product_of(problem)] == list(CONV2D_PRODUCT.parts(problem))


def product_in(problem: Conv2dProblem) -> Any:
    """The equations that the variant stands for."""

    def f(*inputs):
        (eqn,) = jax.make_jaxpr(executed(problem))(*inputs).eqns
        return as_product(*inputs, **eqn.params)

    return f


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_results_of_16_bits_are_rounded_once(dtype):
    changes = {"lhs": dtype, "rhs": dtype, "out": dtype, "epilogue": Epilogue()}
    names = ("pixels", "strided pixels", "patches")
    some = [dataclasses.replace(PRODUCTS[name], **changes) for name in names]
    checked([problem for one in some for problem in directions_of(one)])


def test_a_wide_bias_and_result_of_narrow_operands():
    how = {"lhs": "bfloat16", "rhs": "bfloat16", "out": "float32"}
    epilogue = Epilogue(bias="row", activation="relu", bias_dtype="bfloat16")
    problem = conv((4, 4), (4, 4), (8, 8), epilogue=epilogue, **how)
    checked([problem])


def test_special_values_stay_in_their_windows():
    x, w = normal(1, 8, 8, 3), normal(4, 4, 3, 5)
    x = x.at[0, 1, 2, 0].set(jnp.nan).at[0, 5, 6, 1].set(jnp.inf)
    y = ours(x, w, strides=4, padding="VALID")
    bad = ~np.isfinite(y).all(-1)[0]
    assert bad.tolist() == [[True, False], [False, True]]
    assert np.isnan(y[0, 0, 0]).all() and np.isinf(y[0, 1, 1]).all()


def test_derivatives_of_every_order_are_those_of_lax():
    x, w, t = normal(2, 6, 6, 3), normal(2, 2, 3, 4), normal(2, 6, 6, 3, seed=1)
    b, r = normal(4), normal(2, 3, 3, 4)

    def plain(x, w, b, r):
        y = jax.lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.silu(y + b) * r

    def own(x, w, b, r):
        return r * ours(x, w, bias=b, strides=2, padding="VALID", activation="silu")

    def second(f):
        grad = jax.grad(lambda *a: (f(*a) ** 2).sum(), argnums=(0, 1, 2))
        return jax.jvp(lambda x: jax.checkpoint(grad)(x, w, b, r), (x,), (t,))

    results = jax.jit(lambda: (second(own), second(plain)))()
    for found, wanted in zip(*map(jax.tree.leaves, results), strict=True):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(found, wanted, rtol=0, atol=3e-4 * scale)
    mapped = jax.vmap(own, in_axes=(0, None, None, None))(x[:, None], w, b, r[:1])
    np.testing.assert_allclose(
        mapped, plain(x, w, b, r[:1])[:, None], rtol=1e-5, atol=1e-5
    )


# --- plans ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "device", "reason"),
    [
        (conv((3, 3)), CPU, "windows overlap: the kernel is 3x3 and the stride 1x1"),
        (conv((4, 1), (2, 1)), CPU, "windows overlap: the kernel is 4x1"),
        (conv((2, 2), (4, 4), dilation=(2, 1)), CPU, "kernel is dilated"),
        (conv(groups=5, out_channels=5), CPU, "it has 5 groups; the product is of one"),
        (conv(batch=0), CPU, "its arrays are empty"),
        (conv((8, 8), (8, 8)), CPU, "its arrays are empty"),
        (conv(dtype="int32"), H200, "operands of dtype int32; it takes float32"),
        (conv(out="float64"), H200, "output of dtype float64; it takes float32"),
        (conv(rhs="bfloat16"), H200, "operands must share a dtype"),
        (conv(precision="TF32_TF32_F32"), H200, "names an algorithm only XLA has"),
        (
            conv(epilogue=dataclasses.replace(RESIDUAL, activation="silu")),
            H200,
            "its residual is added before silu",
        ),
        (conv(), OtherDevice(platform="tpu", name="TPU"), "the device is tpu"),
    ],
)
def test_what_is_no_product_is_refused_with_the_reason(problem, device, reason):
    assert reason in (CONV2D_PRODUCT.why_not(problem, device) or "")


def test_the_product_has_the_precision_and_the_layout_of_the_convolution():
    image: dict[str, Any] = {"batch": 8, "in_channels": 3, "out_channels": 768}
    image |= {"precision": "highest"}
    patches = conv((16, 16), (16, 16), (224, 224), **image)
    product = GemmProblem(m=1568, n=768, k=768, precision="highest")
    forward, input_grad, weight_grad = map(product_of, directions_of(patches))
    assert forward == product
    assert input_grad == dataclasses.replace(product, layout="nt")
    turned = dataclasses.replace(product, m=768, k=1568, layout="tn")
    assert weight_grad == turned
    nchw = directions_of(dataclasses.replace(patches, layout="nchw"))
    assert [p.layout for p in map(product_of, nchw)] == ["nt", "nn", "tn"]


def test_where_it_is_chosen_unmeasured_on_a_cpu():
    image: dict[str, Any] = {"batch": 8, "in_channels": 3, "out_channels": 384}
    patches = directions_of(conv((16, 16), (16, 16), (224, 224), **image))
    image |= {"in_channels": 256}
    strided = directions_of(conv((1, 1), (2, 2), (56, 56), **image))
    pixels = directions_of(conv((1, 1), (1, 1), (56, 56), **image))
    nchw = directions_of(dataclasses.replace(strided[0], layout="nchw"))

    def chosen(problems: list[Conv2dProblem], isa: str = "avx512") -> list[str]:
        device = dataclasses.replace(CPU, isa=isa)
        return [dispatch.plan(p, device).variant for p in problems]

    cpu, own = "conv2d_cpu", "conv2d_product"
    assert chosen(patches) == [cpu, own, cpu]
    assert chosen(patches, "avx2") == [cpu, own, own]
    assert chosen(strided) == [cpu, own, own]
    assert chosen(pixels) == [cpu, cpu, cpu]
    assert chosen(nchw) == [own, own, own]


def test_where_it_is_chosen_unmeasured_on_a_gpu():
    image: dict[str, Any] = {"batch": 64, "in_channels": 3, "out_channels": 768}
    patches = directions_of(conv((16, 16), (16, 16), (224, 224), **image))
    image |= {"in_channels": 256}
    pixels = directions_of(conv((1, 1), (1, 1), (28, 28), "bfloat16", **image))
    wide = Epilogue(bias="row", activation="relu", bias_dtype="float32")
    others = [
        dataclasses.replace(pixels[0], epilogue=wide),  # a folded batch norm's
        dataclasses.replace(pixels[0], epilogue=RESIDUAL),
        dataclasses.replace(pixels[0], strides=(2, 2)),
        dataclasses.replace(pixels[0], layout="nchw"),
        dataclasses.replace(pixels[0], batch=1),
    ]
    with compiled_elsewhere():
        chosen = [dispatch.plan(p, H200).variant for p in (*patches, *pixels, *others)]
        product = dispatch.plan(product_of(others[0]), H200)
    own = "conv2d_product"
    assert chosen == [*7 * [own], *2 * ["conv2d_sm90"], "xla", "xla"]
    assert product.variant == "gemm_sm90"  # XLA's would have a float32 result


def test_it_is_a_kernel_of_ours_where_one_is_demanded():
    patches = conv((16, 16), (16, 16), (224, 224), "bfloat16", out_channels=768)
    with compiled_elsewhere():
        plan = dispatch.plan(patches, H200, implementation="tracea")
    assert (plan.variant, plan.call) == ("conv2d_product", Inline(rule="product"))


# --- programs -------------------------------------------------------------------------


class LinenPatches(nn.Module):
    @nn.compact
    def __call__(self, images):
        x = nn.Conv(32, (8, 8), (8, 8), "VALID", dtype=images.dtype)(images)
        return nn.Dense(7, dtype=x.dtype)(x.reshape(x.shape[0], -1, 32))


class Bottleneck(nn.Module):
    """Kernels of 1 x 1, their batch norms folded into the weights."""

    @nn.compact
    def __call__(self, x):
        norm = functools.partial(nn.BatchNorm, use_running_average=True)
        y = nn.relu(norm()(nn.Conv(16, (1, 1), (2, 2), use_bias=False)(x)))
        y = norm()(nn.Conv(24, (1, 1), use_bias=False)(y))
        x = norm()(nn.Conv(24, (1, 1), (2, 2), use_bias=False)(x))
        return nn.relu(x + y)


def of_linen(module: nn.Module, *shape: int) -> tuple[Any, ...]:
    x = normal(*shape)
    variables = filled(jax.eval_shape(module.init, jax.random.key(0), x))
    return module.apply, jax.tree.map(jnp.abs, variables), x


def of_nnx(*shape: int) -> tuple[Any, ...]:
    how = {"strides": (8, 8), "padding": "VALID", "rngs": nnx.Rngs(0)}
    graph, state = nnx.split(nnx.Conv(3, 32, (8, 8), **how))
    return lambda state, x: nnx.merge(graph, state)(x), state, normal(*shape)


MODELS: dict[str, Any] = {
    "patches of linen": (lambda: of_linen(LinenPatches(), 2, 16, 24, 3), 1),
    "patches of nnx": (lambda: of_nnx(2, 16, 24, 3), 1),
    "bottleneck": (lambda: of_linen(Bottleneck(), 2, 8, 8, 12), 3),
}


@pytest.mark.parametrize("name", slow_unless(["bottleneck"], MODELS))
def test_models_with_their_gradients(name):
    make, count = MODELS[name]
    f, *args = make()

    def loss(*args):
        return (f(*args) ** 2).sum()

    step = jax.value_and_grad(loss, argnums=(0, 1))
    wanted = jit(step)(*args)
    for transformed in (
        tracea.transform(step),
        jax.value_and_grad(jax.checkpoint(tracea.transform(loss)), argnums=(0, 1)),
    ):
        with tracea.options(implementation="conv2d_product"):
            lowered = jit(transformed).lower(*args)
        assert "stablehlo.convolution" not in lowered.as_text()
        found = lowered.compile()(*args)
        for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * np.abs(b).max())
    with tracea.options(implementation="conv2d_product"):
        sites = tracea.explain(f, device="H200")(*args).sites
    assert [s.variant for s in sites if s.op == "conv2d"] == count * ["conv2d_product"]


def test_explain_names_the_product_and_what_runs_it():
    images = jax.ShapeDtypeStruct((64, 224, 224, 3), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((16, 16, 3, 768), jnp.bfloat16)
    patches = functools.partial(conv2d, strides=16, padding="VALID")
    explanation = tracea.explain(patches, device="H200")(images, w)
    (site,) = explanation.sites
    (part,) = site.parts
    assert isinstance(site.problem, Conv2dProblem)
    assert site.variant == "conv2d_product"
    assert part.problem == product_of(site.problem)
    assert f"runs {part.problem}: {part.variant}" in str(explanation)
    assert site.to_json()["parts"][0]["variant"] == part.variant


def test_explain_says_why_a_convolution_is_no_product():
    x, w = normal(2, 8, 8, 3), normal(3, 3, 3, 5)
    text = str(tracea.explain(conv2d, device="H200")(x, w))
    assert "not conv2d_product: its windows overlap: the kernel is 3x3" in text
