"""Problems of any size on GPUs: a sentence that refuses them, or a legal launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tracea_jax as tracea
from tracea_jax import catalogue, diagnosis, dispatch, variants
from tracea_jax.device import NAMED, named
from tracea_jax.emit import channel_sums
from tracea_jax.emit.kernel import (
    Im2colMap,
    Kernel,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.problem import ChannelSumsProblem
from tracea_jax.runtime import launch
from tracea_jax.variants import steps

OPS = [op.name for op in catalogue.in_programs() if op.name != "cuda_kernel"]
MOST_BYTES = 2**42
H100 = named("H100")


def numbers(problem: Any) -> list[str]:
    """The fields that are sizes."""
    fields = dataclasses.fields(problem)
    values = {f.name: getattr(problem, f.name) for f in fields}
    return [name for name, value in values.items() if type(value) is int]


def has_whole_groups(problem: Any) -> bool:
    """Whether sizes belong together, which the ops check and problems do not."""
    heads = getattr(problem, "heads", 1), getattr(problem, "kv_heads", 1)
    channels = getattr(problem, "in_channels", 1), getattr(problem, "out_channels", 1)
    groups = getattr(problem, "groups", 1)
    return heads[0] % heads[1] == 0 and not any(c % groups for c in channels)


def huge(op: str, rng: np.random.Generator, count: int) -> Iterator[Any]:
    """Problems with some of their sizes far beyond those of the examples."""
    dtypes = ("bfloat16", "float32", "float16")
    found = 0
    while found < count:
        examples = catalogue.get(op).problem.examples(dtypes[rng.integers(3)])
        problem = list(examples.values())[rng.integers(len(examples))]
        names = numbers(problem)
        for name in rng.choice(names, rng.integers(1, min(4, len(names) + 1))):
            size = 2 ** int(rng.integers(6, 41)) + int(rng.choice([-1, 0, 0, 0, 64]))
            try:
                larger = dataclasses.replace(problem, **{str(name): size})
            except ValueError:  # sizes that belong together
                continue
            if larger.bytes <= MOST_BYTES and has_whole_groups(larger):
                problem = larger
        found += 1
        yield problem


def check(problem: Any, device: Any, configs: int, rng: np.random.Generator) -> int:
    """Launches of a problem that were looked at, which are all legal."""
    looked_at = 0
    with diagnosis.compiled_elsewhere():
        found = diagnosis.diagnose(problem, device)
    assert all(r.reason for r in found.rejected)
    for name in found.candidates:
        if name == "xla":
            continue
        variant = variants.get(problem.op, name)
        chosen = [variant.heuristic(problem, device)]
        if configs:
            space = variant.space(problem, device)
            chosen += [
                space.config(int(i)) for i in rng.integers(len(space), size=configs)
            ]
        for config in chosen:
            call = variant.call(problem, config, device)
            for kernel in variants.kernels_in(call):
                wrong = launch.broken_limit(kernel, device)
                assert wrong is None, (name, str(config), problem, wrong)
                looked_at += 1
    return looked_at


@pytest.mark.parametrize("op", OPS)
def test_huge_problems(op):
    rng = np.random.default_rng(OPS.index(op))
    for problem in huge(op, rng, 12):
        check(problem, H100, 0, rng)


@pytest.mark.slow
@pytest.mark.parametrize("device", sorted(NAMED))
@pytest.mark.parametrize("op", OPS)
def test_many_huge_problems(op, device):
    rng = np.random.default_rng(len(OPS) + OPS.index(op))
    sizes = [check(p, named(device), 2, rng) for p in huge(op, rng, 300)]
    assert len(sizes) == 300


LARGEST = 65535 * 4 * 64  # channels of float32 in a grid of 65535 columns


@pytest.mark.parametrize("channels", [LARGEST, LARGEST + 4 * 64])
def test_channel_sums(channels):
    """A grid has 65535 blocks in y: more channels are left to XLA, with a sentence."""
    problem = ChannelSumsProblem(
        kind="moments", rows=128, channels=channels, dtype="float32"
    )
    fits = channel_sums.columns(problem) <= 65535
    assert fits == (channels == LARGEST)
    variant = variants.get("channel_sums", "channel_sums_cuda")
    why = variant.why_not(problem, H100)
    assert why is None if fits else "a grid has 65535" in str(why)
    with diagnosis.compiled_elsewhere():
        plan = dispatch.plan(problem, H100)
    assert (plan.variant == variant.name) == fits


def test_channel_sums_of_a_program():
    """A program with more channels than a grid has is lowered, as without us."""

    def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.mean(0), (x * x).mean(0)

    x = jax.ShapeDtypeStruct((128, LARGEST + 4 * 64), jnp.float32)
    with tracea.options(device="H100"), diagnosis.compiled_elsewhere():
        traced = jax.jit(tracea.transform(moments)).trace(x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert launch.CUDA_TARGET not in text


# --- a variant that knows no limit ----------------------------------------------------


def kernel(**changes: Any) -> Kernel:
    fields: dict[str, Any] = {
        "entry": "k",
        "source": "",
        "headers": (),
        "arch": "sm_90a",
        "grid": (1, 1, 1),
        "block": (128, 1, 1),
        "smem_bytes": 0,
        "params": (Pointer(operand=0),),
    }
    return Kernel(**{**fields, **changes})


def tiled(**changes: Any) -> Kernel:
    fields: dict[str, Any] = {
        "operand": 0,
        "dtype": "bfloat16",
        "dims": (64, 64),
        "strides": (128,),
        "box": (64, 64),
        "swizzle": TensorMapSwizzle.B128,
    }
    return kernel(params=(TensorMap(**{**fields, **changes}),))


def im2col(**changes: Any) -> Kernel:
    fields: dict[str, Any] = {
        "operand": 0,
        "dtype": "bfloat16",
        "dims": (64, 8, 8, 2),
        "strides": (128, 1024, 8192),
        "lower": (-1, -1),
        "upper": (-1, -1),
        "channels": 64,
        "pixels": 128,
        "element_strides": (1, 1, 1, 1),
        "swizzle": TensorMapSwizzle.B128,
    }
    return kernel(params=(Im2colMap(**{**fields, **changes}),))


ILLEGAL = {
    "x of the grid": (kernel(grid=(2**31, 1, 1)), "grid"),
    "y of the grid": (kernel(grid=(1, 65536, 1)), "grid"),
    "z of the grid": (kernel(grid=(1, 1, 65536)), "grid"),
    "beyond 64 bits": (kernel(grid=(2**70, 1, 1)), "64 bits"),
    "threads": (kernel(block=(1024, 2, 1)), "threads"),
    "z of the block": (kernel(block=(1, 1, 65)), "block"),
    "cluster": (kernel(cluster=(17, 1, 1), grid=(17, 1, 1)), "cluster"),
    "blocks of a cluster": (kernel(cluster=(8, 4, 1), grid=(8, 4, 1)), "cluster"),
    "ragged cluster": (kernel(cluster=(2, 1, 1), grid=(3, 1, 1)), "multiple"),
    "shared memory": (kernel(smem_bytes=H100.smem_per_block_bytes + 1), "shared"),
    "box": (tiled(box=(64, 257)), "box"),
    "dimension": (tiled(dims=(64, 2**32 + 1)), "dimension"),
    "stride": (tiled(strides=(2**40,)), "stride"),
    "uneven stride": (tiled(strides=(136,)), "multiple of 16"),
    "row of a box": (tiled(box=(4, 64)), "16"),
    "swizzle": (tiled(box=(128, 64)), "swizzle"),
    "pixels": (im2col(pixels=1025), "pixels"),
    "channels": (im2col(channels=257), "channels"),
    "corner": (im2col(lower=(-129, 0)), "corner"),
}
LEGAL = {
    "x": kernel(grid=(2**31 - 1, 1, 1)),
    "y": kernel(grid=(1, 65535, 65535)),
    "threads": kernel(block=(1024, 1, 1)),
    "shared memory": kernel(smem_bytes=H100.smem_per_block_bytes),
    "map": tiled(dims=(64, 2**32), box=(64, 256), strides=(2**40 - 16,)),
    "im2col": im2col(),
}


@pytest.mark.parametrize("name", ILLEGAL)
def test_limits(name):
    wrong, word = ILLEGAL[name]
    assert word in str(launch.broken_limit(wrong, H100))


@pytest.mark.parametrize("name", LEGAL)
def test_legal(name):
    assert launch.broken_limit(LEGAL[name], H100) is None


def test_a_scalar_beyond_its_type_is_refused():
    with pytest.raises(ValueError, match="int32"):
        Scalar(value=2**31)


@pytest.mark.parametrize("how", ["kernel", "steps", "error"])
def test_planning_refuses_what_a_variant_missed(how, monkeypatch):
    """The next candidate is planned, and the sentence is among the reasons."""
    problem = ChannelSumsProblem(
        kind="moments", rows=1 << 20, channels=256, dtype="bfloat16"
    )
    variant = variants.get("channel_sums", "channel_sums_cuda")
    with diagnosis.compiled_elsewhere():
        assert dispatch.plan(problem, H100).variant == variant.name

    def call(self: Any, problem: Any, config: Any, device: Any) -> Any:
        wide = kernel(grid=(1, 65536, 1))
        if how == "kernel":
            return wide
        if how == "error":
            return Scalar(value=problem.rows << 20)
        one = steps.Launch(name="a", kernel=wide, reads=("x",), writes=("y",))
        return steps.Steps(operands=("x",), results=("y",), steps=(one,))

    monkeypatch.setattr(type(variant), "call", call)
    with diagnosis.compiled_elsewhere():
        plan = dispatch.plan(problem, H100)
        assert plan.variant == "xla"
        reasons = {r.variant: r.reason for r in plan.rejected}
        word = "integer" if how == "error" else "65535"
        assert word in reasons[variant.name]
        with pytest.raises(dispatch.Unsupported, match=word):
            dispatch.plan(problem, H100, implementation="tracea")
        with pytest.raises(ValueError, match=word):
            dispatch.plan(problem, H100, config={"blocks": 2, "unroll": 2})


def test_sizes_are_found():
    """The generator changes what the problems call their sizes."""
    for op in OPS:
        for problem in catalogue.get(op).problem.examples("float32").values():
            assert numbers(problem), op
