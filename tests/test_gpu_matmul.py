"""matmul on an H100 or H200: gemm_sm90 against float64, and problems left to XLA."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numerics
import numpy as np
import pytest
from gpu_products import FULL, GATE, LAYOUTS, gemm, run_and_check
from jax import export
from numerics import exact, normal
from processes import run_python

import tracea_jax as tracea
from tracea_jax.dispatch import plan
from tracea_jax.ops import export_checks, matmul
from tracea_jax.options import device_for
from tracea_jax.problem import Epilogue

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

DTYPES = ("bfloat16", "float16")
sm90 = functools.partial(matmul, implementation="gemm_sm90")


@pytest.mark.parametrize("n", [8, 64, 72, 136, 248, 264])
@pytest.mark.parametrize("m", [1, 2, 63, 64, 65, 127, 128, 129, 257])
def test_one_config_at_every_awkward_shape(m, n):
    for k in (8, 56, 64, 72, 1000):
        run_and_check(gemm(m, n, k, epilogue=FULL))


@pytest.mark.parametrize("out", [*DTYPES, "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_and_dtype(layout, dtype, out):
    for epilogue in (FULL, GATE):
        run_and_check(
            gemm(200, 328, 136, dtype, out=out, layout=layout, epilogue=epilogue)
        )


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
@pytest.mark.parametrize("bias", ["none", "row"])
@pytest.mark.parametrize(
    ("residual", "save"),
    list(itertools.product(("", "add", "multiply"), (False, True))),
)
def test_every_epilogue(residual, save, bias, activation):
    epilogue = Epilogue(
        bias=bias,
        activation=activation,
        residual=bool(residual),
        residual_op=residual or "add",
        save_preactivation=save,
    )
    run_and_check(gemm(130, 136, 72, epilogue=epilogue))


@pytest.mark.parametrize("bias", ["row", "batched_row"])
@pytest.mark.parametrize("batched", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches_with_shared_operands(layout, batched, bias):
    epilogue = dataclasses.replace(FULL, bias=bias)
    flags = {"lhs_batched": batched[0], "rhs_batched": batched[1]}
    run_and_check(
        gemm(136, 72, 200, batch=5, layout=layout, epilogue=epilogue, **flags)
    )


@pytest.mark.parametrize("other", ["float32", "float16"])
def test_bias_of_another_dtype(other):
    epilogue = dataclasses.replace(FULL, bias_dtype=other)
    run_and_check(gemm(130, 136, 72, epilogue=epilogue))


@pytest.mark.parametrize("out", ["float32", "float16"])
def test_residual_of_another_dtype(out):
    for epilogue in (FULL, GATE):
        epilogue = dataclasses.replace(epilogue, residual_dtype="bfloat16")
        run_and_check(gemm(130, 136, 72, out=out, epilogue=epilogue))


def test_there_is_one_rounding():
    a, b = normal(64, 128, dtype="bfloat16"), normal(128, 64, dtype="bfloat16")
    residual = normal(64, 64, dtype="bfloat16")
    call = functools.partial(sm90, a, b, activation="gelu", residual=residual)
    wide = call(preferred_element_type="float32")
    np.testing.assert_array_equal(call(), wide.astype("bfloat16"), strict=True)


@pytest.mark.parametrize("activation", numerics.ACTIVATIONS)
def test_derivatives(activation):
    args = [normal(136, 64), normal(64, 72), normal(72), normal(136, 72)]
    args = [x.astype("bfloat16") for x in args]

    def gradients(mm, args):
        def loss(a, b, bias, residual):
            y = mm(a, b, bias=bias, activation=activation, residual=residual)
            return (y.astype("float32") ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*args)

    wide = [x.astype("float32") for x in args]
    xla = functools.partial(matmul, implementation="xla", precision="highest")
    found = jax.jit(functools.partial(gradients, sm90))(args)
    for x, y in zip(found, gradients(xla, wide), strict=True):
        assert x.dtype == "bfloat16"
        assert abs(x.astype("float32") - y).max() <= 3e-2 * abs(y).max()


def test_vmap_and_scan():
    x, layers = normal(3, 64, 128), normal(10, 128, 128) / math.sqrt(128)
    x, layers = x.astype("bfloat16"), layers.astype("bfloat16")
    bias = normal(3, 128, dtype="bfloat16")

    def step(mm, x, w):
        each = jax.vmap(functools.partial(mm, activation="relu"), in_axes=(0, None))
        return each(x, w), None

    f = jax.jit(
        lambda mm, *a: jax.lax.scan(functools.partial(step, mm), *a)[0],
        static_argnums=0,
    )
    xla = functools.partial(matmul, implementation="xla")
    difference = abs(f(sm90, x, layers) - f(xla, x, layers)).max()
    assert difference <= 0.05 * abs(f(xla, x, layers)).max()

    y = jax.vmap(lambda x, b: sm90(x, layers[0], bias=b, activation="silu"))(x, bias)
    exact(x, layers[0], bias[:, None], "silu").assert_near(y)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 64, 65), "bfloat16", "must be multiples of 16 bytes"),
        ((2**6, 2**6, 0), "bfloat16", "nothing to multiply"),
    ],
)
def test_what_the_kernel_cannot_take_is_left_to_xla(shape, dtype, reason):
    m, n, k = shape
    a, b = normal(m, k, dtype=dtype), normal(k, n, dtype=dtype)
    found = plan(gemm(m, n, k, dtype), device_for("cuda"))
    assert found.variant == "xla" and reason in str(found)
    y = matmul(a, b, activation="relu", precision="highest")
    exact(a, b, None, "relu").assert_near(y, unit=2.0**-20)
    with pytest.raises(tracea.Unsupported, match=reason):
        sm90(a, b)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)])
def test_empty_operands(shape):
    m, n, k = shape
    a, b = normal(m, k, dtype="bfloat16"), normal(k, n, dtype="bfloat16")
    bias = normal(n, dtype="bfloat16")
    exact(a, b, bias, "gelu").assert_near(matmul(a, b, bias=bias, activation="gelu"))


def test_tuning_finds_a_correct_answer():
    problem = gemm(1024, 1024, 1024, epilogue=Epilogue(bias="row", activation="gelu"))
    entry = tracea.tune(problem, effort="quick", budget_s=20).entry
    assert entry.best.time_us and entry.best.xla_us
    found = plan(problem, device_for("cuda"))
    assert (found.origin, found.variant) == ("tuned", entry.best.variant)


def test_an_exported_program_needs_no_cache(tmp_path):
    a, b = (jnp.asarray(x, jnp.bfloat16) for x in _of_seed(0))
    program = export.export(jax.jit(sm90), disabled_checks=export_checks())(a, b)
    (tmp_path / "program").write_bytes(program.serialize())
    run_python(
        """
        import pathlib, sys
        import jax.numpy as jnp, numpy as np
        import tracea_jax
        from jax import export

        here, rng = pathlib.Path(sys.argv[1]), np.random.default_rng(0)
        args = [rng.normal(size=shape) for shape in ((64, 128), (128, 72))]
        args = [jnp.asarray(x, jnp.bfloat16) for x in args]
        program = export.deserialize(bytearray((here / "program").read_bytes()))
        np.save(here / "y.npy", np.asarray(program.call(*args), np.float32))
        """,
        str(tmp_path),
        TRACEA_CACHE_DIR=str(tmp_path / "empty"),
    )
    y = jnp.asarray(np.load(tmp_path / "y.npy")).astype("bfloat16")
    exact(a, b).assert_near(y)


def _of_seed(seed: int) -> list[np.ndarray]:
    """The operands, as the program above makes them."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape) for shape in ((64, 128), (128, 72))]


_CACHED = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from tracea_jax.ops import matmul

    hits = []
    jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=(64, 64)), jnp.bfloat16) for _ in range(2))
    product = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    programs = {
        "relu": (dict(activation="relu"), np.maximum(product, 0)),
        "residual": (dict(residual=b), product + np.asarray(b, np.float64)),
        "none": (dict(), product),
    }
    for name in sys.argv[1:]:
        arguments, expected = programs[name]
        f = jax.jit(lambda a, b: matmul(a, b, implementation="gemm_sm90", **arguments))
        y = np.asarray(f(a, b), np.float64)
        np.testing.assert_allclose(y, expected, rtol=1e-2, atol=1e-2)
    print(sum(event == "/jax/compilation_cache/cache_hits" for event in hits))
"""


def test_the_compilation_cache_never_gives_another_kernel(tmp_path):
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    run_python(_CACHED, "relu", "residual", "none", **settings)
    second = run_python(_CACHED, "none", "residual", "relu", **settings)
    assert int(second) >= 3
