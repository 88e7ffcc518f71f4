"""Device headers agree with the Python algebra, and a disagreement is found."""

import dataclasses
import shutil
import subprocess

import parity
import pytest

from tracea_jax.runtime import nvrtc

pytestmark = pytest.mark.once


def claims():
    """The cases by name."""
    return {case.name: case for case in parity.cases()}


# One wrong formula for each function of the headers: (header, right, wrong).
MUTANTS = [
    ("tile/swizzle.cuh", "byte ^ ((byte >> S) & kMask)", "byte ^ (byte >> S)"),
    ("tile/swizzle.cuh", "1u << (M + S + B)", "1u << (M + S)"),
    ("tile/fragment.cuh", "16 * (thread / 32)", "8 * (thread / 32)"),
    ("tile/fragment.cuh", "8 * (i / 4) + 2 * (thread % 4)", "8 * (i / 4) + thread % 4"),
    ("tile/fragment.cuh", "lane / 4 + 8 * ((i / 2) % 2)", "lane / 4 + 8 * (i / 4)"),
    ("tile/fragment.cuh", "i % 2 + 8 * (i / 4)", "i % 2 + 8 * ((i / 2) % 2)"),
    ("tile/fragment.cuh", "i % 2 + 8 * (i / 2)", "i % 2 + 4 * (i / 2)"),
    ("tile/fragment.cuh", "int) { return lane / 4; }", "int) { return lane % 8; }"),
    ("tile/fragment.cuh", "return lane / 4 + 8 * (i / 2)", "return lane / 4 + 8 * i"),
    ("tile/fragment.cuh", "return 2 * (lane % 4) + i % 2;", "return lane % 4;"),
    ("tile/fragment.cuh", "return lane % 16", "return lane % 8"),
    ("tile/fragment.cuh", "8 * (lane / 16)", "8 * (lane / 8)"),
    ("tile/fragment.cuh", "j ^ (2 * ((lane / 4) % 2))", "j ^ ((lane / 4) % 2)"),
    ("tile/pipeline.cuh", "phase ^= 1u;", ""),
    ("tile/pipeline.cuh", "k % Stages, static", "k / Stages, static"),
    ("tile/pipeline.cuh", "return phase ^ 1u", "return phase"),
    ("tile/pipeline.cuh", "consumers * cluster", "consumers + cluster"),
    ("tile/fragment.cuh", "8 * block + stm", "4 * block + stm"),
    ("tile/fragment.cuh", "128 * row + 4 * col", "128 * row + 8 * col"),
    ("tile/fragment.cuh", "16 * (thread / kWarpSize)", "(thread / kWarpSize)"),
    (
        "tile/pipeline.cuh",
        "u32 full_arrivals() { return 1",
        "u32 full_arrivals() { return 2",
    ),
    ("tile/pipeline.cuh", "kPrologueGroups = Stages - 1", "kPrologueGroups = Stages"),
    ("tile/pipeline.cuh", "kGroupsBehindA = Stages - 2", "kGroupsBehindA = Stages - 1"),
    ("tile/pipeline.cuh", "kGroupsBehindB = Stages - 1", "kGroupsBehindB = Stages - 2"),
    ("tile/pipeline.cuh", "(k + Stages - 1) % Stages", "k % Stages"),
    (
        "tile/pipeline.cuh",
        "compute_stage(int k) { return k %",
        "compute_stage(int k) { return 1 +",
    ),
    ("tile/swizzle.cuh", "applied ^ (d & kMask)", "applied ^ (distance & kMask)"),
    ("tile/fragment.cuh", "row(thread, 2 * i);", "row(thread, i);"),
    ("tile/fragment.cuh", "thread % 4 + 4 * (i / 2)", "thread % 4 + 4 * (i % 2)"),
    ("tile/fragment.cuh", "(row & 2) << 3", "(row & 2) << 2"),
    ("tile/fragment.cuh", "kTransposed ? half : 2 * half", "half"),
    ("tile/fragment.cuh", "kNext = kTransposed ? 2 : 1", "kNext = 1"),
    ("tile/fragment.cuh", "j ^ ((thread ^ thread / 2) & 1)", "j ^ (thread & 1)"),
    ("tile/fragment.cuh", "128 * kColumns * (col", "32 * kColumns * (col"),
    ("tile/fragment.cuh", "BlockBytes = 8 * 128", "BlockBytes = 4 * 128"),
    ("tile/register_operand_map.cuh", "(i / 2) * 4 * 128", "(i / 2) * 8 * 128"),
    ("tile/register_operand_map.cuh", "(kPaired ? 4 : 32)", "4"),
    ("tile/register_operand_map.cuh", "slab * 2 * kSlab", "slab * kSlab"),
    ("tile/operand_map.cuh", "lane % 8 + 8 * (lane / 16)", "lane % 16"),
    ("tile/operand_map.cuh", ": lane % 16;", ": lane % 8;"),
    ("tile/operand_map.cuh", "? lane / 8 % 2", "? lane / 16"),
    ("tile/operand_map.cuh", "kIsA ? i % 2 : i / 2", "kIsA ? i / 2 : i % 2"),
    ("tile/operand_map.cuh", "lane / 4 * kElementBytes", "lane / 8 * kElementBytes"),
    ("tile/operand_map.cuh", "block * 16 * kRowBytes", "block * 8 * kRowBytes"),
    ("tile/operand_map.cuh", "step * kStepRows", "step * 16"),
    ("tile/operand_map.cuh", "i * (kThreads / kUnitsPerRow)", "i * kUnitsPerRow"),
    ("tile/operand_map.cuh", "i % (kUnitsPerRow / kThreads)", "i"),
    ("tile/operand_map.cuh", "apply(thread * kUnitBytes)", "apply(thread)"),
    ("tile/fast_divide.cuh", "multiplier >> shift", "multiplier >> (shift - 1)"),
]


def wrong(case):
    """The case with its last value changed."""
    *values, last = case.expected
    return dataclasses.replace(case, expected=(*values, last + 1))


def mutate(kernel, header, right, new):
    texts = dict(kernel.headers)
    assert texts[header].count(right) == 1, f"{right!r} is not once in {header}"
    texts[header] = texts[header].replace(right, new)
    return dataclasses.replace(kernel, headers=tuple(texts.items()))


def test_cases_have_distinct_names_and_many_values():
    named = claims()
    assert len(named) == len(parity.cases())
    assert all(case.expected and min(case.expected) >= 0 for case in named.values())
    assert len(named["wgmma_accumulator_row"].expected) == 128 * 128
    assert named["Swizzle_3_4_3"].expected[17 * 16] == 304


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_headers_agree(arch):
    assert nvrtc.compile(parity.kernel(arch=arch)).arch == arch


def first_of_each_header():
    """The mutants, all but the first of a header as slow tests."""
    seen = set()
    for header, right, new in MUTANTS:
        marks = [pytest.mark.slow] * (header in seen)
        seen.add(header)
        yield pytest.param(header, right, new, marks=marks)


@pytest.mark.nvrtc
@pytest.mark.parametrize("header, right, new", [*first_of_each_header()])
def test_a_wrong_header_does_not_compile(header, right, new):
    with pytest.raises(nvrtc.CompileError, match="algebra differ"):
        kernel = parity.kernel(parity.cases(header))
        nvrtc.compile(mutate(kernel, header, right, new))


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "name", ["Swizzle_2_4_3", "stmatrix_4_simulated_3", "ring_5_advanced_stage_idx"]
)
def test_a_wrong_value_is_named(name):
    case = claims()[name]
    last = len(case.expected) - 1
    with pytest.raises(nvrtc.CompileError, match=f"Case={name}, N={last}"):
        nvrtc.compile(parity.kernel([wrong(case)]))


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("header", ["tile/common.cuh", *parity.HEADERS])
def test_every_header_compiles_alone(header, arch):
    kernel = parity.kernel([], arch=arch)
    text = f'#include "{header}"\nextern "C" __global__ void parity() {{}}\n'
    nvrtc.compile(dataclasses.replace(kernel, source=text))


def host_compiles(kernel, directory):
    """Whether the machine's C++ compiler accepts the translation unit."""
    for name, text in kernel.headers:
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (directory / "parity.cc").write_text(kernel.source)
    command = ["c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    result = subprocess.run(
        [*command, "-I", str(directory), str(directory / "parity.cc")],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode == 0, result.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")
def test_a_host_compiler_agrees_too(tmp_path):
    accepted, log = host_compiles(parity.kernel(), tmp_path)
    assert accepted, log
    accepted, log = host_compiles(
        parity.kernel([wrong(claims()["mma_a_col"])]), tmp_path
    )
    assert not accepted and "algebra differ" in log
