"""The catalogue: one record an op, which everything that is not about one op reads.

A record says what an op asks (its problem), what may answer (its variants), and how it
is called, measured, recognised, and written on the command line. Nothing here knows an
op: the built-in records are made in ``ops/<op>/op.py``, and a program adds its own with
``register``, in the module that defines the problem's class, so that each process that
reads such a problem knows the op.

This module is below everything that a record is made of, so the fields of a record are
typed loosely. The first question for an op loads the built-in ones (``BUILT_IN``). That
is the only import in the package that goes upward, and it is made by name.

Asked by problem, variants, options, knowledge, tuning, rewrite, explain, graph, doctor
and the command line.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Generator, Mapping
from typing import Any

BUILT_IN = "tracea_jax.builtin"  # registers the ops of this package


def never(**_: Any) -> bool:
    return False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A primitive of JAX for which a plan chooses what runs.

    Attributes:
      op: the name of the op that it belongs to.
      primitive: with several results; ``implementation`` and ``config`` are parameters.
      problem_of: (abstract operands, **params) -> problem, for static shapes.
      reference: (*operands, **params) -> results in jnp: what it means.
      rules: functions like the reference, by ``variants.Inline.rule``.
      sharding: (abstract operands, **params) -> ``ops.common.sharding.Rule``: how the
        op is split where the compiler partitions arrays by itself; None if XLA has to
        serve it there.
      flattened: (*operands, **params) -> results by the primitive on arrays whose
        dimensions of a kind are merged, as kernels take them; None if all are so.
      is_one_operation: (**params) -> whether XLA's variant of an equation is one
        operation of lax, which programs contain in its place.
    """

    op: str
    primitive: Any
    problem_of: Callable[..., Any]
    reference: Callable[..., Any]
    rules: Mapping[str, Callable[..., Any]] = dataclasses.field(
        default_factory=dict[str, Callable[..., Any]], compare=False
    )
    sharding: Callable[..., Any] | None = dataclasses.field(default=None, compare=False)
    flattened: Callable[..., Any] | None = dataclasses.field(
        default=None, compare=False
    )
    is_one_operation: Callable[..., bool] = dataclasses.field(
        default=never, compare=False
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a problem on the command line.

    Attributes:
      flag: as in ``argparse``: "m", or "--kv-heads".
      how: the other arguments of ``add_argument``. Its ``dest`` is the name of what
        ``Op.build`` gets.
    """

    flag: str
    how: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Everything that the package has to know about one op.

    Attributes:
      name: as users write it, in ``tracea tune matmul`` and ``ops="matmul"``.
      summary: a line for the command's help.
      problem: the subclass of ``problem.Problem`` whose ``op`` is the name.
      variants: our kernels, those that are preferred first, and ``variants.XLA`` last.
      primitives: what programs hold for its calls, those of derivatives included.
      bench: (problem, device) -> ``measure.Bench``: how choices are measured.
      build: plain values -> problem: ``Graph.add_<name>``, and the command line.
      arguments: of ``build``, on the command line. Each op takes ``--dtype`` as well.
      rules: of ``rewrite.Rule``: how ``transform`` finds the op in a program.
      is_called: whether ``ops`` has a function of its name. Of others, such as whole
        programs and kernels of users, the command line and graphs know nothing; ``ops``
        and ``names`` leave them out.
    """

    name: str
    summary: str
    problem: type[Any]
    variants: tuple[Any, ...]
    primitives: tuple[Planned, ...]
    bench: Callable[[Any, Any], Any]
    build: Callable[..., Any]
    arguments: tuple[Argument, ...]
    rules: tuple[Any, ...] = ()
    is_called: bool = True

    def __post_init__(self) -> None:
        if self.problem.op != self.name:
            raise ValueError(
                f"{self.problem.__name__}.op is {self.problem.op!r}; it must be "
                f"{self.name!r}, the name of the op"
            )

    def __str__(self) -> str:
        names = ", ".join(variant.name for variant in self.variants)
        return f"{self.name}: {self.summary}; variants {names}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """An op that is made of calls of others: there is nothing to plan or to measure.

    Attributes:
      name: as users write it, in ``ops="linear_cross_entropy"``.
      primitive: what programs hold for its calls, which has the calls inside.
      how: what it makes of them, in a word, where ops name a variant.
      reason: (abstract operands, **params) -> why so, as a sentence.
      rules: as of ``Op``.
    """

    name: str
    primitive: Any
    how: str
    reason: Callable[..., str]
    rules: tuple[Any, ...] = ()


_ops: dict[str, Op | Composite] = {}


def register(op: Op | Composite) -> None:
    """Makes an op known to this process.

    Raises:
      ValueError: if another op has its name.
    """
    _load()
    if _ops.setdefault(op.name, op) is not op:
        raise ValueError(f"there is an op {op.name!r} already")


@contextlib.contextmanager
def using(op: Op) -> Generator[Op, None, None]:
    """Knows the op inside a ``with`` block only, in place of any other of its name."""
    _load()
    before = _ops.get(op.name)
    _ops[op.name] = op
    try:
        yield op
    finally:
        if before is None:
            del _ops[op.name]
        else:
            _ops[op.name] = before


def get(name: Any) -> Op:
    """The op of this name.

    Raises:
      ValueError: naming the ops there are.
    """
    _load()
    op = _ops.get(name) if isinstance(name, str) else None
    if not isinstance(op, Op):
        raise ValueError(f"op {name!r} must be one of {', '.join(names())}")
    return op


def registered() -> tuple[Op | Composite, ...]:
    """Everything, in the order of registration."""
    _load()
    return tuple(_ops.values())


def ops() -> tuple[Op, ...]:
    """Every op that programs call and that is planned, in the order of registration."""
    return tuple(op for op in registered() if isinstance(op, Op) and op.is_called)


def names() -> tuple[str, ...]:
    """The name of every op that programs call."""
    return tuple(op.name for op in ops())


def composites() -> tuple[Composite, ...]:
    """Every composite, in the order in which they were registered."""
    return tuple(op for op in registered() if isinstance(op, Composite))


def recorded() -> tuple[str, ...]:
    """The name of everything that there may be records of."""
    return tuple(op.name for op in registered() if isinstance(op, Op))


def in_programs() -> tuple[Op, ...]:
    """Every op that programs hold calls of: ``ops``, and kernels of users."""
    return tuple(op for op in registered() if isinstance(op, Op) and op.primitives)


def planned() -> dict[Any, Planned]:
    """The ``Planned`` record of each primitive."""
    return {p.primitive: p for op in in_programs() for p in op.primitives}


@functools.cache
def _load() -> None:
    """Registers the built-in ops; does nothing while they are being registered."""
    importlib.import_module(BUILT_IN)
