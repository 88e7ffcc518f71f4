"""Bundles: functions as files, run by programs in C and in C++ without Python."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
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
from capi_programs import built, computed, run, same_bits
from pages import blocks

import tracea_jax as tracea
from tracea_jax import cli
from tracea_jax.bundle.arrays import ALIGNMENT, DTYPES, Room, placed
from tracea_jax.bundle.installation import Library

INVALID, UNSUPPORTED, CUDA_ERROR = 1, 2, 3

# Name -> function, input, and the implementation that the JAX program runs.
PROGRAMS = {
    "resnet": (*bundle_programs.resnet_block(jnp.float32, 16), "conv2d_cpu"),
    "mlp": (*bundle_programs.mlp(jnp.float32, 64), "gemm_cpu"),
    "mlp bf16": (*bundle_programs.mlp(jnp.bfloat16, 64), "gemm_cpu"),
    "attention": (
        *bundle_programs.attention_block(jnp.float32, "attention_cpu", 2, 32),
        "gemm_cpu",
    ),
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory) -> pathlib.Path:
    return built(tmp_path_factory.mktemp("capi"))


@pytest.fixture(scope="session")
def sanitized(tmp_path_factory) -> pathlib.Path:
    return built(tmp_path_factory.mktemp("asan"), "-DSANITIZE=address")


@pytest.fixture
def mlp(tmp_path) -> pathlib.Path:
    fn, x, implementation = PROGRAMS["mlp"]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "mlp.tracea")
    return tmp_path / "mlp.tracea"


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


# --- results --------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("language", ["c", "cpp"])
def test_eight_threads_compute_the_bits_of_the_jax_program(
    programs, tmp_path, name, language
):
    check_bits(programs / f"run_{language}", *PROGRAMS[name], tmp_path / "b.tracea")


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


def test_single_operations_of_the_library_are_right(programs):
    done = run(programs / "run_cpp", "ops")
    assert done.returncode == 0, done.stdout
    assert "1 lhs of shape (2, 3) contracts 3 elements" in done.stdout


def test_memory_is_moved_and_numbers_are_combined_as_numpy_does(programs, tmp_path):
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
    got = computed(programs / "run_c", "cpu", tmp_path / "moves.tracea", [x, y], want)
    assert same_bits(got, want)
    out1 = np.fromfile(tmp_path / "moves.tracea.arrays" / "out1.bin", np.float32)
    assert same_bits(out1, other.reshape(-1))
    assert [name for name, *_ in report.inputs] == ["args[0]", "args[1]"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_subnormal_numbers_are_what_they_are_in_xlas_threads(programs, tmp_path, dtype):
    array = bundle_programs.Arrays(dtype, 8)
    w, x = array(48, 40, scale=1e-20), array(300, 48, scale=1e-20)
    check_bits(
        programs / "run_c", lambda x: x @ w, x, "gemm_cpu", tmp_path / "tiny.tracea"
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_norms_and_softmax_between_products_are_right(programs, tmp_path, dtype):
    fn, x = bundle_programs.normalised_block(dtype)
    place = tmp_path / "block.tracea"
    tracea.bundle(fn, x, path=place)
    want = np.asarray(jax.jit(fn)(x))
    got = computed(programs / "run_cpp", "cpu", place, [np.asarray(x)], want)
    error = np.abs(got.astype(np.float64) - want.astype(np.float64)).max()
    assert error < (1e-5 if dtype == jnp.float32 else 0.02)


def test_weights_that_are_repeated_are_kept_once(tmp_path):
    w = np.random.default_rng(5).normal(size=64).astype(np.float32)
    x = jax.ShapeDtypeStruct((512, 64), np.float32)
    report = tracea.bundle(lambda x: jnp.exp(x * w), x, path=tmp_path / "b")
    assert report.constants_bytes == w.nbytes


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_every_function_of_elements_is_that_of_numpy(programs, tmp_path, dtype):
    x, y = bundle_programs.special((19, 31), dtype)
    place = tmp_path / "functions.tracea"
    with jax.enable_x64(dtype is np.float64), np.errstate(all="ignore"):
        fn = functools.partial(bundle_programs.every_function, jnp)
        report = tracea.bundle(fn, x, y, path=place)
        want = bundle_programs.every_function(np, x, y)
    computed(programs / "run_c", "cpu", place, [x, y], x)
    arrays = tmp_path / "functions.tracea.arrays"
    got = {
        name.removeprefix("out['").removesuffix("']"): np.fromfile(
            arrays / f"out{i}.bin", kind
        ).reshape(shape)
        for i, (name, kind, shape) in enumerate(report.outputs)
    }
    rtol = 2e-6 if dtype is np.float32 else 1e-13
    bundle_programs.assert_all_close(got, want, rtol)


def test_arguments_that_are_results_and_constants_are_copied(programs, tmp_path):
    w = np.arange(6, dtype=np.int32)
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    place = tmp_path / "copies.tracea"
    tracea.bundle(lambda x: (x.reshape(4, 3), x, w), x, path=place)
    got = computed(programs / "run_cpp", "cpu", place, [x], x.reshape(4, 3))
    assert same_bits(got, x.reshape(4, 3))
    arrays = tmp_path / "copies.tracea.arrays"
    assert (arrays / "out1.bin").read_bytes() == x.tobytes()
    assert (arrays / "out2.bin").read_bytes() == w.tobytes()


def test_what_depends_on_weights_alone_is_computed_now(programs, tmp_path):
    rng = np.random.default_rng(4)
    w, x = (rng.normal(size=s).astype(np.float32) for s in ((8, 4), (5, 8)))

    def fn(x):
        scale = jax.lax.rsqrt(jnp.square(w).sum(0) + 1e-5)  # no kernel has rsqrt
        return jax.nn.silu(x @ (w * scale))

    report = tracea.bundle(fn, x, path=tmp_path / "folded.tracea")
    assert report.steps == 1
    want = np.asarray(fn(x))
    got = computed(programs / "run_c", "cpu", tmp_path / "folded.tracea", [x], want)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_program_of_the_documents_runs(programs, tmp_path):
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


# --- mistakes -------------------------------------------------------------------------


def test_mistakes_of_callers_have_a_status_and_a_sentence(programs, mlp):
    done = run(programs / "run_c", "cpu", mlp)
    assert done.returncode == 0, done.stdout
    lines = [line.split(": ", 1) for line in done.stdout.splitlines()]
    said = {what: sentence for what, sentence in lines}
    wanted = {
        "load": "0 ",
        "no graph": "1 graph is null.",
        "no inputs": "1 the inputs are null.",
        "few inputs": "1 got 0 inputs; the graph has 1.",
        "no workspace": "1 got 0 bytes of workspace; the graph needs ",
        "no spec": "1 index is 99; the graph has 1.",
        "null data": "1 the data of input args[0] is null.",
        "null shape": "1 the shape of input args[0] is null.",
        "wrong shape": "1 input args[0] has the shape (3, 96, 64); the graph has (2, ",
        "wrong rank": "1 input args[0] has the shape (2); the graph has (2, 96, 64).",
        "wrong dtype": "1 input args[0] has the dtype float64; the graph has float32.",
        "no dtype": "1 input args[0] has dtype 77; there is none of it.",
        "wrong device": "1 input args[0] is on CUDA device 0 and the context on the ",
        "wrong strides": "2 input args[0] of shape (2, 96, 64) has the strides (3, 3, ",
        "right again": "0 ",
        "no platform": "1 platform is 7; it must be 0 or 1.",
        "negative threads": "1 threads is -1; it must be from 0 to 4096.",
        "no path": "1 /nowhere/at/all is no whole bundle: ",
        "null path": "1 path is null.",
        "null context": "1 context is null.",
    }
    assert said.keys() == wanted.keys()
    for what, sentence in wanted.items():
        assert said[what].startswith(sentence), (what, said[what])


def loaded(programs: pathlib.Path, bundle: pathlib.Path) -> tuple[int, str]:
    """The status of loading a bundle, and what was said."""
    done = run(programs / "run_c", "cpu", bundle)
    assert not done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"load: {done.returncode} ")
    return done.returncode, first


def test_damaged_files_are_found(programs, mlp):
    for name in ("manifest.json", "constants.bin"):
        file = mlp / name
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            whole[:-1],
            b"",
        ):
            file.write_bytes(damaged)
            status, said = loaded(programs, mlp)
            assert status == INVALID and f"the sha256 of {name}" in said
        file.unlink()
        status, said = loaded(programs, mlp)
        assert status == INVALID and "No such file" in said
        file.write_bytes(whole)
    assert loaded(programs, mlp)[0] == 0
    for line in ("nonsense\n", f"{'0' * 64}  ../../etc/passwd\n", "\0\xff" * 80):
        (mlp / "SHA256SUMS").write_text(line, encoding="utf-8")
        assert loaded(programs, mlp)[0] == INVALID


def resealed(bundle: pathlib.Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Changes the manifest, and the checksums with it."""
    file = bundle / "manifest.json"
    data = json.loads(file.read_text())
    change(data)
    text = json.dumps(data).encode()
    file.write_bytes(text)
    sums = (bundle / "SHA256SUMS").read_text().splitlines()
    new = f"{hashlib.sha256(text).hexdigest()}  manifest.json"
    lines = [new if line.endswith("manifest.json") else line for line in sums]
    (bundle / "SHA256SUMS").write_text("\n".join(lines) + "\n")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], int, str]] = {
    "a later version": (lambda m: m.update(version=2), UNSUPPORTED, "version 2 of the"),
    "another format": (lambda m: m.update(format="zip"), INVALID, "another one"),
    "no steps": (lambda m: m.pop("steps"), INVALID, '"steps" is missing'),
    "another machine": (lambda m: m.update(arch="s390x"), UNSUPPORTED, "of s390x"),
    "another platform": (lambda m: m.update(platform="tpu"), UNSUPPORTED, "'tpu'"),
    "an array outside": (
        lambda m: m["values"][1].update(offset=1 << 40),
        INVALID,
        "does not lie in the",
    ),
    "a shape that overflows": (
        lambda m: m["values"][1].update(shape=[1 << 40, 1 << 40]),
        INVALID,
        "an array has the shape",
    ),
    "a step of no array": (
        lambda m: m["steps"][0]["reads"].append(999),
        INVALID,
        "a step names array 999",
    ),
    "a step that writes a weight": (
        lambda m: m["steps"][0].update(writes=m["steps"][0]["reads"][1:2]),
        INVALID,
        "writes an input or a constant",
    ),
    "an attribute less": (
        lambda m: m["steps"][0]["attributes"].pop("kc"),
        INVALID,
        "attribute 'kc' is missing",
    ),
    "a kernel that is not there": (
        lambda m: m["steps"][0].update(target="tracea_cpu_fft_v1"),
        UNSUPPORTED,
        "no tracea_cpu_fft_v1",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_manifests_that_mean_something_else_are_refused(programs, mlp, what):
    change, status, sentence = CHANGES[what]
    resealed(mlp, change)
    assert loaded(programs, mlp)[0] == status
    assert sentence in loaded(programs, mlp)[1]


COPIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "copies an array to itself": lambda step: step.update(reads=step["writes"]),
    "copies more than there is": lambda step: (
        step.update(  # without an end, in one place
            counts=[1 << 40], from_strides=[0], to_strides=[0]
        )
    ),
}


@pytest.mark.parametrize("sentence", COPIES)
def test_copies_that_would_not_end_or_overlap_are_refused(programs, tmp_path, sentence):
    x = jax.ShapeDtypeStruct((5, 8), np.float32)
    place = tmp_path / "b"
    tracea.bundle(lambda x: jnp.pad(x[:, ::2], ((1, 1), (0, 0))) * 2, x, path=place)

    def change(manifest):
        moves = [s for s in manifest["steps"] if s["kind"] == "move"]
        COPIES[sentence](moves[0])

    resealed(place, change)
    status, said = loaded(programs, place)
    assert status == INVALID and sentence in said


def test_a_program_may_have_set_any_locale(programs, tmp_path):
    place = tmp_path / "de_DE.UTF-8"  # where a decimal point is a comma
    try:
        command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(place)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("localedef makes no locale here")
    fn, x, implementation = PROGRAMS["attention"]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "b")
    variables = {"LOCPATH": str(tmp_path), "LC_ALL": place.name}
    done = run(programs / "run_c", "cpu", tmp_path / "b", **variables)
    assert done.returncode == 0 and "in a locale with commas" in done.stdout


def test_texts_that_are_no_json_are_refused(programs, mlp):
    whole = (mlp / "manifest.json").read_text()
    rng = random.Random(5)
    for _ in range(10):
        cut = rng.randrange(len(whole))
        text = (whole[:cut] + rng.choice(["", "[", '"', "\\", "}"])).encode()
        (mlp / "manifest.json").write_bytes(text)
        sums = (mlp / "SHA256SUMS").read_text().splitlines()[1:]
        line = f"{hashlib.sha256(text).hexdigest()}  manifest.json"
        (mlp / "SHA256SUMS").write_text("\n".join([line, *sums]) + "\n")
        assert loaded(programs, mlp)[0] == INVALID


def test_a_gpu_without_a_driver_is_an_error_of_cuda(programs, mlp):
    done = run(programs / "run_c", "cuda", mlp)
    if done.returncode == UNSUPPORTED:  # a machine with a GPU
        assert "was made for CPUs and the context is one of NVIDIA GPUs" in done.stdout
    else:
        assert done.returncode == CUDA_ERROR and "CUDA driver" in done.stdout


@pytest.mark.nvrtc
def test_a_bundle_for_a_gpu_is_made_without_one(programs, tmp_path):
    place = tmp_path / "gpu.tracea"
    fn, x = bundle_programs.mlp(jnp.bfloat16, 128)
    report = tracea.bundle(fn, x, path=place, device="H200")
    assert {plan.variant for _, plan in report.plans} == {"gemm_sm90"}
    manifest = json.loads((place / "manifest.json").read_text())
    assert (manifest["platform"], manifest["arch"]) == ("cuda", "sm_90a")
    for step in manifest["steps"]:
        assert (place / step["image"]).read_bytes().startswith(b"\x7fELF")
        assert len(step["launch"]) == 10
    assert "/" not in manifest["steps"][0]["source"]
    status, said = loaded(programs, place)
    assert status == UNSUPPORTED and "was made for NVIDIA GPUs" in said


@pytest.mark.nvrtc
def test_scratch_of_kernels_is_bytes(tmp_path):
    fn, x = bundle_programs.attention_block(jnp.bfloat16, "attention_sm90")
    tracea.bundle(fn, x, path=tmp_path / "b", device="H200")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert {value["dtype"] for value in manifest["values"]} <= set(DTYPES)
    assert "zero" in [step["kind"] for step in manifest["steps"]]


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


def test_sums_are_those_of_sha256sum(mlp):
    if not shutil.which("sha256sum"):
        pytest.skip("there is no sha256sum")
    subprocess.run(["sha256sum", "-c", "--strict", "SHA256SUMS"], cwd=mlp, check=True)


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
    assert version == tracea.__version__
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
