"""conv2d_weights_sm80 as text: partial sums of the gradient of a convolution's weights.

Their product is in ``emit.conv_product``; pixels are shared by parts, each a product of
its own, whose sums are added later.
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice
from tracea_jax.emit import conv_product as products
from tracea_jax.emit import epilogue as epilogues
from tracea_jax.emit import gemm_sm80, sources
from tracea_jax.emit.conv_axes import walks
from tracea_jax.emit.epilogue import SHORT
from tracea_jax.emit.gemm_sm80 import GemmSm80Config
from tracea_jax.emit.kernel import Kernel, Pointer, Scalar
from tracea_jax.problem import Conv2dProblem, GemmProblem

_SIZES = ("channels", "group", "images", "groups", "parts", "height", "width", "depth")
_OF_RESULT = 2  # of the sizes


def shared_product(problem: Conv2dProblem, parts: int) -> GemmProblem:
    """The batch of products that blocks compute: of each group and each part."""
    asked = products.product(problem)
    return dataclasses.replace(asked, batch=asked.batch * parts, k=-(-asked.k // parts))


def kernel(
    problem: Conv2dProblem, config: GemmSm80Config, parts: int, device: CudaDevice
) -> Kernel:
    """The kernel that leaves partial sums, (parts, R, S, C / groups, K) of float32."""
    p = problem
    asked = products.product(p)
    (rows,), (columns,) = walks(p)
    sizes = (
        *(p.out_channels, p.out_channels // p.groups),
        *(p.batch, p.groups, parts, p.height, p.width, p.in_channels // p.groups),
    )
    return Kernel(
        entry=_entry(p, config),
        source=_source(p, config),
        headers=sources.headers("conv2d_weights_sm80.cuh"),
        arch=device.arch,
        grid=(parts * gemm_sm80.tile_count(asked, config), 1, 1),
        block=(config.threads, 1, 1),
        smem_bytes=gemm_sm80.smem_bytes(asked, config),
        params=(
            *(Pointer(operand=i) for i in range(3)),
            *(Scalar(value=size) for size in sizes),
            *products.axis_params(rows),
            *products.axis_params(columns),
        ),
    )


def _entry(problem: Conv2dProblem, config: GemmSm80Config) -> str:
    """Name of the kernel; it depends neither on shapes nor on the number of parts."""
    choices = str(config).replace(" ", "_")
    return f"conv2d_weights_sm80_{SHORT[problem.lhs]}_{choices}"


def _source(problem: Conv2dProblem, config: GemmSm80Config) -> str:
    entry = _entry(problem, config)
    sums = dataclasses.replace(problem, out="float32")
    rows, h = products.axis_text("h")
    columns, w = products.axis_text("w")
    sizes = [f"int {name}" for name in _SIZES]
    parameters = ", ".join((*sizes, *rows, *columns))
    finish = f"{{partial, nullptr, nullptr, nullptr, {', '.join(_SIZES[:_OF_RESULT])}}}"
    fields = ", ".join(("x", "dy", finish, *_SIZES[_OF_RESULT:], h, w))
    return f"""\
// conv2d_weights_sm80 | {problem.lhs} | {config}
#include "conv2d_weights_sm80.cuh"

namespace {{
struct Traits {{
{gemm_sm80.tile_traits(products.product(problem), config)}
{epilogues.convolution_traits(sums)}
}};
}}  // namespace

extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{entry}(const void* x, const void* dy, void* partial, {parameters}) {{
  tracea::conv2d_weights_sm80<Traits>({{{fields}}});
}}
"""
