"""Files that others own or can write decide nothing, and cost a warning."""

from __future__ import annotations

import os
import pathlib
import stat

import pytest
from synthetic_bench import DEVICE, PROBLEM, choice, entry, file_of, found
from trusted import KEY, NOBODY, collected, cubin, needs_root, posix, save_kernel

from tracea_jax.doctor import doctor
from tracea_jax.options import Options
from tracea_jax.runtime import cubins as kernels
from tracea_jax.runtime import trust
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store.entries import Store

pytestmark = [posix, pytest.mark.usefixtures("nothing_warned")]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o702])
@pytest.mark.parametrize("below", ["", "tuned", "tuned/*", "tuned/*/matmul"])
def test_answers_that_others_can_write_are_ignored_with_one_warning(
    tmp_path, mode, below
):
    Knowledge(tmp_path).own.record(entry())
    (place,) = [tmp_path] if not below else tmp_path.glob(below)
    place.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"chmod -R go-w {tmp_path}") as caught:
        for _ in range(2):
            assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
        Knowledge(tmp_path).own.record(entry(choice(9)))
    assert len(caught) == 1
    place.chmod(0o700)
    (kept,) = Store.of_cache(tmp_path).heads()  # what the message says helps
    assert kept[1].best == entry().best


def test_an_entry_that_others_can_write_is_ignored(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    file_of(tmp_path).chmod(0o666)
    with pytest.warns(RuntimeWarning, match="written by others"):
        assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None


@pytest.mark.parametrize("below", ["", "cubin", "cubin/sm_90a"])
def test_kernels_that_others_can_write_are_ignored_with_one_warning(tmp_path, below):
    save_kernel(tmp_path)
    assert kernels.load(tmp_path, "sm_90a", KEY) == cubin()
    assert kernels.is_trusted(tmp_path)
    (tmp_path / below).chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w") as caught:
        assert kernels.load(tmp_path, "sm_90a", KEY) is None
        assert not kernels.is_trusted(tmp_path)
        save_kernel(tmp_path, b"new")
    assert len(caught) == 1
    (tmp_path / below).chmod(0o700)
    assert kernels.load(tmp_path, "sm_90a", KEY) == cubin()


@needs_root
def test_a_cache_of_another_user_is_ignored_unless_it_is_named(public):
    Knowledge(public).own.record(entry())
    save_kernel(public)
    for path in (public, *public.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="belongs to.*TRACEA_CACHE_PATH") as caught:
        assert Knowledge(public).lookup(PROBLEM, DEVICE) is None
        assert kernels.load(public, "sm_90a", KEY) is None
    assert len(caught) == 1
    named = Options(cache_path=f"{public}{os.pathsep}")
    assert named.shared == (public,)
    assert found(Knowledge(None, shared=named.shared)).origin == "shared"
    assert kernels.load(public, "sm_90a", KEY, trust.Trust.SHARED) == cubin()
    before = sorted(public.rglob("*"))
    file_of(public).write_bytes(b"damaged")
    with pytest.warns(RuntimeWarning, match="damaged"):
        assert Knowledge(None, shared=named.shared).lookup(PROBLEM, DEVICE) is None
    assert sorted(public.rglob("*")) == before  # a shared cache is only read


def test_the_doctor_tells_which_caches_count(tmp_path, monkeypatch):
    places = [tmp_path / name for name in ("mine", "shared", "open", "none")]
    for place in places[:3]:
        place.mkdir(0o700)
    places[2].chmod(0o777)
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(places[0]))
    monkeypatch.setenv("TRACEA_CACHE_PATH", os.pathsep.join(map(str, places[1:])))
    told = str(doctor())
    assert f"directory: {places[0]} (writable, as a test file showed)" in told
    assert f"shared: {places[1]} (only read)" in told
    assert f"shared: {places[2]} (ignored: {places[2]} can be written by" in told
    assert f"shared: {places[3]} (missing)" in told
    monkeypatch.setenv("TRACEA_CACHE_DIR", str(places[2]))
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        told = str(doctor())
    assert f"directory: {places[2]} (ignored:" in told


@needs_root
def test_one_file_of_another_user_is_ignored(tmp_path):
    Knowledge(tmp_path).own.record(entry())
    save_kernel(tmp_path)
    os.chown(file_of(tmp_path), NOBODY, NOBODY)
    os.chown(kernels.path(tmp_path, "sm_90a", KEY), NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="belongs to"):
        assert Knowledge(tmp_path).lookup(PROBLEM, DEVICE) is None
        assert kernels.load(tmp_path, "sm_90a", KEY) is None


def test_a_local_cache_counts_only_when_it_is_the_users(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    local = tmp_path / ".tracea"
    local.mkdir(0o700)
    assert Options().directory == local
    local.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="ignored") as caught:
        assert Options().directory != local
        assert Options().directory != local
    assert len(caught) == 1


@needs_root
def test_a_local_cache_of_another_user_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".tracea").mkdir(0o700)
    os.chown(tmp_path / ".tracea", NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="belongs to"):
        assert Options().directory != tmp_path / ".tracea"


@needs_root
def test_a_link_of_another_user_leads_to_no_cache(tmp_path, monkeypatch):
    """Its maker decides which of the user's directories is taken for a cache."""
    Knowledge(tmp_path / "unpacked").own.record(entry())
    save_kernel(tmp_path / "unpacked")
    link = tmp_path / ".tracea"
    link.symlink_to(tmp_path / "unpacked")
    monkeypatch.chdir(tmp_path)
    assert Options().directory == link and kernels.is_trusted(link)
    assert found(Knowledge(link)).origin == "tuned"
    os.lchown(link, NOBODY, NOBODY)
    with pytest.warns(RuntimeWarning, match="belongs to") as caught:
        assert Options().directory != link
        assert Knowledge(link).lookup(PROBLEM, DEVICE) is None
        assert Knowledge(None, shared=(link,)).lookup(PROBLEM, DEVICE) is None
        assert kernels.load(link, "sm_90a", KEY) is None
        assert not kernels.is_trusted(link)
        assert collected(link).kernels == 0
    assert len(caught) == 1


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022, 0o077, 0o777])
def test_a_cache_is_private_under_any_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_kernel(tmp_path / "a" / "cache")
        Knowledge(tmp_path / "a" / "cache").own.record(entry())
    finally:
        os.umask(before)
    made = [p for p in (tmp_path / "a").rglob("*") if p.is_dir()]
    assert len(made) == 6
    assert {stat.S_IMODE(p.stat().st_mode) for p in made} == {0o700}
    if umask != 0o777:
        for path in (tmp_path / "a").rglob("*"):
            assert not path.stat().st_mode & 0o022
        assert found(Knowledge(tmp_path / "a" / "cache")).origin == "tuned"
        assert kernels.load(tmp_path / "a" / "cache", "sm_90a", KEY) == cubin()


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="there is no /dev/null")
def test_a_cache_that_is_no_directory_is_not_to_be_changed():
    # Everybody may write to it; advice to change that would harm the machine.
    with pytest.warns(RuntimeWarning, match="cannot be written") as caught:
        assert Knowledge(pathlib.Path("/dev/null")).lookup(PROBLEM, DEVICE) is None
        Knowledge(pathlib.Path("/dev/null")).own.record(entry())
    assert "chmod" not in "".join(str(w.message) for w in caught)


def test_a_user_without_a_home_has_a_cache_that_takes_nothing(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert Options().directory == pathlib.Path("/.cache/tracea_jax")
