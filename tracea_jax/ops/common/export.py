"""Serialised programs: tells ``jax.export`` which custom calls of ours are stable.

The calls themselves are registered in ``runtime.launch``; JAX's private list of stable
targets is reached through ``_compat``. Caller: ``ops``, which makes it public.
"""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from tracea_jax import _compat
from tracea_jax.runtime import launch

# Custom calls of the variant "cudnn" of attention.
_CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{kind}{direction}"
    for kind in ("Softmax", "ScaleBiasSoftmax")
    for direction in ("", "Backward")
)

_OUR_TARGETS = launch.targets()

# The names of our targets carry a version, so that loading a program fails if the
# installed package cannot run it.
_compat.declare_stable(_OUR_TARGETS)


def export_checks() -> list[DisabledSafetyCheck]:
    """The ``disabled_checks`` with which ``jax.export`` serialises our custom calls.

        exported = jax.export.export(jax.jit(f), disabled_checks=export_checks())(x)

    Attention that runs in cuDNN always needs them, because JAX does not guarantee that
    cuDNN's calls stay stable. Our own kernels need them only with versions of JAX in
    which ``_compat.declare_stable`` has no effect. The process that loads a program
    must import ``tracea_jax``.
    """
    targets = (*_OUR_TARGETS, *_CUDNN_TARGETS)
    return [DisabledSafetyCheck.custom_call(target) for target in targets]
