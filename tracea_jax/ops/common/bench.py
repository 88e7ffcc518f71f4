"""The bench: prepares and verifies choices of one problem for the tuner.

An op's part of it, the ``Workload``, is in ``ops/<op>/workload``, and the op's record
gives the tuner an ``OpBench`` of it. How prepared choices are timed is in
``tuning.measure``. Callers: the workloads and the records.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tracea_jax import roofline, variants
from tracea_jax.device import CpuDevice, CudaDevice, Device, backend_of
from tracea_jax.ops.common.building import unknown_dtype
from tracea_jax.ops.common.kernel_time import ProfileError, kernel_times
from tracea_jax.ops.common.typed import (
    Arrays,
    block_until_ready,
    device_put,
    eval_shape,
    finfo,
    full,
    jit,
    lax,
    local_devices,
    zeros,
)
from tracea_jax.policy import Choice
from tracea_jax.problem import Problem
from tracea_jax.tuning import measure

_MAX_INPUT_SETS = 32
_MOST_FROM_NUMPY = 1 << 20  # numbers, in some 10 ms
_MIN_CALL_US = 100.0  # of GPU work in a call, so that dispatching it takes less time
_MIN_CALL_SETS = 8  # input sets of a call where the time of the work is unknown
_MEMORY_SHARE = 8  # all input sets together take 1/8 of a GPU's memory at most
_MIN_CPU_CACHE_BYTES = 16 << 20  # assumed where the system reports no cache size
_MAX_CPU_CACHE_BYTES = 128 << 20  # a virtual machine may be told of a cache it shares


Judge = Callable[[list[jax.Array]], float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Execution and verification of one op's problems.

    Attributes:
      check: (problem); raises ValueError if the problem cannot be run at all.
      operands: (problem, seed) -> random operands, in the primitive's order.
      execute: (*operands, problem=, choice=) -> results, forced to one choice.
      ragged: (problem) -> a small problem of the same kind whose sizes no tile divides.
      judge: (problem, device, operands, seed) -> (results) -> the largest error of the
        results, in units of the error that rounding allows; infinite if a result is not
        finite.
    """

    check: Callable[[Any], None]
    operands: Callable[[Any, int], list[jax.Array]]
    execute: Callable[..., list[jax.Array]]
    ragged: Callable[[Any], Any]
    judge: Callable[[Any, Device, list[jax.Array], int], Judge]


@dataclasses.dataclass(frozen=True, slots=True)
class OpBench:
    """``measure.Bench`` for one problem on one local device."""

    workload: Workload
    problem: Problem
    device: Device
    # Shared by all choices and made when first needed: inputs, the buffer that flushes
    # caches, and the references that results are compared with.
    _shared: dict[Any, Any] = dataclasses.field(
        default_factory=dict[Any, Any], init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        self.workload.check(self.problem)

    def prepare(self, choice: Choice) -> measure.Run:
        """Compiles the choice for random inputs; see ``measure.Bench``."""
        sets = self._inputs()
        run = self._run(self.problem, choice)

        def first(x: Arrays) -> jax.Array:
            return run(*x)[0]

        one = _compiled(first, sets[0])
        many = None if len(sets) == 1 else _InTurn.of(run, sets)
        return _Executions(one=functools.partial(one, sets[0]), many=many)

    def flush(self) -> None:
        """Writes a buffer of twice the last cache's size, which replaces its contents.

        The buffer is read, too: stores alone may bypass the caches of a CPU.
        """
        # The call deletes the buffer, which is donated. Popping the buffer first keeps
        # a deleted one from staying in ``_shared`` after an interrupt.
        write, buffer = self._shared.pop("flush", None) or self._flusher()
        self._shared["flush"] = write, block_until_ready(write(buffer))

    def kernel_times(
        self, runs: Mapping[Any, measure.Run], rounds: int
    ) -> dict[Any, list[float]]:
        """Kernel times on one input set; empty on a CPU, or without a profiler."""
        if not isinstance(self.device, CudaDevice):
            return {}
        calls = {c: run.one for c, run in runs.items() if isinstance(run, _Executions)}
        try:
            return kernel_times(calls, rounds)
        except ProfileError as e:
            warnings.warn(f"kernel times are not known: {e}", stacklevel=2)
            return {}

    def _flusher(self) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        size = 2 * _cache_bytes(self.device)
        with jax.default_device(self._jax_device):
            buffer = zeros(size // 4, jnp.float32)
        write = jit(_one_more, donate_argnums=0).lower(buffer).compile()
        return write, buffer

    def _inputs(self) -> list[list[jax.Array]]:
        """The input sets that a compiled call works through; all choices share them."""
        if "inputs" not in self._shared:
            sets = [self._operands(self.problem, seed) for seed in range(self._sets)]
            self._shared["inputs"] = sets
        return self._shared["inputs"]

    @property
    def _sets(self) -> int:
        """Number of input sets.

        On a GPU there are so many that they exceed the L2 cache and that their work
        takes longer than dispatching the call. On a CPU there is one: calls are cheap,
        and caches stay warm.
        """
        if not isinstance(self.device, CudaDevice):
            return 1
        floor_us = roofline.floor_us(self.problem, self.device)
        busy = math.ceil(_MIN_CALL_US / floor_us) if floor_us else _MIN_CALL_SETS
        each_bytes = max(1, self.problem.bytes)
        cold = 1 + 2 * self.device.l2_bytes // each_bytes
        room = self.device.memory_bytes // _MEMORY_SHARE // each_bytes
        return max(1, min(max(busy, cold, 2), room, _MAX_INPUT_SETS))

    def verify(self, choice: Choice, seed: int = 0) -> measure.Verification:
        """Compares a choice with a reference on fresh inputs, and at a ragged shape."""
        for problem in (self.problem, self.workload.ragged(self.problem)):
            result = self._verify(problem, choice, seed)
            if not result.ok:
                return result
        return result

    def _verify(self, problem: Problem, choice: Choice, seed: int) -> Any:
        inputs, judge = self._exam(problem, seed)
        run = self._run(problem, choice)
        first, second = _poisoned(run, inputs)
        worst = judge(first)
        # XLA rounds after every step, like the program that we replace. Users have its
        # accuracy already, so XLA fails only if a result is not a number.
        tolerance = 1e300 if choice.variant == "xla" else 1.0
        same = all(
            bool(jnp.array_equal(a, b, equal_nan=True))
            for a, b in zip(first, second, strict=True)
        )
        return measure.Verification(
            max_rel_error=worst,
            tolerance=tolerance,
            ok=bool(worst <= tolerance),
            repeatable=same or self._may_vary(problem, choice),
            message=f"{worst:.3g} of the error bound at {problem}",
        )

    def _may_vary(self, problem: Problem, choice: Choice) -> bool:
        """Tests whether the choice's variant says that two runs may differ in bits."""
        variant = variants.get(problem.op, choice.variant)
        found = variants.may_vary(variant, problem, choice.config, self.device)
        return found is not None

    def _exam(self, problem: Problem, seed: int) -> tuple[list[jax.Array], Judge]:
        """Fresh inputs and their judge; kept, as references take long to compute."""
        if (problem, seed) not in self._shared:
            inputs = self._operands(problem, seed + 7919)
            judge = self.workload.judge(problem, self.device, inputs, seed)
            self._shared[problem, seed] = inputs, judge
        return self._shared[problem, seed]

    def _run(self, problem: Problem, choice: Choice) -> Callable[..., Any]:
        return functools.partial(self.workload.execute, problem=problem, choice=choice)

    def _operands(self, problem: Problem, seed: int) -> list[jax.Array]:
        with jax.default_device(self._jax_device):
            return self.workload.operands(problem, seed)

    @property
    def _jax_device(self) -> Any:
        return local_devices(backend=backend_of(self.device.platform))[0]


def _one_more(x: jax.Array) -> jax.Array:
    return x + 1


def _cache_bytes(device: Device) -> int:
    """Bytes of the last cache; on a CPU within the bounds assumed above."""
    if isinstance(device, CudaDevice):
        return device.l2_bytes
    last = device.l3_bytes if isinstance(device, CpuDevice) else 0
    return min(max(last, _MIN_CPU_CACHE_BYTES), _MAX_CPU_CACHE_BYTES)


def forced(choice: Choice) -> dict[str, Any]:
    """The primitive's parameters that force a choice."""
    config = None if choice.variant == "xla" else choice.config
    return {"implementation": choice.variant, "config": config}


def random_normal(shapes: list[tuple[tuple[int, ...], str]], seed: int) -> Any:
    """Independent standard normal arrays of these shapes and dtypes."""
    rng = np.random.default_rng(seed)
    return [_normal(rng, shape, jnp.dtype(dtype)) for shape, dtype in shapes]


@contextlib.contextmanager
def reusing_numbers() -> Generator[None, None, None]:
    """Inside, large random arrays repeat the same numbers, which are drawn only once.

    For times, which need many arrays of many shapes: drawing an array compiles a
    program for its shape.
    """
    token = _reuses.set(True)
    try:
        yield
    finally:
        _reuses.reset(token)


_reuses = contextvars.ContextVar("reuses", default=False)


@functools.cache
def _numbers(dtype: Any) -> np.ndarray:
    """Random numbers, a few less than a power of two, so that rows differ."""
    rng = np.random.default_rng(0)
    return rng.standard_normal(_MOST_FROM_NUMPY - 5, np.float32).astype(dtype)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """NumPy draws few numbers before JAX has compiled; a device draws many itself."""
    if _reuses.get():
        return device_put(np.resize(_numbers(dtype), shape))
    if math.prod(shape) <= _MOST_FROM_NUMPY:
        drawn = np.asarray(rng.standard_normal(shape, np.float32))
        return device_put(drawn.astype(dtype))
    key = jax.random.key(int(rng.integers(1 << 31)))
    return jax.random.normal(key, shape, jnp.float32).astype(dtype)


def check_dtype(name: str) -> None:
    """Raises ValueError unless JAX knows the dtype."""
    try:
        jnp.dtype(name)
    except TypeError as e:
        raise unknown_dtype(name) from e


def unit_roundoff(dtype: str) -> float:
    """Unit roundoff of a floating-point dtype."""
    return float(finfo(dtype).eps) / 2


def operand_roundoff(dtypes: tuple[str, ...], precision: str, device: Device) -> float:
    """Unit roundoff of products in the arithmetic that the precision allows.

    Args:
      dtypes: of the operands.
      precision: as problems name it.
      device: CPUs compute float32 products in float32 whatever the precision.
    """
    if set(dtypes) == {"float64"}:
        return unit_roundoff("float64")
    if "float32" in dtypes and precision != "highest" and device.platform != "cpu":
        return 2.0**-11  # TF32
    if device.platform != "cpu" and any(d.startswith("float8") for d in dtypes):
        return 2.0**-13  # of the sums in Hopper's tensor cores
    return unit_roundoff("float32")


def _compiled(function: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
    return jit(function).lower(arguments).compile()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Executions:
    """A ``measure.Run`` that puts as many executions into one call as it can.

    Attributes:
      one: executes once.
      many: executes once on each of several input sets; None if there is one set.
    """

    one: Callable[[], Any]
    many: _InTurn | None

    @property
    def batch(self) -> int:
        return self.many.sets if self.many is not None else 1

    def __call__(self, count: int) -> None:
        calls, rest = divmod(count, self.batch)
        result = None
        for _ in range(calls):
            result = (self.many or self.one)()
        for _ in range(rest):
            result = self.one()
        block_until_ready(result)


@dataclasses.dataclass(slots=True)
class _InTurn:
    """One call that works through all input sets.

    Each array that a call returns costs the host more time than a small kernel takes.
    So the call returns one sum with a single element of every result. The buffer of the
    sum is donated and keeps its address, because a new address can make XLA update the
    CUDA graph of the call.

    Attributes:
      call: (sum so far, sets) -> sum; compiled.
      arguments: the input sets.
      total: the sum so far, donated to the next call.
    """

    call: Callable[..., jax.Array]
    arguments: list[list[jax.Array]]
    total: jax.Array

    @classmethod
    def of(cls, run: Callable[..., Any], sets: list[list[jax.Array]]) -> _InTurn:
        def call(total: jax.Array, sets: list[list[jax.Array]]) -> jax.Array:
            # The barrier makes XLA compute the results in full, not just one element.
            results = lax.optimization_barrier([run(*x)[0] for x in sets])
            firsts = [x.ravel()[:1].astype(jnp.float32) for x in results]
            return sum(firsts, total)

        with jax.default_device(next(iter(sets[0][0].devices()))):
            total = zeros(1)
        compiled = jit(call, donate_argnums=0).lower(total, sets).compile()
        return cls(compiled, sets, total)

    @property
    def sets(self) -> int:
        return len(self.arguments)

    def __call__(self) -> jax.Array:
        self.total = self.call(self.total, self.arguments)
        return self.total


def _poisoned(
    run: Callable[..., Any], inputs: list[jax.Array]
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The results of two runs, each into donated buffers full of NaN, or of ones."""
    shapes = eval_shape(run, *inputs)

    def poisoned(poison: Arrays, *x: jax.Array) -> list[jax.Array]:
        return run(*x)

    call = jit(poisoned, donate_argnums=0, keep_unused=True)

    def results() -> list[jax.Array]:
        with jax.default_device(next(iter(inputs[0].devices()))):
            poison = [full(s.shape, _poison(s.dtype), s.dtype) for s in shapes]
        return call(poison, *inputs)

    return results(), results()


def _poison(dtype: Any) -> Any:
    return jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else True


__all__ = [
    "Judge",
    "OpBench",
    "Workload",
    "check_dtype",
    "forced",
    "operand_roundoff",
    "random_normal",
    "reusing_numbers",
    "unit_roundoff",
]
