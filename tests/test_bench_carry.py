"""Answers that outlive an edit of a header: those whose machine code is as it was."""

from __future__ import annotations

import concurrent.futures
import dataclasses

import pytest
from synthetic_bench import entry

from tracea_jax.tuning.store import volumes
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.names import Name

pytestmark = pytest.mark.once

SOURCE = 'extern "C" __global__ void doubled(float* x) { x[threadIdx.x] *= 2.0f; }'


@pytest.fixture
def carry(module, monkeypatch):
    pool = concurrent.futures.ThreadPoolExecutor  # a test forks no process with threads
    monkeypatch.setattr(concurrent.futures, "ProcessPoolExecutor", pool)
    return module("carry_answers")


def choice(code, source=SOURCE, grid=(1, 1, 1)):
    text = {"entry": "doubled", "source": source, "headers": (), "arch": "sm_90a"}
    return code, ({**text, "options": (), "grid": grid},)


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("after", "runs_the_same"),
    [
        (choice("new", "// a comment moves all lines\n" + SOURCE), True),
        (
            choice("new", SOURCE.replace("x[threadIdx.x]", "*(x + threadIdx.x)")),
            True,
        ),
        (choice("new", SOURCE.replace("2.0f", "3.0f")), False),
        (choice("new", SOURCE.replace("float", "double")), False),
        (choice("new", grid=(2, 1, 1)), False),
        (("new", ()), False),
    ],
)
def test_a_choice_runs_what_it_ran_if_code_and_launch_are_the_same(
    carry, after, runs_the_same
):
    other = choice("is", SOURCE.replace("2.0f", "4.0f")), choice("was")
    before = {"asked": choice("old"), "another": other[1]}
    now = {"asked": after, "another": other[0]}
    assert carry.judged(before, now) == {"asked": runs_the_same, "another": False}


def test_a_choice_with_the_same_hash_is_not_asked_about(carry):
    assert carry.judged({"asked": choice("old")}, {"asked": choice("old")}) == {}


def test_only_the_hash_that_was_compared_is_replaced(carry):
    made = entry()
    best = dataclasses.replace(made.best, code="before")
    made = dataclasses.replace(made, best=best)
    (record, *_) = carry.named(made)
    name = carry.identity(made, record)
    after = carry.carried(made, {name: ("before", "now")})
    assert after == dataclasses.replace(
        made, best=dataclasses.replace(best, code="now")
    )
    assert carry.carried(made, {name: ("of another text", "now")}) == made
    assert carry.carried(made, {}) == made


@pytest.mark.parametrize("is_bound", [False, True])
def test_entries_are_written_where_they_are_read(carry, tmp_path, is_bound):
    first = entry()
    second = dataclasses.replace(
        first, problem={**first.problem, "m": first.problem["m"] + 1}
    )
    entries = {Name.of(e.problem, e.environment.key): e for e in (first, second)}
    name = next(iter(entries))
    if is_bound:
        place = tmp_path / name.environment / f"{name.op}{volumes.SUFFIX}"
        place.parent.mkdir()
        files = {n.problem: e.to_bytes() for n, e in entries.items()}
        place.write_bytes(volumes.bound(files))
    else:
        for n, e in entries.items():
            Store(tmp_path).write(n, e)
    new = dataclasses.replace(first, best=dataclasses.replace(first.best, code="now"))
    carry.write(tmp_path, {**entries, name: new}, [name])
    assert carry.read(tmp_path) == {**entries, name: new}
    assert (tmp_path / name.environment / name.op).exists() is not is_bound
