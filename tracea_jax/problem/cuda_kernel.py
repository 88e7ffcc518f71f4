"""A call of a user's CUDA kernel as a problem: which kernel, on arrays of which shapes.

What is needed to launch the kernel travels along as ``launcher``, which no key has; see
``ops.cuda_kernel``. Problems of the ops of this package are in the modules beside this.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any, ClassVar

from tracea_jax.problem.base import Problem

Array = tuple[tuple[int, ...], str]  # shape and dtype

# Launchers of this process, by ``CudaKernelProblem.key``: a problem that is read from a
# file has none of its own.
_launchers: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CudaKernelProblem(Problem):
    """A call of a CUDA kernel that a user wrote.

    Attributes:
      kernel: its name.
      code: 16 hexadecimal digits of its source and of how it is launched.
      inputs, outputs: shape and dtype of each array.
      scalars: (name, text) of each number that a call gives.
      launcher: what the variants ask; None if the kernel is unknown to this process.
    """

    op: ClassVar[str] = "cuda_kernel"
    extents: ClassVar[tuple[str, ...]] = ()

    kernel: str
    code: str
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    scalars: tuple[tuple[str, str], ...] = ()
    launcher: Any = dataclasses.field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.launcher is not None:
            _launchers.setdefault(self.key, self.launcher)

    @property
    def key(self) -> str:
        """The key of the problem's launchers in this process."""
        return f"{self.kernel} {self.code} {self.inputs} {self.outputs} {self.scalars}"

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return tuple(dtype for _, dtype in self.inputs or self.outputs)

    @property
    def flops(self) -> int:
        return 0  # only the user knows

    @property
    def bytes(self) -> int:
        return sum(_bytes(array) for array in (*self.inputs, *self.outputs))

    @classmethod
    def examples(cls, dtype: str) -> dict[str, CudaKernelProblem]:
        array = ((1024,), dtype)
        example = cls(
            kernel="kernel",
            code="0" * 16,
            inputs=(array,),
            outputs=(array,),
            scalars=(),
        )
        return {"": example}

    def to_json(self) -> dict[str, Any]:
        def plain(arrays: tuple[Array, ...]) -> list[Any]:
            return [[list(shape), dtype] for shape, dtype in arrays]

        return {
            "op": self.op,
            "kernel": self.kernel,
            "code": self.code,
            "inputs": plain(self.inputs),
            "outputs": plain(self.outputs),
            "scalars": [list(scalar) for scalar in self.scalars],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CudaKernelProblem:
        def arrays(plain: Any) -> tuple[Array, ...]:
            return tuple((tuple(shape), dtype) for shape, dtype in plain)

        problem = cls(
            kernel=data["kernel"],
            code=data["code"],
            inputs=arrays(data["inputs"]),
            outputs=arrays(data["outputs"]),
            scalars=tuple((name, value) for name, value in data.get("scalars", ())),
        )
        return dataclasses.replace(problem, launcher=_launchers.get(problem.key))

    def __str__(self) -> str:
        def texts(arrays: tuple[Array, ...]) -> str:
            return ", ".join(f"{d}[{','.join(map(str, s))}]" for s, d in arrays)

        numbers = ", ".join(f"{name}={value}" for name, value in self.scalars)
        given = ", ".join(filter(None, (texts(self.inputs), numbers)))
        return f"cuda_kernel {self.kernel}({given}) -> {texts(self.outputs)}"


def _bytes(array: Array) -> int:
    shape, dtype = array
    digits = "".join(c for c in dtype.partition("_")[0] if c.isdecimal())
    bits = int(digits[:3] or 8) if dtype != "bool" else 8
    return math.prod(shape) * max(bits, 8) // 8
