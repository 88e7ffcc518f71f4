"""Problems of every op, and kernels that run them again and again on the same operands.

What is compared are bits: of 0.0 and -0.0, and of NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import catalogue
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    ElementwiseProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    GroupNormProblem,
    MaxPoolProblem,
    PagedAttentionProblem,
)
from tracea_jax.problem.channel_sums import ChannelSumsProblem
from tracea_jax.problem.group_norm import Direction as NormDirection

# Fields of configs that say how sums are split, or who computes which part.
SPLITS = ("cluster_k", "dq", "splits", "parts", "blocks", "schedule", "persistent")
GRADIENT = Epilogue(
    activation="gelu", residual=True, residual_op="derivative", column_sums=True
)


def problems() -> Iterator[Any]:
    """A few of each kind, of more work than all multiprocessors do at once."""
    yield from _products()
    yield from _convolutions()
    yield from _attention()
    yield from _others()


def _products() -> Iterator[Any]:
    bf16: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "bfloat16")
    f32: dict[str, Any] = dict.fromkeys(("lhs", "rhs", "out"), "float32")
    yield GemmProblem(m=1000, n=1536, k=2048, **bf16, epilogue=GRADIENT)
    yield GemmProblem(m=136, n=512, k=8192, **bf16)
    yield GemmProblem(m=777, n=1030, k=2043, **bf16)
    yield GemmProblem(m=520, n=1024, k=2048, **f32)
    yield GemmProblem(m=520, n=1024, k=2048, precision="highest", **f32)
    yield GatedMatmulProblem(m=1000, n=1024, k=2048, **bf16, activation="silu")


def _convolutions() -> Iterator[Conv2dProblem]:
    shapes: tuple[dict[str, Any], ...] = (
        {"in_channels": 64, "out_channels": 128},
        {"in_channels": 128, "out_channels": 128, "strides": (2, 2)},
        {"in_channels": 256, "out_channels": 64, "kernel": 1},
        {"in_channels": 96, "out_channels": 96, "groups": 96},
        {"in_channels": 128, "out_channels": 128, "groups": 8},
        {"in_channels": 3, "out_channels": 64, "kernel": 7, "strides": (2, 2)},
    )
    for shape in shapes:
        k = shape.get("kernel", 3)
        rest = {name: value for name, value in shape.items() if name != "kernel"}
        for direction in ("forward", "input_grad", "weight_grad"):
            for dtype in ("bfloat16", "float32"):
                yield Conv2dProblem(
                    direction=direction,
                    batch=8,
                    height=32,
                    width=32,
                    kernel_height=k,
                    kernel_width=k,
                    padding=((k // 2, k // 2), (k // 2, k // 2)),
                    lhs=dtype,
                    rhs=dtype,
                    out=dtype,
                    **rest,
                )


def attention(**fields: Any) -> AttentionProblem:
    usual: dict[str, Any] = {
        "batch": 4,
        "q_len": 1024,
        "kv_len": 1024,
        "heads": 16,
        "kv_heads": 16,
        "head_dim": 64,
        "dtype": "bfloat16",
        "scale": 0.125,
    }
    return AttentionProblem(**(usual | fields))


def _attention() -> Iterator[AttentionProblem]:
    kinds: tuple[dict[str, Any], ...] = (
        {},
        {"is_causal": True, "head_dim": 128, "kv_heads": 4},
        {"segments": True, "soft_cap": 20.0, "sinks": True},
    )
    for kind in kinds:
        yield attention(**kind, saves_lse=True)
        yield attention(**kind, direction="backward")
    bias = {"bias": (1, 16, 1024, 1024), "bias_dtype": "bfloat16"}
    yield attention(direction="backward", bias_gradient=True, **bias)
    # The layers of BERT, and decoding with keys of several lengths.
    bert = {"batch": 16, "q_len": 128, "kv_len": 128, "heads": 12, "kv_heads": 12}
    yield attention(**bert, saves_lse=True, mask=(16, 1, 1, 128))
    yield attention(**bert, direction="backward", mask=(16, 1, 1, 128))
    decode = {"q_len": 1, "head_dim": 128, "scale": 0.0884, "kv_heads": 4}
    yield attention(**decode, batch=8, kv_len=1024, kv_lengths=True)
    yield attention(**decode, batch=1, kv_len=8192)


def _others() -> Iterator[Any]:
    yield PagedAttentionProblem(
        **{"batch": 8, "heads": 16, "kv_heads": 4, "head_dim": 128, "pages": 128},
        **{"page_size": 64, "pages_per_sequence": 16},
        dtype="bfloat16",
        scale=0.0884,
    )
    for direction in get_args(NormDirection):
        norm = {"dtype": "bfloat16", "direction": direction}
        images = {"images": 8, "pixels": 1024, "channels": 320, "groups": 32}
        yield GroupNormProblem(**images, activation="silu", **norm)
        rows = {"images": 8192, "pixels": 1, "channels": 768, "groups": 1}
        yield GroupNormProblem(**rows, activation="none", **norm)
    for kind in ChannelSumsProblem.examples("bfloat16").values():
        yield dataclasses.replace(kind, rows=50_177, channels=256)
    for kind in MaxPoolProblem.examples("bfloat16").values():
        yield dataclasses.replace(kind, batch=8)
    yield ElementwiseProblem(function="multiply", size=1 << 20, dtype="float32")


def choices(problem: Any, device: Device) -> Iterator[Choice]:
    """The default of each variant of ours and of libraries, and each way to split.

    Of ways of one field, some at both ends and in between are taken.
    """
    for variant in catalogue.get(problem.op).variants:
        if variant.name == "xla" or variant.why_not(problem, device) is not None:
            continue
        usual = variant.heuristic(problem, device)
        found: dict[Any, None] = {usual: None}
        configs = variant.space(problem, device).configs()
        for field in SPLITS:
            if not hasattr(usual, field):
                continue
            by_value = {getattr(c, field): c for c in reversed(configs)}
            values = sorted(by_value, key=str)
            found |= dict.fromkeys(
                by_value[v] for v in values[:: len(values) // 3 or 1]
            )
        yield from (Choice(variant=variant.name, config=config) for config in found)


def runner(problem: Any, choice: Choice, device: Device) -> Callable[[], Any]:
    """A compiled call of a choice on random operands."""
    bench, operands = _bench(problem, device)
    call = jax.jit(bench._run(problem, choice))
    return lambda: call(*operands)


@functools.lru_cache(maxsize=1)  # all choices of a problem ask
def _bench(problem: Any, device: Device) -> tuple[Any, Any]:
    bench = catalogue.get(problem.op).bench(problem, device)
    return bench, bench._operands(problem, 3)


def differing(run: Callable[[], Any], runs: int) -> int:
    """How many of so many runs gave other bits than the first one."""
    first = run()
    counts = [_differs(first, run()) for _ in range(runs - 1)]
    return int(np.sum([np.asarray(c) for c in counts]))


@jax.jit
def _differs(one: Any, other: Any) -> jax.Array:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    found = [jnp.any(_bits(a) != _bits(b)) for a, b in pairs]
    return jnp.any(jnp.stack(found))


def _bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
