"""Costs of calling a CPU kernel in a program, and XLA's costs that it saves.

    it pays where  madds * s_madd + elements * s_element + outputs * s_activation
                   is at least the cost of a call

Kernels of XLA are part of the program; one of ours is a custom call, whose buffers are
looked up and whose tasks start each time. A tiny product is over before that.

The rates were measured on a processor with AVX-512 BF16, in programs of 24 products,
see ``benchmarks/bench_choices_cpu.py``. XLA takes one of several loops for tiny
products, by rules of its own; the rates are those saved of the best ones, so that XLA
is kept where it is unknown.
"""

from __future__ import annotations

REASON = "the product saves less than its call costs"
CALL_NS = 700.0  # by which the program's time grows with the smallest product

# Saved of each multiply-add, by dtype.
_MADD_NS = {"float32": 0.00023, "bfloat16": 0.003}
# Of each element of the operands: XLA widens those of 16 bits in a pass of its own.
_ELEMENT_NS = {"float32": 0.0, "bfloat16": 0.11}
CONV_MADD_NS = 0.0003  # of float32: XLA's convolutions are slower than its products
# Of float32 on AVX2, in products of many rows: XLA takes 0.8 of our time for
# 160 x 160 x 160, as much for 256 x 256 x 96, and more from there on.
AVX2_MADD_NS = 0.0001
# Of each activated output; others are no work. XLA has good ones of float32.
_ACTIVATION_NS = {
    "float32": {},
    "bfloat16": {"gelu": 1.5, "gelu_exact": 1.5, "silu": 0.4},
}


def pays(
    *,
    widens: bool,
    madds: int,
    elements: int,
    outputs: int = 0,
    activation: str = "none",
    madd_ns: float | None = None,
) -> bool:
    """Returns whether a sum of products saves what its call costs.

    Args:
      widens: whether XLA widens operands that our kernel multiplies as they are. It is
        known of bfloat16 where pairs of it are multiplied; else float32 is assumed.
      madds: multiply-adds.
      elements: of both operands.
      outputs: elements of the result.
      activation: one of ``problem.epilogue.ACTIVATIONS``.
      madd_ns: saved of each multiply-add of float32, if not as in matrix products.
    """
    rates = "bfloat16" if widens else "float32"
    each_ns = _MADD_NS[rates] if widens or madd_ns is None else madd_ns
    saved_ns = (
        madds * each_ns
        + elements * _ELEMENT_NS[rates]
        + outputs * _ACTIVATION_NS[rates].get(activation, 0.0)
    )
    return saved_ns >= CALL_NS
