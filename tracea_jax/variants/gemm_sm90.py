"""gemm_sm90: the persistent TMA + wgmma GEMM for Hopper, compiled on demand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants.base import Call

_TMA_ALIGNMENT_BYTES = 16
_INT32_MAX = 2**31 - 1
_MOST_ROWS = _INT32_MAX - 1023  # tile coordinates may pass the edge and stay in int32
_EXACT_PRECISIONS = ("default", "high", "highest")  # alike for 16-bit operands

_CHOICES: dict[str, tuple[int, ...]] = {
    "tile_m": (64, 128, 256),
    "tile_n": (64, 128, 192, 256),
    "consumers": (1, 2),
    "cluster_m": (1, 2),
    "cluster_n": (1, 2),
    "wait_depth": (0, 1),
}
# Of each thread, by consumers; more leaves the epilogue too few registers.
_MAX_ACCUMULATORS = {1: 96, 2: 128}
_SPACE_SHAPES = 6  # best tile and cluster shapes in the search space ...
_SPACE_ORDERS = ((8, 1), (16, 1), (8, 0), (16, 0))  # ... each with (band, wait depth)

# Cost model, in cycles of one SM. It only has to rank.
_L2_BYTES_PER_CYCLE = 40.0
_EPILOGUE_BYTES_PER_CYCLE = 24.0
_TILE_OVERHEAD = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class GemmSm90:
    """See the module; the methods are ``variants.base.Variant``'s."""

    name: str = "gemm_sm90"
    config_type: type = GemmSm90Config
    sources: tuple[str, ...] = ("cuda/gemm_sm90.cuh", "cuda/ptx/", "cuda/tile/")

    def reasons(self, problem: GemmProblem, device: Device) -> tuple[str, ...]:
        """Every sentence why the problem cannot be served; empty if it can."""
        return tuple(_reasons(problem, device))

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        return next(_reasons(problem, device), None)

    def check(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> None:
        for name, allowed in _CHOICES.items():
            value = getattr(config, name)
            if value not in allowed:
                listed = ", ".join(map(str, allowed))
                raise ValueError(f"{name}={value!r} must be one of {listed}")
        for name, limit in (("stages", 12), ("raster_band", 1024)):
            value = getattr(config, name)
            if not (isinstance(value, int) and 1 <= value <= limit):
                raise ValueError(
                    f"{name}={value!r} must be an integer from 1 to {limit}"
                )
        if fault := _fault(problem, config, device):
            raise ValueError(fault)

    def space(self, problem: GemmProblem, device: Device) -> tuple[GemmSm90Config, ...]:
        hero = self.heuristic(problem, device)
        shapes = _ranked_shapes(problem, device)[:_SPACE_SHAPES]
        configs = (
            dataclasses.replace(shape, raster_band=band, wait_depth=depth)
            for (band, depth), shape in itertools.product(_SPACE_ORDERS, shapes)
        )
        return tuple(dict.fromkeys((hero, *configs)))

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmSm90Config:
        """The tile and cluster of the least modelled time, see ``modelled_cycles``."""
        return _ranked_shapes(problem, device)[0]

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        # XLA computes these in a second kernel that reads and writes the output; bias,
        # relu and an added residual are part of its own products.
        epilogue = problem.epilogue
        multiplies = epilogue.residual and epilogue.residual_op == "multiply"
        unfused = epilogue.activation not in ("none", "relu") or multiplies
        return unfused and problem.flops >= 2**33

    def call(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        return emit.kernel(problem, config, device)


GEMM_SM90 = GemmSm90()


def modelled_cycles(
    problem: GemmProblem, config: GemmSm90Config, device: Device
) -> float:
    """Time of a problem in SM cycles: waves of tiles, each bound by its slowest unit.

    A 64-deep step of a tile costs the larger of its multiplications (2048 a cycle) and
    of its bytes from L2, halved for what the cluster shares; then comes the epilogue.
    """
    assert isinstance(device, CudaDevice)
    elements = config.tile_m * config.tile_n
    # Below 128 columns the tensor cores wait for shared memory.
    multiply = elements * emit.TILE_K / 2048 * (1.0 if config.tile_n > 64 else 1.3)
    rows = config.tile_m / config.cluster_n + config.tile_n / config.cluster_m
    load = rows * emit.ROW_BYTES / _L2_BYTES_PER_CYCLE
    steps = -(-problem.k // emit.TILE_K)
    results = 1 + problem.epilogue.save_preactivation + problem.epilogue.residual
    stores = elements * ITEMSIZE[problem.out] * results / _EPILOGUE_BYTES_PER_CYCLE
    blocks = emit.grid(problem, config, device.sm_count)
    waves = -(-emit.tile_count(problem, config) // (blocks // config.cluster_size))
    return waves * (steps * max(multiply, load) + stores + _TILE_OVERHEAD)


def _reasons(problem: GemmProblem, device: Device) -> Iterator[str]:
    """The conditions, the ones no other problem could change first."""
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
    elif device.capability != (9, 0):
        yield f"wgmma exists only on sm_90a; the device is {device.arch}"
    if problem.lhs != problem.rhs:
        yield f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
    elif problem.lhs not in emit.DTYPES:
        yield f"operands of dtype {problem.lhs}; it takes {', '.join(emit.DTYPES)}"
    if problem.out not in emit.OUT_DTYPES:
        yield f"output of dtype {problem.out}; it gives {', '.join(emit.OUT_DTYPES)}"
    for role in ("bias", "residual"):
        dtype = getattr(problem.epilogue, f"{role}_dtype")
        if dtype not in (None, *emit.OUT_DTYPES):
            yield f"{role} of dtype {dtype}; it takes {', '.join(emit.OUT_DTYPES)}"
    residual = problem.epilogue.residual_dtype or problem.out
    if ITEMSIZE.get(residual, 0) > ITEMSIZE.get(problem.out, 8):
        # Prefetched ahead of the stores, it would not fit in the registers.
        yield f"residual of dtype {residual}; it must not be wider than the output's"
    if problem.precision not in _EXACT_PRECISIONS:
        yield f"precision {problem.precision} names an algorithm only XLA has"
    if min(problem.batch, problem.m, problem.n, problem.k) < 1:
        yield "an extent is 0, so there is nothing to multiply"
        return
    yield from _misaligned_rows(problem)
    for extent in ("batch", "m", "n", "k"):
        if getattr(problem, extent) > _MOST_ROWS:
            yield (
                f"{extent}={getattr(problem, extent)} is above {_MOST_ROWS}, what "
                "32-bit tensor map coordinates reach"
            )
    smallest = GemmSm90Config(tile_m=64, tile_n=64, stages=1, consumers=1)
    if emit.tile_count(problem, smallest) > _INT32_MAX:
        yield "the output has more than 2^31 - 1 tiles of 64 x 64"


def _misaligned_rows(problem: GemmProblem) -> Iterator[str]:
    """Tensor maps need the stored rows of all operands to be multiples of 16 bytes."""
    left, right = problem.layout
    rows = (
        ("the left operand", "m" if left == "t" else "k", problem.lhs),
        ("the right operand", "k" if right == "t" else "n", problem.rhs),
        ("the output", "n", problem.out),
    )
    for role, extent, dtype in rows:
        unit = _TMA_ALIGNMENT_BYTES // ITEMSIZE.get(dtype, _TMA_ALIGNMENT_BYTES)
        value = getattr(problem, extent)
        if value % unit:
            yield (
                f"rows of {role} must be multiples of 16 bytes for TMA: "
                f"{extent}={value} is not a multiple of {unit} ({dtype})"
            )


def _fault(problem: GemmProblem, config: GemmSm90Config, device: Device) -> str | None:
    """Why choices that are each allowed do not go together, or None."""
    assert isinstance(device, CudaDevice)
    if config.tile_m % (emit.SLAB * config.consumers):
        return (
            f"tile_m={config.tile_m} must be a multiple of 64 for each of "
            f"{config.consumers} consumers"
        )
    if config.accumulators > _MAX_ACCUMULATORS[config.consumers]:
        return (
            f"a {config.tile_m}x{config.tile_n} tile needs {config.accumulators} "
            f"accumulators a thread with {config.consumers} consumers; at most "
            f"{_MAX_ACCUMULATORS[config.consumers]} fit"
        )
    if config.cluster_size > 2:
        return "a cluster has at most 2 blocks: cluster_m * cluster_n <= 2"
    limit = device.smem_per_block_bytes
    if emit.storage(problem, config, limit).smem_bytes > limit:
        fitting = emit.most_stages(problem, config, limit)
        return (
            f"stages={config.stages} of {config.tile_m}x{config.tile_n} tiles exceed "
            f"{limit} bytes of shared memory; at most {fitting} fit"
        )
    if config.stages <= config.wait_depth:
        return (
            f"stages={config.stages} must exceed wait_depth={config.wait_depth}, or "
            "producer and consumers wait for each other"
        )
    return None


def _ranked_shapes(problem: GemmProblem, device: Device) -> tuple[GemmSm90Config, ...]:
    """Every legal tile and cluster shape with its deepest ring, fastest first.

    The model cannot tell times within 5 % apart: there, larger and wider tiles come
    first, then pairs of blocks along m.
    """
    shapes = tuple(_shapes(problem, device))
    cycles = {shape: modelled_cycles(problem, shape, device) for shape in shapes}
    close = 1.05 * min(cycles.values())

    def rank(shape: GemmSm90Config) -> tuple[float, int, int, int]:
        time = max(cycles[shape], close)
        return time, -shape.tile_m * shape.tile_n, -shape.tile_n, -shape.cluster_m

    return tuple(sorted(shapes, key=rank))


def _shapes(problem: GemmProblem, device: Device) -> Iterator[GemmSm90Config]:
    assert isinstance(device, CudaDevice)
    clusters = ((1, 1), (2, 1), (1, 2))
    tiles = itertools.product(_CHOICES["tile_m"], _CHOICES["tile_n"], (1, 2), clusters)
    for tile_m, tile_n, consumers, (cluster_m, cluster_n) in tiles:
        shape = GemmSm90Config(
            tile_m=tile_m,
            tile_n=tile_n,
            stages=2,
            consumers=consumers,
            cluster_m=cluster_m,
            cluster_n=cluster_n,
        )
        if _fault(problem, shape, device):
            continue
        limit = device.smem_per_block_bytes
        stages = min(8, emit.most_stages(problem, shape, limit))
        yield dataclasses.replace(shape, stages=stages)
