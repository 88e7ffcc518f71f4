"""gemm_cpu: the packed, register-tiled GEMM in C++, prebuilt for each CPU ISA."""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CPU_ISAS, CpuDevice, Device
from tracea_jax.problem import GemmProblem
from tracea_jax.variants.base import Call, CpuCall

DTYPES = ("float32", "bfloat16", "float16")
TARGET = "tracea_cpu_gemm_v1"
ABI = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmCpuConfig:
    """Cache blocking and task count; the register tile follows from the ISA.

    Attributes:
      kc: depth of a packed block of B (and A), in elements of K. The one choice that
        changes rounding: blocks are summed one by one.
      nc: width of a packed block of B, in columns.
      tasks: independent pieces of the output for each thread.
    """

    kc: int
    nc: int
    tasks: int

    def __str__(self) -> str:
        return f"kc {self.kc} nc {self.nc} tasks {self.tasks}"


_KC = 384  # deep enough to amortise the partial sums, shallow enough for L1
_PANEL_SHARE = 0.4  # of L2 for the packed block of B; A and C pass through the rest


@dataclasses.dataclass(frozen=True, slots=True)
class GemmCpu:
    """See the module; the methods are ``variants.base.Variant``'s."""

    name: str = "gemm_cpu"
    config_type: type = GemmCpuConfig
    sources: tuple[str, ...] = ("cpu/",)

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        if not isinstance(device, CpuDevice):
            return f"it runs on CPUs; the device is {device.platform}"
        if problem.lhs != problem.rhs:
            return (
                f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
            )
        for role, dtype in (("operands", problem.lhs), ("output", problem.out)):
            if dtype not in DTYPES:
                return f"{role} of dtype {dtype}; it takes {', '.join(DTYPES)}"
        if problem.precision not in ("default", "high", "highest"):
            return f"precision {problem.precision} names an algorithm only XLA has"
        return None

    def check(
        self, problem: GemmProblem, config: GemmCpuConfig, device: Device
    ) -> None:
        for name, limit in (("kc", 8192), ("nc", 8192), ("tasks", 64)):
            value = getattr(config, name)
            if not (isinstance(value, int) and 1 <= value <= limit):
                raise ValueError(
                    f"{name}={value!r} must be an integer from 1 to {limit}"
                )

    def space(self, problem: GemmProblem, device: Device) -> tuple[GemmCpuConfig, ...]:
        grid = [
            GemmCpuConfig(kc=kc, nc=nc, tasks=tasks)
            for kc in (256, 384, 512)
            for nc in (256, 512, 768)
            for tasks in (1, 2, 4)
        ]
        hero = self.heuristic(problem, device)
        return (hero, *(c for c in grid if c != hero))

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmCpuConfig:
        assert isinstance(device, CpuDevice)
        columns = _PANEL_SHARE * device.l2_bytes / (4 * _KC)
        return GemmCpuConfig(kc=_KC, nc=max(64, int(columns) // 32 * 32), tasks=2)

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        # 16-bit operands are widened to f32 here; XLA may have matrix units for them.
        return problem.lhs == "float32"

    def call(self, problem: GemmProblem, config: GemmCpuConfig, device: Device) -> Call:
        assert device.arch in CPU_ISAS
        epilogue = problem.epilogue
        return CpuCall(
            target=TARGET,
            attributes=(
                ("abi", ABI),
                ("trans_lhs", problem.layout[0] == "t"),
                ("trans_rhs", problem.layout[1] == "t"),
                ("bias", epilogue.bias),
                ("activation", epilogue.activation),
                ("residual", epilogue.residual_op if epilogue.residual else "none"),
                ("save_preactivation", epilogue.save_preactivation),
                ("isa", device.arch),
                ("kc", config.kc),
                ("nc", config.nc),
                ("tasks", config.tasks),
            ),
        )


GEMM_CPU = GemmCpu()
