"""Committed results: GPU records match the kernels, and tables match the results."""

from __future__ import annotations

import collections
import importlib.util
import json
import pathlib
import re
import sys
import warnings
from typing import Any

import pytest

from tracea_jax.device import NAMED
from tracea_jax.knowledge import SHIPPED
from tracea_jax.problem import problem_from_json
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import environment as environments
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import Environment

pytestmark = pytest.mark.once

_MARKED = "@pytest.mark." + "gpu"  # apart: this file has no test of a GPU
BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def gpu_runs():
    return _load("gpu_runs")


@pytest.fixture(scope="module")
def gpu_record(gpu_runs):
    return _load("gpu_record")


def test_kernels_were_tested_on_a_gpu_as_they_are(gpu_record):
    records = gpu_record.records()
    found = gpu_record.complaints(gpu_record.of_any_device(records))
    pending = [r["pending"] for r in records if "pending" in r]
    if not found:
        return
    if pending:
        warnings.simplefilter("default")
        warnings.warn(f"GPU tests are pending: {'; '.join(pending)}", stacklevel=1)
        return
    lines = "\n".join(found)
    pytest.fail(f"on a GPU machine run {gpu_record.COMMAND}, as\n{lines}")


@pytest.fixture
def repository(tmp_path, gpu_record):
    """A repository with a kernel for each of two test files, and their record."""
    texts = {
        "kernels/cuda/a.cuh": "int a;",
        "kernels/cuda/tile/b.cuh": "int b;",
        "ffi/launch.cc": "int launch;",
        "ffi/cpu_gemm.cc": "int cpu;",
        "tests/test_a.py": _MARKED,
        "tests/test_b.py": _MARKED,
        "tests/test_c.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.fixture
def record(gpu_record, gpu_runs, repository):
    def entry(**changed):
        outcome = gpu_runs.Outcome(
            **{"passed": 3, "failed": 0, "skipped": 1, **changed}
        )
        return gpu_record.entry_of(outcome, {}, repository)

    shared = ("tile/b.cuh",)
    files = {"test_a.py": entry(sources=("a.cuh", *shared))}
    files["test_b.py"] = entry(sources=shared)
    assert gpu_record.complaints({"files": files}, repository) == []
    return {"files": files}


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("kernels/cuda/a.cuh", ["test_a.py"]),
        ("kernels/cuda/tile/b.cuh", ["test_a.py", "test_b.py"]),
        ("ffi/launch.cc", ["test_a.py", "test_b.py"]),
        ("ffi/cpu_gemm.cc", []),  # no GPU runs it
        ("tests/test_c.py", []),
    ],
)
@pytest.mark.parametrize("is_removed", [False, True])
def test_a_change_concerns_the_test_files_that_ran_it(
    gpu_record, repository, record, changed, stale, is_removed
):
    if is_removed:
        (repository / changed).unlink()
    else:
        (repository / changed).write_text("int changed;")
    found = gpu_record.complaints(record, repository)
    expected = [f"{name} ran with other sources" for name in stale]
    assert [line for line in found if "ran with" in line] == expected
    assert bool(found) == bool(stale)


def test_every_kernel_and_every_test_file_has_to_be_run(gpu_record, repository, record):
    (repository / "kernels/cuda/new.cuh").write_text("int new;")
    record["files"]["test_a.py"] |= {"failed": 1, "failing": ["test_x[2]"]}
    record["files"]["test_b.py"] |= {"passed": 0}
    (repository / "tests/test_d.py").write_text(_MARKED)
    unrun = "no test file that passed runs a kernel with kernels/cuda/"
    assert gpu_record.complaints(record, repository) == [
        "test_a.py failed: test_x[2]",
        "test_b.py has no test that passed",
        "test_d.py was not run",
        *(f"{unrun}{name}" for name in ("a.cuh", "new.cuh", "tile/b.cuh")),
    ]


def test_a_test_file_counts_where_any_device_ran_it(gpu_record, record, repository):
    a, b = record["files"]["test_a.py"], record["files"]["test_b.py"]
    stale, failed = a | {"hash": "of others"}, b | {"failed": 1, "failing": ["test_x"]}
    devices = [
        {"files": {"test_a.py": stale, "test_b.py": b}},
        {"files": {"test_a.py": a, "test_b.py": failed}},
    ]
    for ordered in (devices, devices[::-1]):
        assert gpu_record.of_any_device(ordered, repository) == {
            "files": record["files"]
        }
    found = gpu_record.of_any_device(devices[:1], repository)
    assert (
        gpu_record.complaints(found, repository)[0]
        == "test_a.py ran with other sources"
    )


def test_only_what_is_stale_is_run(gpu_record, gpu_runs):
    first, second, third, *others = gpu_record.gpu_files()
    good = gpu_record.entry_of(gpu_runs.Outcome(passed=2, failed=0, skipped=0), {})
    bad = good | {"failed": 1, "failing": ["test_x"]}
    entries = {file.name: good for file in others}
    entries |= {first.name: bad, second.name: good | {"hash": "of others"}}
    run = gpu_record.tests_to_run
    assert run(entries) == {first: [], second: [], third: []}
    assert run(entries, failed=True) == {first: ["test_x"]}
    assert run(entries, only=[others[0].name]) == {others[0]: []}
    assert list(run(entries, every=True)) == gpu_record.gpu_files()
    summary = gpu_record.summary({**entries, third.name: None, "test_gone.py": good})
    assert list(summary["files"]) == sorted(entries)
    assert summary["passed"] == 2 * len(entries) and summary["failed"] == 1


_MADE = """
import pytest
pytestmark = getattr(pytest.mark, "gpu")

@pytest.mark.parametrize("x", range(10))
def test_x(x, tmp_path):
    store = tmp_path / "cache/cubin/sm_90a"
    store.mkdir(parents=True)
    header = "ptx/sync.cuh" if x == 5 else "tile/swizzle.cuh"
    (store / "k.cu").write_text(f'#include "{header}"\\n#include "generated.h"\\n')
    assert x CONDITION
"""


def test_a_file_is_run_in_parts_and_what_failed_again(
    tmp_path, monkeypatch, gpu_record, gpu_runs
):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    file = tmp_path / "test_made.py"
    how = ["-c", "/dev/null", "-p", "no:cacheprovider", "-W", "ignore"]

    def run(names, condition):
        file.write_text(_MADE.replace("CONDITION", condition))
        ((ran, outcome),) = gpu_runs.run({file: names}, 2, how)
        assert ran == file
        return outcome

    first = run([], "!= 2")
    swizzle = ("tile/common.cuh", "tile/swizzle.cuh")
    sources = ("ptx/sync.cuh", *swizzle)
    assert first == gpu_runs.Outcome(
        passed=9, failed=1, skipped=0, failing=("test_x[2]",), sources=sources
    )
    again = run(first.failing, ">= 0")
    assert (again.passed, again.sources) == (1, swizzle)
    assert gpu_record.together(
        gpu_record.entry_of(first, {}), again
    ) == gpu_runs.Outcome(passed=10, failed=0, skipped=0, sources=sources)
    assert run([], "no Python").failed  # with a report of its own
    assert run(["test_x[1]"], "!= __import__('os')._exit(3)") is None


def test_shipped_answers_belong_to_the_kernels_as_they_are(monkeypatch):
    found = collections.Counter()
    for path in sorted(SHIPPED.glob("*/environment.json")):
        described = Environment(**json.loads(path.read_text()))
        (device,) = [d for d in NAMED.values() if d.name == described.device]
        monkeypatch.setattr(
            environments.devices, "cuda_driver_version", lambda d=described: d.driver
        )
        monkeypatch.setattr(environments.nvrtc, "version", lambda d=described: d.nvrtc)
        environments.environment.cache_clear()
        environments.environment_key.cache_clear()
        knowledge = Knowledge(None, shipped=(SHIPPED,))
        for name, head in Store(SHIPPED, read_only=True).heads():
            if name.environment != path.parent.name:
                continue
            problem = problem_from_json(head.problem)
            assert problem.op == name.op
            assert environments.environment(device) == described
            answer = knowledge.lookup(problem, device)
            assert answer is not None, knowledge.why_missed(problem, device)
            assert answer.origin == "shipped"
            found[problem.op] += 1
    environments.environment.cache_clear()
    environments.environment_key.cache_clear()
    assert set(found) >= {"matmul", "gated_matmul", "conv2d"}


def test_tables_are_made_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # they are made by several modules
    tables = _load("tables")
    for page in tables.PAGES:
        text = page.read_text()
        assert tables.rendered(text, BENCHMARKS / "results") == text, page


def test_every_result_is_in_a_table_of_some_page(monkeypatch):
    """Each table is on one page for all machines, or on those of its machines."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    tables, results = _load("tables"), BENCHMARKS / "results"
    text = "".join(page.read_text() for page in tables.PAGES)
    shown = [(m["table"], m["machines"]) for m in tables.MARKED.finditer(text)]
    assert len(shown) == len(set(shown))
    apart = {
        (name, machines)
        for name, make in tables.TABLES.items()
        if (name, None) not in shown
        for machines in tables.MACHINES
        if "|" in make(tables.Selected(results, machines))
    }
    assert {one for one in shown if one[1] is not None} == apart
    directories = [d for d in results.iterdir() if d.name != "replay"]
    for directory in directories:
        homes = [m for m in tables.MACHINES if _files(tables, m, directory)]
        assert len(homes) == 1, directory


def _files(tables: Any, machines: str, directory: pathlib.Path) -> list[pathlib.Path]:
    pattern = f"{directory.name}/*.json"
    return list(tables.Selected(directory.parent, machines).glob(pattern))


def test_results_that_variants_name_are_kept():
    variants = BENCHMARKS.parent / "tracea_jax" / "variants"
    texts = (file.read_text() for file in variants.glob("*.py"))
    named = {name for text in texts for name in re.findall(r"``(\w+\.json)``", text)}
    assert named and named <= {f.name for f in BENCHMARKS.glob("results/*/*.json")}


def test_shipped_answers_that_won_by_little_have_clearly_less_kernel_time():
    """Those that a race in kernel time did not bear out are left to XLA."""
    results = BENCHMARKS / "results/nvidia_h200/choices_shipped.json"
    rows = json.loads(results.read_text())["rows"]
    entries = {
        problem_from_json(head.problem): head.best
        for _, head in Store(SHIPPED, read_only=True).heads()
        if head.environment.device == "NVIDIA H200"
    }
    assert len(rows) > 100
    for row in rows:
        best = entries[problem_from_json(row["problem"])]
        wanted = row["variant"] if row["ratio_default"] >= 1.01 else "xla"
        assert best.variant == wanted, row["text"]
        assert best.kernel_us == pytest.approx(
            row["xla_us" if wanted == "xla" else "default_us"], rel=1e-3
        )
        assert best.xla_kernel_us == pytest.approx(row["xla_us"], rel=1e-3)
