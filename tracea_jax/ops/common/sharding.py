"""Sharding rules: which dimensions of an op may be split over a mesh, and how.

    Rule    the dimensions of operands and results as named factors, one rule an op
    decide  (rule, shardings) -> the axes that each factor is split over on every device
    text    a rule as Shardy's attribute, by which it propagates shardings

A factor stands for one loop of the op. Splitting it over mesh axes splits every operand
and result that has it; a result without it is a partial sum, which is added up over
these axes. Where axes could split several factors, the one that moves the fewest bytes
is taken. No private JAX is here; ``partition`` applies decisions.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp

from tracea_jax.ops.common.typed import lax

Dim = tuple[str, ...]  # factors of one dimension, the slowest first
Dims = tuple[Dim, ...]  # of one array; a dimension without factors is never split
Axes = tuple[str, ...]  # mesh axes, the slowest first
Spec = tuple[Axes, ...]  # of each dimension of one array
Mesh = Mapping[str, int]  # sizes of axes, the slowest first


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How an op may be split.

    Attributes:
      operands, results: the factors of their dimensions.
      sizes: of the factors.
      whole: factors that kernels cannot split, each with the reason; None where XLA
        gathers what is split along them too.
      late: operands that are read once the sum of the first result is complete.
      is_joint: whether all results are computed from that sum.
      local: (operands, device) -> results of one device, partial sums added; None for
        the primitive on local operands and sums after it.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: Mapping[str, str | None] = dataclasses.field(
        default_factory=dict[str, str | None]
    )
    late: tuple[int, ...] = ()
    is_joint: bool = False
    local: Callable[[Sequence[jax.Array], Device], list[jax.Array]] | None = None

    @property
    def summed(self) -> frozenset[str]:
        """The factors that no result has."""
        kept = {f for dims in self.results for dim in dims for f in dim}
        return frozenset(self.sizes) - kept


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The place of one device's program among the others.

    Attributes:
      decision: how the op is split.
      rule: what it was decided for.
    """

    decision: Decision
    rule: Rule

    @property
    def over(self) -> Mapping[str, Axes]:
        """The axes that each factor is split over."""
        return self.decision.split

    def splits(self, factors: Iterable[str]) -> bool:
        """Whether any of the factors is split."""
        return any(self.over[f] for f in factors)

    def part(self, dim: Dim) -> int:
        """The size of a dimension on one device."""
        mesh = self.decision.mesh
        count = math.prod(mesh[a] for f in dim for a in self.over[f])
        return math.prod(self.rule.sizes[f] for f in dim) // count

    def complete(self, partial: jax.Array, result: int = 0) -> jax.Array:
        """The device's part of a result, of which it has a partial sum."""
        summed = self.decision.summed(self.rule, result)
        dims, scattered = self.rule.results[result], self.decision.scattered[result]
        for place, dim in enumerate(dims):
            if axes := tuple(a for f in dim for a in scattered.get(f, ())):
                partial = lax.psum_scatter(
                    partial, axes, scatter_dimension=place, tiled=True
                )
                summed = tuple(a for a in summed if a not in axes)
        return lax.psum(partial, summed) if summed else partial

    def total(
        self, partial: jax.Array, factors: Iterable[str], dtype: jnp.dtype
    ) -> jax.Array:
        """Its sum over factors of the complete first result, which is sent as dtype."""
        split, scattered = self.decision.split, self.decision.scattered[0]
        axes = tuple(a for f in factors for a in (*split[f], *scattered.get(f, ())))
        if not axes:
            return partial
        return lax.psum(partial.astype(dtype), axes).astype(partial.dtype)


# --- decisions ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How an op is split over a mesh.

    Attributes:
      mesh: its axes.
      split: the axes of each factor.
      scattered: of each result, the further axes of factors, over which its sum is
        scattered.
    """

    mesh: Mesh
    split: Mapping[str, Axes]
    scattered: tuple[Mapping[str, Axes], ...]

    def spec(self, dims: Dims, scattered: Mapping[str, Axes] | None = None) -> Spec:
        """The axes of an array, with those that sums are scattered over."""
        more = scattered or {}
        return tuple(
            tuple(a for f in dim for a in (*self.split[f], *more.get(f, ())))
            for dim in dims
        )

    def summed(self, rule: Rule, result: int) -> Axes:
        """The axes over which a result is a partial sum."""
        own = {f for dim in rule.results[result] for f in dim}
        return tuple(a for f, axes in self.split.items() if f not in own for a in axes)

    def operands(self, rule: Rule) -> list[Spec]:
        return [
            self.spec(dims, self.scattered[0] if i in rule.late else None)
            for i, dims in enumerate(rule.operands)
        ]

    def results(self, rule: Rule) -> list[Spec]:
        pairs = zip(rule.results, self.scattered, strict=True)
        return [self.spec(dims, scattered) for dims, scattered in pairs]


def decide(
    rule: Rule,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    mesh: Mesh,
    nbytes: Sequence[int],
) -> Decision:
    """The split with the least work a device, and the fewest bytes sent among those.

    Args:
      rule: of the op.
      operands: how they are sharded.
      results: how they are wanted.
      mesh: its axes.
      nbytes: of whole operands, then results.
    """
    arrays = [*zip(rule.results, results, strict=True)]
    arrays += zip(rule.operands, operands, strict=True)
    choices = {axis: _factors_of(axis, arrays, rule) for axis in mesh}
    best: tuple[tuple[float, float], Decision] | None = None
    for chosen in itertools.product(*choices.values()):
        split = _split(dict(zip(choices, chosen, strict=True)), arrays, rule)
        if not _is_valid(split, rule, mesh):
            continue
        scattered = _scattered(rule, split, results, mesh)
        made = Decision(mesh=mesh, split=split, scattered=scattered)
        work = 1 / math.prod(mesh[a] for axes in split.values() for a in axes)
        cost = work, _bytes_sent(rule, made, operands, results, nbytes)
        if best is None or cost < best[0]:
            best = cost, made
    assert best is not None, "nothing may be split, too"
    return best[1]


def _factors_of(
    axis: str, arrays: Sequence[tuple[Dims, Spec]], rule: Rule
) -> list[str | None]:
    """The factors that an axis splits in some array, and None."""
    found: dict[str | None, None] = {
        f: None
        for dims, spec in arrays
        for dim, axes in zip(dims, spec, strict=True)
        if axis in axes
        for f in dim
        if f not in rule.whole
    }
    return [*found, None]


def _split(
    chosen: Mapping[str, str | None],
    arrays: Sequence[tuple[Dims, Spec]],
    rule: Rule,
) -> dict[str, Axes]:
    """The axes of each factor, in the order that the first array with them has."""
    order: dict[str, dict[str, None]] = {f: {} for f in rule.sizes}
    for dims, spec in arrays:
        for dim, axes in zip(dims, spec, strict=True):
            for f in dim:
                order[f].update(dict.fromkeys(a for a in axes if chosen[a] == f))
    return {f: tuple(axes) for f, axes in order.items()}


def _is_valid(split: Mapping[str, Axes], rule: Rule, mesh: Mesh) -> bool:
    """Whether sizes can be divided, and parts of dimensions lie together."""
    counts = {f: math.prod(mesh[a] for a in axes) for f, axes in split.items()}
    if any(rule.sizes[f] % count for f, count in counts.items()):
        return False
    return not any(
        counts[fast] > 1 and counts[slow] != rule.sizes[slow]
        for array in (*rule.operands, *rule.results)
        for dim in array
        for slow, fast in itertools.pairwise(dim)
    )


def _scattered(
    rule: Rule, split: Mapping[str, Axes], results: Sequence[Spec], mesh: Mesh
) -> tuple[Mapping[str, Axes], ...]:
    """The axes of sums that each result is wanted split over."""
    found: list[Mapping[str, Axes]] = []
    for dims, wanted in zip(rule.results, results, strict=True):
        own = {f for dim in dims for f in dim}
        left = {a for f, axes in split.items() if f not in own for a in axes}
        found.append(_scatter_of(rule, split, dims, wanted, left, mesh))
    if rule.is_joint:
        same = all(
            one == found[0]
            for one, dims in zip(found, rule.results, strict=True)
            if dims == rule.results[0]
        )
        return ((found[0] if same else dict[str, Axes]()),) * len(found)
    return tuple(found)


def _scatter_of(
    rule: Rule,
    split: Mapping[str, Axes],
    dims: Dims,
    wanted: Spec,
    left: set[str],
    mesh: Mesh,
) -> dict[str, Axes]:
    found: dict[str, Axes] = {}
    for dim, axes in zip(dims, wanted, strict=True):
        if len(dim) != 1:
            continue
        (f,) = dim
        own, more = axes[: len(split[f])], axes[len(split[f]) :]
        count = math.prod(mesh[a] for a in axes)
        if own == split[f] and more and left.issuperset(more):
            if rule.sizes[f] % count == 0:
                found[f] = more
                left = left - {*more}
    return found


# --- bytes ----------------------------------------------------------------------------


def _bytes_sent(
    rule: Rule,
    decision: Decision,
    operands: Sequence[Spec],
    results: Sequence[Spec],
    nbytes: Sequence[int],
) -> float:
    """Bytes a device sends to reshard operands and results and to add up sums."""
    mesh, sizes = decision.mesh, iter(nbytes)
    sent = 0.0
    for given, needed in zip(operands, decision.operands(rule), strict=True):
        sent += _resharding(next(sizes), given, needed, mesh)
    whole = list(sizes)
    pairs = zip(decision.results(rule), results, strict=True)
    for i, (made, wanted) in enumerate(pairs):
        sent += _resharding(whole[i], made, wanted, mesh)
        partial = whole[i] / _devices(decision.spec(rule.results[i]), mesh)
        scattered = [a for axes in decision.scattered[i].values() for a in axes]
        if rule.is_joint and i:
            continue
        summed = [a for a in decision.summed(rule, i) if a not in scattered]
        count = math.prod(mesh[a] for a in scattered)
        sent += partial * (1 - 1 / count)
        sent += 2 * partial / count * (1 - 1 / math.prod(mesh[a] for a in summed))
    return sent


def _resharding(nbytes: int, given: Spec, needed: Spec, mesh: Mesh) -> float:
    """Bytes that each device sends for an array that is gathered over some axes.

    An axis that splits another dimension afterwards counts too: XLA does not always
    find the exchange that moves less.
    """
    lost = [
        axis
        for before, after in zip(given, needed, strict=True)
        for i, axis in enumerate(before)
        if after[: i + 1] != before[: i + 1]
    ]
    gathered = math.prod(mesh[a] for a in lost)
    return nbytes / _devices(given, mesh) * (gathered - 1)


def _devices(spec: Spec, mesh: Mesh) -> int:
    return math.prod(mesh[a] for axes in spec for a in axes)


# --- what a rule refuses --------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An axis that an operand is gathered over because a factor is not split.

    Attributes:
      factor: of the operand's dimension.
      axes: that it was split over.
      reason: why it is not.
    """

    factor: str
    axes: Axes
    reason: str


def refusals(
    rule: Rule, decision: Decision, operands: Sequence[Spec]
) -> Iterator[Refusal]:
    """The operands that are gathered for a reason that XLA does not have."""
    seen: set[str] = set()
    for dims, spec in zip(rule.operands, operands, strict=True):
        for dim, axes in zip(dims, spec, strict=True):
            reason = _why_gathered(dim, axes, rule, decision)
            if reason is not None and seen.isdisjoint(dim):
                seen.update(dim)
                yield Refusal(factor=dim[0], axes=axes, reason=reason)


def _why_gathered(dim: Dim, axes: Axes, rule: Rule, decision: Decision) -> str | None:
    kept = {a for f in dim for a in decision.split[f]}
    if not dim or kept.issuperset(axes):
        return None
    for f in dim:
        if (reason := rule.whole.get(f)) is not None:
            return reason
    count = math.prod(decision.mesh[a] for a in axes)
    size = math.prod(rule.sizes[f] for f in dim)
    return f"{size} is no multiple of {count}" if size % count else None


# --- Shardy's attribute ---------------------------------------------------------------


def text(
    rule: Rule, operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> str:
    """The rule as ``sdy.sharding_rule``, for arrays of these shapes."""
    letters = _Letters()

    def of(arrays: Sequence[Dims], shapes: Sequence[Sequence[int]], kind: str) -> str:
        parts = (
            ", ".join(
                "".join(letters.of(f, rule.sizes[f]) for f in dim)
                or letters.of(f"{kind} {i} {place}", size)
                for place, (dim, size) in enumerate(zip(array, shape, strict=True))
            )
            for i, (array, shape) in enumerate(zip(arrays, shapes, strict=True))
        )
        return ", ".join(f"[{part}]" for part in parts)

    given, made = of(rule.operands, operands, "in"), of(rule.results, results, "out")
    sizes = ", ".join(f"{name}={size}" for name, size in letters.sizes.items())
    kinds = letters.listed("reduction", rule.summed - {*rule.whole})
    kinds += letters.listed("need_replication", rule.whole)
    head = f"({given})->({made})"
    return f"#sdy.op_sharding_rule<{head} {{{sizes}}}{kinds}, custom>"


class _Letters:
    """Shardy's names of factors, given in the order in which they are met."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.sizes: dict[str, int] = {}

    def of(self, factor: str, size: int) -> str:
        if factor not in self.names:
            n = len(self.names)
            self.names[factor] = "ijklmnopqrstuvwxy"[n] if n < 17 else f"z_{n - 16}"
            self.sizes[self.names[factor]] = size
        return self.names[factor]

    def listed(self, kind: str, factors: Iterable[str]) -> str:
        known = sorted(list(self.names).index(f) for f in factors if f in self.names)
        names = [list(self.names.values())[i] for i in known]
        return f" {kind}={{{', '.join(names)}}}" if names else ""
