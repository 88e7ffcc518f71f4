"""Looking after a store: what is wrong in it, and what may go; ``cli.cache`` asks."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from tracea_jax import schema
from tracea_jax.device import Device
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.runtime import trust
from tracea_jax.tuning.answers.legality import current_best, legal_choice
from tracea_jax.tuning.store import files
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import Environment, environment_key
from tracea_jax.tuning.store.formats import UNREADABLE, Damaged, NewerSchema
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry

_OTHER_KERNELS = "its kernels have changed since it was tuned; tune it again"

Check = Callable[[Problem, Choice, Device], str | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something about a file of the cache.

    Attributes:
      path: of the file.
      message: what, as a phrase.
      is_wrong: False for what only deserves to be known.
    """

    path: pathlib.Path
    message: str
    is_wrong: bool = True

    def __str__(self) -> str:
        return schema.one_line(f"{self.path}: {self.message}")


def verify(
    store: Store, devices: Iterable[Device], check: Check | None = None
) -> tuple[int, tuple[Finding, ...]]:
    """Checks every file of a store and changes none.

    An entry must be readable and intact, lie where its problem and environment say, and
    have an answer that is legal on its device, if that is one of ``devices``.

    Args:
      store: what to check.
      devices: known devices; an environment with one's name is checked against it.
      check: runs the answer of an entry that was made in the environment of one of the
        devices as it is now; returns what is wrong, or None.

    Returns:
      The number of entries, and what was found.
    """
    store = dataclasses.replace(store, read_only=True)
    known = tuple(devices)
    findings: list[Finding] = []
    count = 0
    for name in store.names():
        count += 1
        path = store.path(name)
        try:
            findings += _of_entry(store, name, known, check)
        except NewerSchema as e:
            findings.append(Finding(path=path, message=str(e), is_wrong=False))
        except (Damaged, OSError) as e:
            findings.append(Finding(path=path, message=f"it is damaged: {e}"))
    findings += [f for path in store.others() if (f := _of_other(path))]
    return count, tuple(findings)


def _of_entry(
    store: Store, name: Name, devices: tuple[Device, ...], check: Check | None
) -> Iterator[Finding]:
    path = store.path(name)
    entry = store.intact(name)
    if Name.of(entry.problem, entry.environment.key) != name:
        where = store.path(Name.of(entry.problem, entry.environment.key))
        yield Finding(path=path, message=f"it belongs to {where}; nothing finds it")
    try:
        problem = problem_from_json(entry.problem)
    except UNREADABLE as e:
        yield Finding(path=path, message=f"its problem is unknown here: {e}")
        return
    device = next((d for d in devices if d.name == entry.environment.device), None)
    if device is None:
        return
    choice = legal_choice(entry.best.variant, entry.best.config, problem, device)
    if isinstance(choice, str):
        yield Finding(path=path, message=f"its answer {entry.best.variant} {choice}")
    elif name.environment != environment_key(device):
        return
    elif current_best(entry.best, problem, device) is None:
        yield Finding(path=path, message=_OTHER_KERNELS, is_wrong=False)
    elif check is not None:
        if (wrong := check(problem, choice, device)) is not None:
            yield Finding(path=path, message=f"its answer {choice} fails: {wrong}")


def _of_other(path: pathlib.Path) -> Finding | None:
    if path.name == "environment.json":
        try:
            known = Environment.from_json(json.loads(_content(path)))
        except (OSError, *UNREADABLE) as e:
            return Finding(path=path, message=f"it is damaged: {e}")
        if known.key != path.parent.name:
            return Finding(path=path, message=f"it describes {known.key}")
    if ".corrupt-" in path.name:
        message = "a damaged file that was set aside"
        return Finding(path=path, message=message, is_wrong=False)
    if path.suffix == ".journal" and files.is_orphan(path):
        try:
            found = files.read_journal(path)
        except OSError as e:
            return Finding(path=path, message=f"it cannot be read: {e}")
        count = len(found.observations)
        message = (
            f"{count} measurements of an interrupted tuning; the next run resumes it"
        )
        if found.skipped:
            message += f"; {found.skipped} lines cannot be read"
        return Finding(path=path, message=message, is_wrong=False)
    return None


def _content(path: pathlib.Path) -> bytes:
    return trust.read_file(path, files.LIMIT_BYTES)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A file that was removed, or would be.

    Attributes:
      path: of the file.
      reason: why, as a phrase.
      entry: what it was; None for another file.
    """

    path: pathlib.Path
    reason: str
    entry: Entry | None = None


def prune(
    store: Store,
    *,
    older_than_s: float | None = None,
    devices: Collection[Device] | None = None,
    max_entries: int | None = None,
    journals: bool = False,
    now_s: float,
    dry_run: bool = False,
) -> tuple[Pruned, ...]:
    """Removes what the arguments name and nothing else.

    Entries that are written again meanwhile stay, and so do journals of tunings that
    are going on.

    Args:
      store: what to prune.
      older_than_s: seconds since it was written that an entry, a damaged file that was
        set aside, or the journal of an ended tuning may have.
      devices: whose entries stay, if their kernels are as they were; by default all do.
      max_entries: only so many stay, the most recently written.
      journals: whether those of ended tunings go, whatever their age.
      now_s: seconds since 1970.
      dry_run: whether to only tell.

    Returns:
      What was removed, or would be.
    """
    oldest_s = None if older_than_s is None else now_s - older_than_s
    current = None if devices is None else {environment_key(d): d for d in devices}
    doomed: list[Pruned] = []
    for name, entry, reason in _doomed(store, oldest_s, current, max_entries):
        if dry_run or store.remove(name, expected=entry):
            doomed.append(Pruned(path=store.path(name), reason=reason, entry=entry))
    for path in store.others():
        reason = _why_doomed(path, oldest_s, current, journals)
        if reason is not None:
            if not dry_run:
                path.unlink(missing_ok=True)
            doomed.append(Pruned(path=path, reason=reason))
    return tuple(doomed)


def _doomed(
    store: Store,
    oldest_s: float | None,
    current: Mapping[str, Device] | None,
    max_entries: int | None,
) -> Iterator[tuple[Name, Entry, str]]:
    stay: list[tuple[float, Name, Entry]] = []
    for name, entry in store.heads():
        written_s = _written_s(store, name, entry)
        if current is not None and name.environment not in current:
            yield name, entry, "its environment is not the current one"
        elif current is not None and _is_stale(entry, current[name.environment]):
            yield name, entry, "its kernels have changed"
        elif oldest_s is not None and written_s < oldest_s:
            yield name, entry, f"it was written {entry.written}"
        else:
            stay.append((written_s, name, entry))
    if max_entries is not None:
        stay.sort(key=lambda item: (-item[0], dataclasses.astuple(item[1])))
        for _, name, entry in stay[max_entries:]:
            yield name, entry, f"{max_entries} were written later"


def _is_stale(entry: Entry, device: Device) -> bool:
    try:
        problem = problem_from_json(entry.problem)
    except UNREADABLE:  # a newer version may know it
        return False
    return current_best(entry.best, problem, device) is None


def _written_s(store: Store, name: Name, entry: Entry) -> float:
    try:
        return datetime.datetime.fromisoformat(entry.written).timestamp()
    except (ValueError, OverflowError, OSError):
        pass
    try:
        return store.path(name).stat().st_mtime
    except OSError:
        return math.inf  # another process removed it


def _why_doomed(
    path: pathlib.Path,
    oldest_s: float | None,
    current: Collection[str] | None,
    journals: bool,
) -> str | None:
    """Why a file that is no entry may go, or None."""
    try:
        is_old = oldest_s is not None and path.stat().st_mtime < oldest_s
    except OSError:
        return None  # another process was faster
    environment = path.parent.parent.name
    is_foreign = current is not None and environment not in current
    if ".corrupt-" in path.name:
        return "it is damaged and old" if is_old else None
    if path.suffix == ".journal" and (journals or is_old or is_foreign):
        return "its tuning was ended" if files.is_orphan(path) else None
    return None
