"""Header texts: includes, hashes, and calls that all lanes of a warp have to make."""

import hashlib
import re

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


_COLLECTIVE = ("__shfl_xor_sync", "__any_sync", "__all_sync")
_FUNCTION = re.compile(r"TRACEA_DEVICE[^;{}()]*?\b(\w+)\([^;{]*\{")


def _bodies(texts):
    """The bodies of all functions, by name."""
    found = {}
    for text in texts:
        for match in _FUNCTION.finditer(text):
            depth, end = 1, match.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            found.setdefault(match[1], []).append(text[match.end() : end])
    return found


def _collectives(bodies):
    """Names of functions that all lanes of a warp have to call together."""
    found = set(_COLLECTIVE)
    while True:
        calls = re.compile(rf"\b({'|'.join(sorted(found))})\(")
        more = {n for n, of in bodies.items() if all(map(calls.search, of))}
        if more <= found:
            return found
        found |= more


def _skipped_by_some_lanes(texts):
    """Calls of collectives after && or ||, which lanes skip by their own values."""
    names = "|".join(sorted(_collectives(_bodies(texts))))
    after = re.compile(rf"(?:&&|\|\|)\s*!?(?:\w+(?:\.|->|::))*(?:{names})\(")
    return [match[0] for text in texts for match in after.finditer(text)]


def test_all_lanes_of_a_warp_call_its_collectives():
    files = sorted(sources.directory().rglob("*.cuh"))
    texts = [re.sub(r"//[^\n]*", "", file.read_text()) for file in files]
    assert not _skipped_by_some_lanes(texts)
    blind = """TRACEA_DEVICE float total(int half) const {
      return __shfl_xor_sync(kAll, sum_[half], 1);
    }
    TRACEA_DEVICE bool is_blind(int half) const {
      return !has_seen(half) && total(half) > 0.0f;
    }"""
    assert _skipped_by_some_lanes([blind]) == ["&& total("]
