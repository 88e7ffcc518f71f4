"""A call as a sequence of steps over named buffers: kernels, and array code between.

    Steps(
        operands=("lhs", "rhs"),
        results=("y",),
        scratch=(Buffer(name="parts", shape=(4, 64, 64), dtype="float32"),),
        steps=(
            Launch(name="products", kernel=kernel, reads=("lhs", "rhs"),
                   writes=("parts",)),
            Expression(name="sum", function=sum_of_parts, reads=("parts",),
                       writes=("y",)),
        ),
    )

Variants describe their calls with these values and ``emission`` turns them into a
program; nothing here runs, and nothing here knows JAX. A split contraction, several
passes over scratch and kernels of users differ only in their steps.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, cast

from tracea_jax.emit.kernel import Kernel, operand_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """An array that lives only between the steps of one call."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One launch of a kernel.

    A buffer that is both read and written is updated in place: the kernel finds the
    old content in the memory of the new one, under either number.

    Attributes:
      name: of the step, unique in its call.
      kernel: its operands are numbered as the buffers read, then those written.
      reads, writes: names of buffers.
    """

    name: str
    kernel: Kernel
    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @property
    def updates(self) -> dict[int, int]:
        """Number of each buffer read, by its number among those written, if both."""
        both = [name for name in self.writes if name in self.reads]
        return {self.reads.index(name): self.writes.index(name) for name in both}

    def __str__(self) -> str:
        return _equation(self, self.kernel.entry)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Expression:
    """Array code that XLA compiles, and fuses with what surrounds the call.

    Attributes:
      name: of the step, unique in its call.
      function: (array module, arrays read, **arguments) -> the array written, or a
        tuple of several. Pure; the module is ``jax.numpy``, or numpy in a test. Two
        steps are equal only if it is the same function: define it in a module.
      reads, writes: names of buffers.
      arguments: (name, value) of each keyword argument.
    """

    name: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    arguments: tuple[tuple[str, Any], ...] = ()

    def __call__(self, module: Any, *arrays: Any) -> tuple[Any, ...]:
        """The arrays written."""
        written = self.function(module, *arrays, **dict(self.arguments))
        if isinstance(written, tuple):
            return cast("tuple[Any, ...]", written)
        return (written,)

    def __str__(self) -> str:
        arguments = [f"{name}={value}" for name, value in self.arguments]
        return _equation(self, self.function.__name__, *arguments)


Step = Launch | Expression


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The call of a config that takes more than one kernel.

    Attributes:
      operands, results: names, in the order of the op's primitive, which also decides
        their shapes and dtypes.
      scratch: the other buffers.
      steps: in the order in which they run.

    Raises:
      ValueError: naming the step and the buffer, if a step reads what no earlier step
        wrote, writes what it must not, or a result or a scratch buffer is left out.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    scratch: tuple[Buffer, ...] = ()
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        for mistake in _mistakes(self):
            raise ValueError(f"{mistake}; the steps are\n{self}")

    @property
    def kernels(self) -> tuple[Kernel, ...]:
        """Each kernel once, in the order in which they run."""
        launches = (step for step in self.steps if isinstance(step, Launch))
        return tuple(dict.fromkeys(step.kernel for step in launches))

    def __str__(self) -> str:
        header = f"({', '.join(self.operands)}) -> {', '.join(self.results)}"
        scratch = [f"  scratch {buffer}" for buffer in self.scratch]
        return "\n".join([header, *scratch, *(f"  {step}" for step in self.steps)])


def _equation(step: Step, of: str, *arguments: str) -> str:
    read = ", ".join((*step.reads, *arguments))
    return f"{step.name}: {', '.join(step.writes)} = {of}({read})"


def _mistakes(call: Steps) -> Iterator[str]:
    """Mistakes in a call, the first one first."""
    scratch = [buffer.name for buffer in call.scratch]
    buffers = [*call.operands, *call.results, *scratch]
    for kind, names in (("buffer", buffers), ("step", [s.name for s in call.steps])):
        for name, count in collections.Counter(names).items():
            if count > 1:
                yield f"{count} {kind}s have the name {name!r}"
    written = set(call.operands)
    for step in call.steps:
        yield from _mistakes_of_step(step, call, buffers, written)
        written.update(step.writes)
    for result in call.results:
        if result not in written:
            yield f"no step writes the result {result!r}"
    used = {name for step in call.steps for name in (*step.reads, *step.writes)}
    for name in scratch:
        if name not in used:
            yield f"no step uses the scratch buffer {name!r}"


def _mistakes_of_step(
    step: Step, call: Steps, buffers: list[str], written: set[str]
) -> Iterator[str]:
    for name in (*step.reads, *step.writes):
        if name not in buffers:
            known = ", ".join(buffers)
            yield f"step {step.name!r} names the buffer {name!r}; there are {known}"
    for name in step.reads:
        if name not in written:
            yield f"step {step.name!r} reads {name!r}, which no earlier step writes"
    for name in step.writes:
        if name in call.operands:
            yield f"step {step.name!r} writes {name!r}, an operand"
        elif name in written and name not in step.reads:
            yield (
                f"step {step.name!r} writes {name!r} again; a step that updates a "
                "buffer in place also reads it"
            )
    if not step.writes or len(set(step.writes)) < len(step.writes):
        yield f"step {step.name!r} must write one buffer or more, each once"
    if isinstance(step, Launch):
        count = len(step.reads) + len(step.writes)
        highest = max(map(operand_of, step.kernel.params), default=-1)
        if highest >= count:
            yield (
                f"step {step.name!r} names {count} buffers, "
                f"and its kernel uses operand {highest}"
            )


# --- array code that several variants use ---------------------------------------------


def sum_of_parts(module: Any, parts: Any) -> Any:
    """The sum over the first dimension, in which a kernel left partial sums."""
    return module.sum(parts, 0)


def converted(module: Any, x: Any, *, dtype: str) -> Any:
    """The array rounded to another dtype."""
    return x.astype(dtype)


def zeros(module: Any, *, shape: tuple[int, ...], dtype: str) -> Any:
    """Zeros, for a kernel that only adds to a buffer."""
    return module.zeros(shape, dtype)
