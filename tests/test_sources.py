"""Header texts: the includes of a kernel are found, named and hashed."""

import hashlib

import pytest

from tracea_jax.emit import sources


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Writes headers, by name and text, into a directory in place of the real one."""
    monkeypatch.setattr(sources, "directory", lambda: tmp_path)
    sources.text.cache_clear()

    def write(files):
        sources.text.cache_clear()
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)

    yield write
    sources.text.cache_clear()


def test_includes_are_followed_once_each(tree):
    files = {
        "op.cuh": '#pragma once\n#include "tile/a.cuh"\n  # include  "ptx/b.cuh"\n',
        "tile/a.cuh": '#include "tile/c.cuh"  // shared\n',
        "ptx/b.cuh": '#include "tile/c.cuh"\n// #include "no/such.cuh"\n',
        "tile/c.cuh": '#include "op.cuh"\n',  # a cycle ends
        "tile/unused.cuh": "",
    }
    tree(files)
    expected = {name: text for name, text in files.items() if name != "tile/unused.cuh"}
    assert dict(sources.headers("op.cuh")) == expected
    assert sources.headers("op.cuh") == sources.headers("ptx/b.cuh", "tile/a.cuh")


def test_a_missing_header_is_named_with_those_that_exist(tree):
    tree({"op.cuh": '#include "tile/gone.cuh"'})
    with pytest.raises(FileNotFoundError, match=r"'tile/gone.cuh'.* has op.cuh"):
        sources.headers("op.cuh")


def test_hash_covers_names_and_texts_of_all_that_is_included(tree):
    tree({"op.cuh": '#include "a.cuh"', "a.cuh": "1", "b.cuh": "1"})
    first = sources.source_hash("op.cuh")
    assert len(first) == len(hashlib.sha256().hexdigest())
    assert first == sources.source_hash("op.cuh", "a.cuh")
    assert sources.source_hash("a.cuh") != sources.source_hash("b.cuh")
    tree({"a.cuh": "2"})
    assert sources.source_hash("op.cuh") != first


def test_the_real_headers_are_found():
    names = [name for name, _ in sources.headers("tile/swizzle.cuh")]
    assert names == ["tile/common.cuh", "tile/swizzle.cuh"]
    every = [p.relative_to(sources.directory()) for p in sources.directory().rglob("*")]
    for path in every:
        if path.suffix == ".cuh":
            assert path.as_posix() in dict(sources.headers(path.as_posix()))


@pytest.mark.parametrize("place", ["site/tracea_jax/kernels/cuda", "site/kernels/cuda"])
def test_installed_headers_come_before_those_of_the_source_tree(
    place, tmp_path, monkeypatch
):
    module = tmp_path / "site" / "tracea_jax" / "emit" / "sources.py"
    monkeypatch.setattr(sources, "__file__", str(module))
    with pytest.raises(FileNotFoundError, match="install tracea_jax again"):
        sources.directory.__wrapped__()
    (tmp_path / "site/kernels/cuda").mkdir(parents=True)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    assert sources.directory.__wrapped__() == tmp_path / place
