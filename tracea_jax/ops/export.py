"""Serialised programs: what ``jax.export`` has to be told about our custom calls."""

from __future__ import annotations

from jax.export import DisabledSafetyCheck

from tracea_jax.runtime import launch

# What the variant "cudnn" of attention calls.
_CUDNN_TARGETS = tuple(
    f"__cudnn$fmha{kind}{direction}"
    for kind in ("Softmax", "ScaleBiasSoftmax")
    for direction in ("", "Backward")
)


def export_checks() -> list[DisabledSafetyCheck]:
    """The ``disabled_checks`` with which ``jax.export`` serialises our kernels.

        exported = jax.export.export(jax.jit(f), disabled_checks=export_checks())(x)

    Their targets carry a version: a program that an installed package cannot serve is
    refused when it is loaded. The process that loads one must import ``tracea_jax``.
    """
    targets = (*launch.CPU_TARGETS, launch.CUDA_TARGET, *_CUDNN_TARGETS)
    return [DisabledSafetyCheck.custom_call(target) for target in targets]
