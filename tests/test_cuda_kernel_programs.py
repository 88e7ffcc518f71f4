"""Kernels of users in programs for a GPU, in explain, doctor and tune. No GPU."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import cuda_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_kernels import Struct, call_of, program_for_a_gpu
from numerics import normal

import tracea_jax as tracea
from tracea_jax import variants
from tracea_jax.device import local_cpu, named
from tracea_jax.knowledge import bench_of
from tracea_jax.policy import Choice
from tracea_jax.problem import problem_from_json
from tracea_jax.runtime import nvrtc, parameters
from tracea_jax.runtime.nvrtc import CompileError

H200 = named("H200")

# --- programs for a GPU ---------------------------------------------------------------


@pytest.mark.nvrtc
def test_a_program_has_the_kernels_of_a_function_and_of_its_derivative():
    def step(x):
        return jax.vmap(jax.grad(lambda x: kernels.SOFTMAX_OP(x)[0, 0]))(x)

    text = program_for_a_gpu(step, normal(2, 3, 5))
    assert text.count("stablehlo.custom_call @tracea_cuda_launch_v1") == 2
    assert 'entry = "softmax"' in text and 'entry = "backward"' in text
    assert text.count('cubin = "') == 2
    # Another op of equal text is the same kernel.
    again = tracea.cuda_kernel(
        kernels.SOFTMAX, "softmax", reference=jax.nn.softmax, **kernels.ROWS
    )
    x = normal(3, 5)
    keys = [nvrtc.key(call_of(op, x, config=())) for op in (again, kernels.SOFTMAX_OP)]
    assert keys[0] == keys[1] and keys[0] in text


SCALE = """
template <typename T> __global__ void scale(const T* x, T* y, T by, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = by * x[i];
}
"""


@pytest.mark.nvrtc
def test_an_instance_of_a_template_is_named_by_an_expression():
    op = tracea.cuda_kernel(SCALE, "scale<{x}>", scalars={"n": lambda x: x.size})
    x = jnp.arange(6, dtype=jnp.int16)
    text = program_for_a_gpu(lambda x: op(x, by=np.int16(2)), x)
    assert 'entry = "_Z5scaleIsEvPKT_PS0_S0_x"' in text
    with pytest.raises(ValueError, match="'T by' is of a type that is not known"):
        program_for_a_gpu(lambda x: op(x, by=2), x)
    with pytest.raises(ValueError, match="asks for 'z'; there are x, y"):
        wrong = tracea.cuda_kernel(SCALE, "scale<{z}>", scalars={"n": 6})
        program_for_a_gpu(lambda x: wrong(x, by=np.int16(2)), x)


@pytest.mark.nvrtc
def test_a_launch_must_pass_what_the_compiled_kernel_takes():
    op = tracea.cuda_kernel(SCALE, "scale<{x}>", scalars={"n": lambda x: x.size})
    x = jnp.arange(6, dtype=jnp.int16)
    with pytest.raises(ValueError, match="parameter 2 of .* has 2 bytes; .* 8 bytes"):
        program_for_a_gpu(lambda x: op(x, by=np.float64(2)), x)
    arrays = Struct((6,), jnp.float32), Struct((4, 6), jnp.float32)
    kernel = call_of(kernels.AXPY_OP, *arrays, a=2.0)
    cubin = nvrtc.compile(kernel)
    assert parameters.sizes(cubin.image, "axpy") == (8, 8, 8, 4, 8)
    assert parameters.mismatch(kernel, cubin.image, "axpy") is None


BAD = """
extern "C" __global__ void bad(const float* x, float* y) {
  y[0] = x[0] + zeta;  // a mistake of the user's
}
"""


@pytest.mark.nvrtc
def test_a_mistake_is_shown_at_the_users_line_with_a_caret(tmp_path):
    def errors(source: Any) -> str:
        # The reference must not hide it, nor the memory of an earlier try.
        op = tracea.cuda_kernel(source, reference=lambda x: x)
        with pytest.raises(CompileError) as caught:
            program_for_a_gpu(op, normal(2))
        return str(caught.value)

    own = pathlib.Path(__file__)
    line = 1 + own.read_text().splitlines().index(
        "  y[0] = x[0] + zeta;  // a mistake of the user's"
    )
    for _ in range(2):
        lines = errors(BAD).splitlines()
        at = lines.index(
            f'{own.name}({line},17): error: identifier "zeta" is undefined'
        )
        assert "y[0] = x[0] + zeta;" in lines[at + 1]
        assert lines[at + 2].index("^") == lines[at + 1].index("zeta")
    path = tmp_path / "own.cu"
    path.write_text(BAD)
    assert 'own.cu(3,17): error: identifier "zeta"' in errors(path)
    # Each error of a line has its own column, and a tab is one character.
    path.write_text(BAD.replace("  y[0]", "\tgamma(beta); y[0]"))
    found = [s for s in errors(path).splitlines() if s.startswith("own.cu(")]
    places = [s.partition(":")[0] for s in found]
    assert places == ["own.cu(3,8)", "own.cu(3,2)", "own.cu(3,29)"]


@pytest.mark.nvrtc
def test_headers_are_of_the_user_or_of_the_package():
    source = """
    #include "mine.cuh"
    #include "tile/common.cuh"
    extern "C" __global__ void f(float* y) { *y = mine(); }
    """
    op = tracea.cuda_kernel(
        source,
        headers={"mine.cuh": "__device__ float mine() { return 7; }"},
        out=Struct((), jnp.float32),
    )
    names = [name for name, _ in call_of(op).headers]
    assert {"mine.cuh", "tile/common.cuh"} <= {*names}
    assert 'entry = "f"' in program_for_a_gpu(op)


# --- explain, doctor, tune ------------------------------------------------------------


def test_explain_and_doctor_have_rows_of_it():
    x = normal(2, 3)
    (site,) = tracea.explain(kernels.TUNED, device="H200")(x).sites
    assert (site.op, site.variant) == ("cuda_kernel", "cuda_kernel")
    assert str(site.problem) == "cuda_kernel softmax(float32[2,3]) -> float32[2,3]"
    assert site.plan is not None and str(site.plan.config) == "BLOCK=128"
    (site,) = tracea.explain(kernels.TUNED)(x).sites
    assert site.variant == "xla" and "the device is cpu" in str(site)
    said = {s.variant: s for s in tracea.doctor().variants if s.op == "cuda_kernel"}
    assert said["cuda_kernel"].reasons == ["it is a CUDA kernel; the device is cpu"]


def test_a_problem_is_kept_and_goes_to_other_processes():
    x = normal(4, 9)
    problem = kernels.TUNED.definition.launcher([x], ()).problem
    assert problem_from_json(problem.to_json()) == problem
    read: Any = problem_from_json(problem.to_json())
    assert read.launcher is not None
    sent = pickle.loads(pickle.dumps(problem))
    assert sent == problem
    (own, xla) = variants.of("cuda_kernel")
    assert len(own.space(sent, H200)) == 6
    for config in own.space(problem, H200).configs():
        assert own.call(sent, config, H200) == own.call(problem, config, H200)
    verified = bench_of(sent, local_cpu()).verify(
        Choice(variant="xla", config=xla.heuristic(sent, H200))
    )
    assert verified.ok and verified.max_rel_error <= 1.0


def test_a_tuning_needs_a_reference():
    op = tracea.cuda_kernel(kernels.AXPY, scalars={"n": 1, "a": 1})
    problem = op.definition.launcher([normal(3), normal(3)], ()).problem
    with pytest.raises(ValueError, match="cannot be tuned without reference="):
        tracea.tune(problem, progress=False)


def test_a_result_that_is_wrong_is_not_accepted():
    problem = kernels.TUNED.definition.launcher([normal(4, 9)], ()).problem
    bench: Any = bench_of(problem, local_cpu())
    (x,) = bench.workload.operands(problem, 0)
    judge = bench.workload.judge(problem, local_cpu(), [x], 0)
    right = jax.nn.softmax(x)
    assert judge([right]) <= 1
    assert judge([right.at[1, 2].add(1e-3)]) > 1
    assert judge([right.at[1, 2].set(jnp.nan)]) == float("inf")
