"""Kernels of users without a GPU: arguments, references, programs, identities."""

from __future__ import annotations

import functools
import pathlib
import pickle
from typing import Any

import cuda_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxprs import equations

import tracea_jax as tracea
from tracea_jax import variants
from tracea_jax.device import local_cpu, named
from tracea_jax.emit.kernel import Kernel, operand_of
from tracea_jax.emit.signature import signature
from tracea_jax.knowledge import bench_of
from tracea_jax.ops.cuda_kernel.tangent import differentiable
from tracea_jax.policy import Choice
from tracea_jax.problem import problem_from_json
from tracea_jax.runtime import nvrtc, parameters
from tracea_jax.runtime.nvrtc import CompileError
from tracea_jax.variants import Steps

H200 = named("H200")
Struct = jax.ShapeDtypeStruct


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def call_of(op: Any, *operands: Any, config: tuple = (), **numbers: Any) -> Any:
    """What the op launches: a ``Kernel`` or ``Steps``."""
    given = tuple((name, repr(value)) for name, value in numbers.items())
    launcher = op.definition.launcher(operands, given)
    return launcher.call(config or launcher.configs[0], "sm_90a")


def program_for_a_gpu(f: Any, *args: Any) -> str:
    with tracea.options(device="H200"):
        return jax.export.export(jax.jit(f), platforms=["cuda"])(*args).mlir_module()


# --- signatures -----------------------------------------------------------------------

LIST = """
// __global__ void no(int x);
extern "C" {
__global__ void __launch_bounds__(128, 2) first(const float *__restrict__ x,
    unsigned /* n */ n, float4* y, std::size_t s, long long int z[],
    Pair<int, float> p);
}
template <typename T, int N>
__global__ void second(T const* x, const __nv_bfloat16* y, void* z, uint8_t b = 1);
"""


def test_a_signature_says_what_each_parameter_is():
    first = signature(LIST, "first")
    assert first.is_extern_c and not signature(LIST, "second").is_extern_c
    found = [(p.name, p.is_pointer, p.is_const, p.dtype) for p in first.parameters]
    assert found == [
        ("x", True, True, "float32"),
        ("n", False, False, "uint32"),
        ("y", True, False, "float32"),
        ("s", False, False, "uint64"),
        ("z", True, False, "int64"),
        ("p", False, False, None),
    ]
    second = signature(LIST, "second")
    found = [(p.name, p.is_const, p.dtype) for p in second.parameters]
    assert found == [
        ("x", True, None),
        ("y", True, "bfloat16"),
        ("z", False, None),
        ("b", False, "uint8"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [(None, "it has first, second"), ("frist", "did you mean 'first'")],
)
def test_a_source_must_have_the_kernel_that_is_meant(name, message):
    with pytest.raises(ValueError, match=message):
        tracea.cuda_kernel(LIST, name)


# --- calls that make no sense ---------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"scalars": {"m": 1}}, "'m': ...}: axpy.* has no such parameter"),
        ({"scratch": {"q": "x"}}, "has no such parameter"),
        ({"vmap": "all"}, "vmap='all' must be 'sequential', 'leading' or a function"),
    ],
)
def test_arguments_are_checked_when_the_op_is_made(how, message):
    with pytest.raises(ValueError, match=message):
        tracea.cuda_kernel(kernels.AXPY, **how)


X = Struct((4, 6), jnp.float32)
N: dict[str, Any] = {"scalars": {"n": lambda x: x.size}}


@pytest.mark.parametrize(
    ("how", "operands", "numbers", "message"),
    [
        ({}, (X, X), {}, "takes the number 'a': pass a=..."),
        ({}, (X, X), {"a": 1.0, "b": 2}, "takes no number 'b'"),
        ({}, (X, X), {"a": jnp.ones(())}, "a=.* must be a number .* is an operand"),
        ({}, (X, X, X, X), {"a": 1.0}, "has 3 arrays, .* called with 4"),
        ({}, (X,), {"a": 1.0}, "has 3 arrays; 1 operands and 1 results"),
        ({"out": ("x", "x")}, (X,), {"a": 1.0}, "'const float. y' of axpy is const"),
        (
            {"out": Struct((), jnp.int32)},
            (X, X),
            {"a": 1.0},
            "float32; the array is int32",
        ),
        ({}, (X, Struct((4, 6), jnp.int8)), {"a": 1.0}, "'const float. y' of axpy has"),
        ({"out": 3}, (X, X), {"a": 1.0}, "out= of axpy must be jax.ShapeDtypeStruct"),
        (
            {"grid": lambda q: 1},
            (X, X),
            {"a": 1.0},
            "grid= of axpy asks for 'q'; .* x, y",
        ),
        ({"block": 2.5}, (X, X), {"a": 1.0}, "block=2.5 must be an integer"),
        ({"scalars": {"n": 2**63}}, (X, X), {"a": 1.0}, "'long long n': value="),
        ({"block": 0}, (X, X), {"a": 1.0}, "block=0 must be at least 1"),
        ({"block": -1}, (X, X), {"a": 1.0}, "block=-1 must be at least 1"),
        ({"shared": 1.5}, (X, X), {"a": 1.0}, "shared=1.5 must be an integer"),
        ({"inplace": "q"}, (X, X), {"a": 1.0}, "inplace='q' is no operand"),
        ({"inplace": "y"}, (X, X), {"a": 1.0}, "'const float. y' of axpy is const"),
        ({"inplace": ("z", "z")}, (X, X, X), {"a": 1.0}, "inplace= names 'z' twice"),
        ({"maps": {"x": 3}}, (X, X), {"a": 1.0}, "must be a tracea_jax.TensorMap"),
    ],
)
def test_what_does_not_fit_the_parameters_is_said_in_the_call(
    how, operands, numbers, message
):
    op = tracea.cuda_kernel(kernels.AXPY, **{**N, **how})
    with pytest.raises((TypeError, ValueError), match=message):
        jax.eval_shape(lambda *x: op(*x, **numbers), *operands)


def test_a_config_must_be_one_of_the_space():
    x = normal(2, 3)
    with pytest.raises(ValueError, match="config has 'block'; .* did you mean 'BLOCK'"):
        kernels.TUNED(x, config={"block": 32})
    with pytest.raises(ValueError, match="BLOCK=33 must be one of 128, 32"):
        program_for_a_gpu(lambda x: kernels.TUNED(x, config={"BLOCK": 33}), x)
    with pytest.raises(ValueError, match="space: B=.* must be a C name"):
        kernels.SOFTMAX_OP.space(B=())


# --- where the kernel cannot run ------------------------------------------------------


def test_a_cpu_runs_the_reference_under_every_transformation():
    x, w = normal(3, 4, 5), normal(4, 5, seed=1)
    f, g = kernels.SOFTMAX_OP, jax.nn.softmax
    np.testing.assert_array_equal(jax.jit(f)(x), jax.jit(g)(x))

    def loss(f):
        return jax.vmap(jax.grad(lambda x: (f(x) * w).sum()))

    np.testing.assert_allclose(loss(f)(x), loss(g)(x), atol=1e-6)
    remat = jax.grad(lambda x: jax.checkpoint(f)(x)[0, 0, 0])(x)
    np.testing.assert_allclose(remat, jax.grad(lambda x: g(x)[0, 0, 0])(x), atol=1e-6)
    tangent = jax.jvp(lambda x: kernels.AXPY_OP(x, x, a=2.0), (w,), (w,))[1]
    np.testing.assert_allclose(tangent, 3 * w, rtol=1e-6)
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    rows = P(None, "i")
    many = jax.shard_map(f, mesh=mesh, in_specs=rows, out_specs=rows)
    np.testing.assert_allclose(jax.jit(many)(x), g(x), rtol=1e-6)


def test_without_a_reference_the_error_says_why_nothing_runs():
    op = tracea.cuda_kernel(kernels.AXPY, scalars={"n": 1})
    with pytest.raises(
        tracea.Unsupported, match="cuda_kernel: it is a CUDA kernel; the "
    ):
        op(normal(2), normal(2), a=1.0)
    with pytest.raises(tracea.Unsupported, match="no reference="):
        op(normal(2), normal(2), a=1.0, implementation="xla")
    with pytest.raises(TypeError, match="'axpy' has no derivative: pass backward="):
        jax.grad(lambda x: op(x, x, a=1.0)[0])(normal(2))


def test_a_setting_for_all_ops_does_not_take_the_only_kernel_away():
    op = tracea.cuda_kernel(kernels.AXPY, scalars={"n": 1, "a": 1})
    x = normal(2)
    with tracea.options(implementation="xla"):
        (site,) = tracea.explain(op, device="H200")(x, x).sites
    assert site.variant == "cuda_kernel"
    with pytest.raises(tracea.Unsupported, match="'xla' cannot run .* no reference="):
        op(x, x, implementation="xla")


INDEXED = """
extern "C" __global__ void take(const float* x, const int* at, float* y, int n) {
  y[threadIdx.x] = x[at[threadIdx.x]];
}
"""


def test_operands_without_a_derivative_and_numbers_of_the_space():
    """Integers have none; the reference gets numbers that shapes decide."""

    def reference(x, at, *, n):
        assert n == x.size
        return x[at]

    take = tracea.cuda_kernel(
        INDEXED,
        out=Struct((3,), jnp.float32),
        reference=reference,
        scalars={"n": lambda x: x.size},
        backward=lambda x, at, y, dy: (jnp.zeros_like(x).at[at].add(dy), None),
    ).space(BLOCK=(32, 64))
    at = jnp.array([1, 1, 4])
    gradient = jax.grad(lambda x: take(x, at).sum())(normal(5))
    np.testing.assert_array_equal(gradient, [0, 2, 0, 0, 1])


@pytest.mark.parametrize("of_reference", [True, False])
def test_backward_gives_forward_mode_too(of_reference):
    """Of the reference, or the transpose of what the user wrote: mapped, and twice."""
    x, dx, w = (normal(3, 5, seed=i) for i in range(3))
    f, g = kernels.SOFTMAX_OP, jax.nn.softmax
    if not of_reference:
        f = differentiable(
            lambda x: (g(x),),
            "f",
            lambda x, y, dy: kernels.softmax_gradient(y, dy),
            None,
        )
        f = functools.partial(lambda f, x: f(x)[0], f)

    def close(ours, theirs, *args):
        found, wanted = jax.jit(ours)(*args), theirs(*args)
        same = functools.partial(np.testing.assert_allclose, atol=1e-6)
        jax.tree.map(same, found, wanted)

    def tangent(f):
        return lambda x, dx: jax.jvp(f, (x,), (dx,))

    def hessian(mode):
        return lambda f: mode(jax.grad(lambda x: (f(x) ** 2 * w[0]).sum()))

    close(jax.vmap(tangent(f)), jax.vmap(tangent(g)), x, dx)
    close(tangent(jax.vmap(f)), tangent(jax.vmap(g)), x, dx)
    close(hessian(jax.jacfwd)(f), hessian(jax.jacfwd)(g), x[0])
    if of_reference:
        return  # what follows is alike

    def shared(f):  # the mapped and the common operand of one call
        return jax.grad(lambda x: jax.vmap(lambda w: (f(x) * w).sum())(w).sum())

    close(hessian(jax.jacrev)(f), hessian(jax.jacrev)(g), x[0])
    close(shared(f), shared(g), x[0])


def test_a_backward_that_cannot_be_transposed_says_so():
    op = tracea.cuda_kernel(
        kernels.SOFTMAX,
        "softmax",
        scalars={"columns": 1},
        backward=lambda x, y, dy: jax.pure_callback(lambda a: a, dy, dy),
    )
    message = (
        "'softmax' has no derivative in forward mode: JAX cannot .* pass reference="
    )
    with pytest.raises(NotImplementedError, match=message):
        program_for_a_gpu(lambda x: jax.jvp(op, (x,), (x,)), normal(3))


def test_integers_among_results_have_no_derivative():
    source = """
    extern "C" __global__ void top(const float* x, const int* k, float* y, int* at) {}
    """
    op = tracea.cuda_kernel(
        source,
        out=(Struct((), jnp.float32), Struct((), jnp.int32)),
        reference=lambda x, k: (x.max() * k, x.argmax().astype(jnp.int32)),
        backward=lambda x, k, y, at, dy, dat: (
            jnp.zeros_like(x).at[at].set(dy * k),
            None,
        ),
    )
    x, k = jnp.array([1.0, 3.0, 2.0]), jnp.int32(2)
    value, gradient = jax.value_and_grad(lambda x: op(x, k)[0])(x)
    assert value == 6 and gradient.tolist() == [0, 2, 0]
    (y, at), (dy, _) = jax.jvp(lambda x: op(x, k), (x,), (jnp.array([5.0, 7.0, 9.0]),))
    assert (y, at, dy) == (6, 1, 14)


def test_a_cotangent_has_the_shape_of_its_operand():
    op = tracea.cuda_kernel(
        kernels.SOFTMAX,
        "softmax",
        scalars={"columns": 1},
        reference=lambda x: x,
        backward=lambda x, y, dy: dy.sum(),
    )
    with pytest.raises(ValueError, match=r"shape \(\) for an operand of shape \(3,\)"):
        jax.grad(lambda x: op(x).sum())(normal(3))


def test_a_reference_must_return_what_the_kernel_writes():
    op = tracea.cuda_kernel(
        kernels.AXPY, scalars={"n": 1, "a": 1}, reference=lambda x, y: x.sum()
    )
    with pytest.raises(TypeError, match=r"returns float32\[\]; .* writes float32\[3\]"):
        op(normal(3), normal(3))


def test_numbers_that_are_equal_are_still_different():
    divide = tracea.cuda_kernel(
        kernels.AXPY,
        scalars={"n": 1},
        reference=lambda x, y, *, a: x / a + y,
    )
    f = jax.jit(lambda x, a: divide(x, x, a=a), static_argnums=1)
    assert divide(jnp.ones(1), jnp.zeros(1), a=0.0) == jnp.inf
    assert divide(jnp.ones(1), jnp.zeros(1), a=-0.0) == -jnp.inf
    assert jnp.isnan(f(jnp.ones(1), float("nan")))


# --- vmap -----------------------------------------------------------------------------


def shapes_under_vmap(op: Any) -> list[tuple[int, ...]]:
    """The shapes of the operands of the primitive, wherever it is."""
    x = Struct((5, 4, 6), jnp.float32)
    found = equations(jax.vmap(op), x, name="tracea_cuda_kernel")
    return [eqn.invars[0].aval.shape for eqn in found]


def test_vmap_is_a_loop_one_launch_or_a_rule():
    rows: dict[str, Any] = {**kernels.ROWS, "reference": jax.nn.softmax}
    assert shapes_under_vmap(kernels.SOFTMAX_OP) == [(5, 4, 6)]
    loop = tracea.cuda_kernel(
        kernels.SOFTMAX, "softmax", **{**rows, "vmap": "sequential"}
    )
    assert shapes_under_vmap(loop) == [(4, 6)]

    def rule(size, is_mapped, x):
        assert (size, is_mapped) == (5, [True])
        return kernels.SOFTMAX_OP(x.reshape(20, 6)).reshape(x.shape), True

    own = tracea.cuda_kernel(kernels.SOFTMAX, "softmax", **{**rows, "vmap": rule})
    assert shapes_under_vmap(own) == [(20, 6)]
    x = normal(5, 4, 6)
    for op in (loop, own, kernels.SOFTMAX_OP):
        np.testing.assert_allclose(jax.vmap(op)(x), jax.nn.softmax(x), rtol=1e-6)


# --- launches -------------------------------------------------------------------------


def test_a_launch_has_what_was_said_and_else_a_thread_for_each_element():
    kernel = call_of(kernels.AXPY_OP, Struct((1000,), jnp.float32), X, a=2.0)
    assert isinstance(kernel, Kernel)
    assert (kernel.grid, kernel.block) == ((4, 1, 1), (256, 1, 1))
    x = Struct((7, 1000), jnp.float32)
    config = (("BLOCK", 64),)
    kernel = call_of(kernels.TUNED, x, config=config)
    assert (kernel.grid, kernel.block) == ((7, 1, 1), (64, 1, 1))
    assert kernel.options == ("-DBLOCK=64",)
    assert [p.value for p in kernel.params[2:]] == [1000]


def test_arrays_that_are_updated_zeroed_or_scratch_are_steps():
    op = tracea.cuda_kernel(
        'extern "C" __global__ void f(const float* a, float* x, float* s, float* y) {}',
        inplace="x",
        out="a",
        scratch={"s": Struct((9,), jnp.float32)},
        zeroed=True,
    )
    a, x = Struct((3,), jnp.float32), Struct((5,), jnp.float32)
    steps = call_of(op, a, x)
    assert isinstance(steps, Steps)
    assert str(steps).splitlines() == [
        "(a, x) -> x updated, y",
        "  scratch s float32[9]",
        "  start of x: x updated = same(x)",
        "  zeros of y: y = zeros(shape=(3,), dtype=float32)",
        "  zeros of s: s = zeros(shape=(9,), dtype=float32)",
        "  f: x updated, y, s = f(a, x updated, y, s)",
    ]
    names = [*steps.steps[-1].reads, *steps.steps[-1].writes]
    numbers = [operand_of(p) for p in steps.kernels[0].params]
    assert [names[n] for n in numbers] == ["a", "x updated", "s", "y"]
    assert [s.shape for s in jax.eval_shape(op, a, x)] == [(5,), (3,)]


def test_a_tensor_map_follows_the_shape_of_its_array():
    described = tracea.TensorMap(box=(2, 8, 16), swizzle=32).param(
        Struct((3, 10, 100), jnp.float16), 1
    )
    assert described.dims == (100, 10, 3) and described.box == (16, 8, 2)
    assert described.strides == (200, 2000) and described.operand == 1
    with pytest.raises(ValueError, match="must have 1 sizes"):
        tracea.TensorMap(box=(2, 8)).param(Struct((3,), jnp.float16), 0)
    with pytest.raises(ValueError, match="swizzle=16 must be 0, 32, 64 or 128"):
        tracea.TensorMap(box=(2,), swizzle=16)


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
    kernel = call_of(kernels.AXPY_OP, x.astype(jnp.float32), X, a=2.0)
    cubin = nvrtc.compile(kernel)
    assert parameters.sizes(cubin.image, "axpy") == (8, 8, 8, 4, 8)
    assert parameters.mismatch(kernel, cubin.image, "axpy") is None


BAD = """
extern "C" __global__ void bad(const float* x, float* y) {
  y[0] = x[0] + zeta;  // a mistake of the user's
}
"""


def test_a_file_is_text_with_a_mark_or_without(tmp_path):
    path = tmp_path / "größe π.cu"
    for encoding in ("utf-8", "utf-8-sig"):
        path.write_text(kernels.AXPY + "// ü", encoding=encoding)
        assert call_of(tracea.cuda_kernel(path, **N), X, X, a=2.0).source[0] == "\n"
    path.write_text(kernels.AXPY + "// ü", encoding="latin-1")
    with pytest.raises(ValueError, match="größe π.cu is no text in UTF-8"):
        tracea.cuda_kernel(path)
    with pytest.raises(ValueError, match="source is empty"):
        tracea.cuda_kernel("")


@pytest.mark.nvrtc
def test_a_mistake_is_shown_at_the_users_line_with_a_caret(tmp_path):
    def errors(source: Any) -> str:
        # The reference must not hide it, nor the memory of an earlier try.
        op = tracea.cuda_kernel(source, reference=lambda x: x)
        with pytest.raises(CompileError) as caught:
            program_for_a_gpu(op, normal(2))
        return str(caught.value)

    own = pathlib.Path(__file__).read_text().splitlines()
    line = 1 + own.index("  y[0] = x[0] + zeta;  // a mistake of the user's")
    for _ in range(2):
        lines = errors(BAD).splitlines()
        at = lines.index(
            f'test_cuda_kernel.py({line},17): error: identifier "zeta" is undefined'
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
