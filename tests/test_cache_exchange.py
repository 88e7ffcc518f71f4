"""tracea cache export and merge: what arrives elsewhere, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import os

import hypothesis
import pytest
from any_entries import ENTRIES
from cache_commands import record, run, shaped, store_in
from hypothesis import strategies as st
from synthetic_bench import DEVICE, choice, entry, failed, file_of, measured

from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import exchange
from tracea_jax.tuning.store.environment import SCHEMA, environment
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.records import union


@hypothesis.given(st.lists(ENTRIES, max_size=3))
@hypothesis.settings(deadline=None, max_examples=30)
def test_exported_entries_survive_the_round_trip(entries):
    data = exchange.pack(entries)
    assert exchange.unpack(data) == tuple(entries)
    assert json.loads(data)["schema"] == SCHEMA  # any JSON reader can read it


@hypothesis.given(ENTRIES, st.data())
@hypothesis.settings(deadline=None, max_examples=30)
def test_any_damage_of_an_exported_file_is_noticed(original, data):
    content = exchange.pack([original])
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda b: b != content[at]))
    for damaged in (
        content[:at] + bytes([other]) + content[at + 1 :],
        content[:at],
        content + b"x",
    ):
        try:
            assert exchange.unpack(damaged) == (original,)
        except (Damaged, NewerSchema):
            continue
        assert at < content.index(b"\n")  # white space in the first line


def test_export_then_merge_elsewhere_gives_the_same(capsys, cache_dir, tmp_path):
    record(
        cache_dir,
        *(entry(problem=shaped(m), observations=[measured(m)]) for m in (3, 1)),
    )
    abroad = dataclasses.replace(DEVICE, name="other")
    record(
        cache_dir,
        dataclasses.replace(entry(), environment=environment(abroad)),
    )
    file = tmp_path / "tuning_cache.json"
    status, _, err = run(capsys, "export", file)
    assert (status, err) == (0, f"3 tuned problems written to {file}\n")
    first = file.read_bytes()
    assert exchange.merge(store_in(tmp_path), exchange.read(file)).added == 3
    exchange.export(store_in(tmp_path), file)
    assert file.read_bytes() == first
    again = run(capsys, "merge", file, file)
    assert again[:2] == (0, "")
    assert again[2] == ("0 added, 0 changed, 6 as they were, 0 conflicts, 0 left out\n")
    umask = os.umask(0)
    os.umask(umask)
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask


def test_export_of_a_selection(capsys, cache_dir, tmp_path):
    abroad = environment(dataclasses.replace(DEVICE, name="other"))
    record(cache_dir, entry(), dataclasses.replace(entry(), environment=abroad))
    file = tmp_path / "some.json"
    run(capsys, "export", file, "--environment", abroad.key)
    assert [e.environment for e in exchange.read(file)] == [abroad]
    run(capsys, "export", file, "--op", "conv2d")
    assert exchange.read(file) == ()
    status, _, err = run(capsys, "export", file, "--environment", "0123")
    assert status == 1 and abroad.key in err
    (tmp_path / "directory").mkdir()
    assert run(capsys, "export", tmp_path / "directory")[0] == 1


def test_more_repetitions_win_then_the_lower_time(capsys, cache_dir, tmp_path):
    def timed(kc, time_us, repeats, written):
        best = dataclasses.replace(entry(choice(kc)).best, time_us=time_us)
        seen = measured(kc, time_us, repeats)
        made = entry(choice(kc), observations=[seen], written=written)
        return dataclasses.replace(made, best=best, tuner={"seed": kc})

    ours = timed(3, 10.0, 100, "2026")
    for theirs, kept in (
        (timed(4, 5.0, 99, "2027"), 3),
        (timed(4, 20.0, 101, "2025"), 4),
        (timed(4, 9.0, 100, "2025"), 4),
        (timed(4, 11.0, 100, "2027"), 3),
    ):
        for one, other in ((ours, theirs), (theirs, ours)):
            united = exchange.reconcile(one, other)
            assert united.best.config["kc"] == kept
            assert united.observations == union(ours.observations, theirs.observations)
            # Where the other one came from is not forgotten, nor told twice.
            dropped = theirs if kept == 3 else ours
            assert united.tuner["seed"] == kept
            assert united.tuner["merged"] == [
                {**dropped.tuner, "written": dropped.written}
            ]
            assert exchange.reconcile(united, other) == united
    record(cache_dir, ours)
    file = tmp_path / "theirs.json"
    file.write_bytes(exchange.pack([timed(4, 20.0, 101, "2025")]))
    status, out, err = run(capsys, "merge", file)
    assert status == 0 and "1 changed" in err and "1 conflicts" in err
    assert out.startswith("conflict: matmul 96x80x64 float32 nn in ")
    assert "kept    gemm_cpu [kc 4" in out and "measured 101 times" in out
    assert "dropped gemm_cpu [kc 3" in out and "measured 100 times" in out


def test_merging_never_keeps_what_one_side_found_wrong(tmp_path):
    store = store_in(tmp_path)
    record(tmp_path, entry(choice(3), observations=[measured(3), failed(4)]))
    good = entry(choice(4), observations=[measured(4, 1.0, repeats=10**6)])
    merged = exchange.merge(store, [good])
    (stored,) = Knowledge(tmp_path).own.entries(complete=True)
    assert stored.best.config["kc"] == 3 and failed(4) in stored.observations
    assert [c.dropped.config["kc"] for c in merged.conflicts] == [4]
    exchange.merge(store, [entry(choice(3), observations=[failed(3)])])
    (stored,) = Knowledge(tmp_path).own.entries()
    assert stored.best.variant == "xla"


def test_a_bad_file_changes_nothing(capsys, cache_dir, tmp_path):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_bytes(content := exchange.pack([entry()]))
    for damaged, reason in (
        (content[:-9], "is damaged.*export it again"),
        (b"garbage", "is damaged"),
        (entry().to_bytes(), "is damaged or no exported"),
        (content.replace(b'"schema": 1', b'"schema": 99', 1), "newer than.*install"),
    ):
        bad.write_bytes(damaged)
        status, _, err = run(capsys, "merge", good, bad)
        assert status == 1 and str(bad) in err
        with pytest.raises(ValueError, match=reason):
            exchange.read(bad)
        assert list(store_in(cache_dir).names()) == []
    assert run(capsys, "merge", good, tmp_path / "missing.json")[0] == 1
    assert run(capsys, "merge", good)[0] == 0


def test_what_this_version_cannot_place_is_left_out(capsys, cache_dir, tmp_path):
    file = tmp_path / "file.json"
    strange = dataclasses.replace(entry(), problem={"op": "../../outside", "m": 1})
    file.write_bytes(exchange.pack([strange, entry()]))
    status, _, err = run(capsys, "merge", file)
    assert status == 0 and "left out: a problem that this version" in err
    assert "1 added" in err and len(list(store_in(cache_dir).names())) == 1
    newer = file_of(cache_dir)
    newer.write_bytes(b'{"schema":99}')
    status, _, err = run(capsys, "merge", file)
    assert status == 0 and "is kept as it is" in err
    assert newer.read_bytes() == b'{"schema":99}'


def test_fields_of_a_later_version_are_ignored():
    data = entry(observations=[measured(3)]).to_json()
    data["later"] = data["best"]["later"] = data["observations"][0]["later"] = [1]
    data["environment"]["later"] = "x"
    read = type(entry()).from_json(data)
    assert read == entry(observations=[measured(3)])
