"""Problems of a survey, drawn at random: number i of (op, seed, platform).

Each problem is a pure function of its number, so that a survey can be split and resumed
by number. The distribution, with the shares in parentheses:

sizes       log-uniform between two bounds, then rounded to a multiple of 64 (0.4), of 8
            (0.3) or left as they are (0.3), where they are at least that large; of
            channels of images more (0.9) are multiples of 8
matmul      m, n and k from 1 (few rows: 0.25) to 4096 on CPUs and 16384 on GPUs; all
            layouts; batches (0.25), half of those with one shared right operand; the
            epilogues of inference and of training (0.55)
gated       the same sizes, silu or gelu, with its products saved (0.25)
conv2d      forward (0.5), gradients of the input and of the weights (0.25 each); images
            of 4 to 128 pixels a side (256 on GPUs); windows of 1x1 to 7x7, some of them
            not square; strides (0.3), dilation (0.1), groups (0.13), depthwise (0.15),
            few input channels (0.08); all paddings; channels last, on GPUs also first
attention   forward (0.55), a quarter of those with the log-sum-exp, and backward; self
            attention (0.6), other numbers of keys, few queries (0.2); grouped heads
            (0.45); heads of 16 to 256 columns; causal, windows, lengths, segments,
            boolean masks, biases and what else changes scores, some of them together
models      layers of well-known models (``zoo``), in all ops (0.15)
dtypes      float32 and bfloat16 on CPUs; bfloat16 (0.45), float16, float32 and
            8-bit floats on GPUs; some results are wider than the operands

What computes too much or moves too many bytes for a short measurement is drawn again.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """How far the sizes of a platform's problems reach.

    Attributes:
      flops: least and most operations of a problem.
      bytes: most bytes that it moves.
      extent: largest m, n and k.
      side: largest side of an image.
      images: largest batch of images.
      tokens: longest sequence.
      sequences: largest batch of sequences.
      dtypes, layouts: of operands and of images, with their shares.
    """

    flops: tuple[int, int]
    bytes: int
    extent: int
    side: int
    images: int
    tokens: int
    sequences: int
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
        dtypes=((0.5, "bfloat16"), (0.25, "float16"), (0.25, "float32")),
        layouts=((0.7, "nhwc"), (0.3, "nchw")),
    ),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numbered:
    """Problem number ``index`` of a seed."""

    index: int
    seed: int
    problem: Problem

    @classmethod
    def of(cls, op: str, seed: int, platform: str, index: int) -> Numbered:
        found = problem(op, seed, platform, index)
        return cls(index=index, seed=seed, problem=found)

    @property
    def name(self) -> str:
        """What its random candidates follow from."""
        return f"{self.seed} {self.index}"


def draw(op: str, seed: int, platform: str, first: int = 0) -> Iterator[Problem]:
    """The problems from number ``first`` on, without an end."""
    return (problem(op, seed, platform, i) for i in itertools.count(first))


def problem(op: str, seed: int, platform: str, index: int) -> Problem:
    """Problem number ``index``.

    Raises:
      ValueError: if no problems of the op, or for the platform, are drawn.
    """
    for value, known in ((op, DRAWS), (platform, REACHES)):
        if value not in known:
            raise ValueError(f"{value!r} must be one of {', '.join(known)}")
    reach = REACHES[platform]
    rng = random.Random(f"{op} {seed} {platform} {index}")
    while True:
        found = DRAWS[op](rng, reach)
        least, most = reach.flops
        if least <= found.flops <= most and found.bytes <= reach.bytes:
            return found


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


def _factors(rng: random.Random, reach: Reach) -> dict[str, Any]:
    """The fields that all products have."""
    dtype = pick(rng, reach.dtypes)
    out = dtype
    if dtype == "bfloat16" and reach is REACHES["cuda"] and is_drawn(rng, EIGHT_BITS):
        dtype = "float8_e4m3fn"
    elif dtype != "float32" and is_drawn(rng, WIDER):
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
        "layout": pick(rng, LAYOUTS),
    }


def product(rng: random.Random, reach: Reach) -> GemmProblem:
    fields = _factors(rng, reach)
    if is_drawn(rng, 0.25):
        fields["batch"] = between(rng, 2, 64)
        fields["lhs_batched"] = True
        fields["rhs_batched"] = is_drawn(rng, 0.5)
    if fields["lhs"] == "float32" and reach is REACHES["cuda"] and is_drawn(rng, 0.3):
        fields["precision"] = "highest"
    return GemmProblem(**fields, epilogue=pick(rng, EPILOGUES))


def gated(rng: random.Random, reach: Reach) -> GatedMatmulProblem:
    return GatedMatmulProblem(
        **_factors(rng, reach),
        activation=pick(rng, ((0.7, "silu"), (0.2, "gelu"), (0.1, "gelu_exact"))),
        save_products=is_drawn(rng, 0.25),
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


def convolution(rng: random.Random, reach: Reach) -> Conv2dProblem:
    direction = pick(rng, _DIRECTIONS)
    dtype = pick(rng, reach.dtypes)
    if is_drawn(rng, OF_MODELS):
        height, inputs, outputs, taps, stride, groups = one(rng, zoo.CONVOLUTIONS)
        width, window, dilation = height, (taps, taps), 1
    else:
        window = pick(rng, _WINDOWS)
        stride = pick(rng, ((0.7, 1), (0.26, 2), (0.04, max(window))))
        dilated = ((0.9, 1), (0.07, 2), (0.03, 3))
        dilation = pick(rng, dilated) if max(window) > 1 else 1
        groups, inputs, outputs = _channels(rng)
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
        layout=pick(rng, reach.layouts),
        lhs=dtype,
        rhs=dtype,
        out="float32" if is_drawn(rng, WIDER / 2) else dtype,
        epilogue=pick(rng, _AFTER_CONVOLUTION)
        if direction == "forward"
        else Epilogue(),
    )


def _channels(rng: random.Random) -> tuple[int, int, int]:
    """Groups, and the channels of x and of y."""
    kind = pick(rng, ((0.64, "all"), (0.08, "few"), (0.15, "each"), (0.13, "groups")))
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


def attention(rng: random.Random, reach: Reach) -> AttentionProblem:
    backward = is_drawn(rng, 0.45)
    q_len, kv_len = _lengths(rng, reach)
    heads, kv_heads, head_dim, value_dim = _heads(rng)
    fields: dict[str, Any] = {
        "direction": "backward" if backward else "forward",
        "saves_lse": not backward and is_drawn(rng, 0.25),
        "batch": between(rng, 1, reach.sequences),
        "q_len": q_len,
        "kv_len": kv_len,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "value_dim": value_dim,
        "dtype": pick(rng, reach.dtypes),
        "scale": head_dim**-0.5,
    }
    _see_less(rng, fields)
    _change_scores(rng, fields)
    return AttentionProblem(**fields)


def _lengths(rng: random.Random, reach: Reach) -> tuple[int, int]:
    kind = pick(rng, ((0.6, "self"), (0.2, "other"), (0.2, "few")))
    kv_len = size(rng, 8, reach.tokens)
    if kind == "few":
        return (1 if is_drawn(rng, 0.6) else between(rng, 2, 64)), kv_len
    return (kv_len if kind == "self" else size(rng, 8, reach.tokens)), kv_len


def _heads(rng: random.Random) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, columns of a head and of its values."""
    if is_drawn(rng, OF_MODELS):
        return one(rng, zoo.HEADS)
    heads = one(rng, _COUNTS) if is_drawn(rng, 0.7) else between(rng, 1, 64)
    shared = [n for n in range(1, heads + 1) if heads % n == 0]
    kv_heads = heads if is_drawn(rng, 0.55) else one(rng, shared)
    head_dim = one(rng, _HEADS)
    is_wider = head_dim == 192 and is_drawn(rng, 0.5)
    return heads, kv_heads, head_dim, 128 if is_wider else head_dim


def _see_less(rng: random.Random, fields: dict[str, Any]) -> None:
    """Which keys a query sees; some problems have two such rules."""
    q_len, kv_len, batch = (fields[name] for name in ("q_len", "kv_len", "batch"))
    fields["is_causal"] = is_drawn(rng, 0.4) and q_len > 1
    if fields["is_causal"] and q_len < kv_len:
        fields["aligned_at_end"] = is_drawn(rng, 0.5)
    if is_drawn(rng, 0.1) and q_len <= kv_len:
        left = between(rng, 1, kv_len)
        fields["window"] = (left, 0 if fields["is_causal"] else between(rng, 1, kv_len))
    fields["kv_lengths"] = is_drawn(rng, 0.12)
    fields["q_lengths"] = fields["kv_lengths"] and is_drawn(rng, 0.3)
    if is_drawn(rng, 0.08):
        of_batch, of_heads = (is_drawn(rng, share) for share in (0.7, 0.2))
        shape = (batch if of_batch else 1, fields["heads"] if of_heads else 1)
        fields["mask"] = (*shape, q_len if is_drawn(rng, 0.7) else 1, kv_len)
    fields["segments"] = is_drawn(rng, 0.05)


def _change_scores(rng: random.Random, fields: dict[str, Any]) -> None:
    if is_drawn(rng, 0.08):
        shape = (fields["batch"] if is_drawn(rng, 0.4) else 1, fields["heads"])
        fields["bias"] = (*shape, fields["q_len"], fields["kv_len"])
        fields["bias_dtype"] = fields["dtype"]
        backward = fields["direction"] == "backward"
        fields["bias_gradient"] = backward and is_drawn(rng, 0.5)
    fields["soft_cap"] = 50.0 if is_drawn(rng, 0.04) else None
    fields["sinks"] = is_drawn(rng, 0.03)
    fields["alibi"] = "distance" if is_drawn(rng, 0.03) else None


Draw = Callable[[random.Random, Reach], Problem]
DRAWS: Mapping[str, Draw] = {
    "matmul": product,
    "gated_matmul": gated,
    "conv2d": convolution,
    "attention": attention,
}
