"""The epilogue of a product as text: members of Traits, and words of its name."""

from __future__ import annotations

from tracea_jax.problem import Conv2dProblem, Epilogue, GemmProblem

CXX_TYPE = {"bfloat16": "tracea::bf16", "float16": "tracea::f16", "float32": "float"}
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
ACTIVATION = {
    "none": "kNone",
    "relu": "kRelu",
    "gelu": "kGelu",
    "gelu_exact": "kGeluExact",
    "silu": "kSilu",
}


def has_bias(epilogue: Epilogue) -> bool:
    return epilogue.bias != "none"


def name_parts(epilogue: Epilogue) -> tuple[str, ...]:
    """Steps of the epilogue, a word for each."""
    bias = {"none": "", "row": "bias", "batched_row": "bbias"}[epilogue.bias]
    joined = {"add": "res", "multiply": "mul", "derivative": "grad"}
    words = (
        bias + SHORT.get(epilogue.bias_dtype or "", ""),
        "" if epilogue.activation == "none" else epilogue.activation,
        f"{joined[epilogue.residual_op]}{SHORT.get(epilogue.residual_dtype or '', '')}"
        * epilogue.residual,
        "z" if epilogue.save_preactivation else "",
        "sums" if epilogue.column_sums else "",
    )
    return tuple(filter(None, words))


def traits(problem: GemmProblem | Conv2dProblem) -> str:
    """The members of Traits that an epilogue asks for, one to a line."""
    e = problem.epilogue
    flags = {
        "kHasBias": has_bias(e),
        "kBiasIsBatched": e.bias == "batched_row",
        "kHasResidual": e.residual,
        "kMultipliesResidual": e.residual_op == "multiply",
        "kDifferentiates": e.is_derivative,
        "kSumsColumns": e.column_sums,
        "kSavesPreactivation": e.save_preactivation,
    }
    return _members(e, problem.out, flags)


def convolution_traits(problem: Conv2dProblem) -> str:
    """The same of a convolution's epilogue."""
    e = problem.epilogue
    flags = {
        "kHasBias": has_bias(e),
        "kHasResidual": e.residual,
        "kSavesPreactivation": e.save_preactivation,
    }
    return _members(e, problem.out, flags)


def _members(epilogue: Epilogue, out: str, flags: dict[str, bool]) -> str:
    e = epilogue
    lines = (
        f"using ElementOut = {CXX_TYPE[out]};",
        f"using ElementBias = {CXX_TYPE[e.bias_dtype or out]};",
        f"using ElementResidual = {CXX_TYPE[e.residual_dtype or out]};",
        *(f"static constexpr bool {name} = {cxx(v)};" for name, v in flags.items()),
        "static constexpr auto kActivation = "
        f"tracea::Activation::{ACTIVATION[e.activation]};",
    )
    return "\n".join(f"  {line}" for line in lines)


def cxx(value: bool) -> str:
    return "true" if value else "false"
