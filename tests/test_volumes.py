"""Entries bound in one file are read as from files of their own."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
from synthetic_bench import entry

from tracea_jax.runtime.trust import Trust
from tracea_jax.tuning.store import volumes
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.formats import Damaged
from tracea_jax.tuning.store.names import Name

pytestmark = pytest.mark.once


def named(made):
    return Name.of(made.problem, made.environment.key)


@pytest.fixture
def entries():
    first = entry()
    problem = {**first.problem, "m": first.problem["m"] + 1}
    return [first, dataclasses.replace(first, problem=problem)]


@pytest.fixture
def volume(tmp_path, entries):
    """A directory with both entries in a volume."""
    files = {named(e).problem: e.to_bytes() for e in entries}
    place = tmp_path / "bound" / named(entries[0]).environment
    place.mkdir(parents=True)
    path = place / f"{named(entries[0]).op}{volumes.SUFFIX}"
    path.write_bytes(volumes.bound(files))
    return path


def everything(store, name):
    return {
        "names": list(store.names()),
        "heads": list(store.heads()),
        "problems": list(store.problems(name.environment, name.op, journals=False)),
        "entry": store.read(name, complete=True),
        "content": store.content(name),
        "any": store.has_any(name.environment, name.op),
        "environments": store.environments(),
    }


def test_a_volume_is_read_like_files(tmp_path, entries, volume):
    filed = tmp_path / "filed"
    for made in entries:
        Store(filed).write(named(made), made)
    name = named(entries[1])
    found = everything(Store(tmp_path / "bound", read_only=True), name)
    assert found == everything(Store(filed, read_only=True), name)
    assert found["entry"] == entries[1] and len(found["names"]) == 2


def test_a_file_comes_before_a_volume(tmp_path, entries, volume):
    newer = dataclasses.replace(entries[0], written="2999-01-01T00:00:00+00:00")
    store = Store(tmp_path / "bound", read_only=True)
    place = store.path(named(newer))
    place.parent.mkdir()
    place.write_bytes(newer.to_bytes())
    assert store.read(named(newer), complete=True) == newer
    assert store.read(named(entries[1]), complete=True) == entries[1]
    assert len(list(store.names())) == 2


def test_only_what_is_never_written_has_volumes(tmp_path, entries, volume):
    name, directory = named(entries[0]), tmp_path / "bound"
    for store in (Store(directory), Store(directory, True, Trust.SHARED)):
        assert store.read(name, complete=False) is None
        assert not store.has_any(name.environment, name.op)


def test_damage_is_told_and_passed_over(tmp_path, entries, volume):
    data, name = volume.read_bytes(), named(entries[0])
    store = Store(tmp_path / "bound", read_only=True)
    volume.write_bytes(data[:-9])
    with pytest.warns(RuntimeWarning, match="cannot be read .it is cut off."):
        assert not list(store.names())
    volume.write_bytes(data.replace(b'"schema": 1, "check', b'"schema": 1, "chexk'))
    with pytest.warns(RuntimeWarning, match="is damaged"), pytest.raises(Damaged):
        store.read(name, complete=False)
    volume.write_bytes(b"")
    assert store.read(name, complete=False) is None
    shutil.rmtree(volume.parent)
    assert store.read(name, complete=False) is None
