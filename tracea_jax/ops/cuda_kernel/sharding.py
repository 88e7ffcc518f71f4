"""How a user's kernel is split over devices: as the user declares.

    "i j, j -> i j"      both dimensions, the second of them of two operands
    "i _, _ -> i _"      rows only: ``_`` is a dimension that is never split

A name stands for one dimension of operands and results, which the kernel treats entry
by entry: called on a part of it, it makes that part of the results.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax

from tracea_jax.ops.common.sharding import Device, Dims, Rule
from tracea_jax.ops.common.typed import Aval, Primitive

_WHOLE = "_"


def parsed(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """(names of the dimensions of each operand, of each result).

    Raises:
      ValueError: on a text that is no such declaration.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"sharding={text!r} needs one '->', as in 'i j, j -> i j'")
    operands, results = (
        tuple(tuple(part.split()) for part in side.split(",")) if side.strip() else ()
        for side in sides
    )
    for names in (*operands, *results):
        for name in names:
            if not re.fullmatch(r"[A-Za-z]\w*|_", name):
                raise ValueError(f"sharding={text!r}: {name!r} is no name")
        named = [n for n in names if n != _WHOLE]
        if len(named) != len({*named}):
            raise ValueError(f"sharding={text!r} names a dimension twice in one array")
    of_results = [{*names} for names in results]
    for name in {n for names in operands for n in names} - {_WHOLE}:
        if not all(name in own for own in of_results):
            raise ValueError(
                f"sharding={text!r}: {name!r} is no dimension of every result, so that "
                "a device would have a part of a sum; write '_' for it"
            )
    return operands, results


def rule(
    primitive: Primitive,
    avals: Sequence[Aval],
    *,
    kernel: Any,
    numbers: Any,
    **params: Any,
) -> Rule:
    """The rule that the user declared for a kernel.

    Raises:
      ValueError: if it does not fit the arrays.
    """
    operands, results = parsed(kernel.sharding)
    shapes = [x.shape for x in (*avals, *kernel.launcher(avals, numbers).results)]
    names = _with_mapped([*operands, *results], shapes)
    if [len(own) for own in names] != [len(shape) for shape in shapes]:
        found = ", ".join(map(str, map(tuple, shapes)))
        raise ValueError(
            f"sharding={kernel.sharding!r} of {kernel.name} does not fit its operands "
            f"and results: {found}"
        )
    sizes: dict[str, int] = {}
    for own, shape in zip(names, shapes, strict=True):
        for name, size in zip(own, shape, strict=True):
            if name != _WHOLE and sizes.setdefault(name, size) != size:
                raise ValueError(
                    f"sharding={kernel.sharding!r} of {kernel.name}: {name!r} is "
                    f"{sizes[name]} and {size}"
                )
    whole: dict[str, str | None] = {}

    def dims(array: int, names: Sequence[str], shape: Sequence[int]) -> Dims:
        found: list[tuple[str, ...]] = []
        for place, (name, size) in enumerate(zip(names, shape, strict=True)):
            if name == _WHOLE:
                name = f"whole {array} {place}"
                sizes[name] = size
                whole[name] = f"{kernel.name} is declared to need all of a dimension"
            found.append((name,) if size > 1 else ())
        return tuple(found)

    pairs = zip(names, shapes, strict=True)
    every = [dims(i, own, shape) for i, (own, shape) in enumerate(pairs)]
    how = {"kernel": kernel, "numbers": numbers, **params}
    return Rule(
        operands=tuple(every[: len(operands)]),
        results=tuple(every[len(operands) :]),
        sizes=sizes,
        whole=whole,
        local=functools.partial(_local, primitive, how),
    )


def _with_mapped(
    names: Sequence[tuple[str, ...]], shapes: Sequence[Sequence[int]]
) -> list[tuple[str, ...]]:
    """The names, with those of leading dimensions that ``vmap`` has given to all."""
    mapped = {len(s) - len(own) for own, s in zip(names, shapes, strict=False)}
    more = max(mapped.pop(), 0) if len(mapped) == 1 else 0
    return [(*(f"mapped {i}" for i in range(more)), *own) for own in names]


def _local(
    primitive: Primitive,
    params: dict[str, Any],
    operands: Sequence[jax.Array],
    device: Device,
) -> list[jax.Array]:
    results = primitive.bind(*operands, **params)
    pairs = zip(results, device.rule.results, strict=True)
    for i, (y, dims) in enumerate(pairs):
        for size, dim in zip(y.shape, dims, strict=True):
            wanted = device.part(dim)
            if dim and size != wanted:
                raise ValueError(
                    f"{params['kernel'].name}: result {i} of a device has the shape "
                    f"{y.shape}, and {dim[0]!r} is split into parts of {wanted}: out= "
                    "must follow the operands"
                )
    return results
