"""Neighbouring shapes of a problem: which are nearest, and when they are asked."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import synthetic_bench as synthetic
from neighbour_cases import rows, shaped
from synthetic_bench import (
    DEVICE,
    HERO,
    PROBLEM,
    XLA,
    Bench,
    Clock,
    choice,
    entry,
    failed,
    found,
    measured,
)

from tracea_jax import catalogue
from tracea_jax.problem import Epilogue
from tracea_jax.tuning.answers import neighbours
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store.environment import environment
from tracea_jax.tuning.store.records import Best, union

pytestmark = pytest.mark.once


# --- the nearest ----------------------------------------------------------------------


def test_neighbours_are_sorted_by_octaves(tmp_path):
    knowledge = Knowledge(tmp_path)
    for m in (12, 48, 97, 192, 96 * 32):
        knowledge.own.record(entry(problem=shaped(m), observations=[measured(m)]))
    knowledge.own.record(entry(problem=shaped(192, 160)))
    knowledge.own.record(entry())  # the problem itself is no neighbour
    near = Knowledge(tmp_path).neighbours(PROBLEM, DEVICE)
    assert [rows(n) for n in near] == [97, 48, 192, 192, 12]
    octaves = [math.log2(97 / 96), 1, 1, math.sqrt(2), 3]
    assert sorted(n.distance for n in near) == pytest.approx(octaves)
    assert near[0].observations == (measured(97),)
    assert near[0].best == entry().best and near[0].origin == "tuned"
    assert [rows(n) for n in knowledge.neighbours(PROBLEM, DEVICE, 2)] == [97, 48]


def test_all_but_the_extents_must_be_equal(tmp_path):
    knowledge = Knowledge(tmp_path)
    for problem in (
        shaped(97, lhs="bfloat16"),
        shaped(97, layout="nt"),
        shaped(97, epilogue=Epilogue(bias="row")),
        shaped(97, precision="highest"),
        shaped(97, batch=2, rhs_batched=True),
    ):
        knowledge.own.record(entry(problem=problem))
    assert knowledge.neighbours(PROBLEM, DEVICE) == ()
    assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
    other = dataclasses.replace(DEVICE, name="another")
    knowledge.own.record(entry(problem=shaped(97)))
    assert len(knowledge.neighbours(PROBLEM, DEVICE)) == 1
    assert knowledge.neighbours(PROBLEM, other) == ()


def test_every_op_says_which_of_its_fields_are_extents():
    examples = [
        problem
        for op in catalogue.ops()
        for problem in op.problem.examples("float32").values()
    ]
    assert {problem.op for problem in examples} == set(catalogue.names())
    for problem in examples:
        for name in problem.extents:
            doubled = dataclasses.replace(problem, **{name: 2 * getattr(problem, name)})
            shift = np.subtract(
                neighbours.octaves(doubled), neighbours.octaves(problem)
            )
            assert np.linalg.norm(shift) == 1.0


def test_answers_of_other_environments_are_known_the_same_device_first(tmp_path):
    here = environment(DEVICE)
    upgraded = dataclasses.replace(here, unknown={"release": "older"})
    older = dataclasses.replace(here, unknown={"release": "oldest"})
    another = dataclasses.replace(here, device="another", units=64)
    shipped = Knowledge(tmp_path / "shipped")
    knowledge = Knowledge(tmp_path, shipped=(tmp_path / "shipped" / "tuned",))
    for kc, place, written, keeper in (
        (1, here, "2026-05-01", knowledge),
        (2, older, "2026-01-01", knowledge),
        (3, upgraded, "2026-02-01", shipped),
        (4, another, "2026-04-01", knowledge),
    ):
        known = dataclasses.replace(entry(choice(kc)), environment=place)
        keeper.own.record(dataclasses.replace(known, written=written))
    knowledge.own.record(
        dataclasses.replace(entry(problem=shaped(97)), environment=older)
    )
    best = knowledge.elsewhere(PROBLEM, DEVICE)
    assert [b.config["kc"] for b in best] == [3, 2, 4]
    assert knowledge.elsewhere(shaped(98), DEVICE) == ()


def test_a_tuning_after_an_upgrade_begins_with_what_won_before(tmp_path):
    times = {HERO: 100.0, XLA: 120.0} | {choice(kc): 90.0 for kc in range(2, 301)}
    times[choice(217)] = 50.0  # a needle: nothing leads there
    knowledge = Knowledge(tmp_path)
    before = dataclasses.replace(environment(DEVICE), unknown={"release": 0})
    known = entry(choice(217))
    knowledge.own.record(dataclasses.replace(known, environment=before))
    bench = Bench(Clock(), times)
    tuned = synthetic.tune(bench, tmp_path, size=300, effort="quick")
    assert tuned.best.config["kc"] == 217 and tuned.best.origin == "search"


def test_an_empty_problem_has_no_neighbours(tmp_path):
    knowledge = Knowledge(tmp_path)
    knowledge.own.record(entry(problem=shaped(1)))
    knowledge.own.record(entry(problem=shaped(0)))
    assert knowledge.neighbours(shaped(0), DEVICE) == ()
    assert [rows(n) for n in knowledge.neighbours(shaped(2), DEVICE)] == [1]


def test_a_tuning_that_was_not_finished_is_a_neighbour_but_gives_no_answer(tmp_path):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(shaped(97), DEVICE)
    knowledge.own.append(journal, (measured(3), failed(4)))
    knowledge.own.append(journal, (measured(5),))
    (near,) = Knowledge(tmp_path).neighbours(PROBLEM, DEVICE)  # also while it goes on
    assert near.problem == shaped(97) and near.best is None
    assert near.observations == union([measured(3), failed(4), measured(5)])
    journal.close()
    assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
    knowledge.own.record(entry(problem=shaped(97)))
    (near,) = Knowledge(tmp_path).neighbours(PROBLEM, DEVICE)
    assert near.best is not None and len(near.observations) == 3


def test_shipped_neighbours_come_where_there_are_no_own_ones(tmp_path):
    shipped = Knowledge(tmp_path / "shipped")
    for m in (97, 98):
        shipped.own.record(entry(choice(3), problem=shaped(m)))
    own = Knowledge(tmp_path / "own", shipped=(tmp_path / "shipped" / "tuned",))
    own.own.record(entry(choice(4), problem=shaped(97)))
    near = own.neighbours(PROBLEM, DEVICE)
    assert [(rows(n), n.origin) for n in near] == [(97, "tuned"), (98, "shipped")]
    assert near[0].best and near[0].best.config["kc"] == 4


def test_damaged_and_renamed_files_are_passed_over(tmp_path):
    knowledge = Knowledge(tmp_path)
    for m in (97, 98, 99):
        knowledge.own.record(entry(problem=shaped(m)))
    synthetic.file_of(tmp_path, shaped(97)).write_bytes(b"garbage")
    whole = synthetic.file_of(tmp_path, shaped(98))
    whole.write_bytes(whole.read_bytes()[:-2])  # its head is intact
    misnamed = synthetic.file_of(tmp_path, shaped(50))
    misnamed.write_bytes(synthetic.file_of(tmp_path, shaped(99)).read_bytes())
    with pytest.warns(RuntimeWarning, match="damaged"):
        near = Knowledge(tmp_path).neighbours(PROBLEM, DEVICE)
    assert [rows(n) for n in near] == [99]


# --- knowledge ------------------------------------------------------------------------


def test_tuned_then_shipped_then_interpolated(tmp_path):
    shipped = (tmp_path / "shipped" / "tuned",)
    Knowledge(tmp_path).own.record(entry(choice(3), problem=shaped(97)))
    assert found(Knowledge(tmp_path)).origin == "interpolated"
    assert found(Knowledge(tmp_path)).choice == choice(3)
    Knowledge(tmp_path / "shipped").own.record(entry(choice(4)))
    assert found(Knowledge(tmp_path, shipped)).origin == "shipped"
    Knowledge(tmp_path).own.record(entry(choice(5)))
    assert found(Knowledge(tmp_path, shipped)).origin == "tuned"


def test_an_interpolated_answer_is_settled_like_any_other(tmp_path):
    Knowledge(tmp_path).own.record(entry(choice(3), problem=shaped(97)))
    knowledge = Knowledge(tmp_path)
    first = found(knowledge)
    Knowledge(tmp_path).own.record(entry(choice(4)))
    Knowledge(tmp_path).own.record(entry(choice(5), problem=shaped(95)))
    assert found(knowledge) is first
    # The index too is of one moment.
    assert found(knowledge, shaped(94)).neighbours == 1
    assert found(Knowledge(tmp_path), shaped(94)).neighbours == 3


def test_answers_among_some_variants(tmp_path):
    best = Best(variant="xla", config={}, time_us=5.0, xla_us=5.0)
    ours = dataclasses.replace(measured(3, 8.0), extra={"protocol": "race"})
    lucky = measured(4, 1.0)  # never verified
    for problem in (PROBLEM, shaped(97)):
        record = dataclasses.replace(
            entry(problem=problem), best=best, observations=union([ours, lucky])
        )
        Knowledge(tmp_path).own.record(record)
    knowledge = Knowledge(tmp_path)
    for problem, origin in ((PROBLEM, "tuned"), (shaped(98), "interpolated")):
        answer = knowledge.lookup(problem, DEVICE)
        assert answer and (answer.choice.variant, answer.origin) == ("xla", origin)
        ours = knowledge.lookup(problem, DEVICE, ("gemm_cpu",))
        assert ours and (ours.choice, ours.origin) == (choice(3), origin)
        assert knowledge.lookup(problem, DEVICE, ("gemm_sm90",)) is None
