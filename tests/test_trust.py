"""Files that others own or can write decide nothing; unreadable ones cost a warning."""

from __future__ import annotations

import fcntl
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import tempfile
import threading

import pytest
from synthetic_bench import DEVICE, PROBLEM, choice, entry, file_of, found, measured

import tracea_jax
from tracea_jax.doctor import doctor
from tracea_jax.options import Options
from tracea_jax.runtime import cubins as kernels
from tracea_jax.runtime import trust
from tracea_jax.runtime.nvrtc import Cubin
from tracea_jax.tuning.answers.knowledge import Knowledge
from tracea_jax.tuning.store import exchange, files, upkeep
from tracea_jax.tuning.store.entries import Store
from tracea_jax.tuning.store.records import union

NOBODY = 65534
posix = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root changes owners"
)
pytestmark = posix


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch):
    monkeypatch.setattr(trust, "_warned", set())


@pytest.fixture
def public():
    """A directory that other users can reach."""
    path = pathlib.Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


KEY = "0" * 64


def cubin(image: bytes = b"\x7fELF image") -> Cubin:
    nothing = dict.fromkeys(
        ("registers", "stack_bytes", "spill_bytes", "smem_static_bytes")
    )
    texts = {"entry": "scale", "log": "", "warnings": ()}
    return Cubin(key=KEY, arch="sm_90a", image=image, compile_s=0.5, **texts, **nothing)


def save_kernel(directory: pathlib.Path, image: bytes = b"\x7fELF image") -> None:
    from sample_kernels import scale

    kernels._save(directory, scale(), cubin(image))


def as_nobody(program: str, *arguments: object, **environment: str) -> str:
    """What the program prints when another user runs it, warnings included.

    It runs as root first, elsewhere, so that all that Python loads is loaded: the other
    user may not reach Python's own files.

    The package's data and metadata are read later, by the other user. Where root keeps
    them in a private directory, such as a virtual environment in its home, no program
    of that user can have them and nothing can be tested; ``.ci/run`` opens its own.
    """
    tests, package = (pathlib.Path(f).parent for f in (__file__, tracea_jax.__file__))
    for place in (tests, package):
        if not is_open_to_others(place):
            pytest.skip(f"another user cannot reach {place}")
    paths = [str(tests), str(package.parent), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-P", "-c", AS_NOBODY, program, empty, *arguments]
        done = subprocess.run(
            [str(word) for word in command],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "AS_NOBODY": repr(environment),
            },
            cwd="/",
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.partition("=====\n")[2]


def is_open_to_others(directory: pathlib.Path) -> bool:
    """Whether every user may read a directory and go through those above it."""
    above = all(path.stat().st_mode & stat.S_IXOTH for path in directory.parents)
    return above and directory.stat().st_mode & 0o5 == 0o5


AS_NOBODY = f"""
import ast, os, sys, traceback, warnings
import tracea_jax.builtin
_, program, empty, *arguments = sys.argv
os.environ["TRACEA_CACHE_DIR"] = os.environ["HOME"] = empty
sys.argv = ["", empty]
try:
    exec(program, {{}})
except AssertionError:
    pass  # it expects more than an empty cache
sys.stdout.flush()
print("=====", flush=True)
os.setgroups([])
os.setgid({NOBODY})
os.setuid({NOBODY})
sys.argv = ["", *arguments]
os.environ |= ast.literal_eval(os.environ["AS_NOBODY"])
sys.stderr = sys.stdout
warnings.resetwarnings()
warnings.simplefilter("always", RuntimeWarning)
exec(program, {{}})
"""


# Owners and modes.


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


@needs_root
def test_what_root_made_serves_everybody_who_may_read_it(public):
    Knowledge(public).own.record(entry())
    save_kernel(public)
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    program = """if True:
        import pathlib, sys
        from synthetic_bench import PROBLEM, found
        from tracea_jax.runtime import cubins
        from tracea_jax.tuning.answers.knowledge import Knowledge
        directory = pathlib.Path(sys.argv[1])
        assert cubins.load(directory, "sm_90a", "0" * 64) is not None
        print(found(Knowledge(directory)).origin)
    """
    assert as_nobody(program, public) == "tuned\n"


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


def test_a_user_without_a_home_has_a_cache_that_takes_nothing(tmp_path, monkeypatch):
    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert Options().directory == pathlib.Path("/.cache/tracea_jax")


# What cannot be read.

USES = """if True:
    import pathlib, sys
    import jax, jax.numpy as jnp
    import tracea_jax as tracea
    from tracea_jax import cli
    from tracea_jax.options import current

    x = jnp.ones((64, 64))
    y = jax.jit(lambda x: tracea.ops.matmul(x, x))(x)
    assert y[0, 0] == 64
    print(tracea.explain(tracea.transform(lambda x: x @ x))(x))
    print(tracea.doctor())
    assert cli.main(["cache", "list"]) == 0
    cli.main(["cache", "verify"])
    print("used")
"""


@needs_root
@pytest.mark.parametrize(
    "hidden", ["", "tuned", "tuned/*", "tuned/*/matmul", "tuned/*/*/*"]
)
def test_what_only_root_can_read_is_a_miss_with_one_warning(
    public, hidden, monkeypatch
):
    Knowledge(public).own.record(entry(observations=[measured(8)]))
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    (place,) = public.glob(hidden) if hidden else [public]
    place.chmod(0o700)
    text = as_nobody(USES, TRACEA_CACHE_DIR=str(public))
    assert text.count("RuntimeWarning") <= 1 and text.endswith("used\n")
    program = """if True:
        import pathlib, sys
        from synthetic_bench import DEVICE, PROBLEM
        from tracea_jax.tuning.answers.knowledge import Knowledge
        for _ in range(2):
            knowledge = Knowledge(pathlib.Path(sys.argv[1]))
            assert knowledge.lookup(PROBLEM, DEVICE) is None
            assert not knowledge.observations(PROBLEM, DEVICE)
            assert not list(knowledge.own.entries())
            knowledge.digest(DEVICE)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 1 and "cannot be read" in text


@needs_root
def test_what_only_root_can_write_is_used_and_not_written(public):
    Knowledge(public).own.record(entry())
    save_kernel(public)
    for path in (public, *public.rglob("*")):
        path.chmod(0o755)
    before = sorted(public.rglob("*"))
    program = """if True:
        import pathlib, sys
        from sample_kernels import scale
        from synthetic_bench import DEVICE, PROBLEM, choice, entry, found, measured
        from tracea_jax.runtime import cubins
        from tracea_jax.tuning.answers.knowledge import Knowledge
        directory = pathlib.Path(sys.argv[1])
        for _ in range(2):
            cubins.record_failure(directory, scale(), "timeout", "60 s")
        cubins.mark_winner(directory, scale())
        cubins.collect(directory, 0, min_age_s=-60)
        first = Knowledge(directory).lookup(PROBLEM, DEVICE)
        for kc in (9, 10):
            knowledge = Knowledge(directory)
            journal = knowledge.own.journal(PROBLEM, DEVICE)
            knowledge.own.append(journal, (measured(3),))
            knowledge.own.record(entry(choice(kc), written=f"2027-{kc}"), journal)
            journal.close()
        assert found(Knowledge(directory)).choice == choice(10)
        assert first is not None and first.choice == choice(8)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 2  # of answers, and of kernels
    assert text.count("cannot be written") == 2
    assert sorted(public.rglob("*")) == before


@needs_root
def test_kernels_that_only_root_can_read_are_a_miss_with_one_warning(public):
    save_kernel(public)
    public.joinpath("cubin").chmod(0o700)
    program = """if True:
        import pathlib, sys
        from tracea_jax.runtime import cubins
        directory = pathlib.Path(sys.argv[1])
        for _ in range(2):
            assert cubins.load(directory, "sm_90a", "0" * 64) is None
            assert cubins.failure(directory, "sm_90a", "0" * 64) is None
        assert not cubins.is_trusted(directory)
        cubins.collect(directory, 0, min_age_s=-60)
    """
    text = as_nobody(program, public)
    assert text.count("RuntimeWarning") == 1 and "cannot be read" in text
    public.joinpath("cubin").chmod(0o755)
    assert kernels.load(public, "sm_90a", KEY) == cubin()


# Files that are none.


def within(seconds: float, run) -> None:
    """Runs it; a call that hangs fails the test."""
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def test_a_pipe_does_not_hang(tmp_path, recwarn):
    path = file_of(tmp_path)
    trust.make_private_directory(path.parent)
    os.mkfifo(path, 0o600)
    os.mkfifo(path.with_name(f"{path.stem}.1-0.journal"), 0o600)
    image = kernels.path(tmp_path, "sm_90a", KEY)
    trust.make_private_directory(image.parent)
    os.mkfifo(image, 0o600)
    os.mkfifo(tmp_path / "archive", 0o600)

    def use():
        knowledge = Knowledge(tmp_path)
        assert knowledge.lookup(PROBLEM, DEVICE) is None
        assert not knowledge.observations(PROBLEM, DEVICE)
        assert not list(knowledge.neighbours(PROBLEM, DEVICE))
        knowledge.own.record(entry())
        assert kernels.load(tmp_path, "sm_90a", KEY) is None
        with pytest.raises(OSError, match="not a regular file"):
            exchange.read(tmp_path / "archive")

    within(60, use)
    assert found(Knowledge(tmp_path)).choice == choice(8)


def test_links_are_not_followed(tmp_path, recwarn):
    Knowledge(tmp_path / "other").own.record(entry())
    path = file_of(tmp_path / "mine")
    trust.make_private_directory(path.parent)
    path.symlink_to(file_of(tmp_path / "other"))
    assert Knowledge(tmp_path / "mine").lookup(PROBLEM, DEVICE) is None
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    lock = path.parent.parent / ".lock"
    lock.unlink(missing_ok=True)
    lock.symlink_to(target)
    Knowledge(tmp_path / "mine").own.record(entry())
    assert target.read_bytes() == b"precious"


def test_a_file_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    file = tmp_path / "large"
    with file.open("wb") as f:
        f.truncate(1 << 40)
    with pytest.raises(trust.Refused, match="at most 100 are read"):
        trust.read_file(file, 100)
    file.write_bytes(b"x" * 100)
    assert trust.read_file(file, 100) == b"x" * 100
    with pytest.raises(trust.Refused, match="grew"):
        trust._read_all(os.open(file, os.O_RDONLY), file, 50, 99)


def test_an_archive_beyond_the_limit_is_not_read(tmp_path, monkeypatch):
    Knowledge(tmp_path / "cache").own.record(entry())
    exchange.export(Store.of_cache(tmp_path / "cache"), tmp_path / "out")
    size = (tmp_path / "out").stat().st_size
    monkeypatch.setattr(exchange, "LIMIT_BYTES", size)
    assert len(exchange.read(tmp_path / "out")) == 1
    monkeypatch.setattr(exchange, "LIMIT_BYTES", size - 1)
    with pytest.raises(OSError, match=f"{size} bytes; at most {size - 1} are read"):
        exchange.read(tmp_path / "out")


def test_a_writer_overwrites_no_planted_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trust.secrets, "token_hex", lambda n: "ab" * n)
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    planted = tmp_path / f".x.{'ab' * 8}.tmp"
    planted.symlink_to(victim)
    with pytest.raises(FileExistsError):
        trust.write_atomically(tmp_path / "x", b"new")
    assert victim.read_bytes() == b"precious" and planted.is_symlink()


KILLED_EXPORT = """
import os, pathlib, sys
from tracea_jax.tuning.store import exchange
from tracea_jax.tuning.store.entries import Store
os.fsync = lambda fd: os._exit(9)
exchange.export(Store(pathlib.Path(sys.argv[1])), pathlib.Path(sys.argv[2]))
"""


def test_a_killed_export_is_cleaned_by_the_next(tmp_path):
    command = [sys.executable, "-c", KILLED_EXPORT, str(tmp_path), tmp_path / "out"]
    assert subprocess.run(command, cwd="/").returncode == 9
    (leftover,) = tmp_path.glob(".out.*.tmp")
    # No names of ours.
    names = ".out.notes.tmp", "out.2024.tmp", ".out.2024.tmp", f"out.{'0' * 16}.tmp"
    mine = [tmp_path / name for name in names]
    for file in mine:
        file.write_text("keep")
        os.utime(file, (1e9, 1e9))
    exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert leftover.exists()  # its writer may be alive
    os.utime(leftover, (1e9, 1e9))
    exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert not leftover.exists() and all(file.exists() for file in mine)


def test_an_export_replaces_no_pipe(tmp_path):
    os.mkfifo(tmp_path / "out")
    with pytest.raises(OSError, match="not a regular file"):
        exchange.export(Store(tmp_path / "none"), tmp_path / "out")
    assert stat.S_ISFIFO((tmp_path / "out").stat().st_mode)


def test_an_unreadable_journal_is_not_removed(tmp_path, monkeypatch):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    many = tuple(measured(kc) for kc in range(3, 60))
    knowledge.own.append(journal, many)
    journal.close()
    assert journal.path is not None
    assert len(entry().to_bytes()) < 2000 < os.path.getsize(journal.path)
    monkeypatch.setattr(files, "LIMIT_BYTES", 2000)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        Knowledge(tmp_path).own.record(entry())
    monkeypatch.undo()
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == union(many)


@pytest.mark.parametrize("below", ["", "tuned", "tuned/*", "tuned/*/matmul"])
def test_journals_where_others_can_write_are_neither_read_nor_removed(tmp_path, below):
    knowledge = Knowledge(tmp_path)
    journal = knowledge.own.journal(PROBLEM, DEVICE)
    knowledge.own.append(journal, (measured(3),))
    journal.close()
    assert journal.path is not None
    aside = journal.path.with_name("x.json.corrupt-1")
    aside.write_bytes(b"")
    (place,) = [tmp_path] if not below else tmp_path.glob(below)
    place.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w") as caught:
        assert not Knowledge(tmp_path).observations(PROBLEM, DEVICE)
        tidied = {"older_than_s": 1.0, "journals": True, "now_s": 9e9}
        assert not upkeep.prune(Store.of_cache(tmp_path), **tidied)
    assert len(caught) == 1
    place.chmod(0o700)
    assert Knowledge(tmp_path).observations(PROBLEM, DEVICE) == (measured(3),)
    pruned = upkeep.prune(Store.of_cache(tmp_path), **tidied)
    assert {p.path for p in pruned} == {aside, journal.path}


# Collecting.


def collected(directory: pathlib.Path) -> kernels.Collected:
    return kernels.collect(directory, 0, min_age_s=-60)


@pytest.mark.parametrize("linked", ["cubin", "cubin/sm_90a"])
def test_the_collector_follows_no_links(tmp_path, linked):
    save_kernel(tmp_path / "other")
    image = kernels.path(tmp_path / "other", "sm_90a", KEY)
    mine = tmp_path / "mine"
    trust.make_private_directory((mine / linked).parent)
    (mine / linked).symlink_to(tmp_path / "other" / linked)
    assert collected(mine) == kernels.Collected(kernels=0, freed_bytes=0, left_bytes=0)
    assert image.exists() and kernels.count(mine) == 0
    (mine / linked).unlink()
    save_kernel(mine)
    own = kernels.path(mine, "sm_90a", KEY)
    own.unlink()
    own.symlink_to(image)
    assert collected(mine).kernels == 0
    assert image.exists() and own.is_symlink()
    assert collected(tmp_path / "other").kernels == 1 and not image.exists()


def test_the_collector_removes_only_what_the_store_wrote(tmp_path):
    save_kernel(tmp_path)
    folder = tmp_path / "cubin" / "sm_90a"
    names = "notes.txt", "model.cubin", f"{KEY}.bin", f"{KEY[1:]}.cubin", f"{KEY}x.cu"
    others = [folder / name for name in (*names, f".{KEY}.tmp", ".x.0123456789.tmp")]
    others.append(tmp_path / "cubin" / f"{KEY}.cubin")
    for file in others:
        file.write_bytes(b"keep")
    (folder / ("1" * 64 + ".cubin")).mkdir()
    assert kernels.count(tmp_path) == 1
    assert collected(tmp_path).kernels == 1
    assert kernels.count(tmp_path) == 0
    assert all(file.read_bytes() == b"keep" for file in others)


def test_the_collector_leaves_what_others_can_write(tmp_path):
    save_kernel(tmp_path)
    (tmp_path / "cubin").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        assert collected(tmp_path).kernels == 0
    assert kernels.path(tmp_path, "sm_90a", KEY).exists()


def test_the_collector_waits_for_nobody_else(tmp_path):
    """In a directory that others can write, the lock may be theirs for ever."""
    save_kernel(tmp_path)
    lock = os.open(tmp_path / "cubin" / ".lock", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (tmp_path / "cubin").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="chmod -R go-w"):
        within(60, lambda: collected(tmp_path))
    os.close(lock)


def test_the_collector_makes_no_lock_through_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "cubin").symlink_to(tmp_path / "elsewhere")
    collected(tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_lock_that_is_a_link_makes_no_file(tmp_path):
    save_kernel(tmp_path)
    lock = tmp_path / "cubin" / ".lock"
    lock.unlink()
    lock.symlink_to(tmp_path / "planted")
    collected(tmp_path)
    assert not (tmp_path / "planted").exists()
