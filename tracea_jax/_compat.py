"""What no public JAX API offers, with the reason; everything else stays public."""

from __future__ import annotations

from typing import Any

import jax


def partitioned_automatically(ctx: Any) -> bool:
    """Whether the compiler will split this lowering's arrays over several devices.

    A custom call is opaque to the partitioner, which would gather its operands on every
    device. The axis context is the only place that tells, and it is not public: inside
    ``shard_map`` over all mesh axes it lists them as manual and arrays are local.
    """
    axis = ctx.module_context.axis_context
    if hasattr(axis, "num_devices"):
        return (axis.num_devices or 1) > 1
    manual = getattr(axis, "manual_axes", frozenset())
    mesh = getattr(axis, "mesh", None)
    return mesh is not None and frozenset(mesh.axis_names) != frozenset(manual)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which x differs inside ``shard_map``.

    The attribute was ``vma`` before it became part of ``manual_axis_type``.
    """
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())
