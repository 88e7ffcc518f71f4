"""The types that users see are those of what they describe; see also .ci/typing."""

from __future__ import annotations

import importlib.resources
import inspect
import os
from typing import get_args, get_type_hints

import pytest

import tracea_jax as tracea
from tracea_jax import catalogue, dispatch
from tracea_jax import typing as types
from tracea_jax.graph_adds import Adds
from tracea_jax.ops.attention.public import Keywords
from tracea_jax.options import Options, Settings
from tracea_jax.tuning.tuner import EFFORTS
from tracea_jax.variants import check_implementation

OPS = (
    "matmul",
    "gated_matmul",
    "conv2d",
    "attention",
    "paged_attention",
    "elementwise",
)


def test_the_package_says_that_it_has_types():
    assert importlib.resources.files("tracea_jax").joinpath("py.typed").is_file()
    assert tracea.typing is types and "typing" in dir(tracea)
    assert [name for name in types.__all__ if not get_args(getattr(types, name))] == []


def test_all_lists_the_api():
    """The public names are found by ``dir``, ``import *`` and as attributes."""
    listed = set(tracea.__all__)
    assert listed | {"typing", "__version__"} == set(dir(tracea))
    wanted = {"ops", "transform", "explain", "tune", "Graph", "doctor", "options"}
    wanted |= {"masks", "TileGraph", "cuda_kernel", "TensorMap", "bundle", "bench"}
    assert wanted | {"interop"} <= listed
    names: dict[str, object] = {}
    exec("from tracea_jax import *", names)
    names.pop("__builtins__")
    assert set(names) == listed
    assert all(value is getattr(tracea, name) for name, value in names.items())
    assert callable(names["options"]) and callable(names["bench"])


def test_implementations_are_those_of_the_ops():
    names = {v.name for op in catalogue.in_programs() for v in op.variants}
    assert set(get_args(types.Implementation)) == {"tracea", *names}


def test_every_variant_that_doctor_prints_can_be_named():
    """In options, and where programs call the op, in its argument too."""
    printed = {(said.op, said.variant) for said in tracea.doctor().variants}
    called = {op.name for op in catalogue.ops()}
    assert {"max_pool_cuda", "layer_norm", "gemm_cpu"} <= {name for _, name in printed}
    for op, name in printed:
        with tracea.options(implementation=name):
            assert dispatch.default_implementation(op) == name
        if op in called:
            check_implementation(op, name)


def test_every_effort_has_its_number_of_evaluations():
    assert tuple(EFFORTS) == get_args(types.Effort)
    assert list(EFFORTS.values()) == sorted(EFFORTS.values())


def test_the_keywords_of_options_are_its_fields():
    kept = get_type_hints(Options)
    # A path may be given as what ``os.fspath`` takes; it is kept as text.
    paths = {
        name: kept[name] | os.PathLike[str] for name in ("cache_dir", "cache_path")
    }
    assert get_type_hints(Settings) == kept | paths


@pytest.mark.parametrize("op", OPS)
def test_the_methods_of_a_graph_are_those_of_the_builders(op):
    typed = inspect.signature(getattr(Adds, f"add_{op}"))
    built = inspect.signature(catalogue.get(op).build)
    own, *parameters, count = typed.parameters.values()
    assert own.name == "self" and typed.return_annotation == "None"
    assert parameters == list(built.parameters.values())
    assert (count.name, count.default, count.kind) == ("count", 1, count.KEYWORD_ONLY)


def test_a_graph_has_a_typed_method_for_every_op():
    typed = {name for name in vars(Adds) if name.startswith("add_")}
    assert typed == {f"add_{op}" for op in OPS}
    assert {f"add_{op}" for op in catalogue.names()} >= typed


def test_the_keywords_of_attention_are_those_of_its_overloads():
    parameters = inspect.signature(tracea.ops.attention).parameters.values()
    keywords = {p.name for p in parameters if p.kind == p.KEYWORD_ONLY}
    hints = get_type_hints(tracea.ops.attention)
    assert {name: hints[name] for name in keywords - {"return_residual"}} == (
        get_type_hints(Keywords)
    )
