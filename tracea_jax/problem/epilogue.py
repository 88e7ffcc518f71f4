"""The epilogue of a product, and the names that all problems share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

from tracea_jax.mistakes import name_of, shown, similar
from tracea_jax.typing import Activation

ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

BiasKind = Literal["none", "row", "batched_row"]
ResidualOp = Literal["add", "multiply", "derivative"]

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
    """Steps on the accumulator before it is stored, in this order.

    z = acc + bias;  y = activation(z) + residual;  one rounding to the output dtype.

    A convolution adds its residual before the activation, as residual networks do. A
    derivative, y = activation'(residual) * acc, is that of an earlier product's
    activation, at the z that was saved of it.

    Attributes:
      bias: "none"; "row", one vector of N entries; "batched_row", one for each batch.
      activation: one of ``ACTIVATIONS``; "gelu" is the tanh form.
      residual: whether an array of the output's shape joins last.
      residual_op: how it joins: "add"; "multiply", y = activation(z) * residual; or
        "derivative", without a bias.
      save_preactivation: whether z is a second result, in the output dtype (training).
      column_sums: whether the sums over all rows of a derivative, (n,) float32, are a
        second result: the gradient of the earlier product's bias.
      bias_dtype, residual_dtype: set only where they differ from the output's dtype.
    """

    bias: BiasKind = "none"
    activation: Activation = "none"
    residual: bool = False
    residual_op: ResidualOp = "add"
    save_preactivation: bool = False
    bias_dtype: str | None = None
    residual_dtype: str | None = None
    column_sums: bool = False

    def __post_init__(self) -> None:
        check_activation(self.activation)
        if self.column_sums and not self.is_derivative:
            raise ValueError("column_sums are of an epilogue with a derivative")
        if self.is_derivative and (self.bias != "none" or self.save_preactivation):
            raise ValueError("a derivative has neither a bias nor a z to save")

    @property
    def is_derivative(self) -> bool:
        """True if y is the activation's derivative at the residual, times acc."""
        return self.residual and self.residual_op == "derivative"

    @property
    def is_identity(self) -> bool:
        """True if the accumulator is only rounded and stored."""
        return self == Epilogue()

    def __str__(self) -> str:
        if self.is_derivative:
            at = f" at {self.residual_dtype}" if self.residual_dtype else ""
            return f"{self.activation}'{at}" + " &sums" * self.column_sums
        steps = [
            f"bias:{self.bias_dtype}" if self.bias_dtype else "bias",
            self.activation,
            {"add": "residual", "multiply": "multiplier"}[self.residual_op]
            + (f":{self.residual_dtype}" if self.residual_dtype else ""),
        ]
        taken = (self.bias != "none", self.activation != "none", self.residual)
        text = "+".join(s for s, t in zip(steps, taken, strict=True) if t)
        return text + (" &z" if self.save_preactivation else "") or "none"


def without_default_sums(data: dict[str, Any]) -> dict[str, Any]:
    """A problem as plain data, its epilogue without sums that it does not ask for.

    Answers are kept under names made of this data, from before there were sums.
    """
    epilogue = dict(data["epilogue"])
    if not epilogue["column_sums"]:
        del epilogue["column_sums"]
    return {**data, "epilogue": epilogue}


# What other libraries and papers call the same functions.
_SYNONYMS = {
    "gelu_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_erf": "gelu_exact",
    "swish": "silu",
    "linear": "none",
    "identity": "none",
}


def check_activation(name: Any) -> None:
    """Raises ValueError, with the name that may be meant, unless it is an activation.

    The name that is meant by a function is that of ``jax.nn``'s functions.
    """
    if isinstance(name, str) and name in ACTIVATIONS:
        return
    valid = f"it must be one of {', '.join(ACTIVATIONS)}"
    if (function := name_of(name)) is None:
        meant = _meant("none" if name is None else name)
        raise ValueError(f"activation={shown(name)} is unknown; {valid}{meant}")
    is_exact = getattr(name, "keywords", {}).get("approximate") is False
    if function == "gelu" and is_exact:
        function = "gelu_exact"
    raise ValueError(
        f"activation is a name, not {shown(name)}; {valid}"
        + (_meant(function, least=1.0) or "; apply any other one to the result")
    )


def _meant(name: Any, least: float = 0.6) -> str:
    return similar(_SYNONYMS.get(str(name).lower(), name), ACTIVATIONS, least)


def tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    if not isinstance(value, list | tuple):
        return value
    return tuple(map(tuples, cast("Iterable[Any]", value)))
