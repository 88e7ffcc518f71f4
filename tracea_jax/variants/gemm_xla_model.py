"""What XLA takes for a product that needs a second kernel, and whether ours takes less.

    product = max(flops / rate, bytes / bandwidth)
    pass    = bytes that the second kernel reads and writes / bandwidth
    xla     = product + pass + launches

The product is at the device's roofline: XLA's libraries have tiles for every shape and
cut k where tiles are few, so they come near it where ours do not. Only what comes after
the product is surely saved. Ours is worth choosing unmeasured if its modelled time is
not much longer than that, and if the pass is a part of it that the errors of both
predictions leave over.
"""

from __future__ import annotations

from tracea_jax.problem import ITEMSIZE, Epilogue, GemmProblem

FEWEST_FLOPS = 2**29  # of what was measured

# Of 95 products drawn on an H200 (benchmarks/bench_choices.py fused), none that these
# choose ran below 0.97 of XLA. Rates are what XLA reaches at best.
_FLOPS_PER_US = 7.8e8  # of 16-bit operands
_PRODUCT_BYTES_PER_US = 4.2e6
_PASS_BYTES_PER_US = 4.0e6
_LAUNCHES_US = 4.0
_WORTH = 0.8  # least of XLA's predicted time by ours, which is predicted too long
_LEAST_PASS = 0.05  # of the product


def is_fused(epilogue: Epilogue) -> bool:
    """Whether XLA computes the epilogue with the product.

    That are bias, relu (not its derivative) and an added residual.
    """
    multiplies = epilogue.residual and epilogue.residual_op != "add"
    return epilogue.activation in ("none", "relu") and not multiplies


def loses_to(ours_us: float, problem: GemmProblem) -> bool:
    """Whether XLA is expected to be slower than a kernel of this modelled time."""
    if is_fused(problem.epilogue):
        return False
    product_us, pass_us = _product_us(problem), _pass_us(problem)
    xla_us = product_us + pass_us + _LAUNCHES_US
    return xla_us >= _WORTH * ours_us and pass_us >= _LEAST_PASS * product_us


def _product_us(problem: GemmProblem) -> float:
    rate = _FLOPS_PER_US * 2 / ITEMSIZE[problem.lhs]
    return max(problem.flops / rate, problem.bytes / _PRODUCT_BYTES_PER_US)


def _pass_us(problem: GemmProblem) -> float:
    """Of the second kernel: it reads the product, a residual, and writes results."""
    epilogue = problem.epilogue
    matrices = 2 + epilogue.residual + epilogue.save_preactivation
    elements = problem.batch * problem.m * problem.n
    return matrices * elements * ITEMSIZE[problem.out] / _PASS_BYTES_PER_US
