"""The portable GEMM for AMD and Apple GPUs, of which there are none here.

What it refuses and derives; that clang compiles the HIP texts for each GPU; that both
texts compute the product where the host runs them in place of a GPU; the Metal text
against the one that was kept.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import on_host
import pytest

from tracea_jax import cli
from tracea_jax.doctor import doctor
from tracea_jax.emit import gemm_metal, gemm_sm80, sources, targets
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.targets import TARGETS, Target
from tracea_jax.problem import ACTIVATIONS, ITEMSIZE, Epilogue, GemmProblem
from tracea_jax.runtime import clang, code_object, nvrtc
from tracea_jax.variants import gemm_targets

pytestmark = pytest.mark.once

FULL = Epilogue(
    bias="row", activation="gelu_exact", residual=True, save_preactivation=True
)
WIDEST = dataclasses.replace(FULL, bias_dtype="float32", residual_dtype="float32")
TILES = ((128, 128, 2, 4), (64, 64, 2, 2), (32, 32, 1, 2))
HIP = [target for target in TARGETS.values() if target.dialect == "hip"]
GOLDEN = pathlib.Path(__file__).parent / "golden"

needs_clang = pytest.mark.skipif(
    clang.why_unavailable() is not None, reason=str(clang.why_unavailable())
)


def problem(
    m: int = 4096, n: int = 4096, k: int = 4096, dtype: str = "bfloat16", **fields: Any
) -> GemmProblem:
    fields = {"lhs": dtype, "rhs": dtype, "out": dtype} | fields
    return GemmProblem(m=m, n=n, k=k, **fields)


def config_of(dtype: str, tiles: Sequence[int], **fields: Any) -> GemmSm80Config:
    tile_m, tile_n, warps_m, warps_n = tiles
    usual = {"tile_k": 64 // ITEMSIZE[dtype], "stages": 2} | fields
    return GemmSm80Config(
        tile_m=tile_m, tile_n=tile_n, warps_m=warps_m, warps_n=warps_n, **usual
    )


# ---- what it takes, and what it derives ----------------------------------------------


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_every_shape_and_dtype_has_a_legal_config(target: Target):
    shapes = ((1, 1, 1), (31, 4097, 3), (4095, 4097, 4099), (4096, 64, 512))
    for dtype, shape in itertools.product(target.dtypes, shapes):
        for layout in ("nn", "nt", "tn", "tt"):
            asked = problem(*shape, dtype=dtype, layout=layout, epilogue=WIDEST)
            assert gemm_targets.reasons(asked, target) == ()
            gemm_targets.check(asked, gemm_targets.config(asked, target), target)
    large = gemm_targets.config(problem(), target)
    small = gemm_targets.config(problem(40, 40), target)
    assert large.tile_m > small.tile_m == 32


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (problem(dtype="float32"), "float32; WMMA takes bfloat16, float16"),
        (problem(rhs="float16"), "they are bfloat16 and float16"),
        (problem(out="float64"), "output of dtype float64"),
        (problem(precision="BF16_BF16_F32_X3"), "names an algorithm only XLA has"),
        (problem(k=0), "an extent is 0"),
        (problem(m=2**31), "m=2147483648 is above"),
        (problem(33, 8, 8, batch=2**30), "more than 2\\^31 - 1 tiles"),
        (
            problem(epilogue=Epilogue(residual=True, residual_op="derivative")),
            "computes no derivatives",
        ),
    ],
)
def test_says_why_not(asked, words):
    target = TARGETS["gfx1100"]
    assert re.search(words, gemm_targets.reasons(asked, target)[0])
    with pytest.raises(ValueError, match=words):
        gemm_targets.kernel(asked, target)


@pytest.mark.parametrize(
    ("target", "changes", "words"),
    [
        ("gfx90a", {"tile_m": 96}, "tile_m=96 must be one of"),
        ("gfx90a", {"stages": 5}, "stages=5 must be an integer from 2 to 4"),
        ("gfx90a", {"tile_k": 16}, "32 bytes of bfloat16; 64 or 128 fit"),
        ("gfx90a", {"tile_m": 32, "warps_m": 4}, "no side may be less than 16"),
        ("gfx90a", {"tile_m": 32, "tile_n": 64}, "have no 16 bytes each to copy"),
        ("gfx90a", {"tile_k": 64, "stages": 3}, "98304 bytes of shared memory; gfx90a"),
        ("metal", {"stages": 3}, "51200 bytes of shared memory; metal has 32768"),
        ("gfx1100", {"warps_n": 2}, "a thread holds 160 accumulators and"),
    ],
)
def test_refuses_illegal_configs(target, changes, words):
    usual = config_of("bfloat16", TILES[0])
    gemm_targets.check(problem(), usual, TARGETS["gfx90a"])
    config = dataclasses.replace(usual, **changes)
    with pytest.raises(ValueError, match=words):
        gemm_targets.kernel(problem(), TARGETS[target], config)


def test_the_launch_is_that_of_the_sibling():
    asked = problem(300, 500, 70, epilogue=FULL, batch=3, lhs_batched=True)
    config = config_of("bfloat16", TILES[1])
    for target in TARGETS.values():
        kernel = gemm_targets.kernel(asked, target, config)
        assert kernel.params == gemm_sm80.params(asked)
        assert kernel.grid == (gemm_sm80.tile_count(asked, config), 1, 1)
        assert kernel.block == (4 * target.wave, 1, 1)
        assert kernel.arch == target.name


def test_an_unknown_target_is_named_with_those_there_are():
    with pytest.raises(
        ValueError, match="must be one of gfx90a, gfx942, gfx1100, metal"
    ):
        targets.named("gfx9000")


# ---- what clang makes of it ----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("no program", "clang.. cannot be run .*Exec format error"),
        ("#!/bin/sh\nexec sleep 90", "clang.. cannot be run .*timed out"),
        ("#!/bin/sh\nprintf '\\377'", "clang.. is of an unknown version"),
    ],
)
def test_what_is_no_clang_is_named(text, why, tmp_path, monkeypatch):
    program = tmp_path / "clang++"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(clang, "_NAMES", ("clang++",))
    monkeypatch.setattr(clang, "_ROCM", "")
    monkeypatch.setattr(clang, "_ANSWER_S", 0.1 if "sleep" in text else 60)
    clang._require.cache_clear()
    try:
        assert re.search(why, clang.why_unavailable() or "")
    finally:
        clang._require.cache_clear()


def compiled(
    target: Target, asked: GemmProblem, config: GemmSm80Config
) -> clang.CodeObject:
    made = clang.compile(gemm_targets.kernel(asked, target, config))
    (machine,) = struct.unpack_from("<H", made.image, 18)
    assert made.image[:4] == b"\x7fELF" and machine == code_object.MACHINE == 224
    assert f"{made.entry}.kd".encode() in made.image  # the symbol that a launch names
    assert f"amdgcn-amd-amdhsa--{target.name}".encode() in made.image
    usage = made.usage
    assert usage.spills == usage.stack_bytes == 0, (target, asked, config, usage)
    assert usage.smem_bytes == targets.ring_bytes(asked, config, target)
    assert usage.wave == target.wave
    assert made.log == ""
    return made


@needs_clang
@pytest.mark.parametrize("target", HIP, ids=lambda t: t.name)
def test_a_code_object_has_the_kernel_and_no_spills(target):
    for dtype in target.dtypes:
        asked = problem(4096, 4097, 4098, dtype, layout="tt", epilogue=WIDEST)
        compiled(target, asked, gemm_targets.config(asked, target))


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("target", HIP, ids=lambda t: t.name)
def test_every_config_compiles_without_spills(target: Target):
    kept = 0
    for dtype, tiles in itertools.product(target.dtypes, TILES):
        for size, layout in itertools.product(
            (4096, 4100, 4098, 4097), ("nn", "nt", "tn", "tt")
        ):
            asked = problem(
                size, size, size, dtype=dtype, layout=layout, epilogue=WIDEST
            )
            config = config_of(dtype, tiles)
            try:
                gemm_targets.check(asked, config, target)
            except ValueError:
                continue
            compiled(target, asked, config)
            kept += 1
    assert kept > 30 * len(target.dtypes)


@needs_clang
def test_an_error_shows_line_and_caret():
    kernel = gemm_targets.kernel(problem(), TARGETS["gfx90a"])
    broken = dataclasses.replace(kernel, source=kernel.source.replace("kThreads =", ""))
    with pytest.raises(
        nvrtc.CompileError, match=r"cannot compile kernel gemm_gfx"
    ) as e:
        clang.compile(broken)
    assert re.search(
        r"^kernel.hip:\d+:\d+: error: .*\n.*\n *\| [ ~]*\^", e.value.log, re.M
    )


def test_a_missing_compiler_is_named(monkeypatch):
    clang._require.cache_clear()
    monkeypatch.setattr(clang.shutil, "which", lambda *args, **kwargs: None)
    try:
        assert "there is none; apt-get install clang-19" in str(clang.why_unavailable())
        (said, *_) = doctor().elsewhere
        assert said.missing == clang.why_unavailable()
        with pytest.raises(nvrtc.ToolchainMissing):
            clang.compile(gemm_targets.kernel(problem(), TARGETS["gfx90a"]))
    finally:
        clang._require.cache_clear()


def test_only_code_objects_are_read():
    with pytest.raises(ValueError, match="no code object of an AMD GPU"):
        code_object.usage(b"\x7fELF\x02" + bytes(100), "kernel")
    # MessagePack of {"a": [1, -1, 300, null, true, 2.5], "b": "c"}, in each form
    packed = bytes.fromhex("82a1619601ffcd012cc0c3ca40200000a162d90163")
    value, end = code_object._unpacked(packed, 0)
    assert value == {"a": [1, -1, 300, None, True, 2.5], "b": "c"}
    assert end == len(packed)


# ---- what the texts compute ----------------------------------------------------------


def check_on_host(
    target: Target, asked: GemmProblem, config: Any, directory: Any
) -> None:
    kernel = gemm_targets.kernel(asked, target, config)
    for name, (got, expected) in on_host.run(asked, kernel, target, directory).items():
        scale = np.sqrt(asked.k) * np.maximum(1.0, abs(expected) / np.sqrt(asked.k))
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
        error = abs(got.astype(np.float64) - expected) / scale
        assert error.max() < rounding[asked.out], (target.name, name, str(asked))


@needs_clang
@pytest.mark.parametrize(
    ("target", "dtype", "layout"),
    [
        ("gfx90a", "bfloat16", "nn"),
        ("gfx1100", "float16", "tt"),
        ("metal", "float32", "tn"),
    ],
)
def test_the_text_computes_the_product(target, dtype, layout, tmp_path):
    asked = problem(
        67, 34, 75, dtype, layout=layout, epilogue=FULL, batch=2, rhs_batched=True
    )
    check_on_host(TARGETS[target], asked, config_of(dtype, TILES[2]), tmp_path)


SHAPES = (
    (1, 1, 1),
    (16, 17, 2),
    (31, 33, 31),
    (65, 63, 66),
    (64, 136, 200),
    (130, 8, 40),
)


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", ["gfx90a", "gfx1100", "metal"])
def test_every_layout_and_config_at_awkward_shapes(target, dtype, tmp_path):
    gpu = TARGETS[target]
    if dtype not in gpu.dtypes:
        pytest.skip(f"{gpu.instruction} takes no {dtype}")
    layouts = itertools.cycle(("nn", "nt", "tn", "tt"))
    epilogues = itertools.cycle(Epilogue(activation=a) for a in ACTIVATIONS)
    configs = [config_of(dtype, tiles) for tiles in TILES]
    configs += [
        config_of(dtype, TILES[2], stages=3, raster_band=1),
        config_of(dtype, TILES[2], stages=2, tile_k=128 // ITEMSIZE[dtype]),
    ]
    for number, (shape, config) in enumerate(itertools.product(SHAPES, configs)):
        asked = problem(
            *shape, dtype=dtype, layout=next(layouts), epilogue=next(epilogues)
        )
        try:
            gemm_targets.check(asked, config, gpu)
        except ValueError:
            continue
        place = tmp_path / str(number)
        place.mkdir()
        check_on_host(gpu, asked, config, place)


@needs_clang
@pytest.mark.parametrize(
    ("target", "dropped"),
    [
        ("gfx90a", "      block_barrier();"),
        pytest.param("gfx90a", "4 * (lane / 16) + i;", marks=pytest.mark.slow),
        pytest.param("gfx1100", "+ lane / 16;", marks=pytest.mark.slow),
        pytest.param(
            "metal",
            "threadgroup_barrier(mem_flags::mem_threadgroup)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "metal",
            "simdgroup_barrier(mem_flags::mem_threadgroup)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_host_notices_what_is_wrong(target, dropped, tmp_path):
    """A mistake in the text fails on the host, too."""
    gpu = TARGETS[target]
    asked = problem(67, 34, 75, "bfloat16")
    kernel = gemm_targets.kernel(asked, gpu, config_of("bfloat16", TILES[2]))
    put = {"4": "lane % 4 + 4 * i;", "+": ";"}.get(dropped[0], "")
    texts = [kernel.source, *(text for _, text in kernel.headers)]
    assert any(dropped in text for text in texts)
    wrong = dataclasses.replace(
        kernel,
        source=kernel.source.replace(dropped, put),
        headers=tuple((n, text.replace(dropped, put)) for n, text in kernel.headers),
    )
    ((got, expected), *_) = on_host.run(asked, wrong, gpu, tmp_path).values()
    assert not np.allclose(got.astype(np.float64), expected, atol=1.0)


# ---- the texts -----------------------------------------------------------------------

KEPT = {
    "bf16_nn": problem(4096, 4096, 4096),
    "f16_tn_full": problem(100, 68, 50, "float16", layout="tn", epilogue=FULL),
}


@pytest.mark.parametrize("name", KEPT)
def test_the_metal_text_is_the_one_that_was_kept(name):
    """WRITE_GOLDEN=1 writes what is emitted now; read the difference."""
    text = gemm_targets.kernel(KEPT[name], TARGETS["metal"]).source
    kept = GOLDEN / f"gemm_{name}.metal"
    if os.environ.get("WRITE_GOLDEN"):
        kept.write_text(text)
    assert text == kept.read_text()


def test_headers_are_put_in_place_of_includes_once():
    texts = {"a.h": '#pragma once\n#include "b.h"\nA\n', "b.h": "#pragma once\nB\n"}
    source = '#include "b.h"\n  #include "a.h"\n#include "c.h"\nend\n'
    text = sources.inlined(source, texts.items())
    assert text.split() == ["B", "A", "#include", '"c.h"', "end"]


@needs_clang
def test_the_command_writes_a_text_that_stands_alone(tmp_path, capsys):
    text, made = tmp_path / "kernel.hip", tmp_path / "kernel.co"
    words = [
        "emit",
        "matmul",
        "100",
        "200",
        "300",
        "--dtype",
        "f16",
        "--target",
        "gfx942",
    ]
    assert cli.main([*words, "--text", str(text), "--object", str(made)]) == 0
    said = capsys.readouterr()
    assert said.out == "" and "8 blocks of 256 threads" in said.err
    kernel = gemm_targets.kernel(problem(100, 200, 300, "float16"), TARGETS["gfx942"])
    assert code_object.usage(made.read_bytes(), kernel.entry).spills == 0
    alone = dataclasses.replace(kernel, source=text.read_text(), headers=())
    assert clang.compile(alone).usage == clang.compile(kernel).usage


def test_the_command_prints_a_text(capsys):
    words = ["emit", "matmul", "100", "200", "300", "--target"]
    assert cli.main([*words, "metal"]) == 0
    out = capsys.readouterr().out
    asked = problem(100, 200, 300, "float32")
    assert out == gemm_targets.kernel(asked, TARGETS["metal"]).source
    assert (
        gemm_metal.entry_name(asked, gemm_targets.config(asked, TARGETS["metal"]))
        in out
    )
    assert cli.main([*words, "metal", "--object", "x"]) == 1
    assert "no compiler for metal runs here" in capsys.readouterr().err


def test_the_doctor_claims_no_more_than_is_done():
    said = {other.target: other.state for other in doctor().elsewhere}
    assert said == {
        **{target.name: "compile-only" for target in HIP},
        "metal": "text only",
    }
