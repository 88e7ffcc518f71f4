"""Puts answers that ``tune_layers`` made into the volumes that ship.

    python benchmarks/ship_answers.py DIRECTORY ... [--data tracea_jax/data/tuned]

Answers of DIRECTORY take the places of those that ship for the same problems. Of
either, those that were measured with other kernels than today's are left out. Run it in
the tree that is to ship, on any machine.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import shutil
from collections.abc import Iterator, Sequence

from tune_layers import of_today, slim

from tracea_jax import knowledge
from tracea_jax.device import NAMED, Device
from tracea_jax.runtime import trust
from tracea_jax.tuning.store import volumes
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import environment_key
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry

Op = tuple[str, str]  # environment key and name


def found(directory: pathlib.Path) -> Iterator[tuple[Name, Entry]]:
    store = Store(directory, read_only=True)
    for name in store.names():
        entry = store.read(name, complete=True)
        if entry is not None:
            yield name, entry


def united(
    directories: Sequence[pathlib.Path], data: pathlib.Path
) -> dict[Op, dict[Name, Entry]]:
    """The entries of each op that has new ones; new ones before those that ship."""
    every: dict[Op, dict[Name, Entry]] = collections.defaultdict(dict)
    for directory in directories:
        for name, entry in found(directory):
            every[name.environment, name.op][name] = entry
    for name, entry in found(data):
        if (name.environment, name.op) in every:
            every[name.environment, name.op].setdefault(name, entry)
    return every


def bind(data: pathlib.Path, op: Op, entries: dict[Name, Entry]) -> tuple[int, int]:
    """Writes a volume; the numbers of entries in it, and of those left out."""
    held = {
        name: made
        for name, entry in entries.items()
        if (made := of_today(entry, _device(entry))) is not None
    }
    key, name = op
    place = data / key / f"{name}{volumes.SUFFIX}"
    place.parent.mkdir(parents=True, exist_ok=True)
    files = {name.problem: slim(entry).to_bytes() for name, entry in held.items()}
    trust.write_atomically(place, volumes.bound(files), mode=0o644)
    described = next(iter(entries.values())).environment.to_json()
    text = json.dumps(described, indent=1) + "\n"
    trust.write_atomically(place.parent / "environment.json", text.encode(), mode=0o644)
    shutil.rmtree(place.parent / name, ignore_errors=True)
    return len(held), len(entries) - len(held)


def _device(entry: Entry) -> Device:
    """The device that was measured.

    Raises:
      LookupError: if no profile is known that would be asked with the same key.
    """
    for device in NAMED.values():
        if environment_key(device) == entry.environment.key:
            return device
    raise LookupError(f"answers of {entry.environment} are not asked for here")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=pathlib.Path, nargs="+")
    parser.add_argument("--data", type=pathlib.Path, default=knowledge.SHIPPED)
    args = parser.parse_args()
    for op, entries in united(args.directory, args.data).items():
        held, lost = bind(args.data, op, entries)
        print(f"{op[1]}: {held} answers ship, {lost} were of other kernels")


if __name__ == "__main__":
    main()
