"""The two kernels of attention_backward_sm90 that compute scores, as values.

A ``Half`` is what one of them is made of, so that both may be kernels of their own, or
blocks of one launch (``attention_backward_kernels``, the caller). Grids and the orders
of tiles follow from config and problem.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.emit import attention_backward_sm90 as sizes
from tracea_jax.emit import attention_rules as rules
from tracea_jax.emit import attention_sm90 as forward
from tracea_jax.emit.attention_backward_sm90 import PART, AttentionBackwardSm90Config
from tracea_jax.emit.attention_gradient_scores import WORDS, GradientScores, moves
from tracea_jax.emit.attention_sm90 import (
    DTYPES,
    ROWS,
    WARP_ROWS,
    WARPGROUP,
    operand_map,
)
from tracea_jax.emit.epilogue import cxx
from tracea_jax.emit.kernel import Param, Pointer, Scalar, TensorMap, TensorMapSwizzle
from tracea_jax.emit.wgmma import Wgmma
from tracea_jax.ir.swizzle import SWIZZLE_128B
from tracea_jax.problem import AttentionProblem

_ITEMSIZE = 2
_SECTION_BYTES = 32 << 20  # of queries that stay in L2 beside all else
_BOTH_BYTES = 16 << 20  # of all operands, which blocks of both kinds read
_SPAN = "const tracea::SegmentSpan*"
_MAP = "const __grid_constant__ tracea::TensorMap"  # the type of a parameter
# setmaxnreg of the producer and of each consumer, by the number of consumers, where one
# shares a multiprocessor with another block's; and where two of them need more.
_REGISTERS = {1: (24, 232), 2: (40, 232), 3: (32, 160)}
_ALL_REGISTERS = (24, 240)
_FEW = 192  # registers for sums and scores
_WORDS = {
    **{"kHasLeft": "left", "kHasRight": "right", "kQLengths": "qlen"},
    **{"kKvLengths": "kvlen", "kFromEnd": "end"},
    **{"kSegments": "segments", "kSoftCap": "cap"},
    **WORDS,
    **{"kEverywhere": "everywhere", "kAdds": "adds", "kOrdered": "ordered"},
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """One kernel, or its half of a kernel of both.

    Attributes:
      name: "keys" or "queries".
      problem: the op's problem.
      beside: what it is told of biases and masks.
      tile: rows that a block owns, rows of the other side that it has at a time, and
        for how many times these there is room.
      names: of the first two in the Traits.
      columns: of the sums, and of what weights multiply with values.
      own_flags: of the Traits, beside those that both halves have.
      operands: of the launch.
      maps: tensor maps by the names of parameters; None for what the problem lacks.
      pointers: types, and numbers of operands, likewise.
      numbers: integers, likewise.
      tiles: blocks of threads.
      consumers: warpgroups that multiply.
      registers: that a consumer needs for sums and scores.
      smem: bytes of shared memory.
    """

    name: str
    problem: AttentionProblem
    beside: GradientScores
    tile: tuple[int, int, int]
    names: tuple[str, str]
    columns: tuple[int, int]
    own_flags: dict[str, bool]
    operands: tuple[str, ...]
    maps: dict[str, TensorMap | None]
    pointers: dict[str, tuple[str, int]]
    numbers: dict[str, int]
    tiles: int
    consumers: int
    registers: int
    smem: int

    @property
    def products(self) -> tuple[Wgmma, ...]:
        """Scores, both sums, and a part of dq; the text includes their headers."""
        dtype = self.problem.dtype
        return (
            Wgmma(n=self.tile[1], lhs=dtype, rhs=dtype),
            *(
                Wgmma(n=n, lhs=dtype, rhs=dtype, lhs_in_registers=True)
                for n in self.columns
            ),
            Wgmma(n=PART, lhs=dtype, rhs=dtype),
        )

    @property
    def flags(self) -> dict[str, bool]:
        """Boolean constants of the Traits."""
        p = self.problem
        left, right = rules.window(p)
        return {
            "kHasLeft": left is not None,
            "kHasRight": right is not None,
            "kQLengths": p.q_lengths,
            "kKvLengths": p.kv_lengths,
            "kFromEnd": rules.shifts(p),
            "kSegments": p.segments,
            "kSoftCap": p.soft_cap is not None,
            **self.beside.flags,
            **self.own_flags,
        }

    @property
    def kind(self) -> tuple[str, ...]:
        """Words of the entry's name."""
        own, other, stages = self.tile
        said = (_WORDS[f] for f, is_set in self.flags.items() if is_set and f in _WORDS)
        return *said, f"{own}x{other}_s{stages}"

    @property
    def traits(self) -> str:
        """C++ members of the Traits."""
        p = self.problem
        own, other, stages = self.tile
        scores, sums, of_values, part = (
            f"tracea::{w.type_name}" for w in self.products
        )
        producer, consumer = _REGISTERS[self.consumers]
        if self.consumers == 2 and self.registers > _FEW:
            producer, consumer = _ALL_REGISTERS
        bools = ", ".join(
            f"{flag} = {cxx(is_set)}" for flag, is_set in self.flags.items()
        )
        return f"""\
  using Element = {DTYPES[p.dtype][0]};
  using Scores = {scores}<0, 0>;
  using Sums = {sums}<0, 1>;
  using ValueSums = {of_values}<0, 1>;
  using Dq = {part}<1, 1>;
  using Swizzle = {SWIZZLE_128B.cxx()};
  using BiasElement = {self.beside.element};
  static constexpr int kHeadDim = {p.head_dim}, kSlabs = {forward.slabs(p.head_dim)};
  static constexpr int kValueDim = {p.columns}, \
kValueSlabs = {forward.slabs(p.columns)};
  static constexpr int k{self.names[0]} = {own}, k{self.names[1]} = {other}, \
kStages = {stages}, kMostBlocks = {sizes.MOST_BLOCKS};
  static constexpr bool {bools};
  static constexpr int kThreads = {threads_of(self.consumers)}, \
kProducerRegisters = {producer}, kConsumerRegisters = {consumer};
  static constexpr int kSmemBytes = {self.smem};
"""

    @property
    def parameters(self) -> dict[str, str]:
        """The entry point's parameters, name to type, in the order of ``params``."""
        return {
            **{name: _MAP for name, m in self.maps.items() if m},
            **{name: of_type for name, (of_type, _) in self.pointers.items()},
            **dict.fromkeys(self.numbers, "int"),
            **dict.fromkeys(factors(self.problem), "float"),
            **self.beside.parameters,
        }

    @property
    def arguments(self) -> tuple[str, ...]:
        """First fields of the device function's struct; scores' modifiers follow."""
        maps = (f"&{name}" if m else "nullptr" for name, m in self.maps.items())
        return *maps, *self.pointers, *self.numbers, *factors(self.problem)

    @property
    def params(self) -> tuple[Param, ...]:
        """The launch's arguments."""
        floats = factors(self.problem).values()
        return (
            *(m for m in self.maps.values() if m),
            *(Pointer(operand=operand) for _, operand in self.pointers.values()),
            *(Scalar(value=value) for value in self.numbers.values()),
            *(Scalar(value=value, dtype="float32") for value in floats),
            *self.beside.params(self.operands),
        )

    @property
    def given(self) -> dict[str, Param]:
        """The launch's values by the names of the parameters."""
        return dict(zip(self.parameters, self.params, strict=True))


def keys(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    has_blind: bool,
    operands: tuple[str, ...],
) -> Half:
    """The kernel for dk and dv, in a launch with these operands."""
    p, c = problem, config
    beside = sizes.beside_keys(p, c)
    of_queries, of_keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    left, right = rules.window(p)
    wide = (sizes.HALF, sizes.HALF)

    def number(name: str) -> int:
        return sizes.number(operands, name)

    return Half(
        name="keys",
        problem=p,
        beside=beside,
        tile=(c.tile_kv, c.block_q, c.stages_q),
        own_flags={
            "kEverywhere": has_blind,
            "kAdds": bool(c.adds),
            "kOrdered": c.dq == "ordered",
            "kSplits": sizes.splits(p),
            "kIsTight": bool(sizes.is_tight(p, c)),
        },
        columns=wide if sizes.splits(p) else (p.head_dim, p.columns),
        names=("TileKv", "BlockQ"),
        maps={
            "q": operand_map(p, 0, of_queries, c.block_q, p.head_dim),
            "k": operand_map(p, 1, of_keys, c.tile_kv, p.head_dim),
            "v": operand_map(p, 2, of_keys, c.tile_kv, p.columns),
            "d_out": operand_map(p, 3, of_queries, c.block_q, p.columns),
            "rows": _rows_map(p, c),
            "dk": operand_map(p, number("dk"), of_keys, WARP_ROWS, p.head_dim),
            "dv": operand_map(p, number("dv"), of_keys, WARP_ROWS, p.columns),
            "bias": beside.bias_map(operands, c.block_q),
        },
        operands=operands,
        pointers={
            "everywhere": ("const float*", number("everywhere")),
            "q_lengths": ("const int*", number("q_lengths")),
            "kv_lengths": ("const int*", number("kv_lengths")),
            "segments": ("const int*", number("ids_kv")),
            "spans_kv": (_SPAN, number("spans_tile_kv")),
            "spans_q": (_SPAN, number("spans_block_q")),
            "sums": ("float*", number("sums")),
            "turns": ("int*", number("turns")),
        },
        numbers={
            **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len},
            **{"kv_heads": p.kv_heads, "padded_kv": sizes.padded_kv(p, c)},
            "group": p.heads // p.kv_heads,
            **{"left": left or 0, "right": right or 0},
            "section": section_of_both(p) if c.dq == "beside" else _keys_section(p),
        },
        tiles=-(-p.kv_len // c.tile_kv) * p.kv_heads * p.batch,
        consumers=sizes.consumers_of_keys(p, c),
        registers=sizes.keys_registers(p, c),
        smem=int(sizes.keys_smem_bytes(p, c)),
    )


def queries(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    operands: tuple[str, ...],
) -> Half:
    """The kernel for dq, in a launch with these operands."""
    p, c = problem, config
    beside = sizes.beside_queries(p, c)
    of_queries, of_keys = (p.q_len, p.heads), (p.kv_len, p.kv_heads)
    group = p.heads // p.kv_heads
    left, right = rules.window(p)
    is_beside = c.dq == "beside"

    def number(name: str) -> int:
        return sizes.number(operands, name)

    return Half(
        name="queries",
        problem=p,
        beside=beside,
        tile=(c.tile_q, c.block_kv, c.stages_kv),
        own_flags={},
        columns=(p.head_dim, p.columns),
        names=("TileQ", "BlockKv"),
        maps={
            "q": operand_map(p, 0, of_queries, c.tile_q, p.head_dim),
            "k": operand_map(p, 1, of_keys, c.block_kv, p.head_dim),
            "v": operand_map(p, 2, of_keys, c.block_kv, p.columns),
            "d_out": operand_map(p, 3, of_queries, c.tile_q, p.columns),
            "dq": operand_map(p, number("dq"), of_queries, WARP_ROWS, p.head_dim),
            "bias": beside.bias_map(operands, c.tile_q),
            "segments": _ids_map(p, c, operands) if p.segments else None,
        },
        operands=operands,
        pointers={
            "rows": ("const float*", number("rows")),
            "q_lengths": ("const int*", number("q_lengths")),
            "kv_lengths": ("const int*", number("kv_lengths")),
            "spans_q": (_SPAN, number("spans_tile_q")),
            "spans_kv": (_SPAN, number("spans_block_kv")),
        },
        numbers={
            **{"batch": p.batch, "q_len": p.q_len, "kv_len": p.kv_len},
            **{"heads": p.heads, "padded": sizes.padded(p, c), "group": group},
            **{"left": left or 0, "right": right or 0},
            "section": section_of_both(p) * group if is_beside else forward.section(p),
        },
        tiles=-(-p.q_len // c.tile_q) * p.heads * p.batch,
        consumers=c.tile_q // ROWS,
        registers=sizes.queries_registers(p, c),
        smem=int(sizes.queries_smem_bytes(p, c)),
    )


def factors(problem: AttentionProblem) -> dict[str, float]:
    """Factors of the scores in the kernels."""
    p = problem
    product = 1.0 if moves(p) else p.scale  # what scores then lack
    bounds = product if p.soft_cap is None else p.soft_cap
    return {
        "scale": p.scale,
        "scale_log2": bounds * math.log2(math.e),
        "to_cap": product / bounds if p.soft_cap else 0.0,
    }


def threads_of(consumers: int) -> int:
    """Threads of a block: one producer warpgroup and the consumers."""
    return WARPGROUP * (1 + consumers)


def _keys_section(problem: AttentionProblem) -> int:
    """Heads of keys whose tiles are neighbours: their queries stay in L2."""
    group = problem.heads // problem.kv_heads
    columns = problem.head_dim + problem.columns
    bytes_of_queries = problem.q_len * columns * _ITEMSIZE * group
    fitting = max(1, _SECTION_BYTES // bytes_of_queries)
    return min(fitting, problem.kv_heads * problem.batch)


def _rows_map(
    problem: AttentionProblem, config: AttentionBackwardSm90Config
) -> TensorMap:
    """Boxes of the numbers of a block of queries."""
    length, planes = sizes.padded(problem, config), sizes.planes(problem)
    head = 4 * length * planes
    return TensorMap(
        operand=4,
        dtype="float32",
        dims=(length, planes, problem.heads, problem.batch),
        strides=(4 * length, head, head * problem.heads),
        box=(config.block_q, planes, 1, 1),
        swizzle=TensorMapSwizzle.NONE,
    )


def _ids_map(
    problem: AttentionProblem,
    config: AttentionBackwardSm90Config,
    reads: tuple[str, ...],
) -> TensorMap:
    """Boxes of the ids of a block of keys."""
    length = sizes.padded_kv(problem, config)
    row = 4 * length
    return TensorMap(
        operand=sizes.number(reads, "ids_kv"),
        dtype="int32",
        dims=(length, problem.batch, 1, 1),
        strides=(row, row * problem.batch, row * problem.batch),
        box=(config.block_kv, 1, 1, 1),
        swizzle=TensorMapSwizzle.NONE,
    )


def section_of_both(problem: AttentionProblem) -> int:
    """Heads of keys whose operands stay in L2 until blocks of both kinds read them."""
    p = problem
    columns = p.head_dim + p.columns
    of_head = (p.q_len * p.heads // p.kv_heads + p.kv_len) * columns * _ITEMSIZE
    return min(max(1, _BOTH_BYTES // of_head), p.kv_heads * p.batch)
