"""The record of kernels that compile cleanly stands for these kernels and no others."""

from __future__ import annotations

import dataclasses

import compiled
import pytest
from sample_kernels import SCALE_HEADER, scale

from tracea_jax.emit.kernel import Scalar
from tracea_jax.runtime import nvrtc

pytestmark = [pytest.mark.nvrtc, pytest.mark.once]


@pytest.fixture
def recorded(monkeypatch):
    """A record of ``scale()`` alone; returns the entries of what is compiled."""
    known = frozenset({compiled.identity(scale())})
    seen, compile = [], nvrtc.compile
    monkeypatch.setattr(compiled, "_recorded", lambda: known)
    monkeypatch.setattr(compiled, "is_recording", False)
    monkeypatch.setattr(compiled, "_passed", set())
    monkeypatch.setattr(nvrtc, "compile", lambda k: seen.append(k) or compile(k))
    return seen


def test_only_what_is_recorded_is_not_compiled(recorded, monkeypatch):
    compiled.assert_clean(scale())
    assert not recorded
    changed = [
        dataclasses.replace(scale(), headers=(("scale.cuh", SCALE_HEADER + " "),)),
        dataclasses.replace(scale(), arch="sm_80"),
        scale(by=4),
        dataclasses.replace(scale(), grid=(1, 1, 1)),
    ]
    for kernel in changed:
        compiled.assert_clean(kernel)
    assert recorded == changed
    monkeypatch.setattr(compiled, "is_recording", True)
    compiled.assert_clean(scale())
    assert len(recorded) == 5


def test_what_is_not_clean_fails_and_is_not_recorded(recorded):
    local = "volatile float a[4000]; a[by] = 1; out[i] = a[i & 1];"
    spilling = scale().source.replace("out[i] = scaled(in[i], by);", f"{{{local}}}")
    with pytest.raises(AssertionError):
        compiled.assert_clean(dataclasses.replace(scale(), source=spilling))
    fewer = tuple(p for p in scale().params if not isinstance(p, Scalar))
    with pytest.raises(ValueError, match="parameter"):
        compiled.assert_clean(dataclasses.replace(scale(), params=fewer))
    assert len(recorded) == 2 and not compiled._passed
