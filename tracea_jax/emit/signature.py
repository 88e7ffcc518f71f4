"""The parameters of a ``__global__`` function, read from the text of a CUDA source.

    signature("extern \"C\" __global__ void f(const float* x, int n) {}")
    -> f(const float* x, int n)

Only as much of C++ is understood as a parameter list has: pointers, numbers, and other
types, whose meaning the caller must know. What the compiler makes of the parameters is
in ``runtime.parameters``. Caller: ``ops.cuda_kernel``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from tracea_jax.mistakes import similar

# Dtypes of C types, without "const" and such; words of integers in any order.
_NAMED = {
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    "__half": "float16",
    "half": "float16",
    "__nv_bfloat16": "bfloat16",
    "nv_bfloat16": "bfloat16",
    "size_t": "uint64",
    "ptrdiff_t": "int64",
    **{
        f"{u}int{bits}_t": f"{u}int{bits}"
        for u in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
_VECTOR = re.compile(r"(float|double|u?char|u?short|u?int|u?longlong)[1234]")
_WORDS = {"signed", "unsigned", "char", "short", "int", "long"}
_QUALIFIERS = re.compile(
    r"\b(const|volatile|__restrict__|__restrict|restrict|__grid_constant__|struct)\b"
)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
      name: as the source has it.
      text: its declaration.
      is_pointer: whether it is the address of an array.
      is_const: of an array, whether the kernel only reads it.
      dtype: of the number, or of the array's elements; None of any other type.
    """

    name: str
    text: str
    is_pointer: bool
    is_const: bool
    dtype: str | None

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A kernel's name and parameters.

    Attributes:
      name: of the function, without template arguments.
      parameters: in order.
      is_extern_c: whether its name in the compiled code is its own.
    """

    name: str
    parameters: tuple[Parameter, ...]
    is_extern_c: bool

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.parameters))})"


def signature(source: str, name: str | None = None) -> Signature:
    """The signature of a kernel.

    Args:
      source: CUDA C++.
      name: of the kernel; None if the source has only one.

    Raises:
      ValueError: if there is no such kernel, or several where none was named.
    """
    found = {kernel.name: kernel for kernel in signatures(source)}
    listed = ", ".join(found) or "none"
    if name is None:
        if len(found) != 1:
            raise ValueError(
                f"the source must have one __global__ function, or name= says which is "
                f"meant; it has {listed}"
            )
        (name,) = found
    if name not in found:
        raise ValueError(
            f"the source has no __global__ function {name!r}; it has {listed}"
            + similar(name, tuple(found))
        )
    return found[name]


def signatures(source: str) -> Iterator[Signature]:
    """Every kernel that the source defines or declares, in the order of the text."""
    text = _COMMENT.sub(" ", source)
    blocks = [m.end() for m in re.finditer(r'extern\s+"C"\s*\{', text)]
    for match in re.finditer(r"\b__global__\b", text):
        head = _head(text, match.end())
        if head is None:
            continue
        name, inside = head
        before = re.split(r"[;}]", text[: match.start()])[-1]
        is_extern_c = bool(re.search(r'extern\s+"C"', before)) or any(
            _is_open(text[start : match.start()]) for start in blocks
        )
        declared = [_parameter(d, i) for i, d in enumerate(_split(inside))]
        yield Signature(name=name, parameters=tuple(declared), is_extern_c=is_extern_c)


def _head(text: str, start: int) -> tuple[str, str] | None:
    """The name of a function and the text of its parameters, after ``__global__``."""
    position = start
    while (bracket := text.find("(", position)) >= 0:
        words = re.findall(r"\w+", text[position:bracket])
        end = _closing(text, bracket)
        if not words or end is None:
            return None
        if words[-1] not in ("__launch_bounds__", "__maxnreg__", "__cluster_dims__"):
            return words[-1], text[bracket + 1 : end]
        position = end + 1
    return None


def _closing(text: str, start: int) -> int | None:
    """Index of the bracket that closes the one at ``start``."""
    depth = 0
    for i in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return i
    return None


def _is_open(text: str) -> bool:
    """Returns whether a block that begins before the text is still open after it."""
    depth = 1
    for character in _LITERAL.sub("", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return False
    return True


def _split(inside: str) -> list[str]:
    """The declarations of a parameter list; commas in brackets belong to types."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(inside):
        depth += {"(": 1, "<": 1, "[": 1, ")": -1, ">": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(inside[start:i])
            start = i + 1
    parts = [" ".join(part.split()) for part in (*parts, inside[start:])]
    return [part for part in parts if part and part != "void"]


def _parameter(text: str, position: int) -> Parameter:
    declared = text.partition("=")[0].strip()
    array = re.search(r"\[[^\]]*\]\s*$", declared)
    if array is not None:
        declared = declared[: array.start()].strip()
    words = re.search(r"(\w+)$", declared)
    is_named = words is not None and re.search(
        r"[\w>*&]\s*$", declared[: words.start()]
    )
    name = words[1] if words is not None and is_named else f"parameter {position}"
    kind = declared[: words.start()] if words is not None and is_named else declared
    is_pointer = array is not None or "*" in kind
    return Parameter(
        name=name,
        text=text,
        is_pointer=is_pointer,
        is_const=is_pointer and bool(re.search(r"\bconst\b", kind.partition("*")[0])),
        dtype=_dtype(kind.partition("*")[0]),
    )


def _dtype(kind: str) -> str | None:
    """The dtype of a C type; None of void, and of types that programs define."""
    words = _QUALIFIERS.sub(" ", kind).replace("std::", "").split()
    if len(words) == 1 and words[0] in _NAMED:
        return _NAMED[words[0]]
    if len(words) == 1 and (vector := _VECTOR.fullmatch(words[0])):
        base = vector[1].replace("longlong", "long long")
        unsigned = base.startswith("u")
        words = [*(["unsigned"] if unsigned else []), *base.removeprefix("u").split()]
        if words in (["float"], ["double"]):
            return _NAMED[words[0]]
    if not words or not _WORDS.issuperset(words):
        return None
    bits = {"char": 8, "short": 16}.get(next((w for w in words if w in _SHORT), ""), 32)
    bits = 64 if "long" in words else bits
    return f"{'u' if 'unsigned' in words else ''}int{bits}"


_SHORT = ("char", "short")

# What a kernel calls the elements of an array, by dtype.
C_TYPES = {
    "float32": "float",
    "float64": "double",
    "bool": "bool",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
}
