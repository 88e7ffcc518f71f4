"""The user's definition of a CUDA kernel, and its launch for arrays of some shapes.

    Definition, shapes of the operands, numbers -> Launcher

Values that may depend on a call are given as functions, whose parameters are found by
name: arrays of the kernel by the names of its own parameters, its numbers, the fields
of the space. How such a kernel is called and differentiated is in ``public`` and
``primitive``; what a launch is made of, in ``launcher``.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax

from tracea_jax.emit.signature import Parameter, Signature
from tracea_jax.mistakes import shown
from tracea_jax.ops.cuda_kernel import meaning, numbers
from tracea_jax.ops.cuda_kernel.launcher import Launcher

Struct = jax.ShapeDtypeStruct
Names = dict[str, Any]  # what the functions of a user may ask for, by name

# What ``unsigned char*`` and such may stand for: elements of types that C has not.
_RAW_BITS = {"uint8": 8, "uint16": 16, "float32": 64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """The arguments of ``cuda_kernel``, which describes them; hashable.

    Attributes:
      signature: of the ``__global__`` function.
      entry: its name, or a C++ expression with fields in braces.
      source, headers, place: see ``emit.kernel.Kernel``.
      toolkit: options by which the compiler finds headers of the CUDA toolkit.
      space: (name, values) of each field of the configs; empty without a space.
      others: as in ``cuda_kernel``; mappings as tuples of their items.
    """

    signature: Signature
    entry: str
    source: str
    headers: tuple[tuple[str, str], ...]
    toolkit: tuple[str, ...]
    place: tuple[str, int] | None
    out: Any
    grid: Any
    block: Any
    shared: Any
    cluster: Any
    options: Any
    scalars: tuple[tuple[str, Any], ...]
    scratch: tuple[tuple[str, Any], ...]
    maps: tuple[tuple[str, Any], ...]
    inplace: tuple[str, ...]
    zeroed: bool
    reference: Callable[..., Any] | None
    backward: Callable[..., Any] | None
    vmap: Any
    tolerance: float | None
    sharding: str | None = None
    space: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    @property
    def name(self) -> str:
        return self.signature.name

    @property
    def program_text(self) -> str | None:
        """What stands for this in programs of several devices, if it may be split."""
        if self.sharding is None or not meaning.has_digest(self):
            return None
        return f"{self.name} {meaning.digest(self)}"

    def launcher(self, avals: Sequence[Any], given: numbers.Numbers) -> Launcher:
        """The launcher of a call on operands of these shapes.

        Raises:
          TypeError, ValueError: naming what does not fit the kernel's parameters.
        """
        return Launcher.of(self, [Struct(x.shape, x.dtype) for x in avals], given)

    # --- what the kernel's parameters stand for ---------------------------------------

    @property
    def arrays(self) -> tuple[Parameter, ...]:
        """The parameters that stand for inputs and outputs, in order."""
        scratch = dict(self.scratch)
        own = {name for name, m in self.maps if getattr(m, "of", None) in (None, name)}
        return tuple(
            p
            for p in self.signature.parameters
            if (p.is_pointer and p.name not in scratch) or p.name in own
        )

    @property
    def number_parameters(self) -> tuple[Parameter, ...]:
        maps = dict(self.maps)
        return tuple(
            p
            for p in self.signature.parameters
            if not p.is_pointer and p.name not in maps
        )

    def inputs(self, avals: Sequence[Struct]) -> dict[str, Struct]:
        """The operands by the names of the parameters that take them."""
        if len(avals) > len(self.arrays):
            raise TypeError(
                f"{self.signature} has {len(self.arrays)} arrays, results included; it "
                f"was called with {len(avals)}"
            )
        found = {p.name: x for p, x in zip(self.arrays, avals, strict=False)}
        for name in self.inplace:
            if name not in found:
                raise ValueError(f"inplace={name!r} is no operand of {self.signature}")
            if self.inplace.count(name) > 1:
                raise ValueError(f"inplace= names {name!r} twice")
        for p in self.arrays[: len(avals)]:
            self._check_dtype(p, found[p.name])
            if p.is_const and p.name in self.inplace:
                raise ValueError(
                    f"inplace={p.name!r}: {p.text!r} of {self.name} is const"
                )
        return found

    def outputs(self, inputs: Mapping[str, Struct], names: Names) -> dict[str, Struct]:
        """The results that are not inputs, by the names of their parameters."""
        rest = self.arrays[len(inputs) :]
        out = self.out
        if out is None and (self.inplace or not rest):
            out = ()
        elif out is None:
            if not inputs:
                raise ValueError(f"{self.name} has no operands: out= must be given")
            out = next(iter(inputs.values()))
        specs = self.asked("out", out, names)
        several = cast("Any", specs if isinstance(specs, tuple | list) else (specs,))
        structs = [self._struct("out", spec, names) for spec in several]
        if len(structs) != len(rest):
            raise TypeError(
                f"{self.signature} has {len(self.arrays)} arrays; {len(inputs)} "
                f"operands and {len(structs)} results were given"
            )
        if not structs and not self.inplace:
            raise ValueError(f"{self.name} has no result: out= or inplace= names one")
        found = {p.name: x for p, x in zip(rest, structs, strict=True)}
        for p in rest:
            self._check_dtype(p, found[p.name])
            if p.is_const:
                raise TypeError(
                    f"{p.text!r} of {self.name} is const, and stands for a result: the "
                    f"kernel was called with {len(inputs)} operands"
                )
        return found

    def asked(self, what: str, value: Any, names: Names) -> Any:
        """A value that may be a function of arrays, numbers and the config."""
        if not callable(value):
            return value
        parameters = inspect.signature(value).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return value(**names)
        for p in parameters:
            if p.name not in names and p.default is p.empty:
                raise TypeError(
                    f"{what}= of {self.name} asks for {p.name!r}; there are "
                    f"{', '.join(names)}"
                )
        return value(**{p.name: names[p.name] for p in parameters if p.name in names})

    def struct(self, what: str, value: Any, names: Names) -> Struct:
        """The array that a specification describes."""
        return self._struct(what, self.asked(what, value, names), names)

    def _struct(self, what: str, spec: Any, names: Names) -> Struct:
        if isinstance(spec, str) and isinstance(found := names.get(spec), Struct):
            return found
        if not (hasattr(spec, "shape") and hasattr(spec, "dtype")):
            raise TypeError(
                f"{what}= of {self.name} must be jax.ShapeDtypeStruct, the name of an "
                f"operand, or a function that returns one; not {shown(spec)}"
            )
        given = cast("Any", spec)
        return Struct(tuple(given.shape), given.dtype)

    def _check_dtype(self, parameter: Parameter, array: Struct) -> None:
        said, dtype = parameter.dtype, array.dtype
        if not parameter.is_pointer or said in (None, dtype.name):
            return
        if _RAW_BITS.get(said or "") == dtype.itemsize * 8 and dtype.name != "int64":
            if said != "float32" or dtype.kind == "c":
                return
        raise TypeError(
            f"{parameter.text!r} of {self.name} has elements of {said}; the array is "
            f"{dtype.name}{list(array.shape)}"
        )
