"""The wgmma instruction: the shapes and dtypes it has."""

from __future__ import annotations

import pytest

from tracea_jax.emit.wgmma import PTX_TYPE, Wgmma


def test_wgmma_refuses_shapes_the_instruction_does_not_have():
    with pytest.raises(ValueError, match="n=20 must be a multiple of 8"):
        Wgmma(n=20, lhs="bfloat16", rhs="bfloat16")
    with pytest.raises(ValueError, match="rhs='float32'"):
        Wgmma(n=64, lhs="tfloat32", rhs="float32")
    with pytest.raises(ValueError, match="must be equal or have 8 bits"):
        Wgmma(n=64, lhs="bfloat16", rhs="float16")


def test_wgmma_contracts_32_bytes():
    ks = {t: Wgmma(n=64, lhs=t, rhs=t).k for t in PTX_TYPE}
    assert ks == {
        "bfloat16": 16,
        "float16": 16,
        "tfloat32": 8,
        "float8_e4m3fn": 32,
        "float8_e5m2": 32,
    }
