"""Printed forms of a cache entry: a line, data, or everything."""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tracea_jax import schema
from tracea_jax.page import times

if TYPE_CHECKING:
    from tracea_jax.tuning.store.entries import Store
    from tracea_jax.tuning.store.names import Name
    from tracea_jax.tuning.store.records import Best, Entry, Observation


def line(entry: Entry) -> str:
    """The problem, its answer and the times, without the device."""
    best = entry.best
    unknown = "" if _is_known(entry) else " (unknown variant)"
    return f"{_problem(entry)}: {choice(best)}{unknown}, {compared(best)}"


def data(name: Name, entry: Entry) -> dict[str, Any]:
    """The contents of ``line`` and more as plain data; docs/json.md has the keys."""
    best = entry.best
    return {
        "text": _problem(entry),
        "problem": entry.problem,
        "environment": entry.environment.to_json(),
        "environment_key": name.environment,
        "variant": best.variant,
        "config": best.config,
        "is_known": _is_known(entry),
        "time_us": best.time_us,
        "xla_us": best.xla_us,
        "ratio": best.ratio,
        "cold_us": best.cold_us,
        "xla_cold_us": best.xla_cold_us,
        "goal": best.goal,
        "origin": best.origin,
        "written": entry.written,
    }


def _is_known(entry: Entry) -> bool:
    """True if this version of the package has the variant that the entry names."""
    from tracea_jax import catalogue, variants

    op = entry.problem["op"]
    known = catalogue.recorded()
    return op in known and entry.best.variant in {v.name for v in variants.of(op)}


def _of_config(config: dict[str, Any]) -> str:
    return ", ".join(f"{k} {_value(v)}" for k, v in config.items())


def _value(value: Any) -> str:
    """A value of a file, which may have many lines, as a part of one line."""
    return schema.one_line(str(value), 200)


def _problem(entry: Entry) -> str:
    from tracea_jax.problem import problem_from_json

    try:
        return str(problem_from_json(entry.problem))
    except (ValueError, TypeError):  # of another version of the package
        return schema.one_line(json.dumps(entry.problem))


def choice(of: Any) -> str:
    """Variant and config of an answer or an observation."""
    config = _of_config(of.config)
    return of.variant + (f" [{config}]" if config else "")


def compared(best: Best) -> str:
    """The times that decided, ours and XLA's, and their ratio."""
    ours, xla = best.decisive
    if not ours:
        return "not timed"
    text = times.microseconds(ours)
    if xla and best.variant != "xla":
        text += f", XLA {times.microseconds(xla)}, {times.ratio(xla, ours)}"
    return text


def shown(store: Store, name: Name, entry: Entry) -> Iterator[str]:
    """Everything about a complete entry, in lines."""
    from tracea_jax.tuning.store.protocols import ORIGINS, UNTUNED, untuned_us

    best, tuner = entry.best, entry.tuner
    yield _problem(entry)
    yield f"  file         {schema.one_line(str(store.path(name)))}"
    key = schema.one_line(name.environment)
    yield f"  environment  {entry.environment} ({key})"
    yield f"  best         {choice(best)}, {compared(best)}"
    yield from _times(best)
    if untuned := untuned_us(entry.tuner, best.protocol):
        yield f"  untuned      {times.microseconds(untuned)}"
    if second := best.runner_up:
        config = _of_config(second.get("config", {}))
        time_us = second.get("time_us")
        yield f"  runner-up    {second.get('variant')} [{config}]" + (
            f", {time_us:.1f} us" if time_us else ""
        )
    yield f"  chosen       for {best.goal}, {ORIGINS.get(best.origin, best.origin)}"
    yield f"  verified     {_facts(entry.verified) or 'no'}"
    facts = {k: v for k, v in tuner.items() if k not in ("merged", UNTUNED)}
    yield f"  tuned        {entry.written}, {_facts(facts)}"
    for other in tuner.get("merged", ()):
        written = _value(other.get("written"))
        yield f"  merged       {written}, {_facts(other)}"
    yield from _observations(entry.observations)


def _times(best: Best) -> Iterator[str]:
    """Our time and XLA's by each protocol that did not decide."""
    rows = {
        "steady": ("in a row", best.time_us, best.xla_us),
        "cold": ("cold", best.cold_us, best.xla_cold_us),
    }
    for protocol, (name, ours, xla) in rows.items():
        if ours and protocol != best.protocol:
            other = f", XLA {times.microseconds(xla)}" if xla else ""
            yield f"  {name:12} {times.microseconds(ours)}{other}"


def _facts(data: dict[str, Any]) -> str:
    return ", ".join(
        f"{k.replace('_', ' ')} {v:.4g}" if isinstance(v, float) else f"{k} {_value(v)}"
        for k, v in data.items()
        if v not in ("", None) and k != "written"
    )


def _observations(observations: tuple[Observation, ...]) -> Iterator[str]:
    failed = collections.Counter(o.failure for o in observations if o.failure)
    kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(failed.items()))
    count = len(observations)
    yield f"  observed     {count}" + (
        f", failed {failed.total()}: {kinds}" * bool(kinds)
    )
    if count:
        yield f"    {'us':>10} {'cold us':>10} {'repeats':>8}  config"
    for o in sorted(
        observations, key=lambda o: (o.time_us or float("inf"), o.identity)
    ):
        cold = f"{o.cold_us:.2f}" if o.cold_us else "-"
        time_us = f"{o.time_us:.2f}" if o.time_us else "-"
        # Indented, as lines of a message could look like lines of this table.
        message = o.message.replace("\n", "\n" + " " * 32)
        why = f": {o.failure} {message}".rstrip() if o.failure else ""
        yield f"    {time_us:>10} {cold:>10} {o.repeats:>8}  {choice(o)}{why}"
