"""XLA's time for a product that needs a second kernel, against our modelled time.

    product = max(flops / rate, bytes / bandwidth)
    pass    = bytes that the second kernel reads and writes / bandwidth
    xla     = product + pass + launches

The product is modelled at the device's roofline: XLA's libraries have tiles for every
shape and split k where tiles are few, so they come near the roofline even where our
kernel does not. Only the time after the product is certain to be saved. Our kernel is
chosen unmeasured if its modelled time is not much longer than XLA's, and if the pass is
too large a part of the time to be lost in the errors of both predictions. Our own time
is modelled in ``gemm_sm90_model``. Caller: ``gemm_sm90``.
"""

from __future__ import annotations

from tracea_jax.problem import ITEMSIZE, Epilogue, GemmProblem

FEWEST_FLOPS = 2**29  # of the products that were measured

# Fitted to the 95 random products of ``choices_fitted.json`` of an H200: for 47 of them
# our kernel is chosen, and was at least as fast as XLA. The rates are the best that XLA
# reaches.
_FLOPS_PER_US = 7.8e8  # of 16-bit operands
_PRODUCT_BYTES_PER_US = 4.2e6
_PASS_BYTES_PER_US = 4.0e6
_LAUNCHES_US = 4.0
# XLA's predicted time divided by ours must be at least this, as ours is predicted too
# long.
_WORTH = 0.8
_LEAST_PASS = 0.05  # the pass must take at least this part of the product's time


def is_fused(epilogue: Epilogue, out: str) -> bool:
    """Returns whether XLA computes the epilogue in the product's own kernel.

    XLA does so for a bias, relu (but not its derivative) and an added residual. A bias
    that is wider than the result, such as a folded batch norm's, makes the product as
    wide, and a second kernel rounds it.
    """
    multiplies = epilogue.residual and epilogue.residual_op != "add"
    is_wide = ITEMSIZE[epilogue.bias_dtype or out] > ITEMSIZE[out]
    return epilogue.activation in ("none", "relu") and not (multiplies or is_wide)


def loses_to(ours_us: float, problem: GemmProblem) -> bool:
    """True if XLA is expected to be slower than a kernel of this modelled time."""
    if is_fused(problem.epilogue, problem.out):
        return False
    product_us, pass_us = _product_us(problem), _pass_us(problem)
    xla_us = product_us + pass_us + _LAUNCHES_US
    return xla_us >= _WORTH * ours_us and pass_us >= _LEAST_PASS * product_us


def _product_us(problem: GemmProblem) -> float:
    rate = _FLOPS_PER_US * 2 / ITEMSIZE[problem.lhs]
    return max(problem.flops / rate, problem.bytes / _PRODUCT_BYTES_PER_US)


def _pass_us(problem: GemmProblem) -> float:
    """Time of the second kernel, which reads product and residual, writes results."""
    epilogue, own = problem.epilogue, ITEMSIZE[problem.out]
    product = max(own, ITEMSIZE[epilogue.bias_dtype or problem.out])
    others = 1 + epilogue.residual + epilogue.save_preactivation
    elements = problem.batch * problem.m * problem.n
    return elements * (product + others * own) / _PASS_BYTES_PER_US
