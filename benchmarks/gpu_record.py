"""Runs the GPU tests and records which sources they covered.

    python benchmarks/gpu_record.py

The record, ``results/<device>/gpu_tests.json``, has a hash of the tested content of
``kernels/cuda`` and ``ffi`` (without the handlers of CPU kernels). An ordinary test
compares that hash with the present content, so kernels cannot change without a GPU run.
The record is written after every test file: a run that is cut off leaves its results,
``--only`` runs the remaining files, and ``--failed`` the tests that failed, if kernels
and launcher are still the same.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent
TESTS = ROOT.parent / "tests"
TESTED = ("kernels/cuda", "ffi")
OF_CPUS = "cpu_"  # prefix of files that no GPU test runs
COUNTS = ("passed", "failed", "skipped")
_SUITE_COUNTS = ("tests", "failures", "errors", "skipped")
COMMAND = "python benchmarks/gpu_record.py"

Counts = dict[str, Any]  # of a test file: COUNTS, and the names of failing tests


def tested_hash(repository: pathlib.Path = ROOT.parent) -> str:
    """sha256 over the names and contents of the files that GPU tests cover."""
    digest = hashlib.sha256()
    files = (f for d in TESTED for f in (repository / d).rglob("*") if f.is_file())
    for file in sorted(f for f in files if not f.name.startswith(OF_CPUS)):
        content = file.read_bytes()
        name = file.relative_to(repository).as_posix()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def records(results: pathlib.Path = ROOT / "results") -> list[dict]:
    """All records, of any device."""
    return [json.loads(f.read_text()) for f in sorted(results.glob("*/gpu_tests.json"))]


def main() -> int:
    import common  # needs an installed tracea_jax, which the hash does not

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    common.add_arguments(parser)
    parser.add_argument("--only", nargs="*", help="files; others keep their counts")
    parser.add_argument("--failed", action="store_true", help="tests that failed only")
    args, pytest_args = parser.parse_known_args()
    where = common.environment(args.commit)
    path = (args.out or ROOT / "results") / common.slug(where["device"])
    path = path / "gpu_tests.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    chosen = [f for f in gpu_files() if args.only is None or f.name in args.only]
    if not chosen:
        parser.error(f"no test file of a GPU is called {' or '.join(args.only or ())}")
    files = _files_of(path) if args.only or args.failed else {}
    failing = {name: counts.get("failing", []) for name, counts in files.items()}
    if args.failed:
        chosen = [f for f in chosen if failing.get(f.name)]
    else:
        for file in chosen:
            files.pop(file.name, None)
    tests = {f: failing[f.name] if args.failed else [] for f in chosen}
    worst = 0
    for name, status, counts in _run_tests(tests, pytest_args):
        worst = max(worst, abs(status))
        if counts is not None:
            files[name] = together(files.get(name), counts)
            path.write_text(json.dumps(summary(files, where), indent=1) + "\n")
    return worst


def gpu_files() -> list[pathlib.Path]:
    """The test files that need a GPU, or have tests that do."""
    return sorted(f for f in TESTS.glob("test_*.py") if "mark.gpu" in f.read_text())


def together(before: Counts | None, again: Counts) -> Counts:
    """The counts of a file of which the failing tests were run again."""
    if before is None:
        return again
    return {**before, **again, "passed": before["passed"] + again["passed"]}


def summary(files: dict[str, Counts], where: dict[str, Any]) -> dict[str, Any]:
    """The record of the counts of each test file, and the files that remain to run."""
    totals = {name: sum(file[name] for file in files.values()) for name in COUNTS}
    left = [file.name for file in gpu_files() if file.name not in files]
    return {
        "hash": tested_hash(),
        "environment": where,
        **totals,
        "files": {name: files[name] for name in sorted(files)},
        "left": left,
    }


def _files_of(path: pathlib.Path) -> dict[str, Counts]:
    """Counts of an earlier record, if its kernels were the same."""
    record = json.loads(path.read_text()) if path.exists() else {}
    return record["files"] if record.get("hash") == tested_hash() else {}


def _run_tests(
    tests: dict[pathlib.Path, list[str]], pytest_args: list[str]
) -> Iterator[tuple[str, int, Counts | None]]:
    """Runs test files side by side, each in its own process.

    Of a file with names only the tests of these names are run.

    Test files compile for most of their time, so several can share the GPU. Therefore
    none of them may take all of its memory.

    Yields:
      For each file when it is done: its name, the exit status of pytest, and the number
      of tests by outcome; None instead if the process died.
    """
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def run(file: pathlib.Path) -> tuple[str, int, Counts | None]:
        report = pathlib.Path(directory) / f"{file.stem}.xml"
        named = [f"{file}::{name}" for name in tests[file]] or [str(file)]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *named]
        command += [f"--junitxml={report}", *pytest_args]
        done = subprocess.run(command, cwd=ROOT.parent, env=environ)
        return file.name, done.returncode, _counts(report) if report.exists() else None

    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(max(1, len(tests))) as pool,
    ):
        for done in concurrent.futures.as_completed(pool.submit(run, f) for f in tests):
            yield done.result()


def _counts(report: pathlib.Path) -> Counts:
    (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in _SUITE_COUNTS}
    failed = number["failures"] + number["errors"]
    passed = number["tests"] - failed - number["skipped"]
    cases = suite.iter("testcase")
    bad = [
        c for c in cases if c.find("failure") is not None or c.find("error") is not None
    ]
    return {
        "passed": passed,
        "failed": failed,
        "skipped": number["skipped"],
        "failing": [case.get("name", "") for case in bad],
    }


if __name__ == "__main__":
    raise SystemExit(main())
