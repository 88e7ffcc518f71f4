"""Runs the GPU tests and records what they covered: python benchmarks/gpu_record.py

The record, ``results/<device>/gpu_tests.json``, names the content of ``kernels/cuda``
and ``ffi`` that was tested. An ordinary test compares it with what is there now, so
kernels cannot change without a GPU run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent
TESTS = ROOT.parent / "tests"
TESTED = ("kernels/cuda", "ffi")
_SUITE_COUNTS = ("tests", "failures", "errors", "skipped")
COMMAND = "python benchmarks/gpu_record.py"


def tested_hash(repository: pathlib.Path = ROOT.parent) -> str:
    """sha256 over the names and contents of the files that GPU tests cover."""
    digest = hashlib.sha256()
    files = (f for d in TESTED for f in (repository / d).rglob("*") if f.is_file())
    for file in sorted(files):
        content = file.read_bytes()
        name = file.relative_to(repository).as_posix()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def records(results: pathlib.Path = ROOT / "results") -> list[dict]:
    """All records, of any device."""
    return [json.loads(f.read_text()) for f in sorted(results.glob("*/gpu_tests.json"))]


def main() -> int:
    import common  # needs an installed tracea_jax, which the hash does not

    parser = argparse.ArgumentParser(description=__doc__)
    common.add_arguments(parser)
    args, pytest_args = parser.parse_known_args()
    status, counts = _run_tests(pytest_args)
    record = {
        "hash": tested_hash(),
        "environment": common.environment(args.commit),
        **counts,
    }
    directory = (args.out or ROOT / "results") / common.slug(
        record["environment"]["device"]
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "gpu_tests.json").write_text(json.dumps(record, indent=1) + "\n")
    return status


def _run_tests(pytest_args: list[str]) -> tuple[int, dict[str, int]]:
    """pytest's exit status, and how many GPU tests passed, failed or were skipped.

    Files run side by side, each in a process of its own: most of their time they
    compile. For that none of them may take all memory of the GPU.
    """
    files = sorted(f for f in TESTS.glob("test_*.py") if "mark.gpu" in f.read_text())
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    number = dict.fromkeys(_SUITE_COUNTS, 0)
    with tempfile.TemporaryDirectory() as directory:
        runs = []
        for file in files:
            report = pathlib.Path(directory) / f"{file.stem}.xml"
            command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(file)]
            command += [f"--junitxml={report}", *pytest_args]
            run = subprocess.Popen(command, cwd=ROOT.parent, env=environ)
            runs.append((report, run))
        status = max(run.wait() for _, run in runs)
        for report, _ in runs:
            (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
            for name in _SUITE_COUNTS:
                number[name] += int(suite.get(name, 0))
    failed = number["failures"] + number["errors"]
    return status, {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
