"""A whole program as a problem: which of its sites run on our ops.

It is the key under which the race of a program is remembered. No program calls it, and
no kernel computes it: see ``variants.program``.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, ClassVar, cast

from tracea_jax.problem.base import Problem

_HASH = re.compile(r"[0-9a-f]{32}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ProgramProblem(Problem):
    """A function that ``transform`` was given, at arguments of some shapes.

    Attributes:
      jaxpr: 32 hexadecimal digits of what ``transform`` makes of it when every site is
        taken; see ``rewrite.fingerprint``.
      ops: the ops whose sites are taken.
      after_grad: as in ``transform``.
      jax: the version of JAX, which decides what is fused around our calls.
      deterministic: whether nothing runs whose bits may differ from run to run.
    """

    op: ClassVar[str] = "program"
    extents: ClassVar[tuple[str, ...]] = ()

    jaxpr: str
    ops: tuple[str, ...]
    after_grad: bool = False
    jax: str = ""
    deterministic: bool = False

    def __post_init__(self) -> None:
        if _HASH.fullmatch(self.jaxpr) is None:
            raise ValueError(f"jaxpr={self.jaxpr!r} must be 32 hexadecimal digits")

    @property
    def operand_dtypes(self) -> tuple[str, ...]:
        return ()

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return 0

    @classmethod
    def examples(cls, dtype: str) -> dict[str, ProgramProblem]:
        return {}

    def to_json(self) -> dict[str, Any]:
        fields = {**dataclasses.asdict(self), "ops": list(self.ops)}
        if not self.deterministic:
            del fields["deterministic"]  # keys of records are older than the field
        return {"op": self.op, **fields}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ProgramProblem:
        fields = {name: value for name, value in data.items() if name != "op"}
        if isinstance(ops := fields.get("ops"), list):
            fields["ops"] = tuple(cast("list[Any]", ops))
        return cls(**fields)

    def __str__(self) -> str:
        when = " after differentiation" if self.after_grad else ""
        ops = ", ".join(self.ops)
        how = ", deterministic" * self.deterministic
        return f"program {self.jaxpr[:12]} of {ops}{when}, jax {self.jax}{how}"
