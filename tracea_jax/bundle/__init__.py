"""bundle: a function as files, which programs without Python run.

    tracea.bundle(model, x, path="model.tracea")

``lowering`` makes a ``program`` of the traced function, ``writing`` files of that. The
library that runs them (libtracea) is in ``kernels/capi``; ``library`` says where it
lies.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from tracea_jax.bundle import writing
from tracea_jax.bundle.lowering import lowered
from tracea_jax.device import Device
from tracea_jax.dispatch import Plan
from tracea_jax.mistakes import check_function, shown
from tracea_jax.ops.common.choice import without_choices
from tracea_jax.options import current, device_called, options, planned_device, planning
from tracea_jax.page import Column, Page, Printable, Row, Table
from tracea_jax.transform import transform

_COLUMNS = (Column("line"), Column("problem", ": "), Column("runs", " "))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Bundle(Printable):
    """A bundle that was written.

    Attributes:
      path: the directory.
      device: what can run it.
      inputs, outputs: (name, dtype, shape) of each.
      plans: (line of the program, plan) of each call of an op.
      steps: their number, launches and calls.
      workspace_bytes, constants_bytes: sizes.
    """

    path: pathlib.Path
    device: Device
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...]
    plans: tuple[tuple[str, Plan], ...]
    steps: int
    workspace_bytes: int
    constants_bytes: int

    @property
    def page(self) -> Page:
        head = [f"{self.path} for {self.device}"]
        for what, arrays in (("input", self.inputs), ("output", self.outputs)):
            head += [f"{what} {n}: {dtype}{list(shape)}" for n, dtype, shape in arrays]
        head.append(
            f"{self.steps} steps, {self.constants_bytes} bytes of constants, "
            f"{self.workspace_bytes} of workspace"
        )
        rows = [
            Row((source, str(plan.problem), f"{plan.variant} {plan.config}"))
            for source, plan in self.plans
        ]
        return Page(("\n".join(head), Table(columns=_COLUMNS, rows=tuple(rows))))


def bundle(
    fn: Callable[..., Any],
    *args: Any,
    path: str | os.PathLike[str],
    device: str | Device | None = None,
) -> Bundle:
    """Writes a function as a directory that programs without Python run.

        model = functools.partial(apply, params)      # weights become part of it
        tracea.bundle(model, x, path="model.tracea")

    The function is traced as ``transform`` does, and every matrix product, convolution
    and attention is served by a kernel of ours: by a tuned one where there is an
    answer, else by the default config. The directory has the steps in
    ``manifest.json``, the weights in ``constants.bin``, compiled CUDA kernels, and the
    SHA-256 of each file in ``SHA256SUMS``. ``libtracea``, which comes with the package
    (``tracea config``), loads and runs it with the same kernels: results have the bits
    of these kernels in JAX. ``options(implementation=...)`` says which, as there.

    Args:
      fn: a function of arrays, or of pytrees of them. Arrays that it holds, by
        ``functools.partial`` or as a closure, are constants, and what depends on them
        alone is computed now.
      *args: arrays, or their ``jax.ShapeDtypeStruct``: the inputs.
      path: the directory; one that a bundle was written to before is replaced.
      device: "cpu", or a GPU that need not be here, such as "H200"; by default the
        device of the settings, and without one that which JAX computes on.

    Returns:
      What was written; print it.

    Raises:
      Unsupported: if no kernel of ours runs an equation; it names the equation and its
        line.
      TypeError: if fn is no function, or an argument no array.
      FileExistsError: if the path is something else than a bundle.
    """
    check_function(fn, "bundle takes a function", "bundle(f, *args, path=...)")
    target = planned_device() if device is None else device_called(device)
    place = writing.checked(path)
    named, _ = jax.tree_util.tree_flatten_with_path(args)
    for where, leaf in named:
        if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
            raise TypeError(
                f"args{jax.tree_util.keystr(where)} is {shown(leaf)}; bundle takes "
                "arrays. What is constant belongs into the function: "
                "functools.partial(fn, ...)"
            )
    implementation = current().implementation or "tracea"
    if implementation == "xla":
        raise ValueError("implementation='xla' is set; a bundle has kernels of ours")
    with options(implementation=implementation, on_miss="heuristic"):
        with planning(target), without_choices(), jax.disable_jit(False):
            traced = jax.make_jaxpr(transform(fn), return_shape=True)
            jaxpr, shape = traced(*args)
        program = lowered(jaxpr, target)
    results, _ = jax.tree_util.tree_flatten_with_path(shape)
    inputs = writing.named("args", [where for where, _ in named], program.inputs)
    outputs = writing.named("out", [where for where, _ in results], program.outputs)
    writing.write(place, program, inputs, outputs)
    return Bundle(
        path=place,
        device=target,
        inputs=tuple((n, v.dtype, v.shape) for n, v in inputs),
        outputs=tuple((n, v.dtype, v.shape) for n, v in outputs),
        plans=program.plans,
        steps=len(program.steps),
        workspace_bytes=program.workspace_bytes,
        constants_bytes=program.constants_bytes,
    )
