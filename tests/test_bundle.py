"""Bundles: functions as files, run by programs in C and in C++ without Python."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import random
import re
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import bundle_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_programs import PROGRAMS
from capi_programs import INVALID, built, computed, run, same_bits
from pages import blocks
from slow_cases import slow_unless

import tracea_jax as tracea
from tracea_jax import cli
from tracea_jax.bundle.arrays import ALIGNMENT, Room, placed
from tracea_jax.bundle.installation import Library


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory) -> pathlib.Path:
    return built(tmp_path_factory.mktemp("asan"), "-DSANITIZE=address")


def check_bits(
    program: pathlib.Path,
    fn: Callable[..., Any],
    x: jax.Array,
    implementation: str,
    place: pathlib.Path,
) -> None:
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=place)
    want = bundle_programs.in_jax(fn, x, implementation=implementation)
    got = computed(program, "cpu", place, [np.asarray(x)], want)
    assert same_bits(got, want)


def outputs(place: pathlib.Path, report: tracea.Bundle) -> dict[str, np.ndarray]:
    """The results of a function of a dict, by name, as a program has written them."""
    arrays = place.parent / f"{place.name}.arrays"
    return {
        name.removeprefix("out['").removesuffix("']"): np.fromfile(
            arrays / f"out{i}.bin", kind
        ).reshape(shape)
        for i, (name, kind, shape) in enumerate(report.outputs)
    }


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("language", slow_unless(["c"], ["c", "cpp"]))
def test_eight_threads_compute_the_bits_of_the_jax_program(
    c_programs, tmp_path, name, language
):
    check_bits(c_programs / f"run_{language}", *PROGRAMS[name], tmp_path / "b.tracea")


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("language", ["c", "cpp"])
def test_programs_are_clean_under_address_sanitizer(
    sanitized, tmp_path, name, language
):
    check_bits(sanitized / f"run_{language}", *PROGRAMS[name], tmp_path / "b.tracea")
    for arguments in (["cpu", tmp_path / "b.tracea"], ["cpu", tmp_path]):
        done = run(sanitized / "run_c", *arguments)
        assert done.returncode in (0, INVALID) and not done.stderr, done.stderr


def test_single_operations_of_the_library_are_right(c_programs):
    done = run(c_programs / "run_cpp", "ops")
    assert done.returncode == 0, done.stdout
    assert "1 lhs of shape (2, 3) contracts 3 elements" in done.stdout


def test_memory_is_moved_and_numbers_are_combined_as_numpy_does(c_programs, tmp_path):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(3, 5, 8)).astype(np.float32)
    y = rng.normal(size=(5, 3, 16)).astype(np.float32)

    def fn(x, y, module=jnp):
        padded = module.pad(x, ((0, 0), (1, 0), (2, 6)))[:, 1:]  # (3, 5, 16)
        both = module.concatenate([padded, y.transpose(1, 0, 2)], axis=1)
        half = both[:, ::2, 1:14:3]  # (3, 5, 5)
        spread = module.broadcast_to(half[:, :1], half.shape)
        third, quarter = np.float32(3), np.float32(0.25)
        return -(half * spread - abs(half) / third) + quarter, half.T

    report = tracea.bundle(fn, x, y, path=tmp_path / "moves.tracea")
    want, other = fn(x, y, np)  # of which each operation rounds once, as XLA's need not
    got = computed(c_programs / "run_c", "cpu", tmp_path / "moves.tracea", [x, y], want)
    assert same_bits(got, want)
    out1 = np.fromfile(tmp_path / "moves.tracea.arrays" / "out1.bin", np.float32)
    assert same_bits(out1, other.reshape(-1))
    assert [name for name, *_ in report.inputs] == ["args[0]", "args[1]"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_subnormal_numbers_are_what_they_are_in_xlas_threads(
    c_programs, tmp_path, dtype
):
    array = bundle_programs.Arrays(dtype, 8)
    w, x = array(48, 40, scale=1e-20), array(300, 48, scale=1e-20)
    check_bits(
        c_programs / "run_c", lambda x: x @ w, x, "gemm_cpu", tmp_path / "tiny.tracea"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_and_softmax_between_products_are_right(c_programs, tmp_path, dtype):
    fn, x = bundle_programs.normalised_block(dtype)
    place = tmp_path / "block.tracea"
    tracea.bundle(fn, x, path=place)
    want = np.asarray(jax.jit(fn)(x))
    got = computed(c_programs / "run_cpp", "cpu", place, [np.asarray(x)], want)
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    assert error < (1e-5 if dtype == jnp.float32 else 0.02)


def test_weights_that_are_repeated_are_kept_once(tmp_path):
    w = np.random.default_rng(5).normal(size=64).astype(np.float32)
    x = jax.ShapeDtypeStruct((512, 64), np.float32)
    report = tracea.bundle(lambda x: jnp.exp(x * w), x, path=tmp_path / "b")
    assert report.constants_bytes == w.nbytes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function_of_elements_is_that_of_numpy(c_programs, tmp_path, dtype):
    x, y = bundle_programs.special((19, 31), dtype)
    place = tmp_path / "functions.tracea"
    with jax.enable_x64(dtype is np.float64), np.errstate(all="ignore"):
        fn = functools.partial(bundle_programs.every_function, jnp)
        report = tracea.bundle(fn, x, y, path=place)
        want = bundle_programs.every_function(np, x, y)
    computed(c_programs / "run_c", "cpu", place, [x, y], x)
    rtol = 2e-6 if dtype is np.float32 else 1e-13
    bundle_programs.assert_all_close(outputs(place, report), want, rtol)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16])
def test_exact_functions_have_the_bits_of_xla(c_programs, tmp_path, dtype):
    x, y = bundle_programs.special((19, 31), dtype)
    with jax.enable_x64(dtype is np.float64):
        fn = bundle_programs.exact_functions
        report = tracea.bundle(fn, x, y, path=tmp_path / "b")
        want = jax.jit(fn)(x, y)
    first = np.asarray(want[min(want)])
    computed(c_programs / "run_c", "cpu", tmp_path / "b", [x, y], first)
    for name, got in outputs(tmp_path / "b", report).items():
        same = got == np.asarray(want[name])
        same &= np.signbit(got.astype(float)) == np.signbit(want[name].astype(float))
        assert (same | (np.isnan(got) & np.isnan(want[name]))).all(), name


def test_integers_have_no_functions_of_booleans(tmp_path):
    x = np.arange(6, dtype=np.int32)
    with pytest.raises(tracea.Unsupported, match=r"= not\(int32\[6\]\) cannot be"):
        tracea.bundle(lambda x: ~x, x, path=tmp_path / "b")


@pytest.mark.parametrize("shape", [(3, 5, 259), (3, 257, 1), (7, 1, 5)])
def test_many_results_are_reduced_side_by_side(c_programs, tmp_path, shape):
    rng = np.random.default_rng(7)
    x = rng.integers(-9, 9, size=shape).astype(np.float32)  # whose sums are exact
    x[1, :, 0], x[2, 0, -1] = np.nan, np.inf

    def fn(xp, x):
        return xp.stack([x.sum(1), x.max(1), x.min(1)])

    tracea.bundle(functools.partial(fn, jnp), x, path=tmp_path / "b")
    want = fn(np, x)
    got = computed(c_programs / "run_c", "cpu", tmp_path / "b", [x], want)
    np.testing.assert_array_equal(got, want)


def test_arrays_are_split_and_stacked(c_programs, tmp_path):
    x = np.arange(2 * 7 * 3, dtype=np.float32).reshape(2, 7, 3)

    def fn(xp, x):
        first, second, rest = xp.split(x, [2, 4], 1)
        pair = xp.stack([second, first], 1).reshape(2, 4, 3)
        return xp.concatenate([rest, pair, xp.stack([x[:, 0, 0]] * 3, -1)[:, None]], 1)

    report = tracea.bundle(functools.partial(fn, jnp), x, path=tmp_path / "b")
    assert report.workspace_bytes > 0
    want = fn(np, x)
    got = computed(c_programs / "run_cpp", "cpu", tmp_path / "b", [x], want)
    assert same_bits(got, want)


def test_dimensions_between_others_are_repeated_and_reduced(c_programs, tmp_path):
    x = np.random.default_rng(8).integers(-9, 9, size=(3, 4, 2, 5)).astype(np.float32)

    def fn(xp, x):
        y = x * x[:, :1, :1] - x[:, :, 1:].sum((1, 3), keepdims=True)
        return y.sum((0, 2)) + xp.where(x > x[:1, :, :1], x, y).max((0, 2))

    tracea.bundle(functools.partial(fn, jnp), x, path=tmp_path / "b")
    want = fn(np, x)  # whose sums are exact
    got = computed(c_programs / "run_c", "cpu", tmp_path / "b", [x], want)
    assert same_bits(got, want)


def test_a_batch_norm_alone_and_what_uses_it_twice(c_programs, tmp_path):
    array = bundle_programs.Arrays(jnp.float32, 6)
    mean, scale, shift, x = array(6), array(6), array(6), array(2, 5, 4, 6)

    def fn(x):
        y = jax.nn.relu((x - mean) * scale + shift)
        return jax.nn.relu(y * scale + shift + x) + y

    tracea.bundle(fn, x, path=tmp_path / "b")
    want = np.asarray(fn(x))
    got = computed(c_programs / "run_c", "cpu", tmp_path / "b", [np.asarray(x)], want)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_arguments_that_are_results_and_constants_are_copied(c_programs, tmp_path):
    w = np.arange(6, dtype=np.int32)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    place = tmp_path / "copies.tracea"
    tracea.bundle(lambda x: (x.reshape(4, 3), x, w), x, path=place)
    got = computed(c_programs / "run_cpp", "cpu", place, [x], x.reshape(4, 3))
    assert same_bits(got, x.reshape(4, 3))
    arrays = tmp_path / "copies.tracea.arrays"
    assert (arrays / "out1.bin").read_bytes() == x.tobytes()
    assert (arrays / "out2.bin").read_bytes() == w.tobytes()


def test_what_depends_on_weights_alone_is_computed_now(c_programs, tmp_path):
    rng = np.random.default_rng(4)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((8, 4), (5, 8)))

    def fn(x):
        scale = jax.lax.rsqrt(jnp.square(w).sum(0) + 1e-5)  # no kernel has rsqrt
        return jax.nn.silu(x @ (w * scale))

    report = tracea.bundle(fn, x, path=tmp_path / "folded.tracea")
    assert report.steps == 1
    want = np.asarray(fn(x))
    got = computed(c_programs / "run_c", "cpu", tmp_path / "folded.tracea", [x], want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_program_of_the_documents_runs(c_programs, tmp_path):
    page = pathlib.Path(__file__).parent.parent / "docs" / "howto" / "native.md"
    texts = {block.language: block.text for block in blocks(page)}
    (tmp_path / "serve.cpp").write_text(texts["cpp"])
    (tmp_path / "CMakeLists.txt").write_text(texts["cmake"])
    fn, x, _ = PROGRAMS["mlp"]
    tracea.bundle(fn, x, path=tmp_path / "mlp.tracea")
    made = built(tmp_path / "build", source=tmp_path)
    done = subprocess.run(
        [made / "serve"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"out: {x.size} numbers\n", done.stdout


# --- writing --------------------------------------------------------------------------


def test_equations_without_a_kernel_are_named_with_their_line(tmp_path):
    def fn(x):
        y = x @ jnp.ones((4, 4), jnp.float32)
        return jnp.sort(y)  # this line

    x = np.ones((4, 4), np.float32)
    with pytest.raises(
        tracea.Unsupported, match=r"= sort\(float32\[4,4\]\) cannot be"
    ) as e:
        tracea.bundle(fn, x, path=tmp_path / "x")
    line = fn.__code__.co_firstlineno + 2
    assert f"{pathlib.Path(__file__).name}:{line}" in str(e.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((3,), TypeError, r"args\[0\] is 3; bundle takes arrays"),
        ((np.ones(3, np.int64),), tracea.Unsupported, "int32"),
        (({"x": "text"},), TypeError, r"args\[0\]\['x'\] is 'text'"),
    ],
)
def test_arguments_that_are_no_arrays_are_errors(tmp_path, args, error, match):
    if error is tracea.Unsupported:
        args = (jax.ShapeDtypeStruct((3,), jnp.uint8),)
        match = "input 0 has dtype uint8; a bundle has float32"
    with pytest.raises(error, match=match):
        tracea.bundle(lambda x: x, *args, path=tmp_path / "x")


def test_only_bundles_are_replaced(tmp_path):
    x = np.ones((4, 4), np.float32)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="is no bundle"):
        tracea.bundle(lambda x: x, x, path=tmp_path / "mine")
    tracea.bundle(lambda x: x, x, path=tmp_path / "new")
    before = (tmp_path / "new" / "manifest.json").read_text()
    tracea.bundle(lambda x: x.T.T + x, x, path=tmp_path / "new")
    assert (tmp_path / "new" / "manifest.json").read_text() != before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "new"]


def test_a_bundle_that_cannot_be_replaced_stays(tmp_path, monkeypatch):
    x = np.ones((4, 4), np.float32)
    tracea.bundle(lambda x: x, x, path=tmp_path / "new")
    before = (tmp_path / "new" / "manifest.json").read_text()
    replace = os.replace

    def failing(source, target):
        if target == tmp_path / "new" and source.name != "new":
            raise OSError("no")
        replace(source, target)

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(OSError, match="no"):
        tracea.bundle(lambda x: x.T.T + x, x, path=tmp_path / "new")
    assert (tmp_path / "new" / "manifest.json").read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_sums_are_those_of_sha256sum(mlp_bundle):
    if not shutil.which("sha256sum"):
        pytest.skip("there is no sha256sum")
    subprocess.run(
        ["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=mlp_bundle, check=True
    )


def test_rooms_that_live_at_once_share_no_byte():
    rng = random.Random(6)
    for _ in range(100):
        rooms = [
            Room("workspace", rng.randrange(5000)) for _ in range(rng.randrange(9))
        ]
        pairs = [rng.choices(range(6), k=2) for _ in rooms]
        lives = [(min(pair), max(pair)) for pair in pairs]
        total = placed(rooms, lives)
        taken = [
            (room.offset, room.offset + room.bytes, life)
            for room, life in zip(rooms, lives, strict=True)
        ]
        assert all(r.offset % ALIGNMENT == 0 for r in rooms)
        assert all(end <= total for _, end, _ in taken)
        for i, (begin, end, (first, last)) in enumerate(taken):
            for other, stop, (start, finish) in taken[:i]:
                if first <= finish and start <= last:
                    assert (
                        end <= other or stop <= begin or begin == end or other == stop
                    )


# --- the library ----------------------------------------------------------------------


def test_the_library_has_what_its_header_declares_and_the_package_says():
    library = Library.installed()
    header = (library.include / "tracea.h").read_text()
    opened = ctypes.CDLL(str(library.file))
    names = set(re.findall(r"TRACEA_API [^;(]*?(tracea_\w+)\(", header))
    assert len(names) == 19
    for name in names:
        assert hasattr(opened, name)
    opened.tracea_version.restype = ctypes.c_char_p
    version = opened.tracea_version().decode()
    assert version == tracea.__version__.partition(".dev")[0]  # of the next release
    numbers = re.findall(r"define TRACEA_VERSION_\w+ (\d+)", header)
    assert version == ".".join(numbers)
    assert f"Version: {version}" in (library.pkgconfig / "tracea.pc").read_text()


def test_the_header_is_c_and_cpp_on_its_own(tmp_path):
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("there is no cc")
    flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
    flags.append(f"-I{Library.installed().include}")
    for name, language, standard in (
        ("tracea.h", "c", "c99"),
        ("tracea.h", "c++", "c++17"),
        ("tracea.hpp", "c++", "c++17"),
    ):
        source = tmp_path / f"x.{language}"
        source.write_text(f'#include "{name}"\n')
        how = [compiler, "-x", language, f"-std={standard}", *flags]
        subprocess.run([*how, source], check=True)


def test_the_command_writes_bundles_and_says_where_the_library_is(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "made.py").write_text(
        "import jax.numpy as jnp\n"
        "def step(x): return x @ jnp.ones((8, 3), jnp.float32)\n"
    )
    monkeypatch.chdir(tmp_path)
    out = str(tmp_path / "made.tracea")
    assert cli.main(["bundle", "made:step", "--args", "f32[4,8]", "--out", out]) == 0
    assert "input args[0]: float32[4, 8]" in capsys.readouterr().out
    assert (tmp_path / "made.tracea" / "manifest.json").is_file()
    assert cli.main(["config", "--cflags", "--libs"]) == 0
    library = Library.installed()
    assert capsys.readouterr().out.strip() == f"{library.cflags} {library.libs}"
    assert cli.main(["config"]) == 0
    assert f"--cmakedir: {library.cmake}\n" in capsys.readouterr().out
    partial = functools.partial(cli.main, ["bundle", "made:step", "--out", out])
    assert partial() == 1  # without shapes
