"""cudnn: the flash attention of cuDNN, called through XLA's own custom calls.

Here is which problems cuDNN can run and is expected to win; the calls are written in
``ops.attention.cudnn``, which also uses ``masking``. The other caller is the op's
record (``ops.attention.op``).
"""

from __future__ import annotations

import dataclasses

from tracea_jax.device import CudaDevice, Device
from tracea_jax.problem import AttentionProblem
from tracea_jax.variants.attention_mask import (
    BY_MASK,
    is_said_by_mask,
    refuses_extras,
)
from tracea_jax.variants.base import Call, Config, Inline
from tracea_jax.variants.space import Space

DTYPES = ("bfloat16", "float16")
_FEWEST_SCORES = 128 * 128  # of a head; below, XLA's few small kernels are as fast
_FEWEST_QUERIES = 64  # fewer queries do not fill a tile, see ``_decodes_faster``
_FEWEST_KEYS = 100  # for few queries; fewer keys were not measured
# Queries if heads share keys: cuDNN reads shared keys once for each head.
_FEWEST_SHARING = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CudnnConfig:
    """No fields: cuDNN chooses its own kernels."""

    def __str__(self) -> str:
        return "-"


def masking(problem: AttentionProblem) -> tuple[bool, int | None]:
    """(causal, window): the problem's position mask in cuDNN's terms.

    Query i sees keys j <= i if causal, and keys j > i - window if there is a window. A
    limit that excludes no key is dropped.

    Raises:
      ValueError: if cuDNN has no such mask.
    """
    p = problem
    if p.aligned_at_end:
        return False, None  # its mask says it
    if p.window is None:
        return p.is_causal, None
    left, right = p.window
    if left < 0 or right < 0:
        raise ValueError(f"window {p.window} with a negative side")
    causal = p.is_causal or right == 0
    limited = left < p.q_len - 1
    if not causal and (limited or right < p.kv_len - 1):
        raise ValueError(
            f"window {p.window} looks ahead; it takes windows (left, 0), or causal ones"
        )
    return causal, left + 1 if limited else None


@dataclasses.dataclass(frozen=True, slots=True)
class AttentionCudnn:
    """The variant cudnn; for its methods see ``variants.base.Variant``."""

    name: str = "cudnn"
    config_type: type = CudnnConfig
    sources: tuple[str, ...] = ()

    def why_not(self, problem: AttentionProblem, device: Device) -> str | None:
        return (
            _device_refuses(problem, device)
            or _shape_refuses(problem)
            or refuses_extras(problem, *BY_MASK)
            or _bias_refuses(problem)
            or _window_refuses(problem)
        )

    def check(self, problem: AttentionProblem, config: Config, device: Device) -> None:
        return None

    def space(self, problem: AttentionProblem, device: Device) -> Space:
        return Space.of(CudnnConfig())

    def heuristic(self, problem: AttentionProblem, device: Device) -> CudnnConfig:
        return CudnnConfig()

    def expects_to_win(self, problem: AttentionProblem, device: Device) -> bool:
        if problem.q_len < _FEWEST_QUERIES:
            return _decodes_faster(problem)
        return problem.q_len * problem.kv_len >= _FEWEST_SCORES

    def call(self, problem: AttentionProblem, config: Config, device: Device) -> Call:
        return Inline(rule="cudnn")

    def may_vary(
        self, problem: AttentionProblem, config: Config, device: Device
    ) -> str | None:
        if problem.direction == "backward":
            return "cuDNN adds up the gradient of the queries in no fixed order"
        return "cuDNN does not say in which order its kernels add up"


def _decodes_faster(problem: AttentionProblem) -> bool:
    """Returns whether cuDNN is expected to be faster than XLA for few queries.

    By ``choices_decode.json`` of an H200 cuDNN was 1.2 to 5 times faster for a single
    query, and up to 5 times faster for several queries. There were two exceptions:
    several queries of a batch of one, whose operands XLA need not transpose, and very
    few queries whose heads share keys. For gradients cuDNN was sometimes faster and
    sometimes slower. Problems with a bias or a mask were not measured.
    """
    p = problem
    if p.direction == "backward" or p.kv_len < _FEWEST_KEYS:
        return False
    if p.bias or _has_mask(p) or _masks_positions(p):
        return False
    many = p.heads == p.kv_heads or p.q_len >= _FEWEST_SHARING
    return p.q_len == 1 or (p.batch > 1 and many)


def _device_refuses(problem: AttentionProblem, device: Device) -> str | None:
    if not isinstance(device, CudaDevice):
        return f"it runs on NVIDIA GPUs; the device is {device.platform}"
    if device.capability < (8, 0):
        return f"it needs sm_80 or newer; the device is {device.arch}"
    if problem.dtype not in DTYPES:
        return f"operands of dtype {problem.dtype}; it takes {', '.join(DTYPES)}"
    # Only Hopper has kernels of both directions for heads wider than 128.
    widest = 256 if device.capability[0] == 9 else 128
    if problem.head_dim % 8 or not 0 < problem.head_dim <= widest:
        return (
            f"head_dim={problem.head_dim}; on {device.arch} it takes multiples of 8 up "
            f"to {widest}"
        )
    return None


def _shape_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    sizes = (p.batch, p.q_len, p.kv_len, p.heads, p.kv_heads)
    if not all(sizes):
        return "there is nothing to compute"
    if p.q_len == 1 and _masks_positions(p):
        return "a single query with a causal mask or a window"
    if p.direction == "backward" and p.q_len == p.kv_len == 1:
        return "a single query and a single key have no backward kernel"
    return None


def _masks_positions(problem: AttentionProblem) -> bool:
    """Returns whether a query's position limits the keys it sees."""
    p = problem
    return (p.is_causal or p.window is not None) and not p.aligned_at_end


def _has_mask(problem: AttentionProblem) -> bool:
    """Returns whether cuDNN is given a mask, as a bias."""
    return problem.mask is not None or is_said_by_mask(problem)


def _bias_refuses(problem: AttentionProblem) -> str | None:
    p = problem
    if p.bias and p.bias_dtype != p.dtype:
        return (
            f"a bias of dtype {p.bias_dtype}; it reads the bias in the operands' "
            f"dtype, {p.dtype}, and rounding would change the result"
        )
    odd = p.q_len % 2 or p.kv_len % 2
    if p.direction == "backward" and (p.bias or _has_mask(p)) and odd:
        return (
            f"lengths {p.q_len} and {p.kv_len}; the backward pass with a bias or a "
            "mask needs even ones"
        )
    return None


def _window_refuses(problem: AttentionProblem) -> str | None:
    try:
        _, window = masking(problem)
    except ValueError as e:
        return str(e)
    if window is None:
        return None
    if problem.bias or _has_mask(problem):
        return "a window together with a bias or a mask"
    if problem.q_len > problem.kv_len:
        return f"a window with more queries, {problem.q_len}, than keys"
    return None


ATTENTION_CUDNN = AttentionCudnn()
