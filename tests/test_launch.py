"""Lowering of a launch: attributes, identity, refusals. No GPU."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import math
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import pytest
import sample_kernels
from jax.interpreters import mlir
from sample_kernels import KEY, cubin, elf

from tracea_jax import _native
from tracea_jax.emit.kernel import (
    SCALAR_BITS,
    Im2colMap,
    Kernel,
    Pointer,
    Scalar,
    TensorMap,
    TensorMapSwizzle,
)
from tracea_jax.runtime import launch, nvrtc
from tracea_jax.runtime.nvrtc import Cubin


def scale_primitive(kernel: Kernel, code: Cubin, embed: bool = False) -> jex.Primitive:
    """A primitive from an array to one like it that launches ``kernel`` on CUDA."""
    primitive = jex.Primitive("test_scale")
    primitive.def_abstract_eval(lambda x: x)

    def rule(ctx: Any, x: Any) -> Any:
        return launch.cuda_lowering(ctx, [x], kernel, code, embed=embed)

    mlir.register_lowering(primitive, rule, platform="cuda")
    return primitive


def lowered_text(kernel: Kernel, code: Cubin, embed: bool = False) -> str:
    primitive = scale_primitive(kernel, code, embed)
    traced = jax.jit(primitive.bind).trace(jnp.zeros(1000, jnp.float32))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def decode(numbers: list[int]) -> list[tuple[Any, ...]]:
    """Reads parameter records as ffi/launch_spec.h describes them."""
    stream = iter(numbers)
    records: list[tuple[Any, ...]] = []

    def take(count: int) -> tuple[int, ...]:
        return tuple(next(stream) for _ in range(count))

    for kind in stream:
        if kind == 3:
            operand, dtype, rank = take(3)
            layout = take(rank), take(rank - 1), take(rank)
            records.append(("map", operand, dtype, *layout, *take(1)))
        elif kind == 4:
            operand, dtype, rank = take(3)
            array = take(rank), take(rank - 1)
            copied = take(rank - 2), take(rank - 2), take(2), take(rank)
            records.append(("im2col", operand, dtype, *array, *copied, *take(1)))
        else:
            names = {0: "pointer", 1: "scalar32", 2: "scalar64"}
            records.append((names[kind], *take(1)))
    return records


def test_attributes_round_trip():
    kernel = dataclasses.replace(
        sample_kernels.scale(),
        grid=(7, 6, 5),
        block=(128, 2, 1),
        cluster=(1, 2, 5),
        smem_bytes=200_000,
        params=(
            sample_kernels.tiled_map(2),
            Pointer(operand=-1),
            Pointer(operand=3),
            Scalar(value=-5),
            Scalar(value=2**40, dtype="int64"),
            sample_kernels.tiled_map(0),
            IM2COL,
        ),
    )
    attributes = launch.cuda_attributes(kernel, KEY)
    assert attributes["launch"].tolist() == [7, 6, 5, 128, 2, 1, 1, 2, 5, 200_000]
    assert attributes["launch"].dtype == attributes["params"].dtype == np.int64
    layout = (9, (256, 100), (512,), (64, 32), 3)
    assert decode(attributes["params"].tolist()) == [
        ("map", 2, *layout),
        ("pointer", -1),
        ("pointer", 3),
        ("scalar32", -5),
        ("scalar64", 2**40),
        ("map", 0, *layout),
        (
            "im2col",
            1,
            9,
            (64, 56, 28, 8),
            (128, 7168, 200_704),
            (-1, -2),
            (1, 2),
            (32, 128),
            (1, 2, 2, 1),
            2,
        ),
    ]
    named = {k: attributes[k] for k in ("abi", "kernel_key", "entry", "arch")}
    assert named == {"abi": 1, "kernel_key": KEY, "entry": "scale", "arch": "sm_90a"}


def test_unknown_tensor_map_dtype_lists_the_known():
    bad = dataclasses.replace(sample_kernels.tiled_map(0), dtype="complex64")
    kernel = dataclasses.replace(sample_kernels.scale(), params=(bad,))
    with pytest.raises(ValueError, match="'complex64'.*bfloat16"):
        launch.cuda_attributes(kernel, KEY)


def bits(value: int | float, dtype: str) -> tuple[int, int]:
    """The record of a scalar."""
    scalar = Scalar(value=value, dtype=dtype)
    kernel = dataclasses.replace(sample_kernels.scale(), params=(scalar,))
    kind, number = launch.cuda_attributes(kernel, KEY)["params"].tolist()
    _native.check_launch([1] * 9 + [0], [kind, number])
    return kind, number


@pytest.mark.parametrize("dtype", SCALAR_BITS)
def test_the_low_bytes_of_a_scalars_record_are_the_scalar(dtype):
    values: list[Any] = [0, 1, 77]
    if "float" in dtype:
        values += [-0.0, 1.5, -3.25, 2.0**-14, math.inf, -math.inf, math.nan]
        values += [1e30] * (dtype != "float16") + [0.1]
    else:
        info = np.iinfo(dtype)
        values += [int(info.min), int(info.max), int(info.max) // 3]
    size = SCALAR_BITS[dtype] // 8
    for value in values:
        kind, number = bits(value, dtype)
        assert kind == (2 if size == 8 else 1)
        seen = number.to_bytes(8, "little", signed=number < 0)[:size]
        assert seen == np.asarray(value, jnp.dtype(dtype)).tobytes()


def test_a_type_and_a_value_that_scalars_do_not_have():
    with pytest.raises(ValueError, match="no type 'int4'; they have int8, uint8.*bfl"):
        Scalar(value=1, dtype="int4")
    for value, dtype in ((2**31, "int32"), (-1, "uint8"), (1.5, "int16")):
        with pytest.raises(ValueError, match=f"value={value} .* as {dtype} has them"):
            Scalar(value=value, dtype=dtype)
    with pytest.raises(ValueError, match="1e[+]30.*float16.*too large for its type"):
        bits(1e30, "float16")


def test_a_record_of_a_32_bit_scalar_has_no_more():
    for number in (2**32, -(2**31) - 1):
        with pytest.raises(ValueError, match=f"32-bit scalar is {number}"):
            _native.check_launch([1] * 9 + [0], [1, number])


def test_lowered_program_names_target_and_key():
    text = lowered_text(sample_kernels.scale(), cubin())
    assert "@tracea_cuda_launch_v1" in text
    assert f'kernel_key = "{KEY}"' in text
    assert f'sha256 = "{hashlib.sha256(elf()).hexdigest()}"' in text
    assert "cubin = " not in text
    assert _native.has_cubin(KEY)


def test_embedding_puts_the_code_into_the_program():
    text = lowered_text(sample_kernels.scale(), cubin(), embed=True)
    assert base64.b64encode(elf()).decode() in text


def test_lowering_is_independent_of_what_was_lowered_before():
    first = lowered_text(sample_kernels.scale(), cubin())
    lowered_text(sample_kernels.scale(n=500, by=7), cubin(key="f" * 64))
    assert lowered_text(sample_kernels.scale(), cubin()) == first


def test_a_truncated_image_is_refused_at_lowering():
    image = elf(bytes(100))
    for end in (3, 63, 100, len(image) - 1):
        with pytest.raises(ValueError, match="no cubin"):
            lowered_text(sample_kernels.scale(), cubin("e" * 64, image[:end]))
    assert not _native.has_cubin("e" * 64)


@pytest.mark.nvrtc
def test_every_truncation_of_a_real_cubin_is_noticed():
    image = nvrtc.compile(sample_kernels.scale()).image
    _native.put_cubin("d" * 64, image)
    for size in range(0, len(image), 64):
        with pytest.raises(ValueError, match="no cubin"):
            _native.put_cubin("c" * 64, image[:size])
    with pytest.raises(ValueError, match="no cubin"):
        _native.put_cubin("c" * 64, image[:-1])


# Pixels of 32 bfloat16 from images of 28 x 56 pixels, every second row and column.
IM2COL = Im2colMap(
    operand=1,
    dtype="bfloat16",
    dims=(64, 56, 28, 8),
    strides=(128, 7168, 200_704),
    lower=(-1, -2),
    upper=(1, 2),
    channels=32,
    pixels=128,
    element_strides=(1, 2, 2, 1),
    swizzle=TensorMapSwizzle.B64,
)


def im2col(**changes: Any) -> dict[str, Any]:
    return {"params": (dataclasses.replace(IM2COL, **changes),)}


def tensor_map(**changes: Any) -> dict[str, Any]:
    changed = dataclasses.replace(sample_kernels.tiled_map(0), **changes)
    return {"params": (changed,)}


RULES = {
    "negative grid": ({"grid": (-1, 1, 1)}, "grid dimension is -1"),
    "tall grid": ({"grid": (1, 70000, 1)}, "from 0 to 65535"),
    "no threads": ({"block": (0, 1, 1)}, "block dimension is 0"),
    "many threads": ({"block": (64, 32, 1)}, "threads of a block is 2048"),
    "large cluster": ({"grid": (16, 16, 1), "cluster": (8, 4, 1)}, "cluster is 32"),
    "odd grid": ({"grid": (3, 1, 1), "cluster": (2, 1, 1)}, "3x1x1 is no multiple"),
    "negative smem": ({"smem_bytes": -1}, "smem_bytes is -1"),
    "operand": ({"params": (Pointer(operand=-2),)}, "operand of a parameter is -2"),
    "null map": (tensor_map(operand=-1), "operand of a parameter is -1"),
    "rank": (tensor_map(dims=(8,) * 6, box=(8,) * 6), "rank of a tensor map is 6"),
    "empty map": (tensor_map(dims=(0, 100)), "dimension of a tensor map is 0"),
    "odd stride": (
        tensor_map(strides=(520,)),
        "520 bytes; it must be a multiple of 16",
    ),
    "huge stride": (tensor_map(strides=(2**40,)), "stride of a tensor map is"),
    "wide box": (tensor_map(box=(64, 257)), "box dimension of a tensor map is 257"),
    "narrow box": (tensor_map(box=(4, 32)), "rows of 8 bytes; it must be a multiple"),
    "swizzled box": (tensor_map(box=(128, 32)), "rows of 256 bytes.*at most 128"),
    "parameters": ({"params": (Scalar(value=1),) * 65}, "65 parameters"),
    "maps": ({"params": (sample_kernels.tiled_map(0),) * 17}, "17 tensor maps"),
    "null im2col map": (im2col(operand=-1), "operand of a parameter is -1"),
    "flat images": (
        im2col(
            dims=(64, 8), strides=(128,), lower=(), upper=(), element_strides=(1, 1)
        ),
        "rank of an im2col map is 2; it must be from 3 to 5",
    ),
    "corner": (im2col(lower=(-129, 0)), "corner of an im2col map is -129.*to 127"),
    "corner of rank 5": (
        im2col(
            dims=(64, 56, 28, 9, 8),
            strides=(128, 7168, 200_704, 200_704 * 9),
            lower=(0, 0, 16),
            upper=(0, 0, 0),
            element_strides=(1,) * 5,
        ),
        "corner of an im2col map is 16.*-16 to 15",
    ),
    "no positions": (im2col(lower=(28, 0), upper=(-28, 0)), "leave 0 positions.*56"),
    "channels": (im2col(channels=257), "channels of an im2col map is 257"),
    "narrow pixel": (im2col(channels=4), "pixel.*rows of 8 bytes; it must be a mult"),
    "swizzled pixel": (im2col(channels=64), "pixel.*rows of 128 bytes.*at most 64"),
    "pixels": (im2col(pixels=1025), "pixels of an im2col map is 1025"),
    "element stride": (
        im2col(element_strides=(1, 9, 1, 1)),
        "element stride of an im2col map is 9",
    ),
    "image stride": (im2col(strides=(128, 7168, 200_700)), "multiple of 16"),
}


@pytest.mark.parametrize(("change", "message"), RULES.values(), ids=RULES.keys())
def test_an_illegal_launch_is_refused_at_lowering(change, message):
    kernel = dataclasses.replace(sample_kernels.scale(), **change)
    with pytest.raises(ValueError, match=message):
        lowered_text(kernel, cubin())


LEGAL: dict[str, dict[str, Any]] = {
    "no parameters": {"params": ()},
    "signed and unsigned": {
        "params": (Scalar(value=-1), Scalar(value=2**32 - 1, dtype="uint32"))
    },
    "integers and floats": {
        "params": tuple(Scalar(value=1, dtype=dtype) for dtype in SCALAR_BITS)
    },
    "im2col map": {"params": (IM2COL,)},
    "im2col maps of all ranks": {
        "params": tuple(
            dataclasses.replace(
                IM2COL,
                dims=(64, *(9,) * spatial, 8),
                strides=(128,) * (spatial + 1),
                lower=(-1,) * spatial,
                upper=(1,) * spatial,
                element_strides=(1,) * (spatial + 2),
            )
            for spatial in (1, 2, 3)
        )
    },
    "cluster": {"grid": (4, 2, 1), "cluster": (2, 2, 1)},
    "tensor map": {"params": (sample_kernels.tiled_map(1),)},
    "vector map": tensor_map(dims=(1000,), strides=(), box=(64,)),
    "empty problem": {"grid": (0, 1, 1), **tensor_map(dims=(0, 100))},
}


@pytest.mark.parametrize("change", LEGAL.values(), ids=LEGAL.keys())
def test_a_legal_launch_is_lowered(change):
    kernel = dataclasses.replace(sample_kernels.scale(), **change)
    assert "@tracea_cuda_launch_v1" in lowered_text(kernel, cubin())


def test_corners_and_strides_are_as_many_as_the_dimensions_need():
    for change in ({"lower": (0,)}, {"element_strides": (1, 1)}, {"strides": ()}):
        with pytest.raises(ValueError, match="entries, as 4 dims need"):
            im2col(**change)


@pytest.mark.parametrize("cut", [1, 2, 5])
@pytest.mark.parametrize("map", [sample_kernels.tiled_map(0), IM2COL])
def test_an_incomplete_record_is_refused(cut, map):
    kernel = dataclasses.replace(sample_kernels.scale(), params=(map,))
    attributes = launch.cuda_attributes(kernel, KEY)
    with pytest.raises(ValueError, match="incomplete"):
        _native.check_launch(
            attributes["launch"].tolist(), attributes["params"].tolist()[:-cut]
        )


@pytest.mark.nvrtc
def test_what_a_gpu_runs_of_them_compiles():
    """Scalars of every type, and an im2col map: ``test_gpu_launch`` runs them."""
    for kernel in (
        sample_kernels.scalars(),
        sample_kernels.im2col((-1, -1, 0), (1, 2), 2),
    ):
        code = nvrtc.compile(kernel)
        assert code.spill_bytes == 0 and "warning" not in code.log
        assert "@tracea_cuda_launch_v1" in lowered_text(kernel, code)


def test_registering_again_does_nothing():
    launch.register()
    launch.register.__wrapped__()  # past the cache: the same pointers are accepted
    assert float(jax.jit(lambda x: x + 1)(1.0)) == 2.0


def test_cpu_isa_is_one_that_devices_name():
    from tracea_jax.device import CPU_ISAS

    assert launch.cpu_isa() in CPU_ISAS


def test_tensor_map_dtypes_are_the_drivers():
    driver = pytest.importorskip("cuda.bindings.driver")
    names = {"bfloat16": "BFLOAT16", "tfloat32": "TFLOAT32", "float16": "FLOAT16"}
    names |= {"float32": "FLOAT32", "float64": "FLOAT64", "int32": "INT32"}
    for dtype, name in names.items():
        value = driver.CUtensorMapDataType[f"CU_TENSOR_MAP_DATA_TYPE_{name}"]
        assert launch.TENSOR_MAP_DTYPES[dtype] == value
    assert isinstance(sample_kernels.tiled_map(0), TensorMap)
