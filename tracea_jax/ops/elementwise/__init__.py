"""Functions of each element of arrays, by the names that ``jax.numpy`` has for them.

    tracea.ops.elementwise.add(x, y)

XLA computes them as it does those of jnp, fused with what is before and after, unless a
kernel was asked for (``implementation="tracea"``) or measured to be faster. The kernels
compute float32, float64, complex64 and complex128, with the same bits on CPUs and GPUs:
each operation rounds once, to nearest, and subnormal numbers are numbers.
"""

from tracea_jax.ops.elementwise.public import (
    abs,
    add,
    divide,
    multiply,
    negative,
    subtract,
)

__all__ = ["abs", "add", "divide", "multiply", "negative", "subtract"]
