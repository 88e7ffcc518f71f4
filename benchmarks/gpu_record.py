"""Runs the GPU tests and records what they covered: python benchmarks/gpu_record.py

The record, ``results/<device>/gpu_tests.json``, names the content of ``kernels/cuda``
and ``ffi`` that was tested. An ordinary test compares it with what is there now, so
kernels cannot change without a GPU run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(__file__).resolve().parent
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
    """pytest's exit status, and how many GPU tests passed, failed or were skipped."""
    with tempfile.TemporaryDirectory() as directory:
        report = pathlib.Path(directory) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu"]
        command += [f"--junitxml={report}", *pytest_args]
        status = subprocess.run(command, cwd=ROOT.parent).returncode
        (suite,) = xml.etree.ElementTree.parse(report).getroot().iter("testsuite")
    number = {name: int(suite.get(name, 0)) for name in _SUITE_COUNTS}
    failed = number["failures"] + number["errors"]
    return status, {
        "passed": number["tests"] - failed - number["skipped"],
        "failed": failed,
        "skipped": number["skipped"],
    }


if __name__ == "__main__":
    raise SystemExit(main())
