"""Serialised programs: what ``jax.export`` has to be told about our custom calls."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from tracea_jax import _compat
from tracea_jax.runtime import launch

# What the variant "cudnn" of attention calls.
_CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{kind}{direction}"
    for kind in ("Softmax", "ScaleBiasSoftmax")
    for direction in ("", "Backward")
)

_OUR_TARGETS = launch.targets()

# Their names carry a version: a program that an installed package cannot serve is
# refused when it is loaded.
_compat.declare_stable(_OUR_TARGETS)


def export_checks() -> list[DisabledSafetyCheck]:
    """The ``disabled_checks`` with which ``jax.export`` serialises what we call.

        exported = jax.export.export(jax.jit(f), disabled_checks=export_checks())(x)

    Programs with our own kernels need it only where JAX cannot be told that they are
    stable (``_compat.declare_stable``). Attention that runs in cuDNN needs it: JAX
    gives no guarantee for those calls. The process that loads a program must import
    ``tracea_jax``.
    """
    targets = (*_OUR_TARGETS, *_CUDNN_TARGETS)
    return [DisabledSafetyCheck.custom_call(target) for target in targets]
