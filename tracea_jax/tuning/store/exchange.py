"""One file with many entries, to carry tuned answers from one machine to another.

    {"schema": 1, "checksum": "sha256:...",
    "entries": [
    {"best": ..., "environment": ..., "observations": [...], "problem": ..., ...},
    ...
    ]}

An entry only ever meets entries of its own environment: times of another device or
toolchain are not comparable.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tracea_jax.problem import problem_from_json
from tracea_jax.runtime import trust
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import canonical
from tracea_jax.tuning.store.formats import (
    UNREADABLE,
    Damaged,
    NewerSchema,
    checked,
    signed,
)
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Best, Entry, union

LIMIT_BYTES = 256 << 20  # of a file that is merged: a hundred thousand observations


def pack(entries: Iterable[Entry]) -> bytes:
    """The content of a file with these entries, in this order."""
    lines = ",\n".join(canonical(entry.to_json()) for entry in entries)
    return signed(f'"entries": [\n{lines}\n]}}\n')


def unpack(data: bytes) -> tuple[Entry, ...]:
    """The inverse of ``pack``.

    Raises:
      NewerSchema: if only a newer version can read it.
      Damaged: if it is not what was written.
    """
    body = checked(data)
    try:
        entries = json.loads(b"{" + body)["entries"]
        return tuple(Entry.from_json(entry) for entry in entries)
    except UNREADABLE as e:
        raise Damaged(str(e) or type(e).__name__) from e


def export(
    store: Store,
    path: pathlib.Path,
    *,
    environments: Collection[str] = (),
    ops: Collection[str] = (),
) -> int:
    """Writes the store's entries into one file; returns their number.

    The file is replaced at once or not at all. Equal entries make equal files. Entries
    that cannot be read are left out; ``upkeep.verify`` names them.

    Args:
      store: where the entries are.
      path: of the file.
      environments: keys of those to take; all by default.
      ops: names of those to take; all by default.

    Raises:
      OSError: if the file cannot be written, or is a device or a pipe.
    """
    # Replaced, /dev/null would be an archive from then on.
    if os.path.exists(path) and not os.path.isfile(path):
        raise trust.Refused(f"{path} is not a regular file")
    entries = []
    for name in store.names():
        wanted = not environments or name.environment in environments
        if not wanted or (ops and name.op not in ops):
            continue
        try:
            entry = store.read(name, complete=True)
        except (Damaged, NewerSchema):
            continue
        if entry is not None:
            entries.append(entry)
    trust.remove_leftovers(path)
    trust.write_atomically(path, pack(entries), mode=0o666)
    return len(entries)


def read(path: pathlib.Path) -> tuple[Entry, ...]:
    """The entries of an exported file.

    Raises:
      ValueError: if it is damaged, or a newer version wrote it; says which file.
      OSError: if it cannot be read.
    """
    try:
        return unpack(trust.read_file(path, LIMIT_BYTES))
    except NewerSchema as e:
        raise NewerSchema(f"{path}: {e}; install a newer tracea_jax to read it") from e
    except Damaged as e:
        raise Damaged(
            f"{path} is damaged or no exported tuning cache: {e}; export it again"
        ) from e


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Two tunings of one problem in one environment that did not find the same.

    Attributes:
      problem, environment: where.
      kept, dropped: the answer that counts from now on, and the other one.
      repeats: executions behind each of them.
    """

    problem: dict[str, Any]
    environment: str
    kept: Best
    dropped: Best
    repeats: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge.

    Attributes:
      added, changed, unchanged: numbers of entries.
      conflicts: where the answers differed; what was kept.
      refused: entries that were left out, with the reasons.
    """

    added: int
    changed: int
    unchanged: int
    conflicts: tuple[Conflict, ...]
    refused: tuple[str, ...]


def merge(store: Store, entries: Sequence[Entry]) -> Merged:
    """Unites entries with those of a store, in the order given.

    Every observation is kept, of one config the better-measured one. Of two answers the
    one with more executions behind it counts, then the faster one; an answer that the
    union says is wrong never does. Each entry is replaced at once: a merge that was
    killed can be started again.

    Raises:
      OSError: if the store cannot be written; entries before that are merged.
    """
    counts = {"added": 0, "changed": 0, "unchanged": 0}
    conflicts: list[Conflict] = []
    refused: list[str] = []
    for entry in entries:
        if (reason := _why_not(entry)) is not None:
            refused.append(reason)
            continue
        stored: list[Entry] = []

        def combine(new: Entry, old: Entry, stored: list[Entry] = stored) -> Entry:
            stored.append(old)
            return reconcile(new, old)

        name = Name.of(entry.problem, entry.environment.key)
        try:
            result = store.write(name, entry, combine=combine)
        except (NewerSchema, trust.Refused) as e:
            refused.append(f"{store.path(name)} is kept as it is: {e}")
            continue
        changed = "changed" if stored and result != stored[0] else "unchanged"
        counts[changed if stored else "added"] += 1
        conflicts += [c for old in stored if (c := _conflict(result, old, entry))]
    return Merged(**counts, conflicts=tuple(conflicts), refused=tuple(refused))


def reconcile(one: Entry, other: Entry) -> Entry:
    """Both entries as one; it does not matter which comes first.

    What is known of the tuning that was not chosen is kept in ``tuner["merged"]``.
    """
    observations = union(one.observations, other.observations)
    repeats = {o.compiled: o.repeats for o in observations}
    failed = {o.compiled for o in observations if o.failure is not None}

    def rank(entry: Entry) -> tuple[bool, int, float, str, str]:
        best = entry.best
        name = best.compiled
        time = -(best.time_us or float("inf"))
        text = canonical(entry.to_json())
        return name not in failed, repeats.get(name, 0), time, entry.written, text

    chosen, dropped = sorted((one, other), key=rank, reverse=True)
    best, verified = chosen.best, chosen.verified
    if best.compiled in failed:
        best, verified = Best(variant="xla", config={}, xla_us=best.xla_us), {}
    return dataclasses.replace(
        chosen,
        best=best,
        verified=verified,
        observations=observations,
        tuner=_provenance(chosen, dropped),
        unknown={**dropped.unknown, **chosen.unknown},
    )


def _provenance(chosen: Entry, dropped: Entry) -> dict[str, Any]:
    own = {k: v for k, v in chosen.tuner.items() if k != "merged"}
    others = {
        canonical(tuning): tuning
        for entry in (chosen, dropped)
        for tuning in _tunings(entry)
    }
    others.pop(canonical({**own, "written": chosen.written}), None)
    merged = [others[text] for text in sorted(others)]
    return {**own, "merged": merged} if merged else own


def _tunings(entry: Entry) -> list[dict[str, Any]]:
    """The tunings that an entry comes from, its answer's first."""
    own = {k: v for k, v in entry.tuner.items() if k != "merged"}
    return [{**own, "written": entry.written}, *entry.tuner.get("merged", [])]


def _conflict(result: Entry, old: Entry, new: Entry) -> Conflict | None:
    """Returns whether the answers differed, and which one was kept."""
    names = [e.best.compiled for e in (old, new)]
    if names[0] == names[1]:
        return None
    kept = result.best.compiled
    dropped = new if kept == names[0] else old
    repeats = {o.compiled: o.repeats for o in result.observations}
    other = names[1] if dropped is new else names[0]
    return Conflict(
        problem=result.problem,
        environment=result.environment.key,
        kept=result.best,
        dropped=dropped.best,
        repeats=(repeats.get(kept, 0), repeats.get(other, 0)),
    )


def _why_not(entry: Entry) -> str | None:
    """Why an entry from elsewhere is not taken, or None."""
    try:
        problem_from_json(entry.problem)
    except UNREADABLE as e:
        return f"a problem that this version does not know: {e}"
    return None
