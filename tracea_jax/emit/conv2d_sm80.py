"""conv2d_sm80 as text: the kernel of a problem and a config, and its parameters.

The convolution is a product, see ``emit.conv_product``, and has the configs and tiles
of ``emit.gemm_sm80``.
"""

from __future__ import annotations

import itertools

from tracea_jax.device import CudaDevice
from tracea_jax.emit import conv_product as products
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import gemm_sm80, sources
from tracea_jax.emit.conv_axes import source_channels, source_size, walks
from tracea_jax.emit.epilogue import SHORT, cxx
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.kernel import Kernel, Param, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem

_SIZES = (
    *("channels", "group", "rows", "columns"),  # of the result
    *("images", "groups", "height", "width", "depth", "kernel_width"),
)
_OF_RESULT = 4  # of the sizes


def _is_gradient(problem: Conv2dProblem) -> bool:
    return problem.direction == "input_grad"


def scatters(problem: Conv2dProblem) -> bool:
    """Returns whether neighbours among the pixels of a tile are none in memory."""
    return _is_gradient(problem) and problem.strides != (1, 1)


def tile_count(problem: Conv2dProblem, config: GemmSm80Config) -> int:
    """Tiles, and blocks, of all phases and groups."""
    rows, columns = walks(problem)
    m_tiles = sum(
        -(-problem.batch * h.extent * w.extent // config.tile_m)
        for h, w in itertools.product(rows, columns)
    )
    n_tiles = -(-products.channels_out(problem) // problem.groups // config.tile_n)
    return m_tiles * n_tiles * problem.groups


def kernel(
    problem: Conv2dProblem, config: GemmSm80Config, device: CudaDevice
) -> Kernel:
    """The kernel that computes y or dx with this config.

    Operands are lhs, rhs, then bias and residual if the epilogue has them; the results
    are the output, then the preactivation if it is saved. Sizes of images and kernels
    stay out of the source: one cubin serves all.
    """
    return Kernel(
        entry=entry_name(problem, config),
        source=_source(problem, config),
        headers=sources.headers("conv2d_sm80.cuh"),
        arch=device.arch,
        grid=(tile_count(problem, config), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=gemm_sm80.smem_bytes(products.product(problem), config),
        params=_params(problem),
    )


def entry_name(problem: Conv2dProblem, config: GemmSm80Config) -> str:
    """Name of the kernel, readable in a profiler; it does not depend on shapes."""
    rows, columns = walks(problem)
    words = (
        "conv2d_sm80",
        "dgrad" if _is_gradient(problem) else "fprop",
        SHORT[problem.lhs],
        SHORT[problem.out],
        f"phases{len(rows)}x{len(columns)}" if scatters(problem) else "",
        *epilogues.name_parts(problem.epilogue),
        str(config).replace(" ", "_"),
    )
    return "_".join(filter(None, words))


def _params(problem: Conv2dProblem) -> tuple[Param, ...]:
    """The arguments of the entry point, in the order of ``_signature``."""
    p, epilogue = problem, problem.epilogue
    operands = 3 + epilogues.has_bias(epilogue) + epilogue.residual
    channels = products.channels_out(p)
    sizes = (
        *(channels, channels // p.groups),
        *((p.height, p.width) if _is_gradient(p) else p.out_size),
        *(p.batch, p.groups, *source_size(p), source_channels(p) // p.groups),
        p.kernel_width,
    )
    axes = (products.axis_params(walk) for walk in itertools.chain(*walks(p)))
    return (
        *(Pointer(operand=i) for i in range(operands + epilogue.save_preactivation)),
        *(Scalar(value=size) for size in sizes),
        *itertools.chain.from_iterable(axes),
    )


def _source(problem: Conv2dProblem, config: GemmSm80Config) -> str:
    """The translation unit: Traits and one entry."""
    rows, columns = walks(problem)
    types = f"{problem.lhs} -> {problem.out} {problem.direction}"
    parameters, arguments = _signature(problem)
    return f"""\
// conv2d_sm80 | {types}, epilogue {problem.epilogue} | {config}
#include "conv2d_sm80.cuh"

namespace {{
struct Traits {{
{gemm_sm80.tile_traits(products.product(problem), config)}
  static constexpr bool kTransposesWeights = {cxx(_is_gradient(problem))}, \
kScatters = {cxx(scatters(problem))};
  static constexpr int kPhasesH = {len(rows)}, kPhasesW = {len(columns)};
{epilogues.convolution_traits(problem)}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry_name(problem, config)}({parameters}) {{
  tracea::conv2d_sm80<Traits>({{{arguments}}});
}}
"""


def _signature(problem: Conv2dProblem) -> tuple[str, str]:
    """Parameters of the entry, and the fields of ``ConvSm80Params`` made of them."""
    epilogue = problem.epilogue
    inputs = ["source", "weights", *["bias"] * epilogues.has_bias(epilogue)]
    inputs += ["residual"] * epilogue.residual
    results = ["out", *["z"] * epilogue.save_preactivation]
    parameters = [f"const void* {name}" for name in inputs]
    parameters += [f"void* {name}" for name in results]
    parameters += [f"int {name}" for name in _SIZES]
    z, bias, residual = (
        name if name in inputs + results else "nullptr"
        for name in ("z", "bias", "residual")
    )
    finish = f"{{out, {z}, {bias}, {residual}, {', '.join(_SIZES[:_OF_RESULT])}}}"
    fields = ["source", "weights", finish, *_SIZES[_OF_RESULT:]]
    for name, axis in zip("hw", walks(problem), strict=True):
        texts = [products.axis_text(f"{name}{i}") for i in range(len(axis))]
        parameters += itertools.chain.from_iterable(names for names, _ in texts)
        fields.append(f"{{{', '.join(text for _, text in texts)}}}")
    return ", ".join(parameters), ", ".join(fields)
