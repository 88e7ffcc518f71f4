"""Kernels of users where the compiler partitions arrays, split as users declare."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numerics import normal
from partitioned import compiled, mesh, placed

import tracea_jax as tracea
from tracea_jax import serving


@pytest.fixture
def always(monkeypatch):
    """Every call is split by its rule, and computed by XLA on each device."""
    monkeypatch.setattr(serving.Served, "is_xla", False)


SCALE = """
extern "C" __global__ void scaled(const float* x, const float* s, float* y, int n) {
  int i = blockIdx.x;
  for (int j = threadIdx.x; j < n; j += blockDim.x) y[i * n + j] = x[i * n + j] * s[i];
}
"""


def scaled_kernel(**how):
    return tracea.cuda_kernel(
        SCALE,
        grid=lambda x: x.shape[0],
        scalars={"n": lambda x: x.shape[1]},
        reference=lambda x, s: x * s[..., None],
        **how,
    )


@pytest.mark.parametrize("spec", [P("x"), P("x", "y"), P(None, ("y", "x"))])
def test_kernels_of_users_are_split_as_they_declare(spec, always):
    kernel = scaled_kernel(sharding="i j, i -> i j")

    def f(x, s):
        y, pull = jax.vjp(kernel, x, s)
        return y, *pull(y)

    args = normal(8, 16), normal(8)
    given = placed(mesh(4, 2), args, (spec, P(*spec[:1])))
    found = compiled(f, *given)
    (call,) = found.decisions
    assert call.name == "tracea_cuda_kernel"
    assert {f for f, axes in call.decision.split.items() if axes} == {
        name for name, axes in zip("ij", (*spec, None), strict=False) if axes
    }
    x, s = args
    y = x * s[:, None]
    wanted = y, y * s[:, None], (y * x).sum(1)
    for result, want in zip(found.results, wanted, strict=True):
        np.testing.assert_allclose(result, want, rtol=1e-5, atol=1e-5)


def test_mapped_kernels_of_users_split_the_mapped_axis(always):
    kernel = scaled_kernel(sharding="i _, i -> i _", vmap="leading")
    args = normal(4, 8, 16), normal(4, 8)
    found = compiled(jax.vmap(kernel), *placed(mesh(4, 2), args, (P("x", "y"),) * 2))
    (call,) = found.decisions
    assert call.decision.split["mapped 0"] and call.decision.split["i"]
    np.testing.assert_allclose(found.results, args[0] * args[1][..., None], 1e-6)


def test_what_a_kernel_of_a_user_needs_whole_is_gathered_with_a_warning(always):
    kernel = scaled_kernel(sharding="i _, i -> i _")
    args = normal(8, 16), normal(8)
    given = placed(mesh(4, 2), args, (P(None, "x"), P()))
    with pytest.warns(UserWarning, match="mesh axis 'x': scaled is declared to need"):
        found = compiled(kernel, *given)
    np.testing.assert_allclose(found.results, args[0] * args[1][:, None], 1e-6)


def test_undeclared_kernels_of_users_are_left_to_xla():
    args = normal(8, 16), normal(8)
    found = compiled(scaled_kernel(), *placed(mesh(8), args, (P("x"), P("x"))))
    assert not found.decisions
    np.testing.assert_allclose(found.results, args[0] * args[1][:, None], 1e-6)


@pytest.mark.parametrize(
    ("sharding", "message"),
    [
        ("i j, i", "'->'"),
        ("i j, i -> i", "'j' is no dimension of every result"),
        ("i i, i -> i i", "twice"),
        ("i 3, i -> i 3", "'3' is no name"),
    ],
)
def test_declarations_that_are_none(sharding, message):
    with pytest.raises(ValueError, match=message):
        scaled_kernel(sharding=sharding)


def test_declarations_that_do_not_fit(always):
    args = placed(mesh(8), (normal(8, 16), normal(8)), (P("x"), P("x")))
    for declared in ("i, i -> i", "i j, j -> i j"):
        with pytest.raises(ValueError, match="scaled"):
            compiled(scaled_kernel(sharding=declared), *args)


def test_texts_of_kernels_of_users_tell_functions_apart():
    def kernel(factor, **how):
        return tracea.cuda_kernel(
            SCALE, scalars={"n": lambda x: factor * x.size}, sharding="i j, i -> i j"
        ).definition.program_text

    assert kernel(1) == kernel(1) != kernel(2)
    assert scaled_kernel().definition.program_text is None
    unknown = scaled_kernel(sharding="i j, i -> i j", block=Unknown())
    assert unknown.definition.program_text is None


class Unknown:
    def __call__(self, x):
        return 32
