"""gemm_sm90: the persistent TMA + wgmma GEMM for Hopper, compiled on demand.

Here are the reasons that refuse problems and the choice of a config without
measurements; the space is in ``gemm_sm90_space``, the model that ranks configs in
``gemm_sm90_model``, and the kernel's text in ``emit.gemm_sm90_kernel``. Callers: the
op's record (``ops.matmul.op``), the variants built on this kernel
(``gemm_sm90_prepared``, ``gated``, ``gated_sm90``), and benchmarks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit import gemm_sm90_kernel
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.emit.gemm_sm90_kernel import DTYPES, OUT_DTYPES
from tracea_jax.emit.kernel import Kernel
from tracea_jax.problem import ITEMSIZE, Epilogue, GemmProblem
from tracea_jax.variants import gemm_sm90_space as space
from tracea_jax.variants import gemm_xla_model
from tracea_jax.variants.base import Call
from tracea_jax.variants.cuda_gemm import (
    EXACT_PRECISIONS,
    INT32_MAX,
    MAX_BAND,
    refused_extents,
    refused_results,
)
from tracea_jax.variants.gemm_sm90_model import CONSTANTS, Constants, modelled_us
from tracea_jax.variants.space import (
    Columns,
    Space,
    check_choices,
    check_ranges,
    check_rules,
)
from tracea_jax.variants.steps import Buffer, Expression, Launch, Steps, sum_of_parts

_TF32_PRECISIONS = ("default", "TF32_TF32_F32")
_RANGES = {"stages": (1, emit.MAX_STAGES), "raster_band": (1, MAX_BAND)}
_TOLD_APART = 1.02  # least ratio of two modelled times that the model can tell apart
# The values that the heuristic chooses from. In measurements deeper rings gained
# nothing, and other bands gained less than the model can tell.
_CHOICES = space.GRID | {"stages": tuple(range(2, 9)), "raster_band": (2, 8, 16)}


@dataclasses.dataclass(frozen=True, slots=True)
class GemmSm90:
    """The variant gemm_sm90; for its methods see ``variants.base.Variant``."""

    name: str = "gemm_sm90"
    config_type: type = GemmSm90Config
    sources: tuple[str, ...] = ("cuda/gemm_sm90.cuh",)

    def reasons(self, problem: GemmProblem, device: Device) -> tuple[str, ...]:
        """Every sentence why the problem cannot be served; empty if it can."""
        aligned = reasons(problem, device)
        return (*aligned, *(str(row) for row in misaligned_rows(problem)))

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        return next(iter(self.reasons(problem, device)), None)

    def check(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> None:
        assert isinstance(device, CudaDevice)
        check_choices(config, space.CHOICES)
        check_ranges(config, _RANGES)
        check_rules(space.LEGAL, problem, config, device)

    def space(self, problem: GemmProblem, device: Device) -> Space:
        assert isinstance(device, CudaDevice)
        return space_of(problem, device)

    def described(
        self, problem: GemmProblem, columns: Columns, device: Device
    ) -> Space:
        assert isinstance(device, CudaDevice)
        config = space.of_columns(columns)
        return Space(
            config_type=GemmSm90Config,
            columns=columns,
            derived=space.derived(problem, config, device),
            modelled_us=modelled_us(problem, config, device),
        )

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmSm90Config:
        assert isinstance(device, CudaDevice)
        return choose(problem, device)

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        assert isinstance(device, CudaDevice)
        # XLA is slow on odd rows of 16-bit operands.
        odd = problem.lhs != "float32" and not emit.maps_results(problem)
        if odd and problem.flops >= 2**33:
            return True
        if problem.flops < gemm_xla_model.FEWEST_FLOPS:
            return False
        ours_us = float(modelled_us(problem, choose(problem, device), device))
        return gemm_xla_model.loses_to(ours_us, problem)

    def call(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        kernel = gemm_sm90_kernel.kernel(problem, config, device)
        if not problem.epilogue.column_sums:
            return kernel
        return product_steps(problem, config, kernel)


GEMM_SM90 = GemmSm90()


def space_of(
    problem: GemmProblem, device: CudaDevice, **choices: tuple[int, ...]
) -> Space:
    """The configs worth measuring.

    Args:
      problem, device: what to compute, and where.
      **choices: the values that some fields are limited to.
    """
    columns, pruned = space.columns_of(problem, device, **{**space.GRID, **choices})
    known = GEMM_SM90.described(problem, columns, device)
    return dataclasses.replace(known, pruned=pruned)


@functools.lru_cache(maxsize=64)  # a plan asks for its time, and then for the config
def choose(
    problem: GemmProblem,
    device: CudaDevice,
    constants: Constants = CONSTANTS,
    **choices: tuple[int, ...],
) -> GemmSm90Config:
    """The config to use without measurements: the ``preferred`` one by modelled time.

    Args:
      problem, device: what to compute, and where.
      constants: of the model.
      **choices: the values that some fields are limited to.
    """
    columns, _ = space.columns_of(problem, device, **{**_CHOICES, **choices})
    config = space.of_columns(columns)
    best = preferred(config, modelled_us(problem, config, device, constants))
    return Space(config_type=GemmSm90Config, columns=columns).config(best)


def preferred(config: GemmSm90Config, times: np.ndarray) -> int:
    """The index of the config to prefer.

    The model cannot tell times within 2 % of the least one apart. Among such configs,
    larger and wider tiles come first, then blocks that need no partner, then the usual
    band.

    Args:
      config: has columns of all configs.
      times: modelled time of each config.
    """
    time = np.maximum(times, _TOLD_APART * times.min())
    # lexsort compares by the last key first.
    keys: tuple[Any, ...] = (
        -times,
        config.raster_band == space.USUAL_BAND,
        np.logical_not(config.ping_pong),
        -config.cluster_size,
        config.tile_n,
        config.tile_m * config.tile_n,
        -time,
    )
    return int(np.lexsort(keys)[-1])


def product_steps(
    problem: GemmProblem,
    config: GemmSm90Config,
    kernel: Kernel,
    before: Launch | None = None,
    relaid: tuple[Buffer, ...] = (),
) -> Steps:
    """The product with what comes before and after it.

    Args:
      problem, config, kernel: of the product. Column sums, if it has them, are XLA's
        sum of the rows of partial sums that the kernel leaves.
      before: writes operands anew, each as a buffer of the name ``relaid_name`` gives,
        which the product reads in the operand's place.
      relaid: those buffers.
    """
    operands = _operands(problem.epilogue)
    anew = {buffer.name for buffer in relaid}
    read = tuple(x if (y := relaid_name(x)) not in anew else y for x in operands)
    product = functools.partial(Launch, name="product", kernel=kernel, reads=read)
    first = () if before is None else (before,)
    if not problem.epilogue.column_sums:
        results = ("y", "z") if problem.epilogue.save_preactivation else ("y",)
        return Steps(
            operands=operands,
            results=results,
            scratch=relaid,
            steps=(*first, product(writes=results)),
        )
    rows = emit.sum_rows(problem, config)
    partial = Buffer(name="partial_sums", shape=(rows, problem.n), dtype="float32")
    total = Expression(
        name="sum", function=sum_of_parts, reads=(partial.name,), writes=("sums",)
    )
    return Steps(
        operands=operands,
        results=("y", "sums"),
        scratch=(*relaid, partial),
        steps=(*first, product(writes=("y", partial.name)), total),
    )


def relaid_name(operand: str) -> str:
    """The buffer that holds an operand as relayout writes it."""
    return f"{operand}_relaid"


def _operands(epilogue: Epilogue) -> tuple[str, ...]:
    """Names of the operands that a product has, in the order of the primitive."""
    bias = ("bias",) * (epilogue.bias != "none")
    return ("lhs", "rhs", *bias, *(("residual",) * epilogue.residual))


def wrong_device(device: Device) -> Iterator[str]:
    """Why the device cannot run the kernel, whatever the problem."""
    if not isinstance(device, CudaDevice):
        yield f"it runs on NVIDIA GPUs; the device is {device.platform}"
    elif device.capability != (9, 0):
        yield f"wgmma exists only on sm_90a; the device is {device.arch}"


def reasons(problem: GemmProblem, device: Device) -> Iterator[str]:
    """All reasons but misaligned rows; those that hold for every problem come first."""
    yield from wrong_device(device)
    yield from _unknown_operands(problem)
    yield from refused_results(problem, OUT_DTYPES)
    residual = problem.epilogue.residual_dtype or problem.out
    if ITEMSIZE.get(residual, 0) > ITEMSIZE.get(problem.out, 8):
        # The kernel loads the residual ahead of the stores: a wider one would not fit
        # in the registers.
        yield f"residual of dtype {residual}; it must not be wider than the output's"
    if problem.epilogue.column_sums and emit.is_swapped(problem):
        yield "columns of float32 in layout nn are summed only by XLA"
    if problem.lhs == "float32" and problem.precision not in _TF32_PRECISIONS:
        yield f"it multiplies float32 as TF32; precision is {problem.precision}"
    elif problem.lhs != "float32" and problem.precision not in EXACT_PRECISIONS:
        yield f"precision {problem.precision} names an algorithm only XLA has"
    extents = ("batch", "m", "n", "k")
    yield from refused_extents(problem, extents, "32-bit tensor map coordinates")
    smallest = GemmSm90Config(tile_m=64, tile_n=64, stages=1, consumers=1)
    if emit.tile_count(problem, smallest) > INT32_MAX:
        yield "the output has more than 2^31 - 1 tiles of 64 x 64"


def _unknown_operands(problem: GemmProblem) -> Iterator[str]:
    """Why the tensor cores cannot multiply the operands, or not as they are stored."""
    lhs, rhs = problem.lhs, problem.rhs
    for dtype in dict.fromkeys((lhs, rhs)):
        if dtype not in DTYPES:
            yield f"operands of dtype {dtype}; it takes {', '.join(DTYPES)}"
            return
    if lhs != rhs and {ITEMSIZE[lhs], ITEMSIZE[rhs]} != {1}:
        yield (
            "operands must share a dtype unless both have 8 bits; they are "
            f"{lhs} and {rhs}"
        )
    elif lhs == "float32":
        if problem.layout == "tn":
            yield (
                "one of two operands of dtype float32 must be stored with k "
                "contiguous, layout nn, nt or tt; it is tn"
            )
    elif emit.element_bytes(problem) != 2 and problem.layout != "nt":
        yield (
            f"operands of dtype {lhs} must be stored with k contiguous, layout nt; it "
            f"is {problem.layout}"
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MisalignedRows:
    """Why an operand cannot be read as it is stored: its rows are misaligned.

    Attributes:
      operand: 0 for the left, 1 for the right.
      extent: name of the extent that lies along the operand's rows.
      value: the extent's size.
      unit: the size must be a multiple of this.
      dtype: of the elements.
    """

    operand: int
    extent: str
    value: int
    unit: int
    dtype: str

    def __str__(self) -> str:
        role = ("left", "right")[self.operand]
        return (
            f"rows of the {role} operand must be multiples of 16 bytes for TMA: "
            f"{self.extent}={self.value} is not a multiple of {self.unit} "
            f"({self.dtype})"
        )


def misaligned_rows(problem: GemmProblem) -> Iterator[MisalignedRows]:
    """The operands whose stored rows are not multiples of 16 bytes."""
    left, right = problem.layout
    operands = (
        ("m" if left == "t" else "k", problem.lhs),
        ("k" if right == "t" else "n", problem.rhs),
    )
    for operand, (extent, dtype) in enumerate(operands):
        element = dtype.removesuffix("x3")  # parts are stored one after another
        unit = emit.ROW_UNIT_BYTES // ITEMSIZE.get(element, emit.ROW_UNIT_BYTES)
        value = getattr(problem, extent)
        if value % unit:
            yield MisalignedRows(
                operand=operand, extent=extent, value=value, unit=unit, dtype=dtype
            )
