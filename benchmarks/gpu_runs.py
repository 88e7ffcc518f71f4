"""Runs GPU test files in several processes, and finds which kernels they compiled.

Compiling takes most of the time of GPU tests, so processes share the GPU. None of them
may take all of its memory. What fails is in the record; ``gpu_record`` calls ``run``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import itertools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

from tracea_jax.emit import sources

_REPOSITORY = pathlib.Path(__file__).resolve().parent.parent
_FEWEST_TESTS = 8  # of a process: fewer are not worth starting JAX
_LONGEST_S = 420  # of a process: one that takes longer waits for a kernel that hangs
_SUITE_COUNTS = ("tests", "failures", "errors", "skipped")
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of some tests of a file.

    Attributes:
      passed, failed, skipped: numbers of tests.
      failing: names of those that failed.
      sources: names, relative to kernels/cuda, of all that their kernels include.
    """

    passed: int
    failed: int
    skipped: int
    failing: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    def __add__(self, other: Self) -> Outcome:
        """The outcome of these tests and of others."""
        return Outcome(
            passed=self.passed + other.passed,
            failed=self.failed + other.failed,
            skipped=self.skipped + other.skipped,
            failing=self.failing + other.failing,
            sources=tuple(sorted({*self.sources, *other.sources})),
        )


def run(
    files: Mapping[pathlib.Path, Sequence[str]],
    jobs: int,
    pytest_args: Sequence[str] = (),
) -> Iterator[tuple[pathlib.Path, Outcome | None]]:
    """Runs the tests of each file, in at most ``jobs`` processes at a time.

    Args:
      files: test files, and the names of the tests to run; no names are all tests.
      jobs: number of processes.
      pytest_args: more arguments of pytest.

    Yields:
      Each file when it is done, and its outcome; None if one of its processes died.
    """
    names = {**_collected([f for f in files if not files[f]], pytest_args)}
    names |= {file: list(chosen) for file, chosen in files.items() if chosen}
    parts = {file: _parts(names.get(file, []), jobs) for file in files}

    with (
        tempfile.TemporaryDirectory() as directory,
        concurrent.futures.ThreadPoolExecutor(jobs) as pool,
    ):
        number = itertools.count()

        def start(file: pathlib.Path, part: list[str]) -> concurrent.futures.Future:
            own = pathlib.Path(directory) / str(next(number))
            own.mkdir(mode=0o700)
            return pool.submit(_run, file, part, pytest_args, own)

        # A file is recorded when its last part ends, while parts of others still run.
        owners = {start(file, part): file for file in files for part in parts[file]}
        outcomes: dict[pathlib.Path, list[Outcome | None]] = {f: [] for f in files}
        for future in concurrent.futures.as_completed(owners):
            found = outcomes[file := owners[future]]
            found.append(future.result())
            if len(found) == len(parts[file]):
                whole = [outcome for outcome in found if outcome is not None]
                total = sum(whole[1:], whole[0]) if whole else None
                yield file, total if len(whole) == len(found) else None


def compiled_sources(directory: pathlib.Path) -> tuple[str, ...]:
    """The headers of kernels/cuda that kernels in the caches below a directory include.

    The store keeps the text of each kernel that was compiled, in whichever process. The
    headers that an emitter generates are none of kernels/cuda.
    """
    texts = (file.read_text() for file in directory.rglob("cubin/*/*.cu"))
    named = {name for text in texts for name in _INCLUDE.findall(text)}
    real = sorted(name for name in named if (sources.directory() / name).is_file())
    return tuple(name for name, _ in sources.headers(*real))


def _collected(
    files: Sequence[pathlib.Path], pytest_args: Sequence[str]
) -> dict[pathlib.Path, list[str]]:
    """The names of the tests of each file; none of a file that cannot be imported."""
    if not files:
        return {}
    done = subprocess.run(
        _pytest(*map(str, files), "--collect-only", *pytest_args),
        cwd=_REPOSITORY,
        env=_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    found: dict[pathlib.Path, list[str]] = {file: [] for file in files}
    by_name = {file.name: file for file in files}
    for line in done.stdout.splitlines():
        path, is_test, name = line.partition("::")
        if is_test and pathlib.PurePath(path).name in by_name:
            found[by_name[pathlib.PurePath(path).name]].append(name)
    return found


def _parts(names: Sequence[str], jobs: int) -> list[list[str]]:
    """The tests of a file in as many parts as processes are worth starting.

    Neighbours take equally long, so they go to different parts. Without names the file
    is run as a whole, and its report tells what is wrong with it.
    """
    count = max(1, min(jobs, -(-len(names) // _FEWEST_TESTS)))
    return [list(names[i::count]) for i in range(count)]


def _run(
    file: pathlib.Path,
    names: Sequence[str],
    pytest_args: Sequence[str],
    own: pathlib.Path,
) -> Outcome | None:
    """Runs tests of a file in one process, with files in a directory of its own."""
    report = own / "report.xml"
    tests = [f"{file}::{name}" for name in names] or [str(file)]
    where = [f"--basetemp={own / 'tests'}", f"--junitxml={report}"]
    try:
        done = subprocess.run(
            _pytest(*tests, *where, *pytest_args),
            cwd=_REPOSITORY,
            env=_environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_LONGEST_S,
        )
    except subprocess.TimeoutExpired as late:
        shown = (late.output or b"").decode(errors="replace")
        print(f"{file.name} did not end in {_LONGEST_S} s:\n{shown}", flush=True)
        return None
    lines = done.stdout.strip().splitlines()
    shown = lines[-1:] if done.returncode == 0 else lines
    print(f"{file.name}: " + "\n".join(shown), flush=True)
    if not report.exists():
        return None
    found = compiled_sources(own / "tests")
    return dataclasses.replace(_outcome(report), sources=found)


def _pytest(*args: str) -> list[str]:
    return [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *args]


def _environ() -> dict[str, str]:
    return {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _outcome(report: pathlib.Path) -> Outcome:
    (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in _SUITE_COUNTS}
    failed = number["failures"] + number["errors"]
    bad = [
        case.get("name", "")
        for case in suite.iter("testcase")
        if case.find("failure") is not None or case.find("error") is not None
    ]
    return Outcome(
        passed=number["tests"] - failed - number["skipped"],
        failed=failed,
        skipped=number["skipped"],
        failing=tuple(bad),
    )
