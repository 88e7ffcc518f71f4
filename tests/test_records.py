"""Committed results: GPU records match the kernels, and tables match the results."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re
import sys
import warnings

import pytest

from tracea_jax.device import NAMED
from tracea_jax.knowledge import SHIPPED
from tracea_jax.problem import problem_from_json
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import environment as environments
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import Environment
from tracea_jax.tuning.store.records import Entry

BENCHMARKS = pathlib.Path(__file__).resolve().parent.parent / "benchmarks"


def _load(name: str):
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_kernels_were_tested_on_a_gpu_as_they_are():
    gpu_record = _load("gpu_record")
    now = gpu_record.tested_hash()
    records = gpu_record.records()
    pending = [r["pending"] for r in records if "pending" in r]
    passing = [r for r in records if r["passed"] and not (r["failed"] or r["left"])]
    if any(r["hash"] == now for r in passing):
        return
    if pending:
        warnings.simplefilter("default")
        warnings.warn(f"GPU tests are pending: {'; '.join(pending)}", stacklevel=1)
        return
    pytest.fail(
        f"no passing GPU record for kernels/cuda and ffi as they are ({now[:12]}); "
        f"on a GPU machine run: {gpu_record.COMMAND}"
    )


def test_a_record_names_the_files_that_are_left():
    gpu_record = _load("gpu_record")
    names = [file.name for file in gpu_record.gpu_files()]
    counts = {"passed": 3, "failed": 1, "skipped": 0}
    record = gpu_record.summary({name: counts for name in names[1:]}, {})
    assert record["left"] == names[:1]
    assert (record["passed"], record["failed"]) == (3 * len(names[1:]), len(names[1:]))


def test_failing_tests_are_run_again_alone(tmp_path):
    gpu_record = _load("gpu_record")
    file = tmp_path / "test_made.py"
    source = "import pytest\npytestmark = getattr(pytest.mark, 'gpu')\n"
    source += "@pytest.mark.parametrize('x', [1, 2, 3])\ndef test_x(x): assert x {}\n"
    how = ["-c", "/dev/null", "-p", "no:cacheprovider", "-W", "ignore"]

    def run(names, condition):
        file.write_text(source.format(condition))
        ((name, status, counts),) = gpu_record._run_tests({file: names}, how)
        assert name == file.name and bool(status) == bool(counts["failed"])
        return counts

    first = run([], "!= 2")
    assert first == {"passed": 2, "failed": 1, "skipped": 0, "failing": ["test_x[2]"]}
    again = gpu_record.together(first, run(first["failing"], "> 0"))
    assert again == {"passed": 3, "failed": 0, "skipped": 0, "failing": []}
    assert gpu_record.summary({file.name: again}, {})["passed"] == 3


def test_a_changed_kernel_changes_the_hash(tmp_path):
    gpu_record = _load("gpu_record")
    for name in gpu_record.TESTED:
        (tmp_path / name).mkdir(parents=True)
    header = tmp_path / gpu_record.TESTED[0] / "a.cuh"
    header.write_text("int x;")
    before = gpu_record.tested_hash(tmp_path)
    (tmp_path / "ffi" / "cpu_gemm.cc").write_text("int z;")  # no GPU runs it
    assert gpu_record.tested_hash(tmp_path) == before
    header.write_text("int y;")
    assert gpu_record.tested_hash(tmp_path) != before


def test_shipped_answers_belong_to_the_kernels_as_they_are(monkeypatch):
    found = 0
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
        for file in path.parent.glob("*/*.json"):
            head = Entry.from_bytes(file.read_bytes(), complete=False)
            problem = problem_from_json(head.problem)
            assert problem.op == file.parent.name
            assert environments.environment(device) == described
            answer = knowledge.lookup(problem, device)
            assert answer is not None, knowledge.why_missed(problem, device)
            assert answer.origin == "shipped"
            found += 1
    environments.environment.cache_clear()
    environments.environment_key.cache_clear()
    assert found


def test_tables_are_made_from_the_results():
    tables = _load("tables")
    pages = {page: page.read_text() for page in tables.PAGES}
    for text in pages.values():
        assert tables.rendered(text, BENCHMARKS / "results") == text
    shown = set(re.findall(r"<!-- table: (\w+) -->", "".join(pages.values())))
    assert shown == set(tables.TABLES)


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
