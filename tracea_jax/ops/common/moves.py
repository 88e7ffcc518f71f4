"""What moves between devices around an op that is split, in words.

Caller: ``partition``, for those who look into a program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tracea_jax.ops.common.sharding import Axes, Decision, Rule, Spec

Named = Callable[[Axes], str]


def moves(
    rule: Rule,
    decision: Decision,
    given: Sequence[Spec],
    wanted: Sequence[Spec],
    named: Named,
) -> tuple[str, ...]:
    """Phrases such as "operand 1 gathered over mesh axis 'x'".

    Args:
      rule: of the op.
      decision: how it is split.
      given: how operands are sharded.
      wanted: how results are.
      named: axes in words.
    """
    found: list[str] = []
    needed = decision.operands(rule)
    for i, (before, after) in enumerate(zip(given, needed, strict=True)):
        found += _resharded(f"operand {i}", before, after, named)
    made = decision.results(rule)
    for i, (before, after) in enumerate(zip(made, wanted, strict=True)):
        found += _summed(i, rule, decision, named)
        found += _resharded(f"result {i}", before, after, named)
    return tuple(found)


def _summed(i: int, rule: Rule, decision: Decision, named: Named) -> Iterator[str]:
    if rule.is_joint and i and rule.results[i] == rule.results[0]:
        return  # computed from the sum of the first
    summed = decision.summed(rule, i)
    scattered = tuple(a for axes in decision.scattered[i].values() for a in axes)
    if whole := tuple(a for a in summed if a not in scattered):
        yield f"result {i} summed over {named(whole)}"
    if scattered:
        yield f"result {i} summed and scattered over {named(scattered)}"


def _resharded(what: str, before: Spec, after: Spec, named: Named) -> Iterator[str]:
    kept = {a for axes in after for a in axes}
    pairs = list(zip(before, after, strict=True))
    gathered = tuple(a for axes, _ in pairs for a in axes if a not in kept)
    exchanged = tuple(
        a for axes, new in pairs for a in axes if a in kept and a not in new
    )
    if gathered:
        yield f"{what} gathered over {named(gathered)}"
    if exchanged:
        yield f"{what} exchanged over {named(exchanged)}"
