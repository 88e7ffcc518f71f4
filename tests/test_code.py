"""Answers are those of the kernels that they compile: others may change freely."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import shutil
from unittest import mock

import pytest
import synthetic_bench as synthetic
from synthetic_bench import DEVICE, PROBLEM, choice, entry, measured, why_missed

from tracea_jax import variants
from tracea_jax.device import NAMED
from tracea_jax.emit import gemm_sm90_kernel, sources
from tracea_jax.knowledge import SHIPPED
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem, problem_from_json
from tracea_jax.tuning.answers import knowledge as answering
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.store import code, handlers
from tracea_jax.tuning.store import environment as environments
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import Environment, environment
from tracea_jax.tuning.store.records import Best, Entry, Observation, union

pytestmark = pytest.mark.once

H200 = NAMED["H200"]
MOST = 40  # answers of a variant, or not many more
HANDLERS = ("gemm", "conv2d", "attention", "elementwise")


def forget() -> None:
    """As in a new process."""
    for cached in (sources.text, code.code_of, code.roots_hash):
        cached.cache_clear()


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """A copy of the kernels that the package compiles, to be changed."""
    copy = tmp_path / "kernels"
    shutil.copytree(sources.directory().parent, copy)
    monkeypatch.setattr(sources, "directory", lambda: copy / "cuda")
    forget()
    yield copy
    forget()


@pytest.fixture
def cuda_13(monkeypatch):
    """The driver and the compiler that shipped answers were measured with."""
    monkeypatch.setattr(environments.nvrtc, "version", lambda: "13.0")
    monkeypatch.setattr(environments.devices, "cuda_driver_version", lambda: "13.0")
    for cached in (environment, environments.environment_key):
        cached.cache_clear()
    yield
    for cached in (environment, environments.environment_key):
        cached.cache_clear()


def touch(path: pathlib.Path) -> None:
    path.write_text(path.read_text() + "// changed\n")
    forget()


# --- what ships -----------------------------------------------------------------------


@functools.cache
def shipped() -> dict[Problem, Entry]:
    """A sample of those of one device; ``test_records`` looks all of them up."""
    heads = [head for _, head in Store(SHIPPED, read_only=True).heads()]
    by_variant: dict[str, list[Entry]] = {}
    for head in heads:
        if head.environment.device == H200.name:
            by_variant.setdefault(head.best.variant, []).append(head)
    some = [head for same in by_variant.values() for head in sampled(same)]
    return {problem_from_json(head.problem): head for head in some}


def sampled(heads: list[Entry]) -> list[Entry]:
    return heads[:: max(1, len(heads) // MOST)]


def served() -> set[Problem]:
    """The problems whose shipped answers are used."""
    knowledge = Knowledge(None, shipped=(SHIPPED,))
    # What is told in place of an answer that is not used, is slow to find and of no
    # interest here.
    measured = [s for s in answering.SOURCES if s is not answering.interpolated]
    with mock.patch.object(answering, "SOURCES", measured):
        answers = {p: knowledge.lookup(p, H200) for p in shipped()}
    return {p for p, a in answers.items() if a and a.origin == "shipped"}


def users(header: str) -> set[Problem]:
    """The problems with a shipped answer that compiles a header."""
    found = set()
    for problem, head in shipped().items():
        chosen = legal_choice(head.best.variant, head.best.config, problem, H200)
        assert isinstance(chosen, Choice), chosen
        variant = variants.get(problem.op, chosen.variant)
        compiled = variants.kernels_in(variant.call(problem, chosen.config, H200))
        texts = [text for kernel in compiled for text in kernel.headers]
        if not compiled:  # a gated product may run whatever multiplies its factors
            roots = [r.partition("/") for r in variant.sources]
            names = [name for place, _, name in roots if place == "cuda"]
            texts = list(sources.headers(*names))
        if header in dict(texts):
            found.add(problem)
    return found


def test_an_unrelated_header_leaves_every_answer(kernels, cuda_13):
    (kernels / "cuda" / "tile" / "sparse.cuh").write_text('#include "tile/common.cuh"')
    (kernels / "cuda" / "another.cuh").write_text('#include "tile/sparse.cuh"')
    touch(kernels / "cuda" / "tile" / "sparse.cuh")
    for path in (kernels / "cpu").rglob("*.h"):
        touch(path)
    assert served() == set(shipped())


@pytest.mark.parametrize(
    "header",
    ["relayout.cuh", "gemm_sm80.cuh", "gemm_sm90.cuh", "tile/async_copy.cuh"],
)
def test_a_header_retires_exactly_its_users(kernels, cuda_13, header):
    retired = users(header)
    touch(kernels / "cuda" / header)
    assert served() == set(shipped()) - retired
    assert retired and retired != set(shipped())


def test_what_the_emitter_writes_retires_the_configs_it_writes_it_for(
    monkeypatch, cuda_13
):
    real = gemm_sm90_kernel.kernel

    def changed(problem, config, *args, **how):
        made = real(problem, config, *args, **how)
        if config.stages != 4:
            return made
        return dataclasses.replace(made, source=made.source + "// another emitter\n")

    retired = {
        problem
        for problem, head in shipped().items()
        if problem.op in ("matmul", "gated_matmul")
        and "sm90" in head.best.variant
        and head.best.config["stages"] == 4
    }
    monkeypatch.setattr(gemm_sm90_kernel, "kernel", changed)
    forget()
    assert served() == set(shipped()) - retired and retired
    forget()


def test_a_lookup_emits_its_own_answer_alone_and_once(monkeypatch, cuda_13):
    emitted = []
    real = variants.kernels_in
    monkeypatch.setattr(
        variants, "kernels_in", lambda call: emitted.append(call) or real(call)
    )
    forget()
    ours = [p for p, head in shipped().items() if head.best.variant == "gemm_sm90"]
    knowledge = Knowledge(None, shipped=(SHIPPED,))
    for count, problem in enumerate(ours[:3], start=1):
        for _ in range(2):
            assert knowledge.lookup(problem, H200) is not None
            assert len(emitted) == count


# --- CPU kernels ----------------------------------------------------------------------


def test_a_file_of_cpu_kernels_belongs_to_the_handlers_built_from_it(kernels):
    roots = {name: (f"cpu/{name}",) for name in HANDLERS}
    before = {name: code.roots_hash(root, DEVICE) for name, root in roots.items()}
    built = {name: dict(handlers.texts(name)) for name in HANDLERS}
    seen = set()
    for path in sorted((kernels / "cpu").rglob("*.[ch]*")):
        name = path.relative_to(kernels / "cpu").as_posix()
        if name.startswith("calls/"):  # hands operands over, and computes nothing
            continue
        original = path.read_text()
        touch(path)
        after = {h: code.roots_hash(root, DEVICE) for h, root in roots.items()}
        changed = {h for h in HANDLERS if after[h] != before[h]}
        assert changed == {h for h in HANDLERS if name in built[h]}
        assert changed, f"no handler is built from {name}"
        seen.add(frozenset(changed))
        path.write_text(original)
    assert {frozenset({name}) for name in HANDLERS} & seen  # not all for all
    assert frozenset(HANDLERS) in seen


@pytest.mark.parametrize("unit", ["gemm/gemm.cc", "gemm/avx2.cc"])
def test_units_headers_and_what_implements_them_are_followed(
    tmp_path, monkeypatch, unit
):
    monkeypatch.setattr(sources, "directory", lambda: tmp_path / "cuda")
    files = {
        unit: '#include <vector>\n  #  include "beside.h"\n#include "common/isa.h"\n',
        str(pathlib.Path(unit).with_name("beside.h")): '#include "common/isa.h"\n',
        "common/isa.h": "",
        "common/isa.cc": '#include "isa.h"\n#include "features.h"\n',
        "common/features.h": '#include "features.h"\n',
    }
    others = {"conv2d/conv2d.cc": '#include "gone.h"\n', "common/unused.cc": ""}
    for name, text in (files | others).items():
        path = tmp_path / "cpu" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert dict(handlers.texts("gemm")) == files
    with pytest.raises(FileNotFoundError, match=r"conv2d\.cc includes 'gone\.h'"):
        handlers.texts("conv2d")
    with pytest.raises(FileNotFoundError, match="no sources of attention"):
        handlers.texts("attention")


# --- what was measured before a kernel changed ----------------------------------------


def raced(observation):
    return dataclasses.replace(observation, extra={"protocol": "race"})


@pytest.fixture
def changed(kernels, tmp_path):
    """A cache in which the kernels that were measured have changed since."""
    cache = tmp_path / "cache"
    xla = raced(Observation(variant="xla", config={}, time_us=12.0))
    seen = union([raced(measured(8)), measured(9), xla])
    other = dataclasses.replace(PROBLEM, m=100)
    best = Best(variant="xla", config={}, time_us=12.0, xla_us=12.0)
    own = Knowledge(cache).own
    own.record(entry(observations=seen))
    own.record(dataclasses.replace(entry(problem=other, observations=seen), best=best))
    for path in (kernels / "cpu").rglob("*.h"):
        touch(path)
    return cache


def test_times_of_other_kernels_answer_nothing(changed):
    knowledge = Knowledge(changed)
    other = dataclasses.replace(PROBLEM, m=100)
    left = knowledge.lookup(other, DEVICE)
    assert left is not None and left.choice.variant == "xla"  # it compiles nothing
    assert knowledge.lookup(other, DEVICE, ("gemm_cpu",)) is None
    observed = knowledge.observations(PROBLEM, DEVICE)
    assert [o.variant for o in observed] == ["xla"]
    assert len(knowledge.own.observations(PROBLEM, DEVICE)) == 3  # not lost
    (near,) = knowledge.neighbours(dataclasses.replace(PROBLEM, m=101), DEVICE, 1)
    assert [o.variant for o in near.observations] == ["xla"]
    Knowledge(changed).own.remove(
        dataclasses.replace(entry(problem=other), environment=environment(DEVICE))
    )
    assert "other kernels than those of today" in why_missed(Knowledge(changed))


def test_a_tuning_measures_again_and_begins_with_what_won_before(changed):
    knowledge = Knowledge(changed)
    assert [b.config["kc"] for b in knowledge.elsewhere(PROBLEM, DEVICE)] == [8]
    knowledge.own.record(
        entry(choice(7), written="2027", observations=[raced(measured(7))])
    )
    again = Knowledge(changed)
    assert synthetic.found(again).choice == choice(7)
    assert again.elsewhere(PROBLEM, DEVICE) == ()
    kept = again.own.observations(PROBLEM, DEVICE)
    assert len({o.compiled for o in kept}) == len(kept) == 4


def test_a_result_that_was_wrong_says_nothing_about_other_kernels(changed):
    wrong = synthetic.failed(8)
    older = dataclasses.replace(wrong, code="0123456789abcdef")
    right = entry(choice(8), written="2027", observations=[raced(measured(8)), older])
    assert Knowledge(changed).own.record(right).best == right.best
    bad = entry(choice(8), written="2028", observations=[wrong])
    assert Knowledge(changed).own.record(bad).best.variant == "xla"


def test_an_entry_of_a_version_that_hashed_folders_is_kept_and_not_used(tmp_path):
    former = {**environment(DEVICE).to_json(), "sources": "5b4ecf87301a0650"}
    place = Environment.from_json(former)
    assert place.to_json() == former
    Knowledge(tmp_path).own.record(dataclasses.replace(entry(), environment=place))
    assert place.key in Store(tmp_path / "tuned").environments()
    assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
    (before,) = Knowledge(tmp_path).elsewhere(PROBLEM, DEVICE)
    assert before == entry().best
