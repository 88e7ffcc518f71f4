"""The kinds of kernels that compute-sanitizer watches, without a GPU."""

from __future__ import annotations

import pytest
from gpus import H200

from tracea_jax import catalogue
from tracea_jax.variants import kernels_in


@pytest.fixture
def kinds(module):
    return list(module("sanitized_convolutions").kinds())


def test_every_kind_of_image_has_a_kernel_that_is_watched(kinds, module):
    watched = module("sanitize").KERNELS
    for kind in kinds:
        assert kind.variant.why_not(kind.problem, H200) is None, kind.name
        call = kind.variant.call(kind.problem, kind.config(H200), H200)
        names = [kernel.entry for kernel in kernels_in(call)]
        assert names, kind.name
        for name in names:
            assert any(part in name for part in watched), name


def test_kinds_of_images_have_names_of_their_own(kinds):
    names = [kind.name for kind in kinds]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("op", ["conv2d", "max_pool", "group_norm"])
def test_every_variant_of_kernels_for_gpus_is_among_the_kinds(op, kinds):
    elsewhere = {"xla", "conv2d_cpu", "conv2d_product"}
    names = {variant.name for variant in catalogue.get(op).variants}
    assert names - elsewhere <= {kind.variant.name for kind in kinds}
