"""What follows a product before it is stored, and the names all problems share."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

Activation = Literal["none", "relu", "gelu", "gelu_exact", "silu"]
ACTIVATIONS: tuple[str, ...] = get_args(Activation)

BiasKind = Literal["none", "row", "batched_row"]
ResidualOp = Literal["add", "multiply"]

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "bfloat16x3": 6,  # a float32 in three parts, as some kernels take it
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to the accumulator before it is stored, in this order.

    z = acc + bias;  y = activation(z) + residual;  one rounding to the output dtype.

    A convolution adds its residual before the activation, as residual networks do.

    Attributes:
      bias: "none"; "row", one vector of N entries; "batched_row", one for each batch.
      activation: one of ``ACTIVATIONS``; "gelu" is the tanh form.
      residual: whether an array of the output's shape joins last.
      residual_op: how it joins: "add", or "multiply", y = activation(z) * residual.
      save_preactivation: whether z is a second result, in the output dtype (training).
      bias_dtype, residual_dtype: set only where they differ from the output's dtype.
    """

    bias: BiasKind = "none"
    activation: Activation = "none"
    residual: bool = False
    residual_op: ResidualOp = "add"
    save_preactivation: bool = False
    bias_dtype: str | None = None
    residual_dtype: str | None = None

    def __post_init__(self) -> None:
        check_activation(self.activation)

    @property
    def is_identity(self) -> bool:
        """True if the accumulator is only rounded and stored."""
        return self == Epilogue()

    def __str__(self) -> str:
        steps = [
            f"bias:{self.bias_dtype}" if self.bias_dtype else "bias",
            self.activation,
            {"add": "residual", "multiply": "multiplier"}[self.residual_op]
            + (f":{self.residual_dtype}" if self.residual_dtype else ""),
        ]
        taken = (self.bias != "none", self.activation != "none", self.residual)
        text = "+".join(s for s, t in zip(steps, taken, strict=True) if t)
        return text + (" &z" if self.save_preactivation else "") or "none"


def check_activation(name: str) -> None:
    if name not in ACTIVATIONS:
        raise ValueError(
            f"activation={name!r} is unknown; it must be one of "
            + ", ".join(ACTIVATIONS)
        )


def tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value
