"""Sharding rules: what is decided, compared with every other split; meshes; texts."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from tracea_jax.ops.common import meshes, sharding
from tracea_jax.ops.common.ranks import Ranks
from tracea_jax.ops.common.sharding import Rule

# y[m, n] = sum over k of x[m, k] w[k, n]
PRODUCT = Rule(
    operands=((("m",), ("k",)), (("k",), ("n",))),
    results=((("m",), ("n",)),),
    sizes={"m": 8, "k": 16, "n": 12},
)
MESH = {"a": 2, "b": 4}
SPECS = [
    (first, second)
    for first in ((), ("a",), ("b",), ("a", "b"))
    for second in ((), ("a",), ("b",))
    if not {*first} & {*second}
]
NBYTES = (8 * 16 * 4, 16 * 12 * 4, 8 * 12 * 4)


def decided(x, w, y, rule=PRODUCT, mesh=MESH, nbytes=NBYTES):
    return sharding.decide(rule, [x, w], [y], mesh, nbytes)


@pytest.mark.parametrize("x", SPECS)
def test_a_split_is_legal_and_uses_every_axis_that_it_can(x):
    for w, y in itertools.product(SPECS, SPECS):
        found = decided(x, w, y)
        used = [a for axes in found.split.values() for a in axes]
        assert len(used) == len({*used})
        for f, axes in found.split.items():
            assert PRODUCT.sizes[f] % math.prod(MESH[a] for a in axes) == 0
        given = {a for spec in (x, w, y) for axes in spec for a in axes}
        assert {*used} <= given
        # An axis is left out only where no dimension that it splits can be divided.
        for axis in given - {*used}:
            others = [
                f
                for dims, spec in zip(
                    (*PRODUCT.operands, *PRODUCT.results), (x, w, y), strict=True
                )
                for (f,), axes in zip(dims, spec, strict=True)
                if axis in axes
            ]
            for f in others:
                count = MESH[axis] * math.prod(MESH[a] for a in found.split[f])
                assert PRODUCT.sizes[f] % count


CASES = {
    "rows": ((("a",), ()), ((), ()), (("a",), ()), {"m": ("a",)}),
    "columns": (((), ()), ((), ("b",)), ((), ("b",)), {"n": ("b",)}),
    "sums": (((), ("a",)), (("a",), ()), ((), ()), {"k": ("a",)}),
    "sums and rows": (
        (("b",), ("a",)),
        (("a",), ()),
        (("b",), ()),
        {"m": ("b",), "k": ("a",)},
    ),
    "weights gathered": ((("a",), ()), (("a",), ()), (("a",), ()), {"m": ("a",)}),
    "wanted by the result": (((), ()), ((), ()), (("b",), ()), {"m": ("b",)}),
}


@pytest.mark.parametrize("name", CASES)
def test_decisions(name):
    x, w, y, expected = CASES[name]
    found = decided(x, w, y)
    assert {f: axes for f, axes in found.split.items() if axes} == expected


def test_sums_are_scattered_where_the_result_is_wanted_split():
    found = decided(((), ("b",)), (("b",), ()), (("b",), ()))
    assert found.split["k"] == ("b",) and found.scattered == ({"m": ("b",)},)
    assert found.results(PRODUCT) == [(("b",), ())]
    assert found.summed(PRODUCT, 0) == ("b",)


def test_a_dimension_of_two_factors_is_split_from_the_slow_one():
    rule = Rule(
        operands=((("h", "g"),), (("h",),)),
        results=((("h", "g"),),),
        sizes={"h": 2, "g": 4},
    )
    mesh = {"a": 2, "b": 4}
    both = (("a", "b"),)
    found = sharding.decide(rule, [both, ((),)], [both], mesh, [32, 8, 32])
    assert dict(found.split) == {"h": ("a",), "g": ("b",)}
    fast = (("b",),)  # four devices for two heads: none of them is split
    found = sharding.decide(rule, [fast, ((),)], [fast], mesh, [32, 8, 32])
    assert dict(found.split) == {"h": (), "g": ()}


def test_refusals_name_the_axes_and_the_reason():
    rule = Rule(
        operands=((("m",), ("k",)),),
        results=((("m",),),),
        sizes={"m": 6, "k": 8},
        whole={"k": "it is read as a whole"},
    )
    given = [(("b",), ("a",))]
    found = sharding.decide(rule, given, [((),)], MESH, [192, 24])
    first, second = sharding.refusals(rule, found, given)
    assert (first.axes, first.reason) == (("b",), "6 is no multiple of 4")
    assert (second.axes, second.reason) == (("a",), "it is read as a whole")
    silent = Rule(
        operands=rule.operands,
        results=rule.results,
        sizes={"m": 8, "k": 8},
        whole={"k": None},
    )
    found = sharding.decide(silent, given, [((),)], MESH, [256, 32])
    assert list(sharding.refusals(silent, found, given)) == []


def test_texts():
    text = sharding.text(PRODUCT, [(8, 16), (16, 12)], [(8, 12)])
    assert text == (
        "#sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=16, k=12} "
        "reduction={j}, custom>"
    )


# --- meshes ---------------------------------------------------------------------------


def tiling(sizes, order, spec):
    """Which tile of each dimension the devices of a mesh have.

    Args:
      sizes: of the mesh's axes.
      order: of its devices, as positions in a row.
      spec: numbers of the axes that dimensions are split over.
    """
    positions = np.stack(np.unravel_index(np.arange(math.prod(sizes)), sizes))
    tiles = []
    for axes in spec:
        index = np.zeros(positions.shape[1], int)
        for axis in axes:
            index = index * sizes[axis] + positions[axis]
        tiles.append(index[order])
    return np.stack(tiles)


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=60)
def test_axes_explain_the_tiles(data):
    sizes = data.draw(st.lists(st.sampled_from([2, 3, 4, 6]), min_size=1, max_size=3))
    places = data.draw(st.permutations(range(len(sizes))))
    count = data.draw(st.integers(1, 3))
    specs = []
    for _ in range(count):
        cuts = sorted(data.draw(st.lists(st.integers(0, len(sizes)), max_size=2)))
        edges = [0, *cuts, len(sizes)]
        axes = data.draw(st.permutations(places))
        specs.append([axes[i:j] for i, j in itertools.pairwise(edges)])
    order = np.arange(math.prod(sizes))
    tilings = [tiling(sizes, order, spec) for spec in specs]
    mesh, found = meshes.axes_of(tilings)
    assert math.prod(mesh.values()) == math.prod(sizes)
    names = list(mesh)
    for given, spec in zip(tilings, found, strict=True):
        again = [[names.index(a) for a in axes] for axes in spec]
        np.testing.assert_array_equal(tiling(tuple(mesh.values()), order, again), given)


def test_tiles_of_no_mesh_are_refused():
    with pytest.raises(ValueError, match="no mesh"):
        meshes.axes_of([np.array([[0, 1, 1, 0]])])


def test_axes_that_are_always_split_as_one_are_joined():
    mesh = {"x0": 2, "x1": 2, "x2": 2}
    arrays = [((("m",), ()), (("x0", "x1"), ())), ((("h", "g"),), (("x2",),))]
    joined, specs = meshes.joined(mesh, arrays, {"m": 8, "h": 2, "g": 2})
    assert joined == {"x0": 4, "x2": 2}
    assert specs == [(("x0",), ()), (("x2",),)]
    uneven, _ = meshes.joined(mesh, arrays, {"m": 6, "h": 2, "g": 2})
    assert uneven == mesh


# --- ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("shared", ["", "lhs", "rhs"])
def test_ranks_are_those_of_einsum(layout, shared):
    batch, rows, contraction, columns = "ab", "cd", "ef", "gh"
    extents = dict(zip("abcdefgh", (2, 3, 4, 5, 2, 1, 3, 2), strict=True))
    lhs = rows + contraction if layout[0] == "n" else contraction + rows
    rhs = contraction + columns if layout[1] == "n" else columns + contraction
    lhs = lhs if shared == "lhs" else batch + lhs
    rhs = rhs if shared == "rhs" else batch + rhs
    a, b = (np.ones([extents[x] for x in names], np.float32) for names in (lhs, rhs))
    ranks = Ranks(batch=2, rows=2, contraction=2, columns=2)
    left, right = ranks.lhs(a, layout[0]), ranks.rhs(b, layout[1])
    assert left.outer == (4, 5) and right.outer == (3, 2)
    assert left.contraction == right.contraction == (2, 1)
    assert ranks.result(a, b, layout) == (2, 3, 4, 5, 3, 2)
    flat = left.flat(layout[0], outer_first=True)
    own = () if shared == "lhs" else (6,)
    assert flat == (*own, *((20, 2) if layout[0] == "n" else (2, 20)))
    numbers = ranks.dot_dimensions(a, b, layout)
    result = jax.eval_shape(lambda a, b: jax.lax.dot_general(a, b, numbers), a, b)
    assert sorted(result.shape) == sorted((2, 3, 4, 5, 3, 2))
