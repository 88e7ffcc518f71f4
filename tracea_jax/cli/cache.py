"""tracea cache: what was tuned, and looking after it."""

from __future__ import annotations

import argparse
import json
import pathlib
import re
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracea_jax import schema
from tracea_jax.cli.entries import choice, compared, data, line, shown

if TYPE_CHECKING:
    from tracea_jax.device import Device
    from tracea_jax.policy import Choice
    from tracea_jax.problem import Problem
    from tracea_jax.tuning.store.entries import Store

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def add(commands: Any) -> None:
    """Adds the command with its actions."""
    text = "what was tuned: list, show, export, merge, verify, prune"
    cache = commands.add_parser("cache", help=text, description=text)
    actions = cache.add_subparsers(required=True, metavar="ACTION")

    def action(run: Callable[..., int], text: str) -> argparse.ArgumentParser:
        name = run.__name__.strip("_")
        parser = actions.add_parser(name, help=text, description=text)
        parser.set_defaults(command=run)
        return parser

    listed = action(_list, "one line for each tuned problem")
    listed.add_argument("--json", action="store_true", help="print JSON")
    show = action(_show, "all that is known of some problems")
    show.add_argument(
        "words", nargs="+", metavar="WORD", help="show entries that contain every WORD"
    )
    export = action(_export, "write entries into one file, to be merged elsewhere")
    export.add_argument("file", type=pathlib.Path, metavar="FILE")
    export.add_argument("--op", nargs="+", default=[], help="only entries of these ops")
    export.add_argument(
        "--environment",
        nargs="+",
        default=[],
        metavar="KEY",
        help="only entries of these environments",
    )
    merge = action(_merge, "unite exported files with what is here")
    merge.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE")
    verify = action(_verify, "check every file; exit status 1 if one is wrong")
    verify.add_argument(
        "--run", action="store_true", help="also run the answers of this machine"
    )
    _add_prune(action(_prune, "remove what is named here, and nothing else"))


def _add_prune(prune: argparse.ArgumentParser) -> None:
    prune.set_defaults(error=prune.error)
    prune.add_argument(
        "--older-than", type=_seconds, metavar="AGE", help="such as 90d, 12h"
    )
    prune.add_argument(
        "--other-environments",
        action="store_true",
        help="entries of other devices, toolchains and kernels than this machine has",
    )
    prune.add_argument(
        "--max-entries", type=_count, metavar="N", help="keep the N newest"
    )
    prune.add_argument(
        "--journals", action="store_true", help="measurements of interrupted tunings"
    )
    prune.add_argument(
        "--cubins",
        type=_bytes,
        metavar="SIZE",
        help="compiled kernels beyond this size, such as 2GiB",
    )
    prune.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would be removed, and remove nothing",
    )


# --- list and show --------------------------------------------------------------------


def _list(args: argparse.Namespace) -> int:
    heads = [
        (f"{entry.environment.device}: {line(entry)}", data(name, entry))
        for name, entry in _store().heads()
    ]
    heads.sort(key=lambda head: head[0])
    if args.json:
        listed = {"directory": str(_directory()), "entries": [d for _, d in heads]}
        print(json.dumps(listed, indent=1))
    else:
        for text, _ in heads:
            print(text)
    print(f"{len(heads)} tuned problems in {_directory()}", file=sys.stderr)
    return 0


def _show(args: argparse.Namespace) -> int:
    store = _store()
    count = 0
    for name, head in store.heads():
        text = f"{name.problem} {name.environment} {head.environment}: {line(head)}"
        if not all(word.lower() in text.lower() for word in args.words):
            continue
        entry = store.read(name, complete=True)
        if entry is not None:
            print("\n".join([""] * (count > 0) + list(shown(store, name, entry))))
            count += 1
    if not count:
        words = " ".join(args.words)
        raise LookupError(
            f"no tuned problem contains {words!r}; `tracea cache list` shows all"
        )
    return 0


# --- export and merge -----------------------------------------------------------------


def _export(args: argparse.Namespace) -> int:
    from tracea_jax.tuning.store import exchange

    store = _store()
    known = {name.environment for name in store.names()}
    if unknown := sorted(set(args.environment) - known):
        raise ValueError(
            f"environment {', '.join(unknown)} has no entries; those that have: "
            + (schema.one_line(", ".join(sorted(known))) or "none")
        )
    count = exchange.export(
        store, args.file, environments=args.environment, ops=args.op
    )
    print(f"{count} tuned problems written to {args.file}", file=sys.stderr)
    return 0


def _merge(args: argparse.Namespace) -> int:
    from tracea_jax.problem import problem_from_json
    from tracea_jax.tuning.store import exchange

    # All are read before anything is written: a bad file changes nothing.
    entries = [entry for file in args.files for entry in exchange.read(file)]
    merged = exchange.merge(_store(), entries)
    for conflict in merged.conflicts:
        more, fewer = conflict.repeats
        problem = problem_from_json(conflict.problem)
        print(f"conflict: {problem} in {conflict.environment}")
        kept, dropped = conflict.kept, conflict.dropped
        print(f"  kept    {choice(kept)}, {compared(kept)}, measured {more} times")
        print(
            f"  dropped {choice(dropped)}, {compared(dropped)}, measured {fewer} times"
        )
    for reason in merged.refused:
        print(f"left out: {schema.one_line(reason)}", file=sys.stderr)
    print(
        f"{merged.added} added, {merged.changed} changed, {merged.unchanged} as they "
        f"were, {len(merged.conflicts)} conflicts, {len(merged.refused)} left out",
        file=sys.stderr,
    )
    return 0


# --- verify and prune -----------------------------------------------------------------


def _verify(args: argparse.Namespace) -> int:
    from tracea_jax.tuning.store import upkeep

    check = _check if args.run else None
    count, findings = upkeep.verify(_store(), _devices(), check)
    for finding in findings:
        print(f"{'wrong' if finding.is_wrong else 'note'}: {finding}")
    wrong = sum(finding.is_wrong for finding in findings)
    print(f"{count} tuned problems, {wrong} wrong", file=sys.stderr)
    return 1 if wrong else 0


def _devices() -> list[Device]:
    """The devices of this machine, then those that are known by name."""
    from tracea_jax.device import NAMED

    return [*_local_devices(), *NAMED.values()]


def _local_devices() -> list[Device]:
    from tracea_jax.campaign import local_device
    from tracea_jax.options import device_for

    return list(dict.fromkeys([device_for("cpu"), local_device()]))


def _check(problem: Problem, choice: Choice, device: Device) -> str | None:
    """Runs an answer on this machine; what is wrong with its results, or None."""
    from tracea_jax import catalogue
    from tracea_jax.knowledge import bench_of

    is_called = catalogue.get(problem.op).is_called
    if choice.variant == "xla" or not is_called or device not in _local_devices():
        return None
    print(f"running {problem}", file=sys.stderr)
    try:
        result = bench_of(problem, device).verify(choice)
    except Exception as e:  # whatever a kernel does is a finding
        return f"{type(e).__name__}: {e}"
    return None if result.failure is None else f"{result.failure}: {result.message}"


def _prune(args: argparse.Namespace) -> int:
    from tracea_jax.tuning.store import upkeep

    given = (args.older_than, args.max_entries, args.cubins)
    if given == (None,) * 3 and not (args.other_environments or args.journals):
        args.error("name what to remove: --older-than, --other-environments, ...")
    pruned = upkeep.prune(
        _store(),
        older_than_s=args.older_than,
        devices=_local_devices() if args.other_environments else None,
        max_entries=args.max_entries,
        journals=args.journals,
        now_s=time.time(),
        dry_run=args.dry_run,
    )
    for item in pruned:
        path = schema.one_line(str(item.path))
        what = path if item.entry is None else f"{path}: {line(item.entry)}"
        print(f"{what}: {item.reason}")
    would = "would be " if args.dry_run else ""
    print(f"{len(pruned)} files {would}removed", file=sys.stderr)
    if args.cubins is not None and not args.dry_run:
        _prune_cubins(args.cubins)
    return 0


def _prune_cubins(limit_bytes: int) -> None:
    from tracea_jax.runtime.collect import collect

    done = collect(_directory(), limit_bytes)
    print(
        f"{done.kernels} compiled kernels removed, {done.freed_bytes / 1e6:.1f} MB; "
        f"{done.left_bytes / 1e6:.1f} MB are left",
        file=sys.stderr,
    )


# --- shared ---------------------------------------------------------------------------


def _directory() -> pathlib.Path:
    from tracea_jax.options import current

    return current().directory


def _store() -> Store:
    from tracea_jax.tuning.store.entries import Store

    return Store.of_cache(_directory())


def _seconds(text: str) -> float:
    """ "90d" in seconds, as a type of argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no age; write 90d, 12h, 30m or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def _bytes(text: str) -> int:
    """ "2GiB" in bytes, as a type of argparse."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)([kmg]i?)?b?", text.lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is no size; write 2GiB or 500MB")
    return int(float(match[1]) * {**_BYTES, **_BINARY}[match[2] or ""])


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is no number of entries")
    return int(text)
