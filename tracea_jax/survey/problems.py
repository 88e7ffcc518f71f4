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

On GPUs kernels are compiled for what a problem has besides its sizes. So that problems
share kernels, those of one seed have at most 16 such forms of each op, drawn as above;
layers of models may add to them.

What computes too much or moves too many bytes for a short measurement is drawn again.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from tracea_jax.problem import Problem
from tracea_jax.survey.draws import DRAWS, REACHES


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
        """The seed of its random candidates."""
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
    name = f"{op} {seed} {platform}"
    rng = random.Random(f"{name} {index}")
    while True:
        form = rng
        if reach.forms is not None:
            number = int(rng.random() * reach.forms)
            form = random.Random(f"{name} form {number}")
        found = DRAWS[op](rng, form, reach)
        least, most = reach.flops
        if least <= found.flops <= most and found.bytes <= reach.bytes:
            return found
