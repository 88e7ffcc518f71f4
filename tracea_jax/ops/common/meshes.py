"""Meshes, read from which tile of an array each device has.

XLA tells how arrays are sharded without the program's mesh. Caller: ``partition``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from tracea_jax.ops.common.sharding import Dims, Mesh, Spec


def axes_of(tilings: Sequence[np.ndarray]) -> tuple[dict[str, int], list[Spec]]:
    """A mesh of prime sizes whose axes explain which tile of an array each device has.

    Devices are numbered row by row in every mesh of JAX, so that the tile of a device
    is made of digits of its number.

    Args:
      tilings: of each array, (dimensions, devices): the index of a device's tile.

    Raises:
      ValueError: if no mesh makes such tiles.
    """
    count = max((t.shape[1] for t in tilings), default=1)
    for sizes in _orders(_primes(count)):
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        found = [[_digits(tiles, sizes, strides) for tiles in t] for t in tilings]
        if all(digits is not None for array in found for digits in array):
            mesh = {f"x{i}": size for i, size in enumerate(sizes)} or {"x0": 1}
            return mesh, [
                tuple(tuple(f"x{i}" for i in digits or ()) for digits in array)
                for array in found
            ]
    raise ValueError("the arrays are sharded in a way that no mesh makes")


def _orders(primes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Distinct orders of numbers."""
    if not primes:
        yield ()
    for first in sorted(set(primes)):
        rest = list(primes)
        rest.remove(first)
        for order in _orders(rest):
            yield first, *order


def _digits(
    tiles: np.ndarray, sizes: Sequence[int], strides: Sequence[int]
) -> list[int] | None:
    """The digits of a device's number that its tile is made of, the slowest first."""
    numbers = np.arange(len(tiles))
    weights = [int(tiles[stride]) for stride in strides]
    made = sum(
        weight * (numbers // stride % size)
        for weight, stride, size in zip(weights, strides, sizes, strict=True)
    )
    if not np.array_equal(tiles, made + np.zeros_like(tiles)):
        return None
    used = [i for i, weight in enumerate(weights) if weight]
    return sorted(used, key=lambda i: -weights[i])


def joined(
    mesh: Mesh, arrays: Sequence[tuple[Dims, Spec]], sizes: Mapping[str, int]
) -> tuple[dict[str, int], list[Spec]]:
    """The mesh and the specs with axes made one that every array splits as one.

    Dimensions of several factors, or of sizes that cannot be divided so, keep theirs
    apart: each axis may split another factor.
    """
    groups: list[list[str]] = []
    for axis in mesh:
        longer = [*groups[-1], axis] if groups else []
        if longer and _are_one(longer, mesh, arrays, sizes):
            groups[-1].append(axis)
        else:
            groups.append([axis])
    first = {group[0] for group in groups}
    specs = [
        tuple(tuple(a for a in axes if a in first) for axes in spec)
        for _, spec in arrays
    ]
    return {g[0]: math.prod(mesh[a] for a in g) for g in groups}, specs


def _are_one(
    axes: Sequence[str],
    mesh: Mesh,
    arrays: Sequence[tuple[Dims, Spec]],
    sizes: Mapping[str, int],
) -> bool:
    count = math.prod(mesh[a] for a in axes)
    for dims, spec in arrays:
        for dim, own in zip(dims, spec, strict=True):
            if {*axes}.isdisjoint(own):
                continue
            if any(a not in own for a in axes):
                return False
            start = own.index(axes[0])
            follows = list(own[start : start + len(axes)]) == list(axes)
            divides = len(dim) < 2 and all(sizes[f] % count == 0 for f in dim)
            if not (follows and divides):
                return False
    return True


def _primes(n: int) -> list[int]:
    smallest = next((p for p in range(2, n + 1) if n % p == 0), None)
    return [] if smallest is None else [smallest, *_primes(n // smallest)]
