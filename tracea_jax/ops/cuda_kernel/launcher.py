"""A kernel for arrays of given shapes: its launch for each config, and its reference.

Variants ask a problem's launcher. One travels to other processes as plain values, with
the reference as a serialised program, because functions of a user's script may exist
nowhere else; that form is in ``frozen``. Caller: ``definition``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tracea_jax.emit.kernel import Kernel, Param, Pointer
from tracea_jax.mistakes import shown
from tracea_jax.ops.cuda_kernel import numbers
from tracea_jax.ops.cuda_kernel.given import (
    as_list,
    c_type,
    macro,
    sizes,
    whole,
    with_numbers,
)
from tracea_jax.ops.cuda_kernel.maps import TensorMap
from tracea_jax.problem.cuda_kernel import CudaKernelProblem
from tracea_jax.variants import Buffer, Expression, Launch, Step, Steps
from tracea_jax.variants.steps import zeros

if TYPE_CHECKING:
    from tracea_jax.ops.cuda_kernel.definition import Definition

Struct = jax.ShapeDtypeStruct
Values = tuple[tuple[str, Any], ...]  # of a config

_THREADS = 256  # of a block, unless the user says otherwise


# eq=False: it is a parameter of a primitive, and as good as its own identity.
@dataclasses.dataclass(
    frozen=True, slots=True, kw_only=True, weakref_slot=True, eq=False
)
class Launcher:
    """A kernel called on operands of some shapes.

    Attributes:
      definition: what the user told.
      inputs, outputs: arrays by the names of their parameters; of the outputs, those
        that are not updated inputs.
      given: the numbers of the call.
    """

    definition: Any  # a ``Definition``; ``schema`` reads annotations of problems
    inputs: dict[str, Struct]
    outputs: dict[str, Struct]
    given: numbers.Numbers

    @classmethod
    def of(
        cls, definition: Definition, avals: Sequence[Struct], given: numbers.Numbers
    ) -> Launcher:
        inputs = definition.inputs(avals)
        plain = {n: v for n, v in definition.scalars if not callable(v)}
        told = {**plain, **{name: numbers.value(text) for name, text in given}}
        outputs = definition.outputs(inputs, {**inputs, **told})
        made = cls(definition=definition, inputs=inputs, outputs=outputs, given=given)
        made.call(made.configs[0], "")  # every mistake shows where the op is called
        return made

    # --- what is asked by variants ----------------------------------------------------

    @property
    def space(self) -> tuple[tuple[str, tuple[Any, ...]], ...]:
        return self.definition.space

    @property
    def configs(self) -> tuple[Values, ...]:
        """Every config; the first is what runs untuned."""
        names = [name for name, _ in self.space]
        values = itertools.product(*(choices for _, choices in self.space))
        return tuple(tuple(zip(names, row, strict=True)) for row in values)

    @property
    def has_reference(self) -> bool:
        return self.definition.reference is not None

    @property
    def tolerance(self) -> float | None:
        return self.definition.tolerance

    @property
    def results(self) -> list[Struct]:
        """The updated inputs, then the other results."""
        updated = [self.inputs[name] for name in self.definition.inplace]
        return [*updated, *self.outputs.values()]

    @property
    def problem(self) -> CudaKernelProblem:
        def arrays(structs: Sequence[Struct]) -> Any:
            return tuple((tuple(s.shape), s.dtype.name) for s in structs)

        return CudaKernelProblem(
            kernel=self.definition.name,
            code=self._code(),
            inputs=arrays([*self.inputs.values()]),
            outputs=arrays(self.results),
            scalars=self.given,
            launcher=self,
        )

    def reference(self, *operands: Any) -> list[Any]:
        """The results of the user's function in jnp.

        Raises:
          TypeError: if they are no arrays like those of the kernel.
        """
        assert self.definition.reference is not None
        named = self._numbers(self.configs[0])
        call = with_numbers(self.definition.reference, named)
        found = as_list(call(*operands))
        wanted = [_text(s) for s in self.results]
        if [_text(x) for x in found] != wanted:
            raise TypeError(
                f"reference= of {self.definition.name} returns "
                f"{', '.join(map(_text, found))}; the kernel writes {', '.join(wanted)}"
            )
        return found

    def call(self, config: Values, arch: str) -> Kernel | Steps:
        """The launch of a config.

        Raises:
          TypeError, ValueError: naming what does not fit the kernel's parameters.
        """
        d = self.definition
        names: dict[str, Any] = {**self.inputs, **self.outputs, **dict(config)}
        names |= self._numbers(config)
        scratch = {
            name: d.struct(f"scratch[{name!r}]", spec, names)
            for name, spec in d.scratch
        }
        kernel = self._kernel({**names, **scratch}, config, arch, [*scratch])
        is_plain = not (scratch or d.inplace or d.zeroed)
        return kernel if is_plain else self._steps(kernel, scratch)

    def __reduce__(self) -> Any:
        from tracea_jax.ops.cuda_kernel.frozen import freeze

        return _itself, (freeze(self),)

    # --- how it is made ---------------------------------------------------------------

    def _numbers(self, config: Values) -> dict[str, Any]:
        """The numbers of the call and those that follow from shapes and the config."""
        d = self.definition
        names: dict[str, Any] = {**self.inputs, **self.outputs, **dict(config)}
        names |= {name: numbers.value(text) for name, text in self.given}
        for name, value in d.scalars:
            if name not in dict(self.given) and not callable(value):
                names[name] = value
        for name, value in d.scalars:
            if callable(value) and name not in names:
                names[name] = d.asked(f"scalars[{name!r}]", value, names)
        kept = {p.name for p in d.number_parameters}
        return {name: value for name, value in names.items() if name in kept}

    def _kernel(
        self, names: dict[str, Any], config: Values, arch: str, scratch: list[str]
    ) -> Kernel:
        d = self.definition
        block = sizes(d.asked("block", d.block, names), "block") or (_THREADS, 1, 1)
        grid = sizes(d.asked("grid", d.grid, names), "grid")
        if grid is None:  # one thread for each element of the first result
            threads = block[0] * block[1] * block[2]
            grid = (-(-self.results[0].size // threads), 1, 1)
        fields = {
            n: c_type(v.dtype) if isinstance(v, Struct) else v for n, v in names.items()
        }
        macros = [f"-D{name}={macro(value)}" for name, value in config]
        given = d.asked("options", d.options, names)
        given = [given] if isinstance(given, str) else given
        options = (*macros, *d.toolkit, *given)
        return Kernel(
            entry=_expression(d, fields),
            source=d.source,
            headers=d.headers,
            arch=arch,
            options=options,
            grid=grid,
            block=block,
            cluster=sizes(d.asked("cluster", d.cluster, names), "cluster") or (1, 1, 1),
            smem_bytes=whole(d.asked("shared", d.shared, names), "shared"),
            params=tuple(self._params(names, self._buffers(scratch))),
            place=d.place,
        )

    def _buffers(self, scratch: list[str]) -> dict[str, int]:
        """The number of each array's buffer: those read first, then those written."""
        updated = self.definition.inplace
        if not updated and not scratch and not self.definition.zeroed:
            return {n: i for i, n in enumerate([*self.inputs, *self.outputs])}
        read, written = self._read(scratch), [*updated, *self.outputs, *scratch]
        return {
            **{n: i for i, n in enumerate(read)},
            **{n: len(read) + i for i, n in enumerate(written)},
        }

    def _read(self, scratch: list[str]) -> list[str]:
        """The buffers that a launch among steps reads."""
        zeroed = [*self.outputs, *scratch] if self.definition.zeroed else []
        return [*self.inputs, *zeroed]

    def _params(self, names: dict[str, Any], buffers: dict[str, int]) -> list[Param]:
        d, maps = self.definition, dict(self.definition.maps)
        given = dict(self.given)
        found: list[Param] = []
        for p in d.signature.parameters:
            if p.name in maps:
                described = d.asked(f"maps[{p.name!r}]", maps[p.name], names)
                found.append(_map(described, p.name, names, buffers, d.name))
            elif p.is_pointer:
                found.append(Pointer(operand=buffers[p.name]))
            elif p.name in names:
                text = given.get(p.name) or numbers.text(p.name, names[p.name])
                found.append(numbers.scalar(p, text))
            else:
                raise TypeError(
                    f"{d.name} takes the number {p.name!r}: pass {p.name}=... in the "
                    f"call, or scalars={{{p.name!r}: ...}}"
                )
        return found

    def _steps(self, kernel: Kernel, scratch: dict[str, Struct]) -> Steps:
        """The launch with what goes before it: copies that are updated, zeros."""
        d = self.definition
        fresh = {name: f"{name} updated" for name in d.inplace}
        written = [*fresh.values(), *self.outputs, *scratch]
        steps: list[Step] = [
            Expression(name=f"start of {n}", function=same, reads=(n,), writes=(new,))
            for n, new in fresh.items()
        ]
        if d.zeroed:
            steps += [
                Expression(
                    name=f"zeros of {name}",
                    function=zeros,
                    reads=(),
                    writes=(name,),
                    arguments=(("shape", s.shape), ("dtype", s.dtype.name)),
                )
                for name, s in {**self.outputs, **scratch}.items()
            ]
        reads = [fresh.get(name, name) for name in self._read([*scratch])]
        launch = Launch(
            name=d.name, kernel=kernel, reads=tuple(reads), writes=tuple(written)
        )
        return Steps(
            operands=tuple(self.inputs),
            results=tuple([*fresh.values(), *self.outputs]),
            scratch=tuple(
                Buffer(name=name, shape=tuple(s.shape), dtype=s.dtype.name)
                for name, s in scratch.items()
            ),
            steps=(*steps, launch),
        )

    def _code(self) -> str:
        """Hash of all that decides what runs untuned."""
        call = self.call(self.configs[0], "")
        kernels = call.kernels if isinstance(call, Steps) else (call,)
        texts = [repr(dataclasses.replace(k, place=None)) for k in kernels]
        return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _itself(frozen: Any) -> Any:
    return frozen


def same(module: Any, x: Any) -> Any:
    """The array itself: XLA copies it only if it is needed again."""
    return x


# --- parts of a launch ----------------------------------------------------------------


def _expression(definition: Definition, fields: dict[str, Any]) -> str:
    entry = definition.entry
    if "{" in entry:
        try:
            entry = entry.format_map(fields)
        except KeyError as e:
            raise ValueError(
                f"name={entry!r} asks for {e}; there are {', '.join(fields)}"
            ) from None
    is_plain = entry.isidentifier()
    return f"::{entry}" if is_plain and not definition.signature.is_extern_c else entry


def _map(
    described: Any,
    name: str,
    names: dict[str, Any],
    buffers: dict[str, int],
    kernel: str,
) -> Param:
    if not isinstance(described, TensorMap):
        raise TypeError(
            f"maps[{name!r}] of {kernel} must be a tracea_jax.TensorMap, or a function "
            f"that returns one; not {shown(described)}"
        )
    of = described.of or name
    if of not in buffers:
        raise ValueError(
            f"maps[{name!r}] of {kernel} is of {of!r}; its arrays are "
            f"{', '.join(buffers)}"
        )
    return described.param(names[of], buffers[of])


def _text(array: Any) -> str:
    dtype = jnp.result_type(array)
    return f"{dtype.name}[{','.join(map(str, jnp.shape(array)))}]"
