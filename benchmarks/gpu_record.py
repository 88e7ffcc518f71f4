"""Runs GPU tests whose kernels have changed, and records which sources they covered.

    python benchmarks/gpu_record.py

The record, ``results/<device>/gpu_tests.json``, has for each test file its counts, the
headers of ``kernels/cuda`` that its kernels include, and a hash of these headers and of
``ffi`` (without the handlers of CPU kernels). An ordinary test asks ``complaints``, so
kernels cannot change without a GPU run of the tests that run them.

Without arguments those files run that were not run, failed, or ran with other sources,
on whatever device has a record; ``--all`` runs every file, ``--only`` those named,
``--failed`` the tests that failed, if their sources are still the same. The record is
written after every test file: a run that is cut off leaves its results.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import gpu_runs
from gpu_runs import Outcome

from tracea_jax.runtime import trust

ROOT = pathlib.Path(__file__).resolve().parent
REPOSITORY = ROOT.parent
KERNELS = "kernels/cuda"
LAUNCHER = "ffi"  # runs every kernel
OF_CPUS = "cpu_"  # prefix of files that no GPU test runs
COUNTS = ("passed", "failed", "skipped")
COMMAND = "python benchmarks/gpu_record.py"

Entry = dict[str, Any]  # an Outcome, "hash", and "environment", of a test file
Record = dict[str, Any]


def kernel_sources(repository: pathlib.Path = REPOSITORY) -> list[str]:
    """The files of kernels/cuda, by names relative to it."""
    return _files(repository / KERNELS)


def sources_hash(sources: Iterable[str], repository: pathlib.Path = REPOSITORY) -> str:
    """sha256 over names and contents of files of kernels/cuda, and of the launcher."""
    launcher = [
        name
        for name in _files(repository / LAUNCHER)
        if not pathlib.PurePath(name).name.startswith(OF_CPUS)
    ]
    digest = hashlib.sha256()
    for folder, names in ((KERNELS, sorted(sources)), (LAUNCHER, launcher)):
        for name in names:
            file = repository / folder / name
            content = file.read_bytes() if file.is_file() else b"is no more"
            digest.update(f"{folder}/{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def records(results: pathlib.Path = ROOT / "results") -> list[Record]:
    """All records, of any device."""
    return [json.loads(f.read_text()) for f in sorted(results.glob("*/gpu_tests.json"))]


def of_any_device(
    found: Iterable[Record], repository: pathlib.Path = REPOSITORY
) -> Record:
    """One record of several: of each test file an entry that is not stale, if any."""
    best: dict[str, Entry] = {}
    for record in found:
        for name, entry in record["files"].items():
            if name not in best or why_stale(best[name], repository):
                best[name] = entry
    return {"files": best}


def gpu_files(tests: pathlib.Path = REPOSITORY / "tests") -> list[pathlib.Path]:
    """The test files that need a GPU, or have tests that do."""
    return sorted(f for f in tests.glob("test_*.py") if "mark.gpu" in f.read_text())


def complaints(record: Record, repository: pathlib.Path = REPOSITORY) -> list[str]:
    """Why a record does not show that the kernels, as they are, pass the GPU tests."""
    found, covered = [], set()
    for file in gpu_files(repository / "tests"):
        entry = record["files"].get(file.name)
        if why := why_stale(entry, repository):
            found.append(f"{file.name} {why}")
        else:
            covered.update(entry["sources"])
    return found + [
        f"no test file that passed runs a kernel with {KERNELS}/{source}"
        for source in kernel_sources(repository)
        if source not in covered
    ]


def why_stale(entry: Entry | None, repository: pathlib.Path = REPOSITORY) -> str | None:
    """Why a test file has to run; None if it passed with the sources as they are."""
    if entry is None:
        return "was not run"
    if not is_of_sources(entry, repository):
        return "ran with other sources"
    if entry["failed"]:
        return f"failed: {', '.join(entry['failing'])}"
    return None if entry["passed"] else "has no test that passed"


def is_of_sources(entry: Entry, repository: pathlib.Path = REPOSITORY) -> bool:
    """Returns whether a test file ran with the sources as they are."""
    return entry["hash"] == sources_hash(entry["sources"], repository)


def main() -> int:
    import common  # asks for the device's driver, which the ordinary tests do not

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    common.add_arguments(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--all", action="store_true", help="every test file")
    which.add_argument("--only", nargs="+", help="these test files")
    which.add_argument("--failed", action="store_true", help="tests that failed only")
    parser.add_argument("--jobs", type=int, help="processes; 3 for 4 cores by default")
    args = parser.parse_args()
    where = common.environment(args.commit)
    path = (args.out or ROOT / "results") / common.slug(where["device"])
    path = path / "gpu_tests.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = json.loads(path.read_text())["files"] if path.exists() else {}
    everywhere = of_any_device([*records(), {"files": entries}])["files"]
    known = entries if args.failed else everywhere
    chosen = tests_to_run(known, args.all, args.only, args.failed)
    if args.only and len(chosen) != len(args.only):
        parser.error(f"GPU tests are in {', '.join(f.name for f in gpu_files())}")
    jobs = args.jobs or max(1, (os.cpu_count() or 1) * 3 // 4)
    for file, outcome in gpu_runs.run(chosen, jobs):
        if outcome is not None and args.failed:
            outcome = together(entries[file.name], outcome)
        entries[file.name] = outcome and entry_of(outcome, where)
        text = json.dumps(summary(entries), indent=1) + "\n"
        trust.write_atomically(path, text.encode(), mode=0o644)
    found = complaints(of_any_device([*records(), {"files": entries}]))
    print("\n".join(found) or "the kernels pass as they are", file=sys.stderr)
    return int(bool(found))


def tests_to_run(
    entries: Mapping[str, Entry],
    every: bool = False,
    only: Sequence[str] | None = None,
    failed: bool = False,
) -> dict[pathlib.Path, list[str]]:
    """The files to run, and the names of their tests; none for all of them.

    Args:
      entries: of the record, by name of the file.
      every, only, failed: the arguments of the program.
    """
    files = {file: entries.get(file.name) for file in gpu_files()}
    if failed:
        same = {f: e for f, e in files.items() if e and is_of_sources(e)}
        return {f: e["failing"] for f, e in same.items() if e["failing"]}
    if only is not None:
        return {f: [] for f in files if f.name in only}
    return {f: [] for f, entry in files.items() if every or why_stale(entry)}


def summary(entries: Mapping[str, Entry | None]) -> Record:
    """The record; files that could not be run, or are no more, are not in it."""
    names = {file.name for file in gpu_files()}
    known = {n: e for n, e in sorted(entries.items()) if e is not None and n in names}
    totals = {name: sum(entry[name] for entry in known.values()) for name in COUNTS}
    return {**totals, "files": known}


def entry_of(
    outcome: Outcome, where: dict[str, Any], repository: pathlib.Path = REPOSITORY
) -> Entry:
    """The entry of a test file that ran now."""
    return {
        **dataclasses.asdict(outcome),
        "hash": sources_hash(outcome.sources, repository),
        "environment": where,
    }


def together(before: Entry, again: Outcome) -> Outcome:
    """The outcome of a file of which the failing tests were run again."""
    sources = tuple(sorted({*before["sources"], *again.sources}))
    passed = before["passed"] + again.passed
    return dataclasses.replace(again, passed=passed, sources=sources)


def _files(directory: pathlib.Path) -> list[str]:
    """The files below a directory, by sorted names relative to it."""
    files = (f for f in directory.rglob("*") if f.is_file())
    return sorted(f.relative_to(directory).as_posix() for f in files)


if __name__ == "__main__":
    raise SystemExit(main())
