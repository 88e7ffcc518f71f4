"""Random problems of each op; the distribution is described in ``problems``.

A draw takes two generators: one for sizes, one for the form, which is all that kernels
are compiled for.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    Epilogue,
    GatedMatmulProblem,
    GemmProblem,
    Problem,
)
from tracea_jax.problem.conv2d import Direction, ImageLayout
from tracea_jax.problem.gemm import Layout
from tracea_jax.survey import zoo

T = TypeVar("T")
Weighted = Sequence[tuple[float, T]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Ranges of the sizes of a platform's problems.

    Attributes:
      flops: least and most operations of a problem.
      bytes: most bytes that it moves.
      extent: largest m, n and k.
      side: largest side of an image.
      images: largest batch of images.
      tokens: longest sequence.
      sequences: largest batch of sequences.
      forms: how many different forms (dtypes, layouts, epilogues, masks, ...) problems
        of one seed have; None for any number.
      dtypes, layouts: of operands and of images, with their shares.
    """

    flops: tuple[int, int]
    bytes: int
    extent: int
    side: int
    images: int
    tokens: int
    sequences: int
    forms: int | None
    dtypes: Weighted[str]
    layouts: Weighted[ImageLayout]


REACHES = {
    "cpu": Reach(
        flops=(1 << 9, 1 << 29),
        bytes=1 << 26,
        extent=4096,
        side=128,
        images=16,
        tokens=2048,
        sequences=16,
        forms=None,
        dtypes=((0.5, "float32"), (0.5, "bfloat16")),
        layouts=((1.0, "nhwc"),),
    ),
    "cuda": Reach(
        flops=(1 << 22, 1 << 40),
        bytes=1 << 29,
        extent=16384,
        side=256,
        images=128,
        tokens=16384,
        sequences=128,
        forms=16,
        dtypes=((0.5, "bfloat16"), (0.25, "float16"), (0.25, "float32")),
        layouts=((0.7, "nhwc"), (0.3, "nchw")),
    ),
}


# --- parts ----------------------------------------------------------------------------


def pick(rng: random.Random, choices: Weighted[T]) -> T:
    """One of the choices, by their shares, which need not add up to 1."""
    left = rng.random() * math.fsum(share for share, _ in choices)
    for share, choice in choices:
        left -= share
        if left < 0:
            return choice
    return choices[-1][1]


def between(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform."""
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def size(rng: random.Random, low: int, high: int) -> int:
    """Log-uniform, and a multiple of 64, of 8 or of anything."""
    found = between(rng, low, high)
    unit = pick(rng, ((0.4, 64), (0.3, 8), (0.3, 1)))
    return found if found < unit else round(found / unit) * unit


def channels(rng: random.Random, low: int, high: int) -> int:
    """As ``size``, but nine of ten are multiples of 8, as networks have them."""
    found = between(rng, low, high)
    unit = pick(rng, ((0.4, 64), (0.5, 8), (0.1, 1)))
    return found if found < unit else round(found / unit) * unit


def one(rng: random.Random, choices: Sequence[T]) -> T:
    return choices[int(rng.random() * len(choices))]


def is_drawn(rng: random.Random, share: float) -> bool:
    return rng.random() < share


# --- products -------------------------------------------------------------------------

EPILOGUES: Weighted[Epilogue] = (
    (0.45, Epilogue()),
    (0.06, Epilogue(bias="row")),
    (0.05, Epilogue(bias="row", activation="relu")),
    (0.04, Epilogue(activation="gelu")),
    (0.05, Epilogue(bias="row", activation="gelu")),
    (0.04, Epilogue(bias="row", activation="gelu_exact")),
    (0.03, Epilogue(activation="silu")),
    (0.03, Epilogue(bias="row", activation="silu")),
    (0.05, Epilogue(residual=True)),
    (0.05, Epilogue(bias="row", residual=True)),
    (0.03, Epilogue(bias="row", activation="silu", residual=True)),
    (0.03, Epilogue(activation="silu", residual=True, residual_op="multiply")),
    (0.03, Epilogue(bias="row", activation="gelu", save_preactivation=True)),
    (0.02, Epilogue(bias="row", activation="relu", save_preactivation=True)),
    (0.02, Epilogue(activation="gelu", residual=True, residual_op="derivative")),
    (
        0.02,
        Epilogue(
            activation="relu",
            residual=True,
            residual_op="derivative",
            column_sums=True,
        ),
    ),
)
LAYOUTS: Weighted[Layout] = ((0.4, "nn"), (0.25, "nt"), (0.2, "tn"), (0.15, "tt"))
OF_MODELS = 0.15
EIGHT_BITS = 0.08  # of the products on GPUs
WIDER = 0.1  # of the narrow products have a float32 result


def _factors(rng: random.Random, form: random.Random, reach: Reach) -> dict[str, Any]:
    """The fields that all products have."""
    dtype = pick(form, reach.dtypes)
    out = dtype
    is_short, is_wider = is_drawn(form, EIGHT_BITS), is_drawn(form, WIDER)
    if dtype == "bfloat16" and reach is REACHES["cuda"] and is_short:
        dtype = "float8_e4m3fn"
    elif dtype != "float32" and is_wider:
        out = "float32"
    if is_drawn(rng, OF_MODELS):
        n, k = one(rng, zoo.PRODUCTS)
    else:
        n = size(rng, 1 if is_drawn(rng, 0.1) else 8, reach.extent)
        k = size(rng, 8, reach.extent)
    few = is_drawn(rng, 0.25)
    return {
        "m": between(rng, 1, 16) if few else size(rng, 8, reach.extent),
        "n": n,
        "k": k,
        "lhs": dtype,
        "rhs": dtype,
        "out": out,
        "layout": pick(form, LAYOUTS),
    }


def product(rng: random.Random, form: random.Random, reach: Reach) -> GemmProblem:
    fields = _factors(rng, form, reach)
    epilogue = pick(form, EPILOGUES)
    is_exact = is_drawn(form, 0.3)
    if is_drawn(form, 0.25):
        fields["batch"] = between(rng, 2, 64)
        fields["lhs_batched"] = True
        fields["rhs_batched"] = is_drawn(form, 0.5)
    if fields["lhs"] == "float32" and reach is REACHES["cuda"] and is_exact:
        fields["precision"] = "highest"
    return GemmProblem(**fields, epilogue=epilogue)


def gated(rng: random.Random, form: random.Random, reach: Reach) -> GatedMatmulProblem:
    return GatedMatmulProblem(
        **_factors(rng, form, reach),
        activation=pick(form, ((0.7, "silu"), (0.2, "gelu"), (0.1, "gelu_exact"))),
        save_products=is_drawn(form, 0.25),
    )


# --- convolutions ---------------------------------------------------------------------

_AFTER_CONVOLUTION: Weighted[Epilogue] = (
    (0.35, Epilogue()),
    (0.25, Epilogue(bias="row", activation="relu")),
    (0.15, Epilogue(bias="row")),
    (0.1, Epilogue(bias="row", activation="silu")),
    (0.1, Epilogue(bias="row", activation="relu", residual=True)),
    (0.05, Epilogue(bias="row", residual=True)),
)
_DIRECTIONS: Weighted[Direction] = (
    (0.5, "forward"),
    (0.25, "input_grad"),
    (0.25, "weight_grad"),
)
_WINDOWS = (
    *((0.3, (1, 1)), (0.38, (3, 3)), (0.08, (5, 5)), (0.1, (7, 7)), (0.03, (2, 2))),
    *((0.03, (4, 4)), (0.02, (1, 7)), (0.02, (7, 1)), (0.02, (1, 3)), (0.02, (3, 1))),
)


def convolution(rng: random.Random, form: random.Random, reach: Reach) -> Conv2dProblem:
    direction = pick(form, _DIRECTIONS)
    dtype = pick(form, reach.dtypes)
    layout = pick(form, reach.layouts)
    epilogue = pick(form, _AFTER_CONVOLUTION)
    out = "float32" if is_drawn(form, WIDER / 2) else dtype
    window = pick(form, _WINDOWS)
    stride = pick(form, ((0.7, 1), (0.26, 2), (0.04, max(window))))
    dilation = pick(form, ((0.9, 1), (0.07, 2), (0.03, 3)))
    if is_drawn(rng, OF_MODELS):
        height, inputs, outputs, taps, stride, groups = one(rng, zoo.CONVOLUTIONS)
        width, window, dilation = height, (taps, taps), 1
    else:
        dilation = dilation if max(window) > 1 else 1
        groups, inputs, outputs = _channels(rng, form)
        height = size(rng, 4, reach.side)
        width = height if is_drawn(rng, 0.8) else size(rng, 4, reach.side)
    return Conv2dProblem(
        direction=direction,
        batch=between(rng, 1, reach.images),
        height=height,
        width=width,
        in_channels=inputs,
        out_channels=outputs,
        kernel_height=window[0],
        kernel_width=window[1],
        strides=(stride, stride),
        dilation=(dilation, dilation),
        padding=_padding(rng, window, dilation, stride),
        groups=groups,
        layout=layout,
        lhs=dtype,
        rhs=dtype,
        out=out,
        epilogue=epilogue if direction == "forward" else Epilogue(),
    )


def _channels(rng: random.Random, form: random.Random) -> tuple[int, int, int]:
    """Groups, and the channels of x and of y."""
    kind = pick(form, ((0.64, "all"), (0.08, "few"), (0.15, "each"), (0.13, "groups")))
    if kind == "few":
        return 1, between(rng, 1, 6), channels(rng, 8, 256)
    if kind == "each":
        count = channels(rng, 8, 1024)
        return count, count, count
    if kind == "groups":
        groups = between(rng, 2, 64)
        inputs = pick(rng, ((0.5, 4), (0.5, 8), (1.0, 16), (1.0, 32), (0.5, 24)))
        factor = pick(rng, ((0.8, 1), (0.2, 2)))
        return groups, groups * inputs, groups * inputs * factor
    return 1, channels(rng, 8, 1024), channels(rng, 8, 1024)


def _padding(
    rng: random.Random, window: tuple[int, int], dilation: int, stride: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """As much as keeps or divides the size, none, or the same on both sides."""
    kind = pick(rng, ((0.7, "same"), (0.2, "none"), (0.1, "both")))

    def side(taps: int) -> tuple[int, int]:
        around = dilation * (taps - 1)
        if kind == "same":
            around = max(around + 1 - stride, 0)
            return around // 2, around - around // 2
        return (around // 2, around // 2) if kind == "both" else (0, 0)

    return side(window[0]), side(window[1])


# --- attention ------------------------------------------------------------------------

_COUNTS = (1, 2, 4, 8, 12, 16, 20, 32, 40, 64)  # of heads in models
_HEADS = (16, 24, 32, 40, 48, 64, 64, 64, 72, 80, 96, 128, 128, 128, 160, 192, 256, 256)


def attention(
    rng: random.Random, form: random.Random, reach: Reach
) -> AttentionProblem:
    direction = pick(form, ((0.55, "forward"), (0.45, "backward")))
    saves_lse = is_drawn(form, 0.25) and direction == "forward"
    q_len, kv_len = _lengths(rng, reach)
    heads, kv_heads, head_dim, value_dim = _heads(rng, form)
    fields: dict[str, Any] = {
        "direction": direction,
        "saves_lse": saves_lse,
        "batch": between(rng, 1, reach.sequences),
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": pick(form, reach.dtypes),
        "scale": head_dim**-0.5,
    }
    _see_less(rng, form, fields)
    _change_scores(form, fields)
    return AttentionProblem(**fields)


def _lengths(rng: random.Random, reach: Reach) -> tuple[int, int]:
    kind = pick(rng, ((0.6, "self"), (0.2, "other"), (0.2, "few")))
    kv_len = size(rng, 8, reach.tokens)
    if kind == "few":
        return (1 if is_drawn(rng, 0.6) else between(rng, 2, 64)), kv_len
    return (kv_len if kind == "self" else size(rng, 8, reach.tokens)), kv_len


def _heads(rng: random.Random, form: random.Random) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, columns of a head and of its values."""
    head_dim, is_wider = one(form, _HEADS), is_drawn(form, 0.5)
    if is_drawn(rng, OF_MODELS):
        return one(rng, zoo.HEADS)
    heads = one(rng, _COUNTS) if is_drawn(rng, 0.7) else between(rng, 1, 64)
    shared = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = heads if is_drawn(rng, 0.55) else one(rng, shared)
    return heads, kv_heads, head_dim, 128 if head_dim == 192 and is_wider else head_dim


def _see_less(rng: random.Random, form: random.Random, fields: dict[str, Any]) -> None:
    """Which keys a query sees; some problems have two such rules."""
    q_len, kv_len, batch = (fields[name] for name in ("q_len", "kv_len", "batch"))
    shares = (0.4, 0.5, 0.1, 0.12, 0.3, 0.08, 0.7, 0.2, 0.7, 0.05)
    drawn = [is_drawn(form, share) for share in shares]
    causal, at_end, window, kv_lengths, q_lengths = drawn[:5]
    mask, of_batch, of_heads, of_queries, segments = drawn[5:]
    fields["is_causal"] = causal and q_len > 1
    fields["aligned_at_end"] = fields["is_causal"] and q_len < kv_len and at_end
    if window and q_len <= kv_len:
        left = between(rng, 1, kv_len)
        fields["window"] = (left, 0 if fields["is_causal"] else between(rng, 1, kv_len))
    fields["kv_lengths"] = kv_lengths
    fields["q_lengths"] = kv_lengths and q_lengths
    if mask:
        shape = (batch if of_batch else 1, fields["heads"] if of_heads else 1)
        fields["mask"] = (*shape, q_len if of_queries else 1, kv_len)
    fields["segments"] = segments


def _change_scores(form: random.Random, fields: dict[str, Any]) -> None:
    shares = (0.08, 0.4, 0.5, 0.04, 0.03, 0.03)
    bias, of_batch, gradient, cap, sinks, alibi = (is_drawn(form, x) for x in shares)
    if bias:
        shape = (fields["batch"] if of_batch else 1, fields["heads"])
        fields["bias"] = (*shape, fields["q_len"], fields["kv_len"])
        fields["bias_dtype"] = fields["dtype"]
        fields["bias_gradient"] = fields["direction"] == "backward" and gradient
    fields["soft_cap"] = 50.0 if cap else None
    fields["sinks"] = sinks
    fields["alibi"] = "distance" if alibi else None


Draw = Callable[[random.Random, random.Random, Reach], Problem]
DRAWS: Mapping[str, Draw] = {
    "matmul": product,
    "gated_matmul": gated,
    "conv2d": convolution,
    "attention": attention,
}
