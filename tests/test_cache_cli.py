"""tracea cache: list, show, export, merge, verify, prune, and the code behind them."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import signal
import sys
import threading
import time
from typing import Any

import pytest
from cache_commands import local, record, run, shaped, store_in
from synthetic_bench import DEVICE, PROBLEM, choice, entry, failed, file_of, measured

from tracea_jax import cli, knowledge, schema
from tracea_jax.device import local_cpu
from tracea_jax.runtime import trust
from tracea_jax.tuning import measure
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import exchange, upkeep
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.records import Best, identity, union

# --- list and show --------------------------------------------------------------------


def test_list_has_one_sorted_line_for_each(capsys, cache_dir):
    assert run(capsys, "list")[:2] == (0, "")
    record(cache_dir, entry(problem=shaped(7)), entry(choice(9), problem=shaped(5)))
    xla = Best(variant="xla", config={}, time_us=3.0, xla_us=3.0)
    gone = Best(variant="gemm_gone", config={})
    record(cache_dir, dataclasses.replace(entry(), best=xla))
    record(cache_dir, dataclasses.replace(entry(problem=shaped(8)), best=gone))
    status, out, err = run(capsys, "list")
    assert status == 0 and err == f"4 tuned problems in {cache_dir}\n"
    times = "10.0 us, XLA 15.0 us, 1.50x"
    assert out.splitlines() == [
        f"{DEVICE.name}: matmul 5x80x64 float32 nn: gemm_cpu [kc 9, nc 512, tasks 2], "
        + times,
        f"{DEVICE.name}: matmul 7x80x64 float32 nn: gemm_cpu [kc 8, nc 512, tasks 2], "
        + times,
        f"{DEVICE.name}: matmul 8x80x64 float32 nn: gemm_gone (unknown variant), "
        "not timed",
        f"{DEVICE.name}: matmul 96x80x64 float32 nn: xla, 3.00 us",
    ]


def test_a_reader_that_has_enough_hears_nothing_more(capsys, cache_dir, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert cli.main(["cache", "list", "--json"]) == 128 + signal.SIGPIPE
    assert "Broken pipe" not in capsys.readouterr().err


def test_show_tells_everything(capsys, cache_dir):
    best = dataclasses.replace(
        entry().best,
        cold_us=30.0,
        xla_cold_us=40.0,
        origin="search",
        runner_up={
            "variant": "gemm_cpu",
            "config": dataclasses.asdict(choice(9).config),
            "time_us": 11.0,
        },
    )
    cold = dataclasses.replace(measured(8), cold_us=31.0)
    full = dataclasses.replace(
        entry(observations=[cold, measured(9, 11.0), failed(4), failed(5, "timeout")]),
        best=best,
        verified={"max_rel_error": 1e-6, "ok": True},
        tuner={
            "evals": 4,
            "untuned": {"cold_us": 36.0},
            "merged": [{"written": "2025-05-05", "evals": 2}],
        },
    )
    record(cache_dir, full, entry(problem=shaped(7)))
    status, out, _ = run(capsys, "show", "MATMUL", "96x80")
    assert status == 0 and out.startswith("matmul 96x80x64 float32 nn\n")
    for part in (
        str(file_of(cache_dir)),
        DEVICE.name,
        "gemm_cpu [kc 8, nc 512, tasks 2], 30.0 us, XLA 40.0 us, 1.33x",
        "in a row     10.0 us, XLA 15.0 us",
        "untuned      36.0 us",
        "chosen       for latency, tuned config",
        "[kc 9, nc 512, tasks 2], 11.0 us",
        "max rel error 1e-06",
        "2026-01-01, evals 4",
        "2025-05-05, evals 2",
        "4, failed 2: timeout 1, wrong_result 1",
        "wrong_result bad",
    ):
        assert part in out, part
    rows = [line.split() for line in out.splitlines() if "gemm_cpu [kc" in line][2:]
    assert rows[0][:4] == ["10.00", "31.00", "5", "gemm_cpu"]
    assert rows[1][:4] == ["11.00", "-", "5", "gemm_cpu"]
    assert run(capsys, "show", "matmul")[1].count("observed") == 2
    status, _, err = run(capsys, "show", "conv2d")
    assert status == 1 and "no tuned problem contains 'conv2d'" in err


# --- verify ---------------------------------------------------------------------------


def test_verify_finds_what_is_wrong_and_changes_nothing(capsys, cache_dir):
    assert run(capsys, "verify")[0] == 0
    record(cache_dir, *(local(entry(problem=shaped(m))) for m in (1, 2, 3, 4)))
    assert run(capsys, "verify") == (0, "", "4 tuned problems, 0 wrong\n")
    store = store_in(cache_dir)
    paths = [store.path(name) for name in store.names()]
    paths[0].write_bytes(paths[0].read_bytes()[:-3])
    paths[1].rename(misnamed := paths[1].with_name("0123456789abcdef.json"))
    paths[2].write_bytes(b'{"schema":99}')
    illegal = dataclasses.replace(entry(), best=Best(variant="gemm_cpu", config={}))
    record(cache_dir, local(illegal))
    described = paths[0].parents[1] / "environment.json"
    described.write_text(described.read_text().replace('"units": ', '"units": 9'))
    aside = paths[0].with_name("a.json.corrupt-1")
    aside.write_bytes(b"")
    before = sorted((p, p.read_bytes()) for p in cache_dir.rglob("*") if p.is_file())
    status, out, err = run(capsys, "verify")
    after = sorted((p, p.read_bytes()) for p in cache_dir.rglob("*") if p.is_file())
    assert status == 1 and before == after
    lines = out.splitlines()
    for prefix, path, message in (
        ("wrong", paths[0], "damaged"),
        ("wrong", misnamed, "nothing finds it"),
        ("note", paths[2], "newer"),
        ("wrong", described, "describes"),
        ("note", aside, "set aside"),
    ):
        (line,) = [text for text in lines if str(path) in text.partition(": it b")[0]]
        assert line.startswith(prefix) and message in line
    assert any("does not fit" in line for line in lines)
    assert err == "5 tuned problems, 4 wrong\n"


def test_verify_knows_other_devices_by_their_names(tmp_path):
    record(tmp_path, dataclasses.replace(entry(), best=Best(variant="gone", config={})))
    count, findings = upkeep.verify(store_in(tmp_path), [])
    assert (count, findings) == (1, ())  # of a device that is not known
    _, (finding,) = upkeep.verify(store_in(tmp_path), [DEVICE])
    assert "no variant" in finding.message


def test_verify_can_run_the_answers_of_this_machine(capsys, cache_dir, monkeypatch):
    record(cache_dir, local(entry()), entry(problem=shaped(5)))
    ran = []

    class Bench:
        def __init__(self, problem, device):
            ran.append(problem)

        def verify(self, choice):
            ok = choice.config.kc != 9
            return measure.Verification(
                max_rel_error=1.0, tolerance=0.5, ok=ok, repeatable=True
            )

    monkeypatch.setattr(knowledge, "bench_of", Bench)
    assert run(capsys, "verify", "--run")[0] == 0 and ran == [PROBLEM]
    record(cache_dir, local(entry(choice(9), written="2027")))
    status, out, _ = run(capsys, "verify", "--run")
    assert status == 1 and "fails: wrong_result" in out


# --- prune ----------------------------------------------------------------------------

DAY_S = 86400.0


def left(directory):
    return sorted(e.problem["m"] for e in Knowledge(directory).own.entries())


def dated(m, day):
    return local(entry(problem=shaped(m), written=f"2026-01-{day:02}T00:00:00+00:00"))


@pytest.fixture
def aged(cache_dir):
    """Four entries of four days, an old journal, a damaged file, another machine's."""
    record(cache_dir, *(dated(m, m) for m in (1, 2, 3, 4)))
    record(cache_dir, entry(problem=shaped(9), written="2026-01-04T00:00:00+00:00"))
    knowledge = Knowledge(cache_dir)
    journal = knowledge.own.journal(shaped(77), local_cpu())
    knowledge.own.append(journal, (measured(1),))
    journal.close()
    aside = file_of(cache_dir, shaped(9)).with_name("x.json.corrupt-1")
    aside.write_bytes(b"garbage")
    old = time.mktime((2026, 1, 2, 0, 0, 0, 0, 0, 0))
    for path in (aside, *journals(cache_dir)):
        os.utime(path, (old, old))
    return cache_dir


def journals(directory):
    return [p for p in directory.rglob("*.journal")]


def test_prune_by_age(capsys, aged):
    store = store_in(aged)
    now_s = time.mktime((2026, 1, 5, 0, 0, 0, 0, 0, 0))
    how: Any = {"older_than_s": 2.5 * DAY_S, "now_s": now_s}
    told = upkeep.prune(store, **how, dry_run=True)
    assert left(aged) == [1, 2, 3, 4, 9] and journals(aged)
    assert upkeep.prune(store, **how) == told and len(told) == 4
    assert left(aged) == [3, 4, 9] and not journals(aged)
    assert upkeep.prune(store, **how) == ()


def test_prune_by_number_environment_and_kind(capsys, aged):
    assert run(capsys, "prune", "--max-entries", 3)[0] == 0
    assert left(aged) == [3, 4, 9]  # the newest
    status, out, err = run(capsys, "prune", "--other-environments", "--dry-run")
    assert status == 0 and "matmul 9x80x64" in out and "would be removed" in err
    run(capsys, "prune", "--other-environments")
    assert left(aged) == [3, 4] and journals(aged)
    run(capsys, "prune", "--journals")
    assert not journals(aged) and left(aged) == [3, 4]
    status, _, err = run(capsys, "prune")
    assert status == 2 and "name what to remove" in err
    assert run(capsys, "prune", "--older-than", "soon")[0] == 2
    assert run(capsys, "prune", "--older-than", "1000w")[0] == 0
    assert left(aged) == [3, 4]


def test_prune_leaves_what_is_in_use(cache_dir):
    knowledge = Knowledge(cache_dir)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(1),))
    store = store_in(cache_dir)
    assert upkeep.prune(store, journals=True, now_s=time.time()) == ()
    assert journals(cache_dir)
    journal.close()
    record(cache_dir, entry(problem=shaped(3)))
    ((name, stale),) = store.heads()
    record(cache_dir, entry(choice(9), problem=shaped(3), written="2027"))
    assert not store.remove(name, expected=stale)  # it was tuned again meanwhile
    assert left(cache_dir) == [3]


def test_prune_compiled_kernels(capsys, cache_dir):
    kernels = cache_dir / "cubin" / "sm_90a"
    kernels.mkdir(parents=True)
    for name in ("a" * 64, "b" * 64):
        for suffix in (".cubin", ".json", ".cu"):
            file = kernels / f"{name}{suffix}"
            file.write_bytes(b"x" * 1000)
            os.utime(file, (1, 1))
    status, _, err = run(capsys, "prune", "--cubins", "3kB")
    assert status == 0 and "1 compiled kernels removed" in err
    assert len(list(kernels.glob("*.cubin"))) == 1
    assert run(capsys, "prune", "--cubins", "much")[0] == 2
    assert run(capsys, "prune", "--cubins", "9" * 400)[0] == 2


def test_identities_of_observations_do_not_depend_on_new_fields():
    cold = dataclasses.replace(measured(3), cold_us=12.0)
    assert cold.identity == measured(3).identity == identity("gemm_cpu", cold.config)
    assert union([cold], [measured(3)]) == union([measured(3)], [cold]) == (cold,)


@pytest.mark.parametrize(
    "harm", [pathlib.Path.unlink, lambda file: file.write_bytes(b"{}")]
)
def test_prune_bears_that_another_process_harms_an_entry(tmp_path, monkeypatch, harm):
    record(tmp_path, entry(written="some day"))
    store = store_in(tmp_path)
    heads = list(store.heads())
    harm(file_of(tmp_path))
    monkeypatch.setattr(Store, "heads", lambda self: iter(heads))
    pruned = []

    def prune():
        pruned.append(upkeep.prune(store, max_entries=0, now_s=9e9))

    pruning = threading.Thread(target=prune, daemon=True)  # it waited for its own lock
    pruning.start()
    pruning.join(20)
    assert pruned == [()]


# --- what is printed ------------------------------------------------------------------


def check_lines(text: str, start: str) -> None:
    assert schema.text(text) is None and "FORGED" in text
    assert not [line for line in text.splitlines() if line.startswith("FORGED")]
    assert start in text


def test_a_file_forges_no_lines(capsys, cache_dir):
    """Values of many lines are allowed; they are printed as parts of one."""
    forged = "x\nFORGED"
    config = {**dataclasses.asdict(choice(8).config), "later": forged}
    hostile = dataclasses.replace(
        entry(observations=[dataclasses.replace(failed(3), message=forged)]),
        best=dataclasses.replace(
            entry().best,
            config=config,
            runner_up={"variant": "xla", "config": {"a": forged}},
        ),
        verified={"a": forged},
        tuner={"stop": forged, "merged": [{"written": forged, "a": [forged]}]},
    )
    record(cache_dir, hostile)
    for command in (("list",), ("show", "matmul")):
        _, out, _ = run(capsys, *command)
        check_lines(out, "")
    assert "  failed" not in run(capsys, "show", "matmul")[1]
    _, out, _ = run(capsys, "prune", "--max-entries", "0", "--dry-run")
    check_lines(out, "were written later")


@pytest.mark.parametrize("name", ["x\x1b[2J", "x\nFORGED", "x\udcff"])
def test_names_of_files_do_nothing_to_a_terminal(capsys, cache_dir, tmp_path, name):
    record(cache_dir, entry())
    place = cache_dir / "tuned" / name / "matmul"
    trust.make_private_directory(place)
    shutil.copy(file_of(cache_dir), place / f"{name}.json")
    (place / f"{name}.json.corrupt-1").touch()
    out_file = str(tmp_path / "out")
    told = [
        *run(capsys, "show", "matmul"),
        *run(capsys, "verify"),
        *run(capsys, "prune", "--older-than", "1s", "--dry-run"),
        *run(capsys, "export", out_file, "--environment", "none"),
    ]
    for text in map(str, told):
        assert schema.text(text) is None
        assert not [line for line in text.splitlines() if line.startswith("FORGED")]
    file = place / f"{name}.json"
    file.write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="damaged") as caught:
        run(capsys, "list")
    assert schema.text(str(caught[0].message)) is None


@pytest.mark.parametrize("number", [b"[" + b"1," * 50_000 + b"1]", b"9" * 4000])
def test_a_huge_schema_number_is_not_printed(tmp_path, number):
    file = tmp_path / "archive"
    file.write_bytes(b'{"schema": ' + number + b"}")
    with pytest.raises((Damaged, NewerSchema)) as caught:
        exchange.read(file)
    assert len(str(caught.value)) < 1000
