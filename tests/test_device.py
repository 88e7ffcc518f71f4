"""Device profiles: those read from this machine, and the named ones."""

from __future__ import annotations

import os
import sys

import pytest
from processes import run_forked

from tracea_jax import device
from tracea_jax.device import CPU_ISAS
from tracea_jax.runtime.launch import cpu_isa

AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
PAIRS = AVX512 | {"avx512_bf16", "AuthenticAMD"}  # elsewhere they are slower than f32
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@pytest.mark.parametrize(
    ("flags", "machine", "isa"),
    [
        (set(), "x86_64", "baseline"),
        (AVX2, "x86_64", "avx2"),
        (AVX2 | {"sse4_2"}, "AMD64", "avx2"),
        (AVX512, "x86_64", "avx512"),
        (AVX512 | {"amx_tile"}, "x86_64", "avx512"),
        (PAIRS, "x86_64", "avx512_bf16"),
        (PAIRS - {"AuthenticAMD"} | {"GenuineIntel"}, "x86_64", "avx512"),
        (PAIRS - {"avx512_bf16"}, "x86_64", "avx512"),
        (AMX | {"GenuineIntel"}, "x86_64", "amx"),
        (AMX, "x86_64", "amx"),
        (AVX512, "aarch64", "baseline"),
        ({"asimd", "bf16"}, "aarch64", "bfmmla"),
        ({"bf16"}, "arm64", "bfmmla"),
        ({"asimd", "i8mm"}, "aarch64", "baseline"),
        ({"bf16"}, "x86_64", "baseline"),
        *((AVX2 - {flag}, "x86_64", "baseline") for flag in sorted(AVX2)),
        *((AVX512 - {flag}, "x86_64", "avx2") for flag in sorted(AVX512 - AVX2)),
    ],
)
def test_an_isa_needs_all_of_its_flags(flags, machine, isa):
    assert device.isa_from_flags(flags, machine) == isa


def test_an_isa_can_only_be_lowered():
    for detected in CPU_ISAS:
        assert device.forced_isa(detected, None) == detected
        assert device.forced_isa(detected, "") == detected
        for wanted in CPU_ISAS:
            lower = CPU_ISAS[min(CPU_ISAS.index(detected), CPU_ISAS.index(wanted))]
            assert device.forced_isa(detected, wanted) == lower
    with pytest.raises(
        ValueError, match=f"TRACEA_CPU_ISA='mmx'.*{', '.join(CPU_ISAS)}"
    ):
        device.forced_isa(CPU_ISAS[1], "mmx")


@pytest.mark.parametrize(
    ("name", "sm_kib", "of_two_kib"), [("A100", 164, 81), ("H200", 228, 113)]
)
def test_blocks_share_the_memory_of_a_multiprocessor(name, sm_kib, of_two_kib):
    """As the tables of compute capabilities have it: a KiB of each block is taken."""
    gpu = device.named(name)
    assert gpu.smem_per_sm_bytes == sm_kib << 10
    assert gpu.smem_of_each(1) == gpu.smem_per_block_bytes
    assert gpu.smem_of_each(2) == of_two_kib << 10
    assert gpu.blocks_in_smem(of_two_kib << 10) == 2
    assert gpu.blocks_in_smem((of_two_kib << 10) + 1) == 1


def test_the_local_cpu():
    cpu = device.local_cpu()
    assert cpu.platform == "cpu" and cpu.arch == cpu.isa
    assert cpu.name and 1 <= cpu.cores <= (os.cpu_count() or 1)
    assert 0 < cpu.l1d_bytes <= cpu.l2_bytes
    # The profile and the extension ask the processor in different ways.
    assert cpu.isa == device.forced_isa(cpu_isa(), os.environ.get("TRACEA_CPU_ISA"))
    assert hash(cpu) == hash(device.local_cpu())
    assert cpu.name in str(cpu) and cpu.isa in str(cpu)


def test_the_environment_lowers_the_isa_of_programs():
    program = """
        import jax, jax.numpy as jnp
        from tracea_jax.ops import matmul
        f = jax.jit(lambda x: matmul(x, x, implementation="gemm_cpu"))
        x = jnp.eye(8)
        assert (f(x) == x).all()
        print('isa = "baseline"' in f.lower(x).as_text())
    """
    assert run_forked(program, TRACEA_CPU_ISA="baseline") == "True\n"


@pytest.mark.parametrize("name", device.NAMED)
def test_named_gpus(name):
    gpu = device.named(name)
    assert gpu.platform == "cuda" and name in gpu.name
    assert gpu.arch == {"A100": "sm_80"}.get(name, "sm_90a")
    assert gpu.arch in str(gpu) and gpu.name in str(gpu)


def test_an_unknown_gpu_lists_the_known():
    with pytest.raises(ValueError, match="'H900' is unknown.*H200, H100, A100"):
        device.named("H900")


def test_a_machine_without_a_driver_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    device.local_cuda.cache_clear()
    with pytest.raises(RuntimeError, match=r"pip install 'tracea_jax\[cuda13\]'"):
        device.local_cuda(0)
