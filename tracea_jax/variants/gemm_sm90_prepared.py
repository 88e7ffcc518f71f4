"""gemm_sm90 for operands that it cannot read as stored: a relayout copies them first.

gemm_sm90_padded   pads rows whose bytes are no multiple of 16
gemm_sm90_split    splits float32 operands into three bfloat16 parts, whose products
                   have the accuracy of float32

Every entry of an operand is exactly x = x0 + x1 + x2. The kernel sums six of the nine
products of parts: the three others are below 2^-24 of a product, the rounding of a
float32. Two results differ from float32's. If an operand has an infinite entry, results
that are infinite in float32 may be NaN (the same results are finite as in float32). Of
entries below 2^-110, the part that bfloat16 cannot represent is lost: at most 2^-134.

The relayout kernel is in ``emit.relayout``. Callers: the op's record
(``ops.matmul.op``) and ``gated``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from tracea_jax.device import CudaDevice, Device
from tracea_jax.emit import gemm_sm90 as emit
from tracea_jax.emit import gemm_sm90_kernel, relayout
from tracea_jax.emit.gemm_sm90 import GemmSm90Config
from tracea_jax.problem import ITEMSIZE, GemmProblem
from tracea_jax.variants import gemm_sm90
from tracea_jax.variants.base import Call
from tracea_jax.variants.gemm_sm90 import GEMM_SM90, misaligned_rows
from tracea_jax.variants.space import Columns, Space
from tracea_jax.variants.steps import Buffer, Launch

# On 16-bit products of at least this many flops, rows and columns, and this depth, XLA
# was 1.2 to 4 times slower than we, in all 26 random problems that are such of
# ``choices_fitted.json`` of an H200, whatever the epilogue. With fewer rows, our copies
# take too long; on shallower products, XLA is fast.
_FEWEST_FLOPS, _FEWEST_ROWS, _LEAST_DEPTH = 2**29, 24, 96

# On other products with fewer flops for each byte than this, our copies of the operands
# take longer than XLA's slower products. They follow from rates of an H200: those at
# which XLA and our kernel multiply odd rows, or float32 at highest precision, and that
# of the copies.
_FLOPS_PER_BYTE = {"padded": 128, "split": 64}


def split(problem: GemmProblem) -> GemmProblem:
    """The problem with operands in three bfloat16 parts."""
    parts = {"lhs": "bfloat16x3", "rhs": "bfloat16x3", "precision": "default"}
    return dataclasses.replace(problem, **parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GemmSm90Prepared:
    """A variant with a relayout; for its methods see ``variants.base.Variant``.

    Attributes:
      seen: maps a problem to the one that the kernel sees.
      relaid: maps a problem to the operands that are copied first.
      reasons: yields the sentences why the variant cannot serve a problem.
      wins: whether the variant is expected to beat XLA, without measurements.
    """

    name: str
    seen: Callable[[GemmProblem], GemmProblem]
    relaid: Callable[[GemmProblem], tuple[int, ...]]
    reasons: Callable[[GemmProblem, Device], Iterator[str]]
    wins: Callable[[GemmProblem], bool]
    config_type: type = GemmSm90Config
    sources: tuple[str, ...] = (*GEMM_SM90.sources, "cuda/relayout.cuh")

    def why_not(self, problem: GemmProblem, device: Device) -> str | None:
        return next(self.reasons(problem, device), None)

    def check(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> None:
        GEMM_SM90.check(self.seen(problem), config, device)

    def space(self, problem: GemmProblem, device: Device) -> Space:
        return GEMM_SM90.space(self.seen(problem), device)

    def described(
        self, problem: GemmProblem, columns: Columns, device: Device
    ) -> Space:
        return GEMM_SM90.described(self.seen(problem), columns, device)

    def heuristic(self, problem: GemmProblem, device: Device) -> GemmSm90Config:
        return GEMM_SM90.heuristic(self.seen(problem), device)

    def expects_to_win(self, problem: GemmProblem, device: Device) -> bool:
        return self.wins(problem)

    def call(
        self, problem: GemmProblem, config: GemmSm90Config, device: Device
    ) -> Call:
        assert isinstance(device, CudaDevice)
        seen = self.seen(problem)
        kernel = gemm_sm90_kernel.kernel(seen, config, device)
        before, relaid = _relayout(problem, seen, self.relaid(problem), device)
        return gemm_sm90.product_steps(seen, config, kernel, before, relaid)


def _relayout(
    problem: GemmProblem,
    seen: GemmProblem,
    operands: tuple[int, ...],
    device: CudaDevice,
) -> tuple[Launch, tuple[Buffer, ...]]:
    """The step that writes operands as the product reads them, and what it writes."""
    is_split = emit.parts(seen) > 1
    stored = [_stored(problem, operand) for operand in operands]
    dtypes = [(problem.lhs, problem.rhs)[operand] for operand in operands]
    outs = ["bfloat16" if is_split else dtype for dtype in dtypes]
    # Two of different dtypes have 8 bits both: the same for who only moves them.
    kernel = relayout.kernel(
        [(batch * rows, columns) for batch, rows, columns in stored],
        dtypes[0],
        device,
        split=is_split,
    )
    names = [("lhs", "rhs")[operand] for operand in operands]
    written = tuple(
        Buffer(
            name=gemm_sm90.relaid_name(name),
            shape=(emit.parts(seen) * batch, rows, relayout.stride(columns, out)),
            dtype=out,
        )
        for name, (batch, rows, columns), out in zip(names, stored, outs, strict=True)
    )
    step = Launch(
        name="relayout",
        kernel=kernel,
        reads=tuple(names),
        writes=tuple(buffer.name for buffer in written),
    )
    return step, written


def _stored(problem: GemmProblem, operand: int) -> tuple[int, int, int]:
    """Batch, rows and columns of an operand in memory."""
    p = problem
    batched = (p.lhs_batched, p.rhs_batched)[operand]
    rows, columns = ((p.m, p.k), (p.k, p.n))[operand]
    if p.layout[operand] == "t":
        rows, columns = columns, rows
    return p.batch if batched else 1, rows, columns


def _misaligned(problem: GemmProblem) -> tuple[int, ...]:
    return tuple(row.operand for row in misaligned_rows(problem))


def _too_large(problem: GemmProblem) -> Iterator[str]:
    for operand, role in enumerate(("left", "right")):
        batch, rows, columns = _stored(problem, operand)
        if batch * rows * columns > relayout.MOST_ELEMENTS:
            yield (
                f"the {role} operand has more than {relayout.MOST_ELEMENTS} elements, "
                "too many to be written anew"
            )


def _why_not_padded(problem: GemmProblem, device: Device) -> Iterator[str]:
    yield from gemm_sm90.reasons(problem, device)
    if not _misaligned(problem):
        yield "it is only for rows whose size is not a multiple of 16 bytes"
    yield from _too_large(problem)


def _padded_wins(problem: GemmProblem) -> bool:
    if ITEMSIZE[problem.lhs] == ITEMSIZE[problem.rhs] == 2:
        is_large = problem.flops >= _FEWEST_FLOPS and problem.k >= _LEAST_DEPTH
        if is_large and min(problem.m, problem.n) >= _FEWEST_ROWS:
            return True
    enough = max(2**33, _FLOPS_PER_BYTE["padded"] * problem.bytes)
    # XLA's speed on odd rows of float32, computed as TF32, was not measured.
    return problem.lhs != "float32" and problem.flops >= enough


def _why_not_split(problem: GemmProblem, device: Device) -> Iterator[str]:
    yield from gemm_sm90.wrong_device(device)
    dtypes = (problem.lhs, problem.rhs, problem.out)
    if set(dtypes) != {"float32"}:
        yield f"dtypes {', '.join(dtypes)}; it takes float32 operands and gives float32"
    if problem.precision not in ("high", "highest"):
        yield (
            f"precision {problem.precision}; it computes to the accuracy of float32, "
            "for precision high or highest"
        )
    yield from gemm_sm90.reasons(split(problem), device)
    yield from _too_large(problem)


def _split_wins(problem: GemmProblem) -> bool:
    # At precision "high", XLA may use TF32, which is faster than our parts.
    enough = max(2**31, _FLOPS_PER_BYTE["split"] * problem.bytes)
    return problem.precision == "highest" and problem.flops >= enough


GEMM_SM90_PADDED = GemmSm90Prepared(
    name="gemm_sm90_padded",
    seen=lambda problem: problem,
    relaid=_misaligned,
    reasons=_why_not_padded,
    wins=_padded_wins,
)
GEMM_SM90_SPLIT = GemmSm90Prepared(
    name="gemm_sm90_split",
    seen=split,
    relaid=lambda problem: (0, 1),
    reasons=_why_not_split,
    wins=_split_wins,
)
