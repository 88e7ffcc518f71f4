"""Device profiles: what a CPU or GPU can do, queried once and frozen.

A kernel choice may depend on nothing of a machine except its profile. So named profiles
(``H200``) can stand for machines that are absent: for lowering ahead of time and for
``explain``. Peak rates are in ``roofline``; whether a variant can run on a
device is in ``variants``. Almost every module above imports this one.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pathlib
import platform
from typing import Any, ClassVar

# JAX's names of the platforms that have kernels, as lowering rules have them; of what
# it calls otherwise where backends and devices are meant, that name.
PLATFORMS = ("cpu", "cuda")
_BACKENDS = {"cuda": "gpu"}


def backend_of(platform: str) -> str:
    """The name by which ``jax.devices`` knows a lowering platform."""
    return _BACKENDS.get(platform, platform)


def platform_of(backend: str) -> str:
    """The lowering platform of what ``jax.default_backend`` and devices name."""
    return {name: own for own, name in _BACKENDS.items()}.get(backend, backend)


def isas(machine: str) -> tuple[str, ...]:
    """The instruction sets that CPU kernels are built for on a type of machine.

    Args:
      machine: as ``platform.machine()`` names it.

    Returns:
      From the narrowest to the widest; each includes the ones before it.
    """
    if machine in ("aarch64", "arm64"):
        return ("baseline", "bfmmla")
    return ("baseline", "avx2", "avx512", "avx512_bf16", "amx")


CPU_ISAS = isas(platform.machine())
_ISA_FLAGS = {
    "bfmmla": {"bf16"},
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
}
# Without AMX, VDPBF16PS pays where it is twice as fast as multiply-adds of f32: on
# processors of AMD, told by their vendor string. On those of Intel it is half as fast.
_ISA_FLAGS["avx512_bf16"] = _ISA_FLAGS["avx512"] | {"avx512_bf16", "AuthenticAMD"}
_ISA_FLAGS["amx"] = _ISA_FLAGS["avx512"] | {"avx512_bf16", "amx_tile", "amx_bf16"}
_ARCH_SPECIFIC = {(9, 0): "sm_90a"}  # targets whose own instructions need the suffix


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuDevice:
    """A host processor.

    Attributes:
      name: the vendor's model name.
      isa: the widest instruction set our kernels may use, one of ``CPU_ISAS``.
      cores: processors this process may run on.
      l1d_bytes, l2_bytes: caches of one core.
      l3_bytes: the last-level cache that cores share; 0 if there is none.
    """

    platform: ClassVar[str] = "cpu"
    name: str
    isa: str
    cores: int
    l1d_bytes: int = 32 << 10
    l2_bytes: int = 1 << 20
    l3_bytes: int = 0

    @property
    def arch(self) -> str:
        return self.isa

    def __str__(self) -> str:
        caches = f"L1d {self.l1d_bytes >> 10} KiB, L2 {self.l2_bytes >> 10} KiB"
        return f"{self.name}, {self.isa}, {self.cores} cores, {caches}"


BLOCK_RESERVED_BYTES = 1024  # of shared memory, by the driver, for each block


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudaDevice:
    """An NVIDIA GPU, with the limits a kernel must respect.

    Attributes:
      name: as the driver reports it.
      capability: (major, minor) compute capability.
      sm_count: streaming multiprocessors.
      smem_per_block_bytes: most dynamic shared memory one block may opt in to.
      l2_bytes, memory_bytes: L2 cache and device memory.
    """

    platform: ClassVar[str] = "cuda"
    name: str
    capability: tuple[int, int]
    sm_count: int
    smem_per_block_bytes: int
    l2_bytes: int
    memory_bytes: int

    @property
    def smem_per_sm_bytes(self) -> int:
        """Shared memory of a multiprocessor: of one block, and what that has beside."""
        return self.smem_per_block_bytes + BLOCK_RESERVED_BYTES

    def blocks_in_smem(self, smem_bytes: int) -> int:
        """Blocks with so much shared memory that a multiprocessor has room for."""
        return self.smem_per_sm_bytes // (smem_bytes + BLOCK_RESERVED_BYTES)

    def smem_of_each(self, blocks: int) -> int:
        """Most shared memory of each block, if a multiprocessor holds so many."""
        return self.smem_per_sm_bytes // blocks - BLOCK_RESERVED_BYTES

    @property
    def arch(self) -> str:
        """The exact compilation target, such as "sm_90a"."""
        major, minor = self.capability
        return _ARCH_SPECIFIC.get(self.capability, f"sm_{major}{minor}")

    def __str__(self) -> str:
        memory = f"{self.memory_bytes / 1e9:.0f} GB"
        return f"{self.name}, {self.arch}, {self.sm_count} SMs, {memory}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OtherDevice:
    """A platform for which the package has no kernels; XLA runs every problem."""

    platform: str
    name: str
    arch: ClassVar[str] = "any"

    def __str__(self) -> str:
        return f"{self.name} ({self.platform})"


Device = CpuDevice | CudaDevice | OtherDevice


def to_json(device: Device) -> dict[str, Any]:
    """The device as plain data: platform and arch, then its fields."""
    kind = {"platform": device.platform, "arch": device.arch}
    return {**kind, **dataclasses.asdict(device)}


NAMED: dict[str, CudaDevice] = {
    "H200": CudaDevice(
        name="NVIDIA H200",
        capability=(9, 0),
        sm_count=132,
        smem_per_block_bytes=232448,
        l2_bytes=60 << 20,
        memory_bytes=143771 << 20,
    ),
    "H100": CudaDevice(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        sm_count=132,
        smem_per_block_bytes=232448,
        l2_bytes=50 << 20,
        memory_bytes=80 * 10**9,
    ),
    "A100": CudaDevice(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        sm_count=108,
        smem_per_block_bytes=166912,
        l2_bytes=40 << 20,
        memory_bytes=80 * 10**9,
    ),
}


def named(name: str) -> CudaDevice:
    """The named profile of a GPU, which need not be present.

    Raises:
      ValueError: on an unknown name, listing the known ones.
    """
    if name not in NAMED:
        raise ValueError(
            f"device {name!r} is unknown; named devices are {', '.join(NAMED)}"
        )
    return NAMED[name]


def isa_from_flags(flags: set[str], machine: str) -> str:
    """The widest of ``isas(machine)`` that a processor has.

    Args:
      flags: the processor's flags, and its vendor string.
      machine: as ``platform.machine()`` names it.
    """
    wider = reversed(isas(machine)[1:])
    return next((isa for isa in wider if _ISA_FLAGS[isa] <= flags), "baseline")


def forced_isa(detected: str, wanted: str | None) -> str:
    """The ISA to use when the user asks for ``wanted``: never above ``detected``."""
    if not wanted:
        return detected
    if wanted not in CPU_ISAS:
        raise ValueError(
            f"TRACEA_CPU_ISA={wanted!r}; it must be one of {', '.join(CPU_ISAS)}"
        )
    return min(wanted, detected, key=CPU_ISAS.index)


@functools.cache
def local_cpu() -> CpuDevice:
    """The host, from /proc and /sys; ``TRACEA_CPU_ISA`` lowers the ISA."""
    info = _cpuinfo()
    machine = platform.machine()
    flags = info.get("flags") or info.get("Features", "")  # of x86, of Arm
    detected = isa_from_flags({*flags.split(), info.get("vendor_id", "")}, machine)
    return CpuDevice(
        name=info.get("model name") or platform.processor() or machine,
        isa=forced_isa(detected, os.environ.get("TRACEA_CPU_ISA")),
        cores=_available_cores(),
        l1d_bytes=_cache_bytes(1) or 32 << 10,
        l2_bytes=_cache_bytes(2) or 1 << 20,
        l3_bytes=_cache_bytes(3) or 0,
    )


@functools.cache
def local_cuda(ordinal: int) -> CudaDevice:
    """The GPU with this CUDA ordinal, as the driver describes it.

    Raises:
      RuntimeError: if cuda-python is missing or the driver reports an error; the
        message says which.
    """
    try:
        driver = _driver()
    except ImportError as e:
        raise RuntimeError(
            "cuda-bindings is not installed; pip install 'tracea_jax[cuda13]'"
        ) from e
    _check(driver, driver.cuInit(0))
    (device,) = _check(driver, driver.cuDeviceGet(ordinal))
    (name,) = _check(driver, driver.cuDeviceGetName(128, device))
    (memory,) = _check(driver, driver.cuDeviceTotalMem(device))
    attribute = driver.CUdevice_attribute

    def get(which: Any) -> int:
        return _check(driver, driver.cuDeviceGetAttribute(which, device))[0]

    return CudaDevice(
        name=name.split(b"\0")[0].decode(),
        capability=(
            get(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
            get(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        ),
        sm_count=get(attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        smem_per_block_bytes=get(
            attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
        ),
        l2_bytes=get(attribute.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        memory_bytes=memory,
    )


@functools.cache
def cuda_driver_version() -> str | None:
    """The CUDA version the installed driver supports, as "13.0"; None without one."""
    try:
        driver = _driver()
        (version,) = _check(driver, driver.cuDriverGetVersion())
    except (ImportError, RuntimeError):
        return None
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _check(driver: Any, result: tuple[Any, ...]) -> tuple[Any, ...]:
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the CUDA driver answered {status.name}")
    return tuple(values)


def _cpuinfo() -> dict[str, str]:
    """The first processor's entry of /proc/cpuinfo; {} where the file is missing."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    lines = text.split("\n\n", 1)[0].splitlines()
    return {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in lines)}


def _cache_bytes(level: int) -> int | None:
    """Size of the data or unified cache of this level, from sysfs."""
    for index in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            kind = (index / "type").read_text().strip()
            if int((index / "level").read_text()) != level or kind == "Instruction":
                continue
            return int((index / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return None


def _available_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
