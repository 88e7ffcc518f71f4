"""Graphs: problems from plain values and from functions, with their counts of runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import tracea_jax as tracea
from tracea_jax.explain import explain
from tracea_jax.graph import Graph, Node
from tracea_jax.problem import (
    AttentionProblem,
    Conv2dProblem,
    GatedMatmulProblem,
    GemmProblem,
)

pytestmark = pytest.mark.once

SMALL = GemmProblem(m=16, n=24, k=8)


def struct(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def asked(fn, *args):
    """The problem of a call of an op, from its own description."""
    (site,) = explain(fn, ops=())(*args).sites
    return site.problem


def only(graph: Graph):
    (node,) = graph
    return node.problem


# --- from plain values ----------------------------------------------------------------


def test_a_product_is_what_the_op_asks():
    graph = tracea.Graph()
    graph.add_matmul(16, 24, 8, dtype="bfloat16", bias=True, activation="gelu")
    x, w, b = (struct(*s, dtype="bfloat16") for s in ((16, 8), (8, 24), (24,)))

    def fn(x, w, b):
        return tracea.ops.matmul(x, w, bias=b, activation="gelu")

    assert only(graph) == asked(fn, x, w, b)


def test_a_batch_of_products_is_what_the_op_asks():
    graph = tracea.Graph()
    graph.add_matmul(16, 24, 8, batch=3, precision="highest", residual=True)
    x, w, r = struct(3, 16, 8), struct(3, 8, 24), struct(3, 16, 24)

    def fn(x, w, r):
        return tracea.ops.matmul(x, w, residual=r, precision="highest")

    assert only(graph) == asked(fn, x, w, r)


def test_a_gated_product_is_what_the_op_asks():
    graph = tracea.Graph()
    graph.add_gated_matmul(16, 24, 8, dtype=jnp.bfloat16, activation="gelu")
    x, w = struct(16, 8, dtype="bfloat16"), struct(8, 24, dtype="bfloat16")

    def fn(x, gate, up):
        return tracea.ops.gated_matmul(x, gate, up, activation="gelu")

    assert only(graph) == asked(fn, x, w, w)


def test_a_convolution_is_what_the_op_asks():
    graph = tracea.Graph()
    graph.add_conv2d(
        *(2, 9, 8, 6, 3, 3, 16), strides=(2, 1), padding="VALID", groups=2, bias=True
    )
    x, w, b = struct(2, 9, 8, 6), struct(3, 3, 3, 16), struct(16)

    def fn(x, w, b):
        how = {"strides": (2, 1), "padding": "VALID", "groups": 2}
        return tracea.ops.conv2d(x, w, bias=b, **how)

    assert only(graph) == asked(fn, x, w, b)


def test_an_attention_is_what_the_op_asks():
    graph = tracea.Graph()
    graph.add_attention(
        2, 16, 24, 4, 8, kv_heads=2, is_causal=True, local_window_size=5
    )
    q, kv = struct(2, 16, 4, 8), struct(2, 24, 2, 8)

    def fn(q, k, v):
        return tracea.ops.attention(q, k, v, is_causal=True, local_window_size=5)

    assert only(graph) == asked(fn, q, kv, kv)


def test_gradients():
    graph = tracea.Graph()
    graph.add_attention(1, 8, 8, 2, 4, direction="backward")
    graph.add_conv2d(1, 8, 8, 4, 3, 3, 4, direction="weight_grad", layout="NCHW")
    attention, conv2d = (node.problem for node in graph)
    assert isinstance(attention, AttentionProblem)
    assert attention.direction == "backward"
    assert isinstance(conv2d, Conv2dProblem)
    assert conv2d.direction == "weight_grad"
    assert conv2d.layout == "nchw" and conv2d.out_channels == 4


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (lambda g: g.add_matmul(0, 8, 8), "m=0 must be an integer of at least 1"),
        (lambda g: g.add_matmul(8, 8, 8.0), "k=8.0 must be an integer"),
        (lambda g: g.add_matmul(8, 8, 8, dtype="float33"), "'float33' is unknown to"),
        (lambda g: g.add_matmul(8, 8, 8, dtype="float64"), "JAX_ENABLE_X64"),
        (lambda g: g.add_matmul(8, 8, 8, layout="xy"), "layout='xy' must be one of nn"),
        (lambda g: g.add_matmul(8, 8, 8, activation="swish"), "'swish' is unknown"),
        (lambda g: g.add_matmul(8, 8, 8, precision="bogus"), "'bogus' is unknown"),
        (
            lambda g: g.add_matmul(8, 8, 8, count=-1),
            "count=-1 must be a number of runs",
        ),
        (lambda g: g.add_attention(1, 8, 8, 2, 0), "head_dim=0 must be"),
        (lambda g: g.add_attention(1, 8, 8, 2, 4, direction="up"), "direction='up'"),
        (
            lambda g: g.add_conv2d(
                *(1, 8, 8, 4, 3, 3, 4), direction="input_grad", bias=True
            ),
            "a gradient takes no bias",
        ),
    ],
)
def test_wrong_values_name_the_right_ones(add, message):
    graph = tracea.Graph()
    with pytest.raises(ValueError, match=message):
        add(graph)
    assert not graph


def test_only_problems_can_be_added():
    with pytest.raises(TypeError, match="a graph has problems, .* not 'matmul'"):
        tracea.Graph().add("matmul")  # pyright: ignore[reportArgumentType]


# --- nodes ----------------------------------------------------------------------------


def test_equal_problems_are_one_node_and_counts_add_up():
    graph = Graph([SMALL])
    graph.add_matmul(16, 24, 8, count=3)
    graph.add_matmul(16, 24, 9)
    graph.add(SMALL, count=0)
    first, second = graph
    assert first == Node(problem=SMALL, count=4)
    assert (second.problem, second.count) == (GemmProblem(m=16, n=24, k=9), 1)
    assert len(graph) == 2 and SMALL in graph
    assert first.flops == 4 * SMALL.flops
    assert graph == Graph([SMALL] * 4 + [second.problem]) != Graph([SMALL])


def test_a_graph_prints_its_nodes():
    graph = Graph([SMALL] * 12)
    graph.add_attention(1, 8, 8, 2, 4)
    assert str(graph).splitlines() == [
        "2 problems, 13 runs",
        "  12 x matmul 16x24x8 float32 nn",
        "   1 x attention 1x8x8 heads 2 dim 4 float32",
    ]


# --- from functions -------------------------------------------------------------------


def layer(x, w):
    return jax.nn.relu(x @ w)


def test_the_sites_of_a_function_are_its_nodes():
    def fn(x, w, v):
        return layer(layer(x, w), w) @ v

    graph = Graph.from_function(fn, struct(16, 8), jnp.ones((8, 8)), struct(8, 4))
    assert [(n.count, str(n.problem)) for n in graph] == [
        (2, "matmul 16x8x8 float32 nn relu"),
        (1, "matmul 16x4x8 float32 nn"),
    ]


def test_a_scan_counts_as_often_as_it_is_long():
    @jax.jit
    def inner(x, ws):
        return jax.lax.scan(lambda x, w: (layer(x, w), ()), x, ws)[0]

    def fn(x, ws):
        return jax.lax.scan(lambda x, _: (inner(x, ws), ()), x, length=3)[0]

    graph = Graph.from_function(fn, struct(16, 8), struct(5, 8, 8))
    assert [n.count for n in graph] == [15]


def test_a_loop_of_unknown_length_counts_once():
    def fn(x, w):
        return jax.lax.while_loop(lambda x: x.sum() < 9, lambda x: layer(x, w), x)

    assert [n.count for n in Graph.from_function(fn, struct(8, 8), struct(8, 8))] == [1]


def test_gradients_of_a_transformed_function_are_nodes():
    fast = tracea.transform(lambda x, w: layer(x, w).sum())
    forward = Graph.from_function(fast, struct(16, 8), struct(8, 4))
    both = Graph.from_function(jax.grad(fast, (0, 1)), struct(16, 8), struct(8, 4))
    assert len(forward) == 1
    problems = [node.problem for node in both]
    sizes = {(p.m, p.n, p.k) for p in problems if isinstance(p, GemmProblem)}
    assert sizes == {(16, 4, 8), (16, 8, 4), (8, 4, 16)}


def test_ops_restrict_what_is_taken():
    def fn(x, w):
        return jax.nn.silu(x @ w) * (x @ w), tracea.ops.matmul(x, w)

    args = struct(16, 8), struct(8, 8)
    kinds = [type(n.problem) for n in Graph.from_function(fn, *args)]
    assert kinds == [GatedMatmulProblem, GemmProblem]
    (node,) = Graph.from_function(fn, *args, ops=["gated_matmul"])
    assert isinstance(node.problem, GatedMatmulProblem)
    with pytest.raises(ValueError, match="ops=.*sort"):
        Graph.from_function(fn, *args, ops=["sort"])


def test_what_tuning_cannot_change_is_left_out():
    def fn(x, w):
        config = {"kc": 256, "nc": 512, "tasks": 2}
        a = tracea.ops.matmul(x, w, implementation="xla")
        b = tracea.ops.matmul(x, w, config=config)
        return a, b, x.astype(int) @ w.astype(int)

    assert not Graph.from_function(fn, struct(16, 8), struct(8, 8))


def test_what_has_no_answer_is_taken_also_where_that_is_an_error():
    with tracea.options(on_miss="error"):
        graph = Graph.from_function(layer, struct(16, 8), struct(8, 8))
    assert len(graph) == 1
