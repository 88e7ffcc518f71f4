"""The base class of problems: members that the code of each op fills in.

The problems of the ops here are in the modules beside this one; whoever adds an op
derives its problem from the same class.
"""

from __future__ import annotations

import abc
from typing import Any, ClassVar


class Problem(abc.ABC):
    """A problem of an op; a frozen dataclass derives from it for each op.

    Attributes:
      op: name of the op.
      extents: names of the sizes that a config's merits vary with smoothly. Whatever
        else a problem has must be equal for one to tell something about another: a
        kernel's extent or a head's size changes the algorithm.
      only_between: whether measured sizes tell nothing about smaller and larger ones,
        as no model of the op's variants says how times go on.
    """

    __slots__ = ()

    op: ClassVar[str]
    extents: ClassVar[tuple[str, ...]]
    only_between: ClassVar[bool] = False

    @property
    @abc.abstractmethod
    def operand_dtypes(self) -> tuple[str, ...]:
        """Dtype names of the operands of its products, the left one's first."""

    @property
    def fused_operands(self) -> str | None:
        """XLA's work on operands while it reads them on GPUs, as a phrase.

        A kernel of ours reads what another one wrote, so that measurements of operands
        in memory tell nothing. None if nothing precedes the problem in its program.
        """
        return None

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Floating-point operations, multiply-adds counted twice."""

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """Fewest bytes moved through memory: operands read, results written."""

    @classmethod
    @abc.abstractmethod
    def examples(cls, dtype: str) -> dict[str, Any]:
        """Typical problems in a dtype, by what tells them apart, as the direction may.

        Doctor shows what variants say of them. The only one of an op is called "".
        """

    @abc.abstractmethod
    def to_json(self) -> dict[str, Any]:
        """The problem as plain data, ``op`` first: the key of the tuning database.

        A field that came later is left out where it has its default, so that answers
        from before keep their keys.
        """

    @classmethod
    @abc.abstractmethod
    def from_json(cls, data: dict[str, Any]) -> Any:
        """The inverse of ``to_json``; missing fields have their defaults."""

    def __repr__(self) -> str:
        """The problem as a line, of a dataclass that is made with ``repr=False``."""
        return str(self)
