"""The tuning cache keeps its entries, and says why it cannot answer."""

from __future__ import annotations

import dataclasses
import functools
import json

import hypothesis
import pytest
import synthetic_bench as synthetic
from any_entries import ENTRIES, OBSERVATIONS
from hypothesis import strategies as st
from synthetic_bench import (
    DEVICE,
    PROBLEM,
    choice,
    entry,
    failed,
    file_of,
    found,
    measured,
    why_missed,
)

from tracea_jax import catalogue, variants
from tracea_jax.device import NAMED, CpuDevice
from tracea_jax.policy import Choice
from tracea_jax.problem import GemmProblem
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import environment as environments
from tracea_jax.tuning.store import files, formats, records
from tracea_jax.tuning.store.code import named
from tracea_jax.tuning.store.environment import (
    Environment,
    environment,
    environment_key,
)
from tracea_jax.tuning.store.records import Best, Entry, Observation
from tracea_jax.variants.base import Xla
from tracea_jax.variants.gemm_sm90 import GEMM_SM90

GPU_CONFIG = GEMM_SM90.heuristic(
    GemmProblem(m=512, n=512, k=512, lhs="bfloat16", rhs="bfloat16", out="bfloat16"),
    NAMED["H200"],
)


# Records.


@hypothesis.given(ENTRIES)
@hypothesis.settings(deadline=None, max_examples=40)
def test_entries_survive_the_round_trip(original):
    data = original.to_bytes()
    assert Entry.from_bytes(data) == original
    head = dataclasses.replace(original, observations=())
    assert Entry.from_bytes(data, complete=False) == head
    assert (
        json.loads(data)["schema"] == environments.SCHEMA
    )  # any JSON reader can read it


@hypothesis.given(ENTRIES, st.data())
@hypothesis.settings(deadline=None, max_examples=40)
def test_any_damage_is_noticed(original, data):
    content = original.to_bytes()
    at = data.draw(st.integers(0, len(content) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda b: b != content[at]))
    flipped = content[:at] + bytes([other]) + content[at + 1 :]
    for damaged in (flipped, content[:at], content + b"x", b""):
        try:
            read = Entry.from_bytes(damaged)
        except (formats.Damaged, formats.NewerSchema):
            continue
        # White space and the like in the first line, which no checksum covers.
        assert read == original and at < content.index(b"\n")


def test_fields_that_are_not_known_are_ignored(tmp_path):
    head = entry().to_json()
    del head["observations"]
    observations = [{**dataclasses.asdict(measured(3)), "later": 1}]
    head["later"] = head["best"]["later"] = {"of": "another version"}
    body = (
        f'"head": {json.dumps(head)},\n"observations": {json.dumps(observations)}}}\n'
    )
    file_of(tmp_path).parent.mkdir(parents=True)
    file_of(tmp_path).write_bytes(formats.signed(body))
    (read,) = Knowledge(tmp_path).own.entries(complete=True)
    assert read == entry(observations=[measured(3)])
    line = json.dumps(observations[0])
    assert records.parse_observation(line) == measured(3)


@hypothesis.given(OBSERVATIONS, OBSERVATIONS, OBSERVATIONS)
@hypothesis.settings(deadline=None, max_examples=60)
def test_union_depends_on_no_order_and_forgets_no_config(a, b, c):
    whole = records.union(a, b, c)
    assert records.union(c, records.union(b, a)) == whole == records.union(whole, b)
    assert {o.identity for o in whole} == {o.identity for o in (*a, *b, *c)}


def test_the_better_measured_observation_is_kept():
    one_slice, several = measured(3, 9.0, repeats=1), measured(3, 10.0, repeats=50)
    assert records.union([several], [one_slice]) == (several,)
    assert records.union([failed(3, "launch_error")], [one_slice]) == (one_slice,)
    # No number of repeats makes up for a wrong result.
    assert records.union([failed(3)], [several]) == (failed(3),)


def test_merge_takes_the_best_of_the_more_recent_race():
    older = entry(choice(3), written="2026-01-01", observations=[measured(3)])
    newer = entry(choice(4), written="2026-01-02", observations=[measured(4)])
    for merged in (records.merge(older, newer), records.merge(newer, older)):
        assert merged.best == newer.best
        assert merged.observations == (measured(3), measured(4))


def test_merge_never_keeps_a_best_that_the_other_found_wrong():
    older = entry(choice(3), written="2026-01-01", observations=[failed(4)])
    newer = entry(choice(4), written="2026-01-02", observations=[measured(4)])
    assert records.merge(newer, older).best == older.best
    both = entry(choice(3), written="2026-01-03", observations=[failed(3), failed(4)])
    assert records.merge(newer, both).best.variant == "xla"


@pytest.mark.parametrize(
    "fields",
    [
        {"time_us": 1.0, "failure": "timeout"},
        {},
        {"time_us": 0.0},
        {"time_us": float("nan")},
        {"failure": "unlucky"},
    ],
)
def test_an_observation_has_a_time_or_a_known_failure(fields):
    with pytest.raises(ValueError):
        Observation(variant="xla", config={}, **fields)


# Environments.


def test_everything_that_changes_times_changes_the_environment(monkeypatch):
    h200, h100 = NAMED["H200"], NAMED["H100"]
    half = dataclasses.replace(h200, sm_count=66)
    monkeypatch.setattr(environments.nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(environments.devices, "cuda_driver_version", lambda: "13.0")
    environment.cache_clear()
    base = environment(h200)
    assert (base.driver, base.nvrtc, base.arch) == ("13", "13.0", "sm_90a")
    keys = {base.key, *(environment(d).key for d in (h100, half, DEVICE))}
    monkeypatch.setattr(environments.nvrtc, "version", lambda: "13.1")
    environment.cache_clear()
    keys.add(environment(h200).key)
    assert len(keys) == 5
    assert all(len(k) == 12 and int(k, 16) >= 0 for k in keys)
    environment.cache_clear()


def test_a_minor_driver_update_keeps_the_environment(monkeypatch):
    keys = set()
    for version in ("13.0", "13.2"):
        answer = functools.partial(str, version)
        monkeypatch.setattr(environments.devices, "cuda_driver_version", answer)
        environment.cache_clear()
        keys.add(environment(NAMED["H200"]).key)
    environment.cache_clear()
    assert len(keys) == 1


# Knowledge.


def test_record_and_lookup(tmp_path):
    directory = tmp_path / "made" / "later"
    knowledge = Knowledge(directory)
    assert "never tuned" in why_missed(knowledge)
    assert not directory.exists()
    stored = knowledge.own.record(entry(observations=[measured(8)]))
    answer = found(Knowledge(directory))
    assert answer.choice == choice(8) and answer.origin == "tuned"
    assert (answer.time_us, answer.xla_us, answer.ratio) == (10.0, 15.0, 1.5)
    assert Knowledge(directory).why_missed(PROBLEM, DEVICE) is None
    assert list(Knowledge(directory).own.entries(complete=True)) == [stored]
    assert directory.stat().st_mode & 0o077 == 0
    described = json.loads(
        (file_of(directory).parents[1] / "environment.json").read_text()
    )
    assert Environment(**described) == stored.environment


def test_answers_never_change(tmp_path):
    other = dataclasses.replace(PROBLEM, m=5)
    knowledge = Knowledge(tmp_path)
    assert knowledge.lookup(PROBLEM, DEVICE) is None
    knowledge.own.record(entry())
    knowledge.own.record(entry(problem=other))
    assert knowledge.lookup(PROBLEM, DEVICE) is None
    before = knowledge.lookup(other, DEVICE)
    knowledge.own.record(entry(choice(9), problem=other, written="2027"))
    assert knowledge.lookup(other, DEVICE) is before
    assert found(Knowledge(tmp_path), other).choice == choice(9)


def test_a_settled_answer_needs_no_file(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    knowledge = Knowledge(tmp_path)
    before = knowledge.lookup(PROBLEM, DEVICE)
    file_of(tmp_path).unlink()
    assert knowledge.lookup(dataclasses.replace(PROBLEM), DEVICE) is before


def test_shipped_answers_come_after_the_users(tmp_path):
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    Knowledge(shipped).own.record(entry(choice(3)))
    where = (tmp_path / "missing", shipped / "tuned")
    assert found(Knowledge(user, shipped=where)).origin == "shipped"
    Knowledge(user).own.record(entry(choice(4)))
    answer = found(Knowledge(user, shipped=where))
    assert (answer.origin, answer.choice) == ("tuned", choice(4))
    assert found(Knowledge(None, shipped=where)).choice == choice(3)


def test_another_environment_does_not_answer(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    more_cores = dataclasses.replace(DEVICE, cores=64)
    assert Knowledge(tmp_path).lookup(PROBLEM, more_cores) is None


@pytest.mark.parametrize(
    ("variant", "config", "reason"),
    [
        ("gemm_gone", {}, "no variant"),
        ("gemm_cpu", {"kc": 1, "nc": 1, "tasks": 1, "unroll": 4}, "no config field"),
        ("gemm_cpu", {"kc": 1}, "does not fit"),
        ("gemm_cpu", {"kc": 0, "nc": 8, "tasks": 1}, "from 1 to"),
        ("gemm_cpu", {"kc": "8", "nc": 8, "tasks": 1}, "from 1 to"),
        ("gemm_cpu", {"kc": [8], "nc": 8, "tasks": 1}, "from 1 to"),
        ("gemm_sm90", dataclasses.asdict(GPU_CONFIG), "cannot run"),
    ],
)
def test_an_answer_that_is_no_longer_legal_is_a_miss(tmp_path, variant, config, reason):
    stale = dataclasses.replace(entry(), best=Best(variant=variant, config=config))
    Knowledge(tmp_path).own.record(stale)
    knowledge = Knowledge(tmp_path)
    assert knowledge.lookup(PROBLEM, DEVICE) is None
    assert reason in why_missed(knowledge)
    assert file_of(tmp_path).exists()


def test_a_renamed_file_does_not_answer_for_another_problem(tmp_path):
    other = dataclasses.replace(PROBLEM, k=PROBLEM.k + 1)
    Knowledge(tmp_path).own.record(entry())
    file_of(tmp_path).rename(file_of(tmp_path, other))
    knowledge = Knowledge(tmp_path)
    assert "another problem" in why_missed(knowledge, other)


def test_a_renamed_journal_tells_nothing_of_another_problem(tmp_path):
    other = dataclasses.replace(PROBLEM, k=PROBLEM.k + 1)
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(3),))
    journal.close()
    assert journal.path is not None
    place = file_of(tmp_path, other).with_suffix(".1-0.journal")
    renamed = journal.path.rename(place)
    with pytest.warns(RuntimeWarning, match="about another problem"):
        assert not Knowledge(tmp_path).observations(other, DEVICE)
    Knowledge(tmp_path).own.record(entry(problem=other))
    assert not Knowledge(tmp_path).observations(other, DEVICE)
    renamed.rename(journal.path)
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == (measured(3),)


def test_a_moved_directory_does_not_answer_for_another_environment(tmp_path):
    other = dataclasses.replace(DEVICE, cores=64)
    Knowledge(tmp_path).own.record(entry())
    here, there = (environment_key(d) for d in (DEVICE, other))
    (tmp_path / "tuned" / here).rename(tmp_path / "tuned" / there)
    assert Knowledge(tmp_path).lookup(PROBLEM, other) is None
    assert not Knowledge(tmp_path).observations(PROBLEM, other)


def test_what_a_renamed_file_says_is_not_mixed_with_another_problem(tmp_path):
    other = dataclasses.replace(PROBLEM, k=PROBLEM.k + 1)
    late = entry(choice(3), observations=[measured(3)], written="2026-01-02")
    Knowledge(tmp_path).own.record(late)
    renamed = file_of(tmp_path).rename(file_of(tmp_path, other))
    content = renamed.read_bytes()
    assert not Knowledge(tmp_path).observations(other, DEVICE)
    with pytest.warns(RuntimeWarning, match="another problem.*renamed to"):
        Knowledge(tmp_path).own.record(entry(choice(4), problem=other))
    assert found(Knowledge(tmp_path), other).choice == choice(4)
    assert not Knowledge(tmp_path).observations(other, DEVICE)
    (aside,) = renamed.parent.glob("*.corrupt-*")
    assert aside.read_bytes() == content


def test_recording_unites_with_what_is_stored(tmp_path):
    Knowledge(tmp_path).own.record(
        entry(written="2026-01-01", observations=[measured(1)])
    )
    Knowledge(tmp_path).own.record(
        entry(written="2026-01-02", observations=[measured(2)])
    )
    (stored,) = Knowledge(tmp_path).own.entries(complete=True)
    assert stored.observations == (measured(1), measured(2))


@pytest.mark.parametrize("wrong", ["2999-01-01T00:00:00.000000+00:00", "2999", "~"])
def test_what_is_recorded_after_a_clock_jump_counts(tmp_path, wrong):
    """The clock was ahead, and is right or even behind now."""
    knowledge = Knowledge(tmp_path)
    knowledge.own.record(entry(choice(3), written=wrong, observations=[measured(3)]))
    for kc, written in ((4, "2026-01-01"), (5, "1970-01-01"), (6, "2026-01-02")):
        told = entry(choice(kc), written=written, observations=[measured(kc)])
        stored = knowledge.own.record(told)
        assert stored.best == told.best and stored.written > wrong
        assert found(Knowledge(tmp_path)).choice == choice(kc)
    assert [o.config["kc"] for o in stored.observations] == [3, 4, 5, 6]


def test_a_race_that_ended_before_the_stored_one_does_not_replace_it(tmp_path):
    # It waited for the lock while another process recorded.
    Knowledge(tmp_path).own.record(entry(choice(4), written="2026-01-02T00:00:01"))
    stored = Knowledge(tmp_path).own.record(
        entry(choice(3), written="2026-01-02T00:00:00")
    )
    assert stored.best.config["kc"] == 4


def test_remove_forgets_one_problem(tmp_path):
    knowledge = Knowledge(tmp_path)
    other = dataclasses.replace(PROBLEM, m=7)
    first = knowledge.own.record(entry(observations=[measured(1)]))
    second = knowledge.own.record(entry(problem=other))
    assert knowledge.own.remove(first) and not knowledge.own.remove(first)
    assert list(Knowledge(tmp_path).own.entries()) == [second]
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == ()


def test_listing_names_every_entry_of_every_environment(tmp_path):
    knowledge = Knowledge(tmp_path)
    problems = [dataclasses.replace(PROBLEM, m=m) for m in range(1, 21)]
    for problem in problems:
        knowledge.own.record(entry(problem=problem, observations=[measured(3)]))
    foreign = CpuDevice(name="other", isa="avx512", cores=2)
    abroad = dataclasses.replace(entry(), environment=environment(foreign))
    knowledge.own.record(abroad)
    listed = list(Knowledge(tmp_path).own.entries())
    assert len(listed) == 21 and all(e.observations == () for e in listed)
    assert {GemmProblem.from_json(e.problem) for e in listed} == {*problems, PROBLEM}
    assert {e.environment.device for e in listed} == {DEVICE.name, "other"}


# Journals.


def test_a_torn_journal_gives_all_whole_lines(tmp_path):
    path = tmp_path / "x.journal"
    journal = files.Journal(path)
    journal.append([measured(1), measured(2)])
    journal.append([failed(3)])
    journal.close()
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        whole = content[:size].count(b"\n")
        assert len(files.read_journal(path).observations) - whole in (0, 1)
        # One more at most: a line that lacks only its end is whole.
    path.write_bytes(content[:-9] + b"\0\0\xff\n")
    assert files.read_journal(path).observations == (measured(1), measured(2))


def test_a_journal_with_a_living_writer_is_left_alone(tmp_path):
    writer = Knowledge(tmp_path)
    living = writer.own.journal(PROBLEM, DEVICE)
    writer.own.append(living, (measured(1),))
    Knowledge(tmp_path).own.record(entry(observations=[measured(2)]))
    assert living.path and living.path.exists()
    everything = Knowledge(tmp_path).observations(PROBLEM, DEVICE)
    assert everything == (measured(1), measured(2))
    living.close()  # as a kill does
    Knowledge(tmp_path).own.record(entry(observations=[measured(3)]))
    assert not (living.path and living.path.exists())
    (stored,) = Knowledge(tmp_path).own.entries(complete=True)
    assert stored.observations == (measured(1), measured(2), measured(3))


def test_knowledge_without_directory_keeps_entries_to_itself():
    knowledge = Knowledge(None)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(1),))
    knowledge.own.record(entry(observations=[measured(2)]), journal)
    assert knowledge.observations(PROBLEM, DEVICE) == (measured(2),)
    assert found(knowledge).choice == choice(8)
    assert list(Knowledge(None).own.entries()) == []


def test_a_tuned_answer_is_known_next_time(tmp_path):
    clock = synthetic.Clock()
    synthetic.tune(synthetic.Bench(clock, {choice(6): 20.0}), tmp_path)
    answer = found(Knowledge(tmp_path))
    assert answer.choice == choice(6) and answer.time_us == pytest.approx(20.0)
    assert list(file_of(tmp_path).parent.glob("*.journal")) == []


def test_the_config_of_every_variant_survives_the_cache(tmp_path):
    bf16 = GemmProblem(
        m=512, n=512, k=512, lhs="bfloat16", rhs="bfloat16", out="bfloat16"
    )
    for device in (DEVICE, NAMED["H200"]):
        for variant in variants.of("matmul"):
            if variant.why_not(bf16, device) is None:
                wanted = variant.space(bf16, device).configs()[-1]
                name = named(bf16, Choice(variant=variant.name, config=wanted), device)
                record = dataclasses.replace(
                    entry(problem=bf16),
                    environment=environment(device),
                    best=Best(**name),
                    written=variant.name,
                )
                Knowledge(tmp_path / variant.name).own.record(record)
                answer = found(Knowledge(tmp_path / variant.name), bf16, device)
                assert answer.choice == Choice(variant=variant.name, config=wanted)


@dataclasses.dataclass(frozen=True)
class TupleConfig:
    cluster: tuple[int, int]


class TupleVariant(Xla):
    """A variant whose config has a tuple, which JSON does not know."""


def test_a_config_with_a_tuple_survives_the_cache(tmp_path):
    variant = TupleVariant(name="tuples", config_type=TupleConfig)
    op = dataclasses.replace(catalogue.get("matmul"), variants=(variant, variants.XLA))
    wanted = TupleConfig((2, 1))
    with catalogue.using(op):
        best = Choice(variant="tuples", config=wanted)
        Knowledge(tmp_path).own.record(entry(best))
        answer = found(Knowledge(tmp_path))
    assert answer.choice.config == wanted and hash(answer.choice)
