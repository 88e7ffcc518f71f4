"""conv2d_product: convolutions whose windows do not overlap, as one matrix product.

    forward       y = windows(x) @ w        rows are pixels of y
    input_grad    windows(dx) = dy @ w^T
    weight_grad   dw = windows(x)^T @ dy

Each entry of x is then in one window at most: 1 x 1 kernels of any stride, strides as
large as the kernel (patch embeddings), and kernels as large as the padded image. The
product is a problem of ``matmul``, which is planned on its own: one of our kernels with
the convolution's epilogue, or XLA's. Here is which product it is and when it is
expected to win; the views of the arrays are in ``ops.conv2d.product``. Callers: the
op's record (``ops.conv2d.op``), those views, and ``conv2d_cpu``.
"""

from __future__ import annotations

import dataclasses
import math

from tracea_jax.device import CpuDevice, CudaDevice, Device
from tracea_jax.problem import ITEMSIZE, Conv2dProblem, Epilogue, GemmProblem
from tracea_jax.problem.gemm import Layout
from tracea_jax.variants.base import Call, Inline
from tracea_jax.variants.gemm_cpu import GEMM_CPU
from tracea_jax.variants.gemm_sm80 import GEMM_SM80
from tracea_jax.variants.gemm_sm90 import GEMM_SM90
from tracea_jax.variants.gemm_sm90_prepared import GEMM_SM90_PADDED, GEMM_SM90_SPLIT
from tracea_jax.variants.space import Space

DTYPES = ("float32", "bfloat16", "float16")
PRECISIONS = ("default", "high", "highest")
_TILE_CHANNELS = 32  # columns of conv2d_cpu's register tile
_VECTOR = 8  # channels that cuDNN loads at once
_FEWEST_FLOPS = 2**32  # of the products of pixels that were measured
_FEWEST_SUMMED = 2**13  # pixels, of a gradient of weights
_KERNELS = (GEMM_SM90, GEMM_SM90_PADDED, GEMM_SM90_SPLIT, GEMM_SM80, GEMM_CPU)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProductConfig:
    """No fields: the product has the config of its own problem."""

    def __str__(self) -> str:
        return "-"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """Windows along an axis of the image.

    Attributes:
      size: of the axis.
      before: entries of padding in front of it; negative if it is cropped.
      count: of windows.
      taps: entries of a window that the kernel takes.
      step: entries from one window to the next, at least ``taps``.
    """

    size: int
    before: int
    count: int
    taps: int
    step: int

    @property
    def after(self) -> int:
        """Entries of padding that complete the last step; negative to crop."""
        return self.count * self.step - self.size - self.before

    @property
    def is_all(self) -> bool:
        """Returns whether the windows are the axis as it is, each entry one."""
        return (self.before, self.after, self.step) == (0, 0, 1)


def windows_of(problem: Conv2dProblem) -> tuple[Windows, Windows]:
    """The windows of rows and of columns of x."""
    p = problem
    rows, columns = (
        Windows(
            size=size,
            before=before,
            count=count,
            taps=taps,
            step=stride if count > 1 else taps,
        )
        for size, (before, _), count, taps, stride in zip(
            (p.height, p.width),
            p.padding,
            p.out_size,
            (p.kernel_height, p.kernel_width),
            p.strides,
            strict=True,
        )
    )
    return rows, columns


def is_pointwise(problem: Conv2dProblem) -> bool:
    """Returns whether the windows are the pixels of x as they lie in memory."""
    return all(axis.is_all for axis in windows_of(problem))


def why_no_product(problem: Conv2dProblem) -> str | None:
    """Why the convolution is not one product, or None."""
    p = problem
    if p.groups != 1:
        return f"it has {p.groups} groups; the product is of one"
    if 0 in p.elements:
        return "its arrays are empty"
    kernel = (p.kernel_height, p.kernel_width)
    if any(k > 1 and d > 1 for k, d in zip(kernel, p.dilation, strict=True)):
        return "its kernel is dilated, so that windows have gaps"
    if any(axis.taps > axis.step for axis in windows_of(problem)):
        text = "{}x{}".format
        return (
            f"its windows overlap: the kernel is {text(*kernel)} and the stride "
            f"{text(*p.strides)}"
        )
    return None


def product_of(problem: Conv2dProblem) -> GemmProblem:
    """The product that the convolution is; see ``why_no_product``."""
    p = problem
    pixels = p.batch * math.prod(p.out_size)
    depth = p.kernel_height * p.kernel_width * p.in_channels
    wide = p.out_channels
    hwio = p.layout == "nhwc"
    layout: Layout
    if p.direction == "forward":
        m, n, k, layout = pixels, wide, depth, "nn" if hwio else "nt"
    elif p.direction == "input_grad":
        m, n, k, layout = pixels, depth, wide, "nt" if hwio else "nn"
    else:
        m, n = (depth, wide) if hwio else (wide, depth)
        k, layout = pixels, "tn"
    return GemmProblem(
        m=m,
        n=n,
        k=k,
        lhs=p.lhs,
        rhs=p.rhs,
        out=p.out,
        layout=layout,
        precision=p.precision,
        epilogue=product_epilogue(p.epilogue),
    )


def product_epilogue(epilogue: Epilogue) -> Epilogue:
    """The part of a convolution's epilogue that the product applies.

    A residual joins a product after its activation: one that comes before it leaves the
    activation to XLA.
    """
    if not (epilogue.residual and epilogue.activation != "none"):
        return epilogue
    return dataclasses.replace(epilogue, activation="none", save_preactivation=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Conv2dAsProduct:
    """The variant conv2d_product; for its methods see ``variants.base``."""

    name: str = "conv2d_product"
    config_type: type = ProductConfig
    implementation: str | None = None
    sources: tuple[str, ...] = tuple(s for v in _KERNELS for s in v.sources)

    def why_not(self, problem: Conv2dProblem, device: Device) -> str | None:
        if not isinstance(device, CpuDevice | CudaDevice):
            return f"it runs on CPUs and NVIDIA GPUs; the device is {device.platform}"
        for what, dtype in (("operands", problem.lhs), ("output", problem.out)):
            if dtype not in DTYPES:
                return f"{what} of dtype {dtype}; it takes {', '.join(DTYPES)}"
        if problem.lhs != problem.rhs:
            return (
                f"operands must share a dtype; they are {problem.lhs} and {problem.rhs}"
            )
        if problem.precision not in PRECISIONS:
            return f"precision {problem.precision} names an algorithm only XLA has"
        epilogue = problem.epilogue
        if epilogue.residual and epilogue.activation not in ("none", "relu"):
            return (
                f"its residual is added before {epilogue.activation}, which would take "
                "it rounded"
            )
        return why_no_product(problem)

    def parts(self, problem: Conv2dProblem) -> tuple[GemmProblem, ...]:
        return () if why_no_product(problem) else (product_of(problem),)

    def check(
        self, problem: Conv2dProblem, config: ProductConfig, device: Device
    ) -> None:
        return None

    def space(self, problem: Conv2dProblem, device: Device) -> Space:
        return Space.of(ProductConfig())

    def heuristic(self, problem: Conv2dProblem, device: Device) -> ProductConfig:
        return ProductConfig()

    def expects_to_win(self, problem: Conv2dProblem, device: Device) -> bool:
        if isinstance(device, CudaDevice):
            return _wins_on_cuda(problem, device)
        return _wins_on_cpu(problem, device)

    def call(
        self, problem: Conv2dProblem, config: ProductConfig, device: Device
    ) -> Call:
        return Inline(rule="product")


CONV2D_PRODUCT = Conv2dAsProduct()


def _wins_on_cuda(problem: Conv2dProblem, device: CudaDevice) -> bool:
    """Returns whether the product is expected to beat cuDNN's convolution.

    By ``conv2d.json`` of an H100 patches of 3 channels are 11 times faster as products,
    and their weights' gradients 3 times; where channels fill its vectors, cuDNN saves
    the copies of windows. Pixels with a bias are 1.02 to 1.18 times faster.
    Gradients of weights gain where they sum over many pixels, but not always with a
    further pass over the result; strided ones lose, for the copy.
    """
    p = problem
    if max(p.kernel_height, p.kernel_width) > 1:
        return p.in_channels % _VECTOR != 0
    if p.epilogue.bias_dtype is not None:
        # XLA's product would leave its result in the bias's dtype, for a further pass.
        product = product_of(p)
        if GEMM_SM90.why_not(product, device):
            return False
        if not GEMM_SM90.expects_to_win(product, device):
            return False
    return (
        device.capability == (9, 0)
        and ITEMSIZE[p.lhs] == 2 == ITEMSIZE[p.out]
        and p.layout == "nhwc"
        and (p.direction != "weight_grad" or product_of(p).k >= _FEWEST_SUMMED)
        and is_pointwise(p)
        and product_epilogue(p.epilogue) == p.epilogue
        and p.flops >= _FEWEST_FLOPS
    )


def _wins_on_cpu(problem: Conv2dProblem, device: Device) -> bool:
    """Returns whether the product is expected to beat both conv2d_cpu and XLA.

    conv2d_cpu reads the windows where they are, which is the better way to compute a
    forward convolution. Of the gradient of x it fills tiles of 32 channels, and takes
    the taps of each pixel one by one. Of the gradient of weights it packs windows in
    small pieces, and one copy of them all is faster. It takes no NCHW images, and XLA
    widens those of 16 bits to float32; only there the transposes cost more than they
    save, if nothing but pixels is multiplied.
    """
    p, product = problem, product_of(problem)
    if GEMM_CPU.why_not(product, device) or GEMM_CPU.doubt(product, device):
        return False
    if device.arch == "avx2" and product.lhs == "bfloat16":
        return False  # copies of windows were not measured there
    if p.layout == "nchw":
        is_slow = p.direction == "forward" and p.lhs == "float32" and is_pointwise(p)
        return not (is_slow or p.epilogue.residual)
    if p.direction == "forward" or is_pointwise(p):
        return False
    is_strided = (p.kernel_height, p.kernel_width) == (1, 1)
    if p.direction == "weight_grad" and not is_strided:
        return device.arch == "avx2"
    if is_strided:
        return True
    return p.in_channels < _TILE_CHANNELS or p.out_size == (1, 1)
