"""What one device does in a compiled program: products, kernels, and bytes it sends.

Everything is read from the text of the optimized HLO, which is the program of one
device. What a loop repeats counts as often as it runs.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

# In the order of the columns of tables.
COLLECTIVES = {
    "all-reduce": "AR",
    "all-gather": "AG",
    "reduce-scatter": "RS",
    "all-to-all": "A2A",
    "collective-permute": "CP",
}
_MOVES = "collective-broadcast", "ragged-all-to-all", "send", "recv"  # in no program

_BITS = {"pred": 8, "token": 0}  # of dtypes whose name does not end in their bits
_SHAPE = re.compile(r"(pred|token|[a-z]+\d+\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w\-]*)\(")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True, slots=True)
class Collective:
    """Collectives of one kind: how many arrays they move, and bytes a device sends."""

    kind: str
    arrays: int
    sent: int

    def __str__(self) -> str:
        return f"{COLLECTIVES[self.kind]}{self.arrays}/{_short(self.sent)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The work of one device in one run of a program.

    Attributes:
      flops: floating point operations of products and convolutions, by XLA and by
        kernels of ours. Kernels of attention count as the products of their definition.
      kernels: (target, number) of the custom calls of ours in the program's text.
      left: number of products and convolutions in the text that XLA computes.
      collectives: by kind; of those that reach one device only, none.
    """

    flops: int
    kernels: tuple[tuple[str, int], ...]
    left: int
    collectives: tuple[Collective, ...]

    @property
    def sent(self) -> int:
        """Bytes that a device sends, by the ring algorithm of each collective."""
        return sum(c.sent for c in self.collectives)

    @property
    def calls(self) -> int:
        return sum(count for _, count in self.kernels)

    @property
    def moved(self) -> str:
        """The collectives, in words."""
        return " ".join(map(str, self.collectives)) or "-"

    def as_row(self) -> dict[str, Any]:
        """The counts, as files of results have them."""
        return {
            "flops": self.flops,
            "kernels": self.calls,
            "left": self.left,
            "sent": self.sent,
            "moved": self.moved,
        }

    def __str__(self) -> str:
        return (
            f"{self.flops / 1e6:.2f} Mflop, {self.calls} kernels, {self.left} left, "
            f"{_short(self.sent)} sent: {self.moved}"
        )


def _short(count: int) -> str:
    return f"{count / 1024:.1f}k"


def measured(text: str) -> Measured:
    """The work of one device, from the text of a compiled program.

    Raises:
      ValueError: if the number of runs of a loop, or the work of a custom call of ours,
        is not known.
    """
    flops, left = 0, 0
    kernels: collections.Counter[str] = collections.Counter()
    for instruction, runs in _executed(text):
        flops += runs * _flops(instruction)
        opcode = instruction.opcode
        if opcode in ("dot", "convolution"):
            left += 1
        elif opcode == "custom-call" and instruction.target.startswith("tracea_"):
            kernels[instruction.target] += 1
    return Measured(flops, tuple(sorted(kernels.items())), left, communication(text))


def communication(text: str) -> tuple[Collective, ...]:
    """The collectives of a compiled program, of any backend, by kind.

    Raises:
      ValueError: if the number of runs of a loop is not known.
    """
    arrays: collections.Counter[str] = collections.Counter()
    sent: collections.Counter[str] = collections.Counter()
    for instruction, runs in _executed(text):
        if (kind := instruction.opcode.removesuffix("-start")) in COLLECTIVES:
            if volume := _sent(kind, instruction):
                arrays[kind] += runs * len(instruction.results)
                sent[kind] += runs * volume
        elif instruction.opcode in _MOVES:
            raise ValueError(f"{instruction.opcode} is not counted")
    return tuple(
        Collective(kind, arrays[kind], sent[kind]) for kind in COLLECTIVES if sent[kind]
    )


# --- instructions ---------------------------------------------------------------------

Shape = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class _Instruction:
    """One line: its shapes, and the text of its attributes."""

    opcode: str
    results: tuple[Shape, ...]
    operands: tuple[Shape, ...]
    attributes: str

    @property
    def target(self) -> str:
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def number(self, name: str) -> int:
        """An integer of the configuration of a call."""
        found = re.search(rf"\b{name} = (\d+) : i64", self.attributes)
        if not found:
            raise ValueError(f"{self.target} has no {name}")
        return int(found[1])

    def is_set(self, name: str) -> bool:
        return f"{name} = true" in self.attributes

    def dims(self, name: str) -> tuple[int, ...]:
        found = re.search(rf"\b{name}={{([\d,]*)}}", self.attributes)
        return _integers(found[1]) if found else ()


def _executed(text: str) -> Iterator[tuple[_Instruction, int]]:
    """Each instruction, with the number of times that a run of the program runs it."""
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    entry = ""
    for line in text.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations[match[2]] = []
            entry = match[2] if match[1] else entry
        elif _INSTRUCTION.match(line):
            lines.append(line)
    runs = collections.Counter({entry: 1})
    for name in reversed(computations):  # callers come after what they call
        if runs[name]:
            for instruction in _instructions(computations[name]):
                yield instruction, runs[name]
                for callee, times in _called(instruction):
                    runs[callee] += runs[name] * times


def _instructions(lines: Iterable[str]) -> Iterator[_Instruction]:
    known: dict[str, tuple[Shape, ...]] = {}
    for line in lines:
        match = _INSTRUCTION.match(line)
        assert match
        name, rest = match[1], match[2]
        opcode = _OPCODE.search(" " + rest)
        if not opcode:
            continue
        head = rest[: opcode.start()]
        operands, attributes = _split(rest[opcode.end() - 1 :])
        known[name] = results = _shapes(head)
        shapes = [s for n in _NAME.findall(operands) for s in known.get(n, ())]
        yield _Instruction(opcode[1], results, tuple(shapes), attributes)


def _split(rest: str) -> tuple[str, str]:
    """What is between the parentheses of the operands, and what follows."""
    depth = 1
    for i, character in enumerate(rest):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return rest[:i], rest[i + 1 :]
    raise ValueError(f"no end of the operands: {rest[:80]}")


def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple((m[1], _integers(m[2])) for m in _SHAPE.finditer(text))


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(d) for d in text.split(",") if d)


def _called(instruction: _Instruction) -> Iterator[tuple[str, int]]:
    """Computations that an instruction runs, and how often."""
    attributes = instruction.attributes
    if instruction.opcode == "while":
        found = re.search(r'known_trip_count":\{"n":"(\d+)"', attributes)
        if not found:
            raise ValueError("the number of runs of a loop is not known")
        for name in re.findall(r"\bbody=%?([\w.\-]+)", attributes):
            yield name, int(found[1])
    elif instruction.opcode in ("fusion", "call", "conditional", "async-start"):
        for names in re.findall(
            r"\b(?:calls|to_apply|true_computation|false_computation"
            r"|branch_computations)=\{?((?:%?[\w.\-]+(?:, )?)+)",
            attributes,
        ):
            for name in re.findall(r"%?([\w.\-]+)", names):
                yield name, 1


# --- bytes ----------------------------------------------------------------------------


def _sent(kind: str, instruction: _Instruction) -> int:
    """Bytes that one device sends, as a ring of all devices of a group needs them."""
    attributes = instruction.attributes
    results = instruction.results
    if instruction.opcode.endswith("-start") and kind != "all-reduce":
        results = results[len(results) // 2 :]  # operands come before
    size = sum(_bytes(s) for s in results)
    if kind == "collective-permute":
        pairs = re.findall(r"\{(\d+),(\d+)\}", attributes)
        return size if any(a != b for a, b in pairs) else 0
    n = _group_size(attributes)
    match kind:
        case "all-reduce":
            return 2 * (n - 1) * size // n
        case "reduce-scatter":
            return (n - 1) * size
        case _:
            return (n - 1) * size // n


def _bytes(shape: Shape) -> int:
    dtype, dims = shape
    found = re.search(r"\d+", dtype)
    bits = _BITS[dtype] if dtype in _BITS else int(found[0]) if found else 0
    return math.prod(dims) * bits // 8


def _group_size(attributes: str) -> int:
    """Devices that take part in one collective; replica_groups has three notations."""
    # mesh['a'=2,'b'=4] {'b'}, or {'b':(1)2}: a part of that axis, of size 2
    if found := re.search(r"replica_groups=mesh\[(.*?)\][^{]*\{(.*?)\}", attributes):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[axis]) for axis, part in axes)
    # [2,4]<=[8]: two groups of four
    if found := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(found[2])
    # {{0,1},{2,3}}
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return len(_integers(found[1]))
    raise ValueError(f"no groups of devices in {attributes[:200]}")


# --- floating point operations --------------------------------------------------------


def _flops(instruction: _Instruction) -> int:
    match instruction.opcode:
        case "dot":
            _, lhs = instruction.operands[0]
            contracted = (lhs[i] for i in instruction.dims("lhs_contracting_dims"))
            return 2 * math.prod(instruction.results[0][1]) * math.prod(contracted)
        case "convolution":
            return _convolution_flops(instruction)
        case "custom-call" if instruction.target.startswith("tracea_"):
            if instruction.target not in _KERNELS:
                raise ValueError(f"the work of {instruction.target} is not known")
            return _KERNELS[instruction.target](instruction)
    return 0


def _gemm_flops(call: _Instruction) -> int:
    (_, x), (_, y) = call.operands[0], call.results[0]
    return 2 * math.prod(y) * x[-2 if call.is_set("trans_lhs") else -1]


def _attention_flops(call: _Instruction) -> int:
    """Those of q k^T and p v."""
    (_, q), (_, k), (_, v) = call.operands[:3]
    batch, queries, heads, width = q
    return 2 * batch * heads * queries * k[1] * (width + v[3])


def _attention_gradient_flops(call: _Instruction) -> int:
    """Those of dv, dp, dq and dk; scores that a kernel computes again do not count."""
    return 2 * _attention_flops(call)


def _conv2d_flops(call: _Instruction) -> int:
    (_, first), (_, second), (_, result) = *call.operands[:2], call.results[0]
    images, weights, outputs = {
        "forward": (first, second, result),
        "input_grad": (result, second, first),
        "weight_grad": (first, result, second),
    }[re.findall(r'direction = "(\w+)"', call.attributes)[0]]
    pairs = math.prod(
        _pairs(
            size,
            taps,
            outs,
            stride=call.number(f"stride_{axis}"),
            before=call.number(f"padding_{axis}"),
            kernel_dilation=call.number(f"dilation_{axis}"),
        )
        for axis, size, taps, outs in zip(
            ("height", "width"), images[1:3], weights[:2], outputs[1:3], strict=True
        )
    )
    return 2 * images[0] * pairs * weights[2] * weights[3]


def _convolution_flops(instruction: _Instruction) -> int:
    """Those of XLA's convolution, without products with padding or between elements."""
    attributes = instruction.attributes
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    assert found
    (_, lhs), (_, rhs), (_, out) = *instruction.operands[:2], instruction.results[0]
    window = re.search(r"window=\{([^}]*)\}", attributes)
    settings = dict(s.split("=") for s in window[1].split()) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", attributes)

    def each(name: str, count: int) -> Sequence[str]:
        return settings[name].split("x") if name in settings else [""] * count

    spatial = sorted(set(found[3]) - set("bf"))
    names = ("stride", "pad", "lhs_dilate", "rhs_dilate")
    columns = zip(*(each(name, len(spatial)) for name in names), strict=True)
    pairs = 1
    for label, (stride, pad, between, dilate) in zip(spatial, columns, strict=True):
        pairs *= _pairs(
            lhs[found[1].index(label)],
            rhs[found[2].index(label)],
            out[found[3].index(label)],
            stride=int(stride or 1),
            before=int(pad.split("_")[0]) if pad else 0,
            image_dilation=int(between or 1),
            kernel_dilation=int(dilate or 1),
        )
    inputs = rhs[found[2].index("i")]
    images = lhs[found[1].index("b")] // int(groups[1] if groups else 1)
    return 2 * images * pairs * inputs * out[found[3].index("f")]


@functools.cache
def _pairs(
    size: int,
    taps: int,
    outs: int,
    *,
    stride: int,
    before: int,
    kernel_dilation: int,
    image_dilation: int = 1,
) -> int:
    """How many (output, tap) pairs of one axis read an element of the image."""
    reads = (
        out * stride - before + tap * kernel_dilation
        for out in range(outs)
        for tap in range(taps)
    )
    return sum(
        at % image_dilation == 0 and 0 <= at < size * image_dilation for at in reads
    )


_KERNELS: Mapping[str, Callable[[_Instruction], int]] = {
    "tracea_cpu_gemm_v1": _gemm_flops,
    "tracea_cpu_attention_v1": _attention_flops,
    "tracea_cpu_attention_gradient_v1": _attention_gradient_flops,
    "tracea_cpu_conv2d_v1": _conv2d_flops,
    "tracea_cpu_elementwise_v1": lambda call: 0,
}
