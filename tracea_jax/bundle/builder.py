"""Building a program: arrays get memory, calls of ops become steps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from tracea_jax import variants
from tracea_jax.bundle import direct
from tracea_jax.bundle.arrays import (
    DTYPES,
    Room,
    Spread,
    View,
    placed,
    rounded,
    size_bytes,
)
from tracea_jax.bundle.moves import Move
from tracea_jax.bundle.pointwise import COPY
from tracea_jax.bundle.program import Program, Step, image_name
from tracea_jax.device import CudaDevice, Device
from tracea_jax.dispatch import Plan, Unsupported
from tracea_jax.emit import pointwise as emit
from tracea_jax.emit.kernel import Kernel
from tracea_jax.options import current
from tracea_jax.runtime import cubins, launch
from tracea_jax.runtime.nvrtc import Cubin
from tracea_jax.serving import Served
from tracea_jax.variants import Inline, Launch, Steps
from tracea_jax.variants.base import CpuCall
from tracea_jax.variants.steps import zeros


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """State of a program that is being built; see ``Builder.mark``."""

    steps: int
    plans: int


class Builder:
    """A program that grows by steps. Values are views, or what is known or spread."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._steps: list[Step] = []
        self._constants: dict[int, tuple[Any, View]] = {}  # by identity, kept alive
        self._cubins: dict[str, Cubin] = {}
        self._plans: list[tuple[str, Plan]] = []

    # --- values ---------------------------------------------------------------------

    def input(self, index: int, aval: Any) -> View:
        """An array that the caller gives."""
        return self.view("input", aval, f"input {index}", index)

    def output(self, index: int, value: Any) -> View:
        """The value, computed into the memory of an output."""
        view = self.in_memory(value)
        if view.room.storage == "workspace":
            view.room.storage, view.room.index = "output", index
            return view
        made = self.view("output", value_type(value), f"output {index}", index)
        copy = Step(kind="copy", reads=(view,), writes=(made,), source="the results")
        self._steps.append(copy)
        return made

    def view(self, storage: Any, aval: Any, what: str, index: int = 0) -> View:
        """A new array of the shape and dtype of ``aval``.

        Raises:
          Unsupported: if the library has no such arrays.
        """
        dtype = aval.dtype.name
        if dtype not in DTYPES:
            raise Unsupported(
                f"{what} has dtype {dtype}; a bundle has {', '.join(DTYPES)}"
            )
        if not all(isinstance(size, int) for size in aval.shape):
            raise Unsupported(f"{what} has the symbolic shape {aval.shape}")
        room = Room(storage, size_bytes(aval.dtype, aval.shape), index)
        return View(room=room, dtype=dtype, shape=tuple(aval.shape))

    def in_memory(self, value: Any) -> View:
        """The view of a value; a known one becomes a constant of the bundle."""
        if isinstance(value, View):
            return value
        if isinstance(value, Spread):
            out = self.view("workspace", value_type(value), "a broadcast")
            self.pointwise(COPY, [value], out, "a broadcast")
            return out
        if (found := self._constants.get(id(value))) is not None:
            return found[1]
        array = np.ascontiguousarray(value).reshape(np.shape(value))
        view = self.view("constants", array, "a constant")
        view.room.data = array
        self._constants[id(value)] = (value, view)
        return view

    # --- steps ----------------------------------------------------------------------

    def mark(self) -> Mark:
        """A state that ``back_to`` returns to."""
        return Mark(len(self._steps), len(self._plans))

    def back_to(self, mark: Mark) -> None:
        """Forgets the steps since then."""
        del self._steps[mark.steps :], self._plans[mark.plans :]

    def planned(self, source: str, plan: Plan) -> None:
        """Notes a plan, for people."""
        self._plans.append((source, plan))

    def call(
        self, served: Served, reads: list[View], writes: list[View], source: str
    ) -> None:
        """The steps of what serves a call of an op.

        Raises:
          Unsupported: if one of them is array code.
        """
        call = served.call
        if isinstance(call, CpuCall):
            fields = {"target": call.target, "attributes": dict(call.attributes)}
            self.step("cpu", reads, writes, source, fields)
            return
        assert not isinstance(call, Inline)
        code = dict(zip(variants.kernels_in(call), served.cubins, strict=True))
        if isinstance(call, Kernel):
            assert served.plan is not None
            name = direct.name_of(served.plan.problem, reads, writes)
            self._launch(call, code[call], reads, writes, source, name)
            return
        self._steps_of(call, code, reads, writes, source)

    def _steps_of(
        self,
        call: Steps,
        code: dict[Kernel, Cubin],
        reads: list[View],
        writes: list[View],
        source: str,
    ) -> None:
        views = dict(zip(call.operands, reads, strict=True))
        views |= dict(zip(call.results, writes, strict=True))
        for buffer in call.scratch:
            shape = jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)
            views[buffer.name] = self._scratch(shape)
        for step in call.steps:
            read = [views[name] for name in step.reads]
            written = [views[name] for name in step.writes]
            if isinstance(step, Launch):
                self._launch(step.kernel, code[step.kernel], read, written, source)
            elif step.function is zeros:
                self.step("zero", [], written, source)
            else:
                raise Unsupported(
                    f"{source}: the step {step.name!r} of the chosen kernel is array "
                    "code, which a bundle has none of; pass another config="
                )

    def _scratch(self, shape: Any) -> View:
        """Memory between kernels, as bytes: its dtype may be one of theirs alone."""
        size = size_bytes(shape.dtype, shape.shape)
        return View(room=Room("workspace", size), dtype="bool", shape=(size,))

    def _launch(
        self,
        kernel: Kernel,
        cubin: Cubin,
        reads: list[View],
        writes: list[View],
        source: str,
        name: str | None = None,
    ) -> None:
        attributes = launch.ready(kernel, cubin, embed=False)
        self._cubins[cubin.key] = cubin
        fields = {
            "image": image_name(cubin),
            "key": cubin.key,
            "entry": attributes["entry"],
            "arch": attributes["arch"],
            "launch": attributes["launch"].tolist(),
            "params": attributes["params"].tolist(),
        }
        if name is not None:
            fields["call"] = name
        self.step("cuda", reads, writes, source, fields)

    def pointwise(
        self,
        fields: dict[str, Any],
        operands: list[View | Spread],
        out: View,
        source: str,
    ) -> None:
        """A step that ``bundle.pointwise`` describes."""
        is_map = "exponent" in fields
        reads = [x.view if isinstance(x, Spread) else x for x in operands]
        if is_map:
            inners = [x.inner if isinstance(x, Spread) else 1 for x in operands]
            fields = {**fields, "inners": inners}
        if not isinstance(self.device, CudaDevice):
            self.step("map" if is_map else "reduce", reads, [out], source, fields)
            return
        if is_map:
            kernel = emit.mapped(
                fields,
                [math.prod(x.shape) for x in reads],
                [x.dtype for x in reads],
                math.prod(out.shape),
                out.dtype,
                self.device,
            )
        else:
            kernel = emit.reduced(fields, reads[0].dtype, out.dtype, self.device)
        self._compiled(kernel, reads, out, source)

    def move(self, move: Move, read: View, out: View, source: str) -> None:
        """A strided copy."""
        itemsize = jax.numpy.dtype(out.dtype).itemsize
        fields = move.fields(itemsize)
        if isinstance(self.device, CudaDevice):
            kernel = emit.moved(fields, itemsize, self.device)
            self._compiled(kernel, [read], out, source)
        else:
            self.step("move", [read], [out], source, fields)

    def _compiled(
        self, kernel: Kernel, reads: list[View], out: View, source: str
    ) -> None:
        settings = current()
        cubin = cubins.get_or_compile(kernel, settings.directory, settings.shared)
        self._launch(kernel, cubin, reads, [out], source)

    def step(
        self,
        kind: str,
        reads: list[View],
        writes: list[View],
        source: str,
        fields: dict[str, Any] | None = None,
    ) -> None:
        """One step; see ``program.Step``."""
        step = Step(
            kind=kind,
            fields=fields or {},
            reads=tuple(reads),
            writes=tuple(writes),
            source=source,
        )
        self._steps.append(step)

    # --- memory ---------------------------------------------------------------------

    def finished(self, inputs: list[View], outputs: list[View]) -> Program:
        """Everything, placed in memory."""
        lives: dict[Room, tuple[int, int]] = {}
        for index, step in enumerate(self._steps):
            for view in (*step.reads, *step.writes):
                if view.room.storage == "workspace":
                    first, _ = lives.get(view.room, (index, index))
                    lives[view.room] = (first, index)
        workspace = placed(list(lives), list(lives.values()))
        constants, end = [], 0
        for _, view in self._constants.values():
            view.room.offset = end
            end = rounded(end + view.room.bytes)
            constants.append(view.room)
        return Program(
            device=self.device,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            constants=tuple(constants),
            steps=tuple(self._steps),
            workspace_bytes=workspace,
            constants_bytes=end,
            cubins=tuple(self._cubins.values()),
            plans=tuple(self._plans),
        )


def value_type(value: Any) -> Any:
    """Shape and dtype of a value, known or not."""
    if isinstance(value, Spread):
        dtype = jax.numpy.dtype(value.view.dtype)
        return jax.ShapeDtypeStruct(value.shape, dtype)
    if isinstance(value, View):
        return jax.ShapeDtypeStruct(value.shape, jax.numpy.dtype(value.dtype))
    return jax.ShapeDtypeStruct(np.shape(value), jax.numpy.result_type(value))
