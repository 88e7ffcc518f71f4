"""The compiler: results, messages and keys. Needs NVRTC, no GPU."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest
import sample_kernels

from tracea_jax.runtime import nvrtc

SPILLING = """
extern "C" __global__ void __maxnreg__(24) spilling(float* data) {
  float x[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) x[i] = data[i * 32 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < 64; ++i) data[i * 32 + threadIdx.x] = x[63 - i] * x[(7 * i) % 64];
}
"""
# Without launch bounds ptxas cannot honour setmaxnreg, and says so (C7508).
SLOW = """
extern "C" __global__ void slow() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
}
"""


@pytest.mark.nvrtc
def test_compiles_to_an_image_for_the_target():
    kernel = sample_kernels.scale()
    cubin = nvrtc.compile(kernel)
    assert cubin.image.startswith(b"\x7fELF")
    assert b"scale" in cubin.image
    assert (cubin.arch, cubin.entry) == ("sm_90a", "scale")
    assert cubin.key == nvrtc.key(kernel)
    assert 0 < (cubin.registers or 0) <= 255
    assert cubin.spill_bytes == cubin.stack_bytes == cubin.smem_static_bytes == 0
    assert cubin.warnings == ()
    assert cubin.compile_s > 0


@pytest.mark.nvrtc
def test_reports_static_shared_memory():
    body = "__shared__ float x[33]; x[threadIdx.x] = 1; __syncthreads(); *p = x[0];"
    source = f'extern "C" __global__ void scale(float* p) {{ {body} }}'
    cubin = nvrtc.compile(dataclasses.replace(sample_kernels.scale(), source=source))
    assert cubin.smem_static_bytes == 33 * 4


@pytest.mark.nvrtc
def test_reports_spills():
    kernel = dataclasses.replace(
        sample_kernels.scale(), source=SPILLING, entry="spilling"
    )
    cubin = nvrtc.compile(kernel)
    assert (cubin.spill_bytes or 0) > 0
    assert (cubin.stack_bytes or 0) > 0
    assert (cubin.registers or 256) <= 24


@pytest.mark.nvrtc
def test_reports_ignored_performance_requests():
    kernel = dataclasses.replace(sample_kernels.scale(), source=SLOW, entry="slow")
    (warning,) = nvrtc.compile(kernel).warnings
    assert "setmaxnreg" in warning


@pytest.mark.nvrtc
def test_resources_are_those_of_the_entry():
    other = "".join(f"float v{i} = p[{i}];" for i in range(40))
    total = "+".join(f"v{i}*v{39 - i}" for i in range(40))
    source = (
        'extern "C" __global__ void scale() {}\n'
        f'extern "C" __global__ void other(float* p) {{ {other} *p = {total}; }}'
    )
    kernel = dataclasses.replace(sample_kernels.scale(), source=source)
    small = nvrtc.compile(kernel)
    large = nvrtc.compile(dataclasses.replace(kernel, entry="other"))
    assert 0 < (small.registers or 0) < (large.registers or 0)


@pytest.mark.nvrtc
def test_error_shows_numbered_source():
    source = sample_kernels.SCALE.replace("scaled(in[i], by)", "missing(in[i])")
    kernel = dataclasses.replace(sample_kernels.scale(), source=source)
    with pytest.raises(nvrtc.CompileError) as info:
        nvrtc.compile(kernel)
    assert 'identifier "missing" is undefined' in info.value.log
    line = 1 + source.splitlines().index("  if (i < n) out[i] = missing(in[i]);")
    assert f">{line:5d} |   if (i < n) out[i] = missing(in[i]);" in info.value.excerpt
    assert f" {line - 1:5d} |   int i" in info.value.excerpt
    for part in ("scale", "sm_90a", info.value.log, info.value.excerpt):
        assert part in str(info.value)


@pytest.mark.nvrtc
def test_error_in_a_header_shows_the_header():
    header = "#pragma once\n\n\nint broken = ;\n"
    kernel = dataclasses.replace(
        sample_kernels.scale(), headers=(("scale.cuh", header),)
    )
    with pytest.raises(nvrtc.CompileError) as info:
        nvrtc.compile(kernel)
    assert "scale.cuh:" in info.value.excerpt
    assert ">    4 | int broken = ;" in info.value.excerpt


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arch": "sm_1"}, "gpu-architecture"),
        ({"options": ("--no-such-option",)}, "--no-such-option"),
        ({"headers": ()}, "scale.cuh"),
        ({"entry": "absent"}, "absent; it defines scale"),
    ],
)
def test_error_names_what_is_wrong(change, message):
    with pytest.raises(nvrtc.CompileError, match=message):
        nvrtc.compile(dataclasses.replace(sample_kernels.scale(), **change))


@pytest.mark.nvrtc
def test_key_depends_on_every_ingredient(monkeypatch):
    kernel = sample_kernels.scale()
    renamed = (("other.cuh", sample_kernels.SCALE_HEADER),)
    edited = (("scale.cuh", sample_kernels.SCALE_HEADER + " "),)
    changes = [
        {},
        {"source": kernel.source + " "},
        {"headers": renamed},
        {"headers": edited},
        {"headers": (*kernel.headers, ("unused.cuh", ""))},
        {"options": ("-lineinfo",)},
        {"options": ("-lineinfo", "-DX")},
        {"arch": "sm_80"},
        {"entry": "other"},
    ]
    keys = [nvrtc.key(dataclasses.replace(kernel, **change)) for change in changes]
    monkeypatch.setattr(nvrtc, "_require", lambda: "99.0")
    keys.append(nvrtc.key(kernel))
    monkeypatch.setattr(nvrtc, "ABI", nvrtc.ABI + 1)
    keys.append(nvrtc.key(kernel))
    assert len(set(keys)) == len(keys)


@pytest.mark.nvrtc
def test_key_ignores_the_launch_and_the_order_of_headers():
    kernel = sample_kernels.scale()
    launch = {"grid": (7, 1, 1), "smem_bytes": 64, "params": (), "cluster": (7, 1, 1)}
    assert nvrtc.key(dataclasses.replace(kernel, **launch)) == nvrtc.key(kernel)
    two = (("a.cuh", "1"), ("b.cuh", "2"))
    assert nvrtc.key(dataclasses.replace(kernel, headers=two)) == nvrtc.key(
        dataclasses.replace(kernel, headers=two[::-1])
    )


@pytest.mark.nvrtc
def test_key_is_the_same_in_another_process(tmp_path):
    script = tmp_path / "key.py"
    script.write_text(
        f"import sys; sys.path.append({os.path.dirname(sample_kernels.__file__)!r})\n"
        "import sample_kernels\n"
        "from tracea_jax.runtime import nvrtc\n"
        "print(nvrtc.key(sample_kernels.scale()))\n"
    )
    assert _run(script) == nvrtc.key(sample_kernels.scale())


BLOCKED = """
import sys
sys.modules["cuda.bindings"] = None  # makes importing it fail
from tracea_jax.runtime import nvrtc
assert nvrtc.version() is None
print(nvrtc.why_unavailable())
"""
NO_LIBRARY = """
import sys, types
def broken(): raise RuntimeError("libnvrtc.so.13 not found")
fake = types.ModuleType("cuda.bindings.nvrtc")
fake.nvrtcVersion = broken
bindings = types.ModuleType("cuda.bindings")
bindings.nvrtc = fake
sys.modules.update({"cuda.bindings": bindings, "cuda.bindings.nvrtc": fake})
from tracea_jax.emit.kernel import Kernel
from tracea_jax.runtime import nvrtc
kernel = Kernel(entry="k", source="", headers=(), arch="sm_90a", grid=(1, 1, 1),
                block=(1, 1, 1), smem_bytes=0, params=())
for function in (nvrtc.key, nvrtc.compile):
    try:
        function(kernel)
    except nvrtc.ToolchainMissing as e:
        print(e, end=" ")
"""


def test_missing_bindings_say_what_to_install(tmp_path):
    script = tmp_path / "blocked.py"
    script.write_text(BLOCKED)
    said = _run(script)
    assert "cuda-bindings is not installed" in said
    assert "pip install 'tracea_jax[cuda13]'" in said


def test_missing_library_says_what_to_install(tmp_path):
    script = tmp_path / "no_library.py"
    script.write_text(NO_LIBRARY)
    said = _run(script)
    assert said.count("libnvrtc.so.13 not found") == 2
    assert said.count("pip install 'tracea_jax[cuda13]'") == 2


def _run(script) -> str:
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=script.parent
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
