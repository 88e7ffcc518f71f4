"""``cuda_kernel``: CUDA C++ text as an op of JAX.

What the arguments mean for a call is worked out in ``definition``; the primitive that a
call binds is in ``primitive``.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from tracea_jax.emit.signature import signature
from tracea_jax.mistakes import check_kind, flag, shown, similar
from tracea_jax.ops.common.typed import asarray, jit
from tracea_jax.ops.cuda_kernel import numbers as texts
from tracea_jax.ops.cuda_kernel.definition import Definition
from tracea_jax.ops.cuda_kernel.given import (
    as_list,
    frozen,
    sizes,
    whole,
    with_numbers,
)
from tracea_jax.ops.cuda_kernel.primitive import bind, reference
from tracea_jax.ops.cuda_kernel.sharding import parsed
from tracea_jax.ops.cuda_kernel.tangent import differentiable
from tracea_jax.ops.cuda_kernel.text import included, place_of, read
from tracea_jax.variants.cuda_kernel import KernelConfig, check_size

_IMPLEMENTATIONS = (None, "tracea", "cuda_kernel", "xla")
_RESERVED = ("config", "implementation")


def cuda_kernel(
    source: str | os.PathLike[str],
    name: str | None = None,
    *,
    out: Any = None,
    grid: Any = None,
    block: Any = None,
    shared: Any = 0,
    cluster: Any = None,
    scalars: Mapping[str, Any] | None = None,
    scratch: Mapping[str, Any] | None = None,
    maps: Mapping[str, Any] | None = None,
    inplace: str | Sequence[str] = (),
    zeroed: bool = False,
    options: Any = (),
    headers: Mapping[str, str | os.PathLike[str]] | None = None,
    reference: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    vmap: str | Callable[..., Any] = "sequential",
    tolerance: float | None = None,
    sharding: str | None = None,
) -> CudaKernel:
    """CUDA C++ as an op of JAX, under jit, vmap, grad, scan, shard_map and export.

        twice = tracea.cuda_kernel(source, scalars={"n": lambda x: x.size})
        y = twice(x)

    The kernel's parameters are read from the source. Its arrays (pointers) are the
    operands of a call, in order, then the results; numbers are parameters by value.
    Arrays are dense and row-major. Nothing is compiled before a program that calls the
    op is compiled for a GPU; the compiled kernel is kept in the cache.

    Whatever may differ from call to call may be a function: of ``out``, ``grid``,
    ``block``, ``shared``, ``cluster``, ``options`` and the values of ``scalars``,
    ``scratch`` and ``maps``. It asks for what it needs by the names of its own
    parameters: arrays as ``jax.ShapeDtypeStruct`` and numbers, by the names that the
    kernel has for them, and fields of the config.

    Args:
      source: CUDA C++, or a path to it; it may include the headers of this package.
      name: of the ``__global__`` function, if there are several; of a template an
        instance, "softmax<float, 128>". In braces, names of arrays stand for the C
        type of their elements, others for values: "softmax<{x}, {BLOCK}>".
      out: the results: ``jax.ShapeDtypeStruct``, the name of an operand, or a tuple of
        these; by default one result like the first operand.
      grid: blocks, one to three numbers; by default one thread for each element of the
        first result.
      block: threads of a block, one to three numbers; 256 by default.
      shared: bytes of dynamic shared memory.
      cluster: blocks of a cluster, one to three numbers.
      scalars: numbers by parameter; those that it does not have are keywords of a call.
      scratch: arrays that exist during the call only, by parameter.
      maps: tensor maps (``tracea_jax.TensorMap``) by parameter.
      inplace: operands that the kernel updates. The updated arrays are the first
        results; an operand that is needed again is copied.
      zeroed: whether results and scratch are zero when the kernel begins, for kernels
        that add to them.
      options: of the compiler, a sequence of str; the fields of the config are macros.
      headers: text or path of each header that the source includes beside those of the
        package, by the name in the ``#include``.
      reference: ``(*operands, **numbers)`` -> the same results in jnp. Of the numbers
        it gets those for which it has parameters after a ``*``, as in
        ``lambda x, y, *, a: a * x + y``. It runs where the kernel cannot, and is what a
        tuning compares with.
      backward: ``(*operands, *results, *cotangents)`` -> the cotangent of each
        operand, None for none; jnp or another such op. Without it, the derivative is
        that of the reference.
      vmap: "sequential", one launch after another; "leading", one launch, as the kernel
        takes operands with more leading dimensions; or a rule as of
        ``jax.custom_batching.custom_vmap``: ``(size, is_mapped, *operands)`` ->
        (results, whether each is mapped), mapped dimensions first.
      tolerance: of a tuning: the largest error of a result, relative to its reference
        plus its root mean square; by default 64 units of roundoff of its dtype.
      sharding: which dimensions the compiler may split over devices, as in
        "i j, j -> i j": operands, then results, "_" for a dimension that is never
        split. Called on parts of the named dimensions, the kernel must make these
        parts of the results; ``out`` and numbers follow from the operands. Without it
        arrays that the compiler splits are the reference's.

    Returns:
      A function of the operands, with numbers as keywords; ``config=`` chooses one of
      its ``space``, ``implementation="xla"`` the reference.

    Raises:
      ValueError: on arguments that do not fit the kernel's parameters.
      TypeError: on an argument of another type, by its name.
      FileNotFoundError: if a path leads nowhere.
    """
    _check_kinds(
        name=name,
        out=out,
        scalars=scalars,
        scratch=scratch,
        maps=maps,
        inplace=inplace,
        options=options,
        headers=headers,
        reference=reference,
        backward=backward,
        vmap=vmap,
        tolerance=tolerance,
        sharding=sharding,
    )
    if sharding is not None:
        parsed(sharding)
    _check_launch(grid=grid, block=block, cluster=cluster, shared=shared)
    text, place = read(source)
    base = None if name is None else name.partition("<")[0].strip().split("::")[-1]
    try:
        found = signature(text, base)
    except ValueError as e:
        given = "" if name is None else f" {name=}"
        raise ValueError(f"cuda_kernel{given}: {e}") from None
    parameters = {p.name for p in found.parameters}
    for what, named in (("scalars", scalars), ("scratch", scratch), ("maps", maps)):
        for key in named or {}:
            if key not in parameters:
                raise ValueError(
                    f"{what}={{{key!r}: ...}}: {found} has no such parameter"
                    + similar(key, parameters)
                )
    if isinstance(vmap, str) and vmap not in ("sequential", "leading"):
        raise ValueError(
            f"vmap={shown(vmap)} must be 'sequential', 'leading' or a function"
        )
    for key in _RESERVED:
        if any(p.name == key and not p.is_pointer for p in found.parameters):
            raise ValueError(f"{key!r} is a keyword of the call; rename the parameter")
    own, others = included(text, headers or {})
    return CudaKernel(
        definition=Definition(
            signature=found,
            entry=name or found.name,
            source=text,
            headers=own,
            toolkit=others,
            place=place or place_of(text),
            out=frozen(out),
            grid=frozen(grid),
            block=frozen(block),
            shared=shared,
            cluster=frozen(cluster),
            options=frozen(options),
            scalars=tuple((scalars or {}).items()),
            scratch=tuple((scratch or {}).items()),
            maps=tuple((maps or {}).items()),
            inplace=(inplace,) if isinstance(inplace, str) else tuple(inplace),
            zeroed=flag("zeroed", zeroed),
            reference=reference,
            backward=backward,
            vmap=vmap,
            tolerance=tolerance,
            sharding=sharding,
        )
    )


_LIST: Any = Sequence  # kinds, as ``isinstance`` takes them
_DICT: Any = Mapping
_CALL: Any = Callable
_NAMED: tuple[Any, str] = (_DICT | None, "a dict by name, or None")
_FUNCTION: tuple[Any, str] = (_CALL | None, "a function or None")
_KINDS: dict[str, tuple[Any, str]] = {
    "name": (str | None, "a str or None"),
    "scalars": _NAMED,
    "scratch": _NAMED,
    "maps": _NAMED,
    "inplace": (_LIST, "a name or a sequence of names"),
    "options": (_LIST | _CALL, "a sequence of str, or a function"),
    "headers": _NAMED,
    "reference": _FUNCTION,
    "backward": _FUNCTION,
    "vmap": (str | _CALL, "'sequential', 'leading' or a function"),
    "tolerance": (Real | None, "a number or None"),
    "sharding": (str | None, "a str or None"),
}


def _check_kinds(*, out: Any, **given: Any) -> None:
    """Refuses arguments of other types, by their names."""
    for name, (kinds, wanted) in _KINDS.items():
        check_kind(name, given[name], kinds, wanted)
    for name in ("inplace", "options"):
        several = () if callable(given[name]) else given[name]
        for one in several:
            check_kind(name, one, str, "a sequence of str")
    headers: Mapping[Any, Any] = given["headers"] or {}
    for name, text in headers.items():
        check_kind("headers", name, str, "a dict with names of files")
        check_kind(f"headers[{name!r}]", text, str | os.PathLike, "text or a path")
    if (tolerance := given["tolerance"]) is not None and not tolerance > 0:
        raise ValueError(f"{tolerance=} must be positive")
    for one in as_list(out):
        is_array = hasattr(one, "shape") and hasattr(one, "dtype")
        if not (one is None or is_array or callable(one)):
            check_kind(
                "out",
                one,
                str,
                "a ShapeDtypeStruct, an operand's name, or a tuple of these",
            )


def _check_launch(*, shared: Any, **shape: Any) -> None:
    """The same of what describes a launch, unless functions compute it."""
    for name, value in shape.items():
        if not callable(value):
            sizes(value, name)
    if not callable(shared):
        whole(shared, "shared")


@dataclasses.dataclass(
    frozen=True, slots=True, kw_only=True, repr=False, weakref_slot=True
)
class CudaKernel:
    """A CUDA kernel as a function of arrays; ``cuda_kernel`` makes it.

    Attributes:
      definition: what ``cuda_kernel`` was told.
    """

    definition: Definition

    def __call__(
        self,
        *operands: Any,
        config: Mapping[str, Any] | None = None,
        implementation: str | None = None,
        **numbers: Any,
    ) -> Any:
        """The result of the kernel, or a tuple of several.

        Args:
          *operands: arrays, in the order of the kernel's parameters.
          config: a value for each field of the space.
          implementation: None, the best known; "tracea", the kernel; "xla", the
            reference.
          **numbers: by parameter, in place of those of ``scalars``.

        Raises:
          TypeError: on arrays and numbers that the kernel's parameters do not take.
          ValueError: on a config that is not of the space, and on wrong sizes.
          tracea_jax.Unsupported: where it cannot run and there is no reference.
          RuntimeError: with the compiler's words, when the program is compiled.
        """
        d = self.definition
        known = {p.name for p in d.number_parameters}
        for name in numbers:
            if name not in known:
                raise TypeError(
                    f"{d.signature} takes no number {name!r}{similar(name, known)}"
                )
        if implementation not in _IMPLEMENTATIONS:
            raise ValueError(
                f"implementation={shown(implementation)} must be None, "
                f"{', '.join(map(str, _IMPLEMENTATIONS[1:]))}"
            )
        given = tuple(sorted((n, texts.text(n, v)) for n, v in numbers.items()))
        params = {
            "numbers": given,
            "implementation": implementation,
            "config": _config(config, d),
        }
        arrays = [asarray(x) for x in operands]
        if d.backward is None:
            results = bind(*arrays, kernel=d, **params)
        else:
            results = _with_backward(d, **params)(*arrays)
        return results[0] if len(results) == 1 else tuple(results)

    def space(
        self, fields: Mapping[str, Sequence[Any]] | None = None, **more: Sequence[Any]
    ) -> CudaKernel:
        """The same op with choices that ``tracea.tune`` decides between.

            softmax = softmax.space({"BLOCK": (128, 256, 512)})
            tracea.tune(softmax, x)

        Each field is a macro of its name when the source is compiled, and functions of
        ``cuda_kernel``'s arguments may ask for it. Untuned, the first values run.

        Raises:
          ValueError: on a field without values, a name that is none, or more than 4096
            combinations.
        """
        check_kind("fields", fields, _DICT | None, "a dict by name, or None")
        fields = {**(fields or {}), **more}
        for name, values in fields.items():
            is_list = isinstance(values, _LIST) and not isinstance(values, str)
            if not (str(name).isidentifier() and is_list and values):
                raise ValueError(
                    f"space: {name}={shown(values)} must be a C name with its values"
                )
            for value in values:
                if not isinstance(value, bool | int | float | str):
                    raise ValueError(
                        f"space: {name} has the value {shown(value)}; values are "
                        "numbers and texts"
                    )
        made = tuple((name, tuple(values)) for name, values in fields.items())
        check_size(made)
        return CudaKernel(definition=dataclasses.replace(self.definition, space=made))

    @property
    def __name__(self) -> str:
        return self.definition.name

    def __repr__(self) -> str:
        d = self.definition
        fields = ", ".join(f"{n}={list(v)}" for n, v in d.space)
        return f"<cuda_kernel {d.signature}{f'; space {fields}' if fields else ''}>"


def _config(config: Mapping[str, Any] | None, definition: Definition) -> Any:
    """The config as a primitive's parameter: pairs in the order of the space."""
    if config is None:
        return None
    names = [name for name, _ in definition.space]
    if unknown := [name for name in config if name not in names]:
        raise ValueError(
            f"config has {unknown[0]!r}; the fields of {definition.name} are "
            f"{', '.join(names) or 'none'}{similar(unknown[0], names)}"
        )
    return KernelConfig(values=tuple((n, config[n]) for n in names if n in config))


@functools.lru_cache(maxsize=256)
def _with_backward(definition: Definition, **params: Any) -> Callable[..., Any]:
    """The kernel with the user's derivative."""
    backward = definition.backward
    assert backward is not None
    named = {name: texts.value(text) for name, text in params["numbers"]}
    backward = with_numbers(backward, named)

    def call(*operands: Any) -> tuple[Any, ...]:
        return tuple(bind(*operands, kernel=definition, **params))

    made = differentiable(
        call,
        definition.name,
        backward,
        functools.partial(reference, kernel=definition, **params)
        if definition.reference is not None
        else None,
    )
    # Outside of ``jit``, JAX would trace a function with a rule again in every call.
    return jit(made, inline=True)
