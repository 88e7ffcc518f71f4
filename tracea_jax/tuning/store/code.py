"""A hash of the code that a choice compiles: times of other code do not apply to it.

    a CUDA kernel  the text that the emitter made, and every header that it includes
    a CPU kernel   the units of its handler, and all that they include
    XLA            nothing of ours: its times outlive every change of a kernel

Device and compiler are no part; ``store.environment`` has them. Tunings name their
records by ``named``, and readers of records ask ``is_current``.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from tracea_jax import variants
from tracea_jax.device import Device
from tracea_jax.emit import sources
from tracea_jax.emit.kernel import Kernel
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning.store import handlers
from tracea_jax.tuning.store.environment import canonical, digest


@functools.lru_cache(maxsize=4096)  # generating the text takes half a millisecond
def code_of(problem: Problem, choice: Choice, device: Device) -> str:
    """16 hexadecimal digits of what a legal choice compiles; "" if nothing of ours.

    A choice whose kernels other problems choose, as those of a gated product's factors,
    stands for all kernels that its variant names.
    """
    variant = variants.get(problem.op, choice.variant)
    kernels = variants.kernels_in(variant.call(problem, choice.config, device))
    if kernels:
        # Sorted: the order in which kernels run is none of their text.
        return _joined(tuple(sorted({_kernel(kernel) for kernel in kernels})))
    return roots_hash(variant.sources, device)


def named(problem: Problem, choice: Choice, device: Device) -> dict[str, Any]:
    """The fields by which records tell a choice: variant, config and code."""
    return {
        "variant": choice.variant,
        "config": dataclasses.asdict(choice.config),
        "code": code_of(problem, choice, device),
    }


@functools.cache
def roots_hash(roots: tuple[str, ...], device: Device) -> str:
    """16 hexadecimal digits of the files of ``Variant.sources`` for the device.

    Those of the other platform do not count: a change of a GPU kernel must not forget
    what was measured on CPUs.
    """
    own = [r for r in sorted(set(roots)) if r.startswith(f"{device.platform}/")]
    return _joined(tuple(map(_root, own)))


def _root(name: str) -> str:
    platform, _, rest = name.partition("/")
    if platform == "cuda":
        return sources.source_hash(rest)
    return sources.content_hash(handlers.texts(rest))


def _kernel(kernel: Kernel) -> str:
    parts = (kernel.source, _headers(kernel.headers), kernel.options, kernel.arch)
    return digest(canonical(parts), 64)


@functools.lru_cache(maxsize=256)  # of thousands of kernels, a few sets of headers
def _headers(headers: tuple[tuple[str, str], ...]) -> str:
    return sources.content_hash(headers)


def _joined(hashes: tuple[str, ...]) -> str:
    return digest(canonical(hashes), 16) if hashes else ""
