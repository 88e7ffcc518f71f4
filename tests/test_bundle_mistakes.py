"""Bundles that are damaged or misused: each mistake has a status and a sentence."""

from __future__ import annotations

import hashlib
import json
import pathlib
import random
import subprocess
from collections.abc import Callable
from typing import Any

import bundle_programs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundle_programs import PROGRAMS
from capi_programs import CUDA_ERROR, INVALID, UNSUPPORTED, run

import tracea_jax as tracea
from tracea_jax.bundle.arrays import DTYPES


def test_mistakes_of_callers_have_a_status_and_a_sentence(c_programs, mlp_bundle):
    done = run(c_programs / "run_c", "cpu", mlp_bundle)
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


def loaded(c_programs: pathlib.Path, bundle: pathlib.Path) -> tuple[int, str]:
    """The status of loading a bundle, and what was said."""
    done = run(c_programs / "run_c", "cpu", bundle)
    assert not done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith(f"load: {done.returncode} ")
    return done.returncode, first


def test_damaged_files_are_found(c_programs, mlp_bundle):
    for name in ("manifest.json", "constants.bin"):
        file = mlp_bundle / name
        whole = file.read_bytes()
        middle = len(whole) // 2
        for damaged in (
            whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            whole[:-1],
            b"",
        ):
            file.write_bytes(damaged)
            status, said = loaded(c_programs, mlp_bundle)
            assert status == INVALID and f"the sha256 of {name}" in said
        file.unlink()
        status, said = loaded(c_programs, mlp_bundle)
        assert status == INVALID and "No such file" in said
        file.write_bytes(whole)
    assert loaded(c_programs, mlp_bundle)[0] == 0
    for line in ("nonsense\n", f"{'0' * 64}  ../../etc/passwd\n", "\0\xff" * 80):
        (mlp_bundle / "SHA256SUMS").write_text(line, encoding="utf-8")
        assert loaded(c_programs, mlp_bundle)[0] == INVALID


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
    "blocks whose size overflows": (
        lambda m: m["steps"][0]["attributes"].update(nc=(1 << 63) - 1),
        INVALID,
        "nc=9223372036854775807 must be 0 or more, and less than 2^31",
    ),
    "a kernel that is not there": (
        lambda m: m["steps"][0].update(target="tracea_cpu_fft_v1"),
        UNSUPPORTED,
        "no tracea_cpu_fft_v1",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_manifests_that_mean_something_else_are_refused(c_programs, mlp_bundle, what):
    change, status, sentence = CHANGES[what]
    resealed(mlp_bundle, change)
    assert loaded(c_programs, mlp_bundle)[0] == status
    assert sentence in loaded(c_programs, mlp_bundle)[1]


def copied(counts: list[int], stride: int = 0, **fields: int) -> dict[str, Any]:
    """The fields of a strided copy."""
    strides = [stride] * len(counts)
    return {"counts": counts, "from_strides": strides, "to_strides": strides, **fields}


_MOST = (1 << 63) - 1
COPIES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "onto itself": (lambda s: {"reads": s["writes"]}, "copies an array to itself"),
    "without an end": (lambda s: copied([1 << 40]), "copies more than there is"),
    "whose end overflows": (
        lambda s: copied([], run=_MOST, from_offset=_MOST, to_offset=_MOST),
        "copies more than there is",
    ),
    "nested without an end": (lambda s: copied([1] * 9999), "copies what it cannot"),
}


@pytest.mark.parametrize("which", COPIES)
def test_copies_that_would_not_end_or_overlap_are_refused(c_programs, tmp_path, which):
    x = jax.ShapeDtypeStruct((5, 8), np.float32)
    place = tmp_path / "b"
    tracea.bundle(lambda x: jnp.pad(x[:, ::2], ((1, 1), (0, 0))) * 2, x, path=place)

    def change(manifest):
        moves = [s for s in manifest["steps"] if s["kind"] == "move"]
        moves[0].update(changed(moves[0]))

    changed, sentence = COPIES[which]
    resealed(place, change)
    status, said = loaded(c_programs, place)
    assert status == INVALID and sentence in said


def test_sizes_of_a_reduction_whose_product_overflows_are_refused(c_programs, tmp_path):
    x = jax.ShapeDtypeStruct((6, 4), np.float32)
    place = tmp_path / "b"
    tracea.bundle(lambda x: x.max(1), x, path=place)

    def change(manifest):
        large, small = [1 << 34], [1 << 32]  # outer * inner is small, modulo 2^64
        step = manifest["steps"][0]
        step.update(outer=1 << 32, inner=(1 << 32) + 1, reduced=4)
        arrays = manifest["values"]
        for array in (manifest["inputs"][0], arrays[step["reads"][0]]):
            array["shape"] = large
        for array in (manifest["outputs"][0], arrays[step["writes"][0]]):
            array["shape"] = small

    resealed(place, change)
    status, said = loaded(c_programs, place)
    assert status == INVALID and "it reduces other arrays than it can" in said


def test_a_program_may_have_set_any_locale(c_programs, tmp_path):
    place = tmp_path / "de_DE.UTF-8"  # where a decimal point is a comma
    try:
        command = ["localedef", "-i", "de_DE", "-f", "UTF-8", str(place)]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no locale de_DE here; Debian has it in the package locales")
    fn, x, implementation = PROGRAMS["attention"]
    with tracea.options(implementation=implementation):
        tracea.bundle(fn, x, path=tmp_path / "b")
    variables = {"LOCPATH": str(tmp_path), "LC_ALL": place.name}
    done = run(c_programs / "run_c", "cpu", tmp_path / "b", **variables)
    assert done.returncode == 0 and "in a locale with commas" in done.stdout


def test_texts_that_are_no_json_are_refused(c_programs, mlp_bundle):
    whole = (mlp_bundle / "manifest.json").read_text()
    rng = random.Random(5)
    for _ in range(10):
        cut = rng.randrange(len(whole))
        text = (whole[:cut] + rng.choice(["", "[", '"', "\\", "}"])).encode()
        (mlp_bundle / "manifest.json").write_bytes(text)
        sums = (mlp_bundle / "SHA256SUMS").read_text().splitlines()[1:]
        line = f"{hashlib.sha256(text).hexdigest()}  manifest.json"
        (mlp_bundle / "SHA256SUMS").write_text("\n".join([line, *sums]) + "\n")
        assert loaded(c_programs, mlp_bundle)[0] == INVALID


def test_a_gpu_without_a_driver_is_an_error_of_cuda(c_programs, mlp_bundle):
    done = run(c_programs / "run_c", "cuda", mlp_bundle)
    if done.returncode == UNSUPPORTED:  # a machine with a GPU
        assert "was made for CPUs and the context is one of NVIDIA GPUs" in done.stdout
    else:
        assert done.returncode == CUDA_ERROR and "CUDA driver" in done.stdout


@pytest.mark.nvrtc
def test_a_bundle_for_a_gpu_is_made_without_one(c_programs, tmp_path):
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
    status, said = loaded(c_programs, place)
    assert status == UNSUPPORTED and "was made for NVIDIA GPUs" in said


@pytest.mark.nvrtc
def test_scratch_of_kernels_is_bytes(tmp_path):
    fn, x = bundle_programs.attention_block(jnp.bfloat16, "attention_sm90")
    x = jnp.zeros((2, 8192, x.shape[-1]), x.dtype)  # tiles enough to be drawn
    tracea.bundle(fn, x, path=tmp_path / "b", device="H200")
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert {value["dtype"] for value in manifest["values"]} <= set(DTYPES)
    assert "zero" in [step["kind"] for step in manifest["steps"]]
