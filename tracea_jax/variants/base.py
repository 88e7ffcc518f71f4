"""The protocol of variants: ways to compute an op that say when they cannot.

A variant is pure knowledge. It neither compiles nor runs anything: it names the reason
it does not apply, the configs worth measuring, the one to use unmeasured, and the call
that a config stands for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

from tracea_jax.device import Device
from tracea_jax.emit.kernel import Kernel
from tracea_jax.mistakes import shown, similar
from tracea_jax.problem import Problem
from tracea_jax.variants.space import Columns, Space
from tracea_jax.variants.steps import Steps

Config = Any  # a frozen dataclass of free choices, the variant's own type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuCall:
    """A prebuilt CPU handler and the attributes it is called with."""

    target: str
    attributes: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inline:
    """Equations in place of a kernel: XLA compiles them and fuses what it can.

    The op registers a function in JAX for each rule; what it traces to takes the place
    of the op's one equation.

    Attributes:
      rule: whose equations run. "xla" stands for the user's: the op's steps as people
        write them in jnp, each rounded to the dtype that it has there. Any other rule
        stands for the equations of the variant that names it: products of ours, which
        are planned on their own, or calls of a library.
      params: (name, value) of parameters that the function gets instead of the op's.
    """

    rule: str = "xla"
    params: tuple[tuple[str, Any], ...] = ()


Call = Kernel | Steps | CpuCall | Inline


def kernels_in(call: Call) -> tuple[Kernel, ...]:
    """The kernels that a call has to compile, in the order in which they run."""
    if isinstance(call, Steps):
        return call.kernels
    return (call,) if isinstance(call, Kernel) else ()


class Variant(Protocol):
    """One implementation of an op; ``problem`` is that op's."""

    @property
    def name(self) -> str:
        """As users write it in ``implementation=``."""
        ...

    @property
    def config_type(self) -> type:
        """The frozen dataclass of this variant's free choices."""
        ...

    @property
    def sources(self) -> tuple[str, ...]:
        """Sources of its kernels: "cuda/<header>" or "cpu/<handler>".

        All that these include is meant too; see ``tuning.store.code``.
        """
        ...

    def why_not(self, problem: Any, device: Device) -> str | None:
        """The sentence why this variant cannot serve the problem, or None."""
        ...

    def check(self, problem: Any, config: Config, device: Device) -> None:
        """Raises ValueError if the config is not legal for this problem."""
        ...

    def space(self, problem: Any, device: Device) -> Space:
        """The legal configs worth measuring; the heuristic's is one of them."""
        ...

    def heuristic(self, problem: Any, device: Device) -> Config:
        """The config to use when nothing was measured."""
        ...

    def expects_to_win(self, problem: Any, device: Device) -> bool:
        """Returns whether the heuristic's config is expected to beat XLA, unmeasured.

        Files that variants name as their reason are in ``benchmarks/results``, in the
        folder of the device.
        """
        ...

    def call(self, problem: Any, config: Config, device: Device) -> Call:
        """The call that the config stands for."""
        ...


@runtime_checkable
class Ranking(Protocol):
    """A variant that ranks its configs by a model of their times."""

    def likely(self, problem: Any, device: Device, count: int) -> tuple[Config, ...]:
        """So many legal configs, the likely fastest first."""
        ...


@runtime_checkable
class Describing(Protocol):
    """A variant that knows more of its configs than their fields."""

    def described(self, problem: Any, columns: Columns, device: Device) -> Space:
        """The space of these legal configs, with all that ``space`` says of them."""
        ...


@runtime_checkable
class Doubting(Protocol):
    """A variant that says why XLA runs unmeasured where it could."""

    def doubt(self, problem: Any, device: Device) -> str | None:
        """A sentence; None where it has no reason of its own."""
        ...


@runtime_checkable
class Insisting(Protocol):
    """A variant of a kernel that users wrote.

    That it cannot be compiled is an error they must see; no reason to run XLA.
    """

    insists: bool


@runtime_checkable
class Varying(Protocol):
    """A variant with configs whose results may have other bits from run to run.

    All other variants give equal bits for equal operands on one device: their sums have
    an order that shapes and configs alone decide. The default config does too, unless
    no config of the variant does.
    """

    def may_vary(self, problem: Any, config: Any, device: Device) -> str | None:
        """The sentence why bits may differ with this config, or None."""
        ...


def may_vary(
    variant: Variant, problem: Any, config: Config, device: Device
) -> str | None:
    """Why the bits of a choice's results may differ from run to run, or None.

    XLA's are those of the plain program, and are never said to vary.
    """
    if not isinstance(variant, Varying):
        return None
    return variant.may_vary(problem, config, device)


def is_legal(variant: Variant, problem: Any, config: Config, device: Device) -> bool:
    """Whether a config is legal for a problem that the variant can serve."""
    try:
        variant.check(problem, config, device)
    except ValueError:
        return False
    return True


def described(
    variant: Variant, problem: Any, configs: Sequence[Config], device: Device
) -> Space:
    """The space of these legal configs of a variant, in this order.

    Features and times are those that the configs have in the whole space.
    """
    known = Space.of(*configs)
    if not isinstance(variant, Describing):
        return known
    return variant.described(problem, known.columns, device)


@runtime_checkable
class Composed(Protocol):
    """A variant that runs problems of another op, which are planned on their own."""

    @property
    def implementation(self) -> str | None:
        """The variant that they are limited to, as in ``implementation=``."""
        ...

    def parts(self, problem: Any) -> tuple[Problem, ...]:
        """They, in the order in which they run; none if it cannot serve the problem."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class XlaConfig:
    """XLA takes no choices of ours."""

    def __str__(self) -> str:
        return "-"


@dataclasses.dataclass(frozen=True, slots=True)
class Xla:
    """XLA's own compilation of the reference: always possible, always a candidate."""

    name: str = "xla"
    config_type: type = XlaConfig
    sources: tuple[str, ...] = ()

    def why_not(self, problem: Problem, device: Device) -> str | None:
        return None

    def check(self, problem: Problem, config: Config, device: Device) -> None:
        return None

    def space(self, problem: Problem, device: Device) -> Space:
        return Space.of(XlaConfig())

    def heuristic(self, problem: Problem, device: Device) -> Config:
        return XlaConfig()

    def expects_to_win(self, problem: Problem, device: Device) -> bool:
        return False

    def call(self, problem: Problem, config: Config, device: Device) -> Call:
        return Inline()


XLA = Xla()


def config_from_json(variant: Variant, data: dict[str, Any] | Config) -> Config:
    """A config from plain data; a config of the right type passes through.

    Raises:
      ValueError: on a field the variant does not have or one it misses.
    """
    if isinstance(data, variant.config_type):
        return data
    names = [f.name for f in dataclasses.fields(variant.config_type)]
    if not isinstance(data, dict):
        is_config = dataclasses.is_dataclass(data) and not isinstance(data, type)
        given = repr(data) if is_config else shown(data)
        raise ValueError(
            f"config={given} does not fit {variant.name}: pass "
            f"{variant.config_type.__name__} or a dict of "
            + (", ".join(names) or "nothing")
        )
    fields = cast("dict[str, Any]", data)
    ours = f"its fields are {', '.join(names) or 'none'}"
    if unknown := sorted(set(fields) - set(names), key=str):
        raise ValueError(
            f"{variant.name} has no config field {', '.join(map(str, unknown))}; "
            f"{ours}{similar(unknown[0], names)}"
        )
    if missing := [name for name in _required(variant) if name not in fields]:
        raise ValueError(
            f"config={data!r} does not fit {variant.name}: it lacks "
            f"{', '.join(missing)}; {ours}"
        )
    try:
        return variant.config_type(**fields)
    except TypeError as e:  # of a value that its own checks cannot compare
        raise ValueError(f"config={data!r} does not fit {variant.name}: {e}") from e


def _required(variant: Variant) -> list[str]:
    """The fields of the variant's config that have no default."""
    fields = dataclasses.fields(variant.config_type)
    none = dataclasses.MISSING
    return [f.name for f in fields if f.default is none and f.default_factory is none]
