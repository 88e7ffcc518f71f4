"""Mutated files: no exception escapes, no answer is wrong, and nothing is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import warnings
from typing import Any

import mutations
import pytest
from synthetic_bench import (
    DEVICE,
    PROBLEM,
    choice,
    entry,
    failed,
    file_of,
    measured,
)

from tracea_jax import schema
from tracea_jax.cli import entries as shown
from tracea_jax.problem import Problem
from tracea_jax.runtime import cubins as kernels
from tracea_jax.runtime import trust
from tracea_jax.runtime.nvrtc import Cubin
from tracea_jax.tuning.answers.answer import Answer
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.answers.legality import legal_choice
from tracea_jax.tuning.store import exchange, files, formats, records, upkeep
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.environment import (
    Environment,
    environment_key,
    problem_key,
)
from tracea_jax.tuning.store.formats import Damaged, NewerSchema
from tracea_jax.tuning.store.names import Name
from tracea_jax.tuning.store.records import Entry

pytestmark = pytest.mark.once

COUNT = [60, pytest.param(2000, marks=pytest.mark.slow)]
counts = pytest.mark.parametrize("count", COUNT)
WHOLE = dataclasses.replace(
    entry(observations=[measured(8), measured(9, 20.0), failed(7)]),
    tuner={"seed": 1, "stop": "complete", "merged": [{"seed": 2}]},
    verified={"ok": True, "rounds": 11},
)
OTHER = dataclasses.replace(PROBLEM, k=PROBLEM.k * 2)


@pytest.fixture(autouse=True)
def _quick_and_silent(monkeypatch):
    """The disk is not waited for; warnings, which are due, are no errors here."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def lines(items: list[Any]) -> str:
    return ",\n".join(mutations.dumps(item) for item in items)


def encode_entry(data: Any) -> bytes:
    data = dict(data) if isinstance(data, dict) else {"head": data}
    observations = data.pop("observations", [])
    inner = lines(observations) if isinstance(observations, list) else "1"
    head = mutations.dumps(data)
    return formats.signed(f'"head": {head},\n"observations": [\n{inner}\n]}}\n')


def encode_archive(data: Any) -> bytes:
    inner = lines(data) if isinstance(data, list) else mutations.dumps(data)
    return formats.signed(f'"entries": [\n{inner}\n]}}\n')


def encode_journal(data: Any) -> bytes:
    items = data if isinstance(data, list) else [data]
    return "".join(mutations.dumps(item) + "\n" for item in items).encode()


def encode_json(data: Any) -> bytes:
    return mutations.dumps(data).encode()


def plain(record: Entry) -> Any:
    return json.loads(mutations.dumps(record.to_json()))


def use(directory: pathlib.Path) -> Answer | None:
    """Does all that reads the tuning cache; returns the answer."""
    knowledge = Knowledge(directory)
    answer = knowledge.lookup(PROBLEM, DEVICE)
    knowledge.why_missed(PROBLEM, DEVICE)
    knowledge.lookup(PROBLEM, DEVICE, ("gemm_cpu",))
    knowledge.elsewhere(PROBLEM, DEVICE)
    knowledge.observations(PROBLEM, DEVICE)
    for problem in (PROBLEM, OTHER):
        for neighbour in knowledge.neighbours(problem, DEVICE):
            assert all(math.isfinite(t.time_us) for t in neighbour.times or ())
    Knowledge(directory).lookup(OTHER, DEVICE)
    frozen = Knowledge(directory)
    frozen.digest(DEVICE)
    if file_of(directory).exists():  # or its observations were found damaged
        assert frozen.lookup(PROBLEM, DEVICE) == answer
    store = Store.of_cache(directory)
    _, findings = upkeep.verify(store, [DEVICE])
    told = [str(finding) for finding in findings]
    for name, head in store.heads():
        told += [str(head.environment), shown.line(head)]
        whole = store.read(name, complete=True)
        if whole is not None:
            told += shown.shown(store, name, whole)
    for text in told:
        assert schema.text(text) is None, "it would act on a terminal"
    upkeep.prune(store, older_than_s=1.0, max_entries=0, now_s=2e9, dry_run=True)
    return answer


def check_answer(answer: Answer | None, problem: Problem = PROBLEM) -> None:
    """Whatever a file says: an answer is legal, its numbers are numbers."""
    if answer is None:
        return
    config = dataclasses.asdict(answer.choice.config)
    assert legal_choice(answer.choice.variant, config, problem, DEVICE) == answer.choice
    for number in (answer.time_us, answer.xla_us, answer.ratio):
        assert number is None or 0 < number < math.inf


def original(directory: pathlib.Path) -> pathlib.Path:
    """A cache with one entry; returns its file."""
    Knowledge(directory).own.record(WHOLE)
    return file_of(directory)


def everything(directory: pathlib.Path) -> list[bytes]:
    return [p.read_bytes() for p in directory.rglob("*") if p.is_file()]


def check_kept(directory: pathlib.Path, content: bytes) -> None:
    """After a tuning, what the file held is in the cache or set aside."""
    try:
        whole = Entry.from_bytes(content)
        Name.of(PROBLEM.to_json(), environment_key(DEVICE)).check(whole)
        before = whole.observations
    except NewerSchema:
        assert content in everything(directory)
        return
    except Damaged:
        before = None
    Knowledge(directory).own.record(entry(choice(9), observations=[measured(20)]))
    knowledge = Knowledge(directory)
    assert measured(20) in knowledge.own.observations(PROBLEM, DEVICE)
    if before is None:
        assert content in everything(directory)
    else:
        after = knowledge.own.observations(PROBLEM, DEVICE)
        missing = {o.identity for o in before} - {o.identity for o in after}
        assert not missing
    check_answer(knowledge.lookup(PROBLEM, DEVICE))


@counts
def test_entries(tmp_path, count):
    content = original(tmp_path / "original").read_bytes()
    here = tmp_path / "cache"
    for seed in range(count):
        mutated, is_signed = mutations.of(seed, content, plain(WHOLE), encode_entry)
        shutil.rmtree(here, ignore_errors=True)
        file = file_of(here)
        trust.make_private_directory(file.parent)
        trust.write_atomically(file, mutated)
        answer = use(here)
        check_answer(answer)
        if not is_signed and answer is not None:
            assert answer.choice == choice(8) and answer.time_us == 10.0
        check_kept(here, mutated)


@counts
def test_journals(tmp_path, count):
    whole = [measured(3), measured(4, 5.0), failed(7)]
    title = {"problem": PROBLEM.to_json()}
    data = [title, *(records.observation_json(o) for o in whole)]
    content = encode_journal(data)
    here = tmp_path / "cache"
    for seed in range(count):
        mutated, _ = mutations.of(seed, content, data, encode_journal)
        shutil.rmtree(here, ignore_errors=True)
        file = original(here)
        journal = file.with_name(f"{file.stem}.1-0.journal")
        trust.write_atomically(journal, mutated)
        answer = use(here)
        assert answer is not None and answer.choice == choice(8)
        read = files.read_journal(journal)
        Knowledge(here).own.record(entry(observations=[measured(20)]))
        kept = {o.identity for o in Knowledge(here).own.observations(PROBLEM, DEVICE)}
        about = PROBLEM.to_json() if read.problem is None else read.problem
        is_mine = problem_key(about) == file.stem
        mine = read.observations if is_mine else ()
        wanted = {o.identity for o in (*WHOLE.observations, *mine)}
        assert wanted | {measured(20).identity} <= kept
        assert journal.exists() == (not is_mine)
        assert not read.skipped or mutated in everything(here)


@counts
def test_archives(tmp_path, count):
    second = dataclasses.replace(WHOLE, problem=OTHER.to_json())
    content = exchange.pack([WHOLE, second])
    data = [plain(WHOLE), plain(second)]
    here, archive = tmp_path / "cache", tmp_path / "archive"
    for seed in range(count):
        mutated, is_signed = mutations.of(seed, content, data, encode_archive)
        shutil.rmtree(here, ignore_errors=True)
        Knowledge(here).own.record(entry(observations=[measured(20)]))
        before = everything(here)
        archive.write_bytes(mutated)
        try:
            read = exchange.read(archive)
        except (Damaged, NewerSchema) as e:
            assert schema.text(str(e)) is None
            assert everything(here) == before
            continue
        if not is_signed:
            assert read == (WHOLE, second)
        merged = exchange.merge(Store.of_cache(here), read)
        assert all(schema.text(reason) is None for reason in merged.refused)
        check_answer(use(here))
        check_answer(Knowledge(here).lookup(OTHER, DEVICE), OTHER)
        assert measured(20) in Knowledge(here).own.observations(PROBLEM, DEVICE)
        exchange.export(Store.of_cache(here), archive)
        exchange.read(archive)


@counts
def test_descriptions_of_environments(tmp_path, count):
    file = original(tmp_path)
    described = file.parent.parent / "environment.json"
    content = described.read_bytes()
    for seed in range(count):
        mutated, _ = mutations.of(seed, content, json.loads(content), encode_json)
        trust.write_atomically(described, mutated)
        answer = use(tmp_path)
        assert answer is not None and answer.choice == choice(8)
        key = None
        with contextlib.suppress(ValueError, RecursionError):
            key = Environment.from_json(json.loads(mutated)).key
        _, findings = upkeep.verify(Store.of_cache(tmp_path), [DEVICE])
        told = [f for f in findings if f.path == described and f.is_wrong]
        assert bool(told) == (key != described.parent.name)


KEY = "0" * 64
IMAGE = bytes(range(256)) * 8
CUBIN = Cubin(
    key=KEY,
    arch="sm_90a",
    entry="scale",
    image=IMAGE,
    registers=32,
    stack_bytes=0,
    spill_bytes=None,
    smem_static_bytes=1024,
    warnings=("slower than written",),
    log="warning: slower than written",
    compile_s=0.5,
)


@counts
@pytest.mark.parametrize("suffix", [".cubin", ".json"])
def test_kernels(tmp_path, suffix, count):
    image = kernels.path(tmp_path, "sm_90a", KEY)
    metadata = kernels._encode(CUBIN)
    contents = {".cubin": IMAGE, ".json": json.dumps(metadata).encode()}
    for seed in range(count):
        data = metadata if suffix == ".json" else [1]
        encode = encode_json if suffix == ".json" else repeat
        mutated, _ = mutations.of(seed, contents[suffix], data, encode)
        trust.make_private_directory(image.parent)
        for other, content in {**contents, suffix: mutated}.items():
            trust.write_atomically(image.with_suffix(other), content)
        loaded = kernels.load(tmp_path, "sm_90a", KEY)
        assert loaded is None or loaded.image == IMAGE
        if loaded is not None:
            assert (loaded.key, loaded.arch) == (KEY, "sm_90a")
            assert {type(c) for c in (loaded.registers, loaded.stack_bytes)} <= {
                int,
                type(None),
            }
            assert all(isinstance(w, str) for w in loaded.warnings)
        # A damaged one is out of the way of the next compilation.
        assert image.exists() == (loaded is not None)
        whole = {image.with_suffix(s): contents[s] for s in (".json", ".cubin")}
        kernels._write_files(tmp_path, whole)
        again = kernels.load(tmp_path, "sm_90a", KEY)
        assert again is not None and again.image == IMAGE


def repeat(data: Any) -> bytes:
    """An image is no JSON."""
    return IMAGE + repr(data).encode()


@counts
def test_failures_of_kernels(tmp_path, count):
    file = kernels.path(tmp_path, "sm_90a", KEY).with_suffix(".failed.json")
    data = {"key": KEY, "entry": "x", "kind": "timeout", "message": "m", "log": "l"}
    content = json.dumps(data, indent=1).encode()
    trust.make_private_directory(file.parent)
    for seed in range(count):
        mutated, _ = mutations.of(seed, content, data, encode_json)
        trust.write_atomically(file, mutated)
        known = kernels.failure(tmp_path, "sm_90a", KEY)
        assert known is None or known.kind in kernels.FAILURES
        assert known is None or schema.text(f"{known}{known.log}") is None
