"""A partitioner of custom calls of our own, which JAX offers in no public way.

``jax.experimental.custom_partitioning`` writes the ``id`` of a Python object into the
program, so that no fresh process finds it in JAX's persistent cache, and has no
derivatives. It is made of functions that are used here directly. Where one of them is
missing, ``why_not`` says so, and operations are left to XLA.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

Spec = tuple[tuple[str, ...], ...]  # axes of each dimension
Partition = Callable[..., Any]  # see ``register``


@functools.cache
def why_not() -> str | None:
    """Why calls cannot be partitioned with this JAX, or None."""
    try:
        private = _Private()
    except (ImportError, AttributeError) as e:
        return f"jax {jax.__version__} has no such function: {e}"
    del private
    return None


def is_enabled() -> bool:
    """Whether programs are partitioned by Shardy, which reads our rules."""
    return bool(getattr(jax.config, "jax_use_shardy_partitioner", False))


class _Private:
    """The functions that are used; finding them all is the probe."""

    def __init__(self) -> None:
        from jax._src import core, mesh, sharding_impls, xla_bridge
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
        from jax.extend.mlir import ir
        from jax.extend.mlir.dialects import stablehlo

        self.ir = ir
        self.custom_call = stablehlo.CustomCallOp
        self.register = xla_client.register_custom_call_partitioner
        self.register_plugins = xla_bridge.register_plugin_callbacks
        self.tuple_sharding = xla_client.HloSharding.tuple_sharding
        self.axis_environment = core.extend_axis_env_nd
        self.manual = sharding_impls.SPMDAxisContext
        self.module = mlir.build_mlir_module_helper
        self.bytecode = mlir.module_to_bytecode
        self.dtype = mlir.dtype_to_ir_type
        self.use_mesh = mesh.use_abstract_mesh
        self.no_mesh = mesh.empty_abstract_mesh
        self.to_hlo = jax.sharding.NamedSharding._to_xla_hlo_sharding


@functools.cache
def _private() -> _Private:
    return _Private()


def devices_of(ctx: Any) -> int:
    """Over how many devices the compiler splits all of a lowering's arrays.

    1 where there is one, where axes of a mesh are manual, and where a program is
    exported, as the process that loads it has no rules.
    """
    context = ctx.module_context
    if context.lowering_parameters.for_export:
        return 1
    return getattr(context.axis_context, "num_devices", None) or 1


def axis_names(ctx: Any) -> Mapping[str, int]:
    """The axes of the program's mesh, as far as its arguments show one."""
    context = ctx.module_context
    kept = getattr(context, "keepalives", ())
    found = next((x for x in kept if isinstance(x, _Axes)), None)
    if found is None:
        found = _Axes(_axes_of_arguments(context.module))
        context.add_keepalive(found)
    return found.sizes


@dataclasses.dataclass(frozen=True, slots=True)
class _Axes:
    """The mesh that a program's arguments show, found once for all equations."""

    sizes: Mapping[str, int]


def _axes_of_arguments(module: Any) -> Mapping[str, int]:
    for op in module.body.operations:
        attributes = op.operation.attributes
        for argument in attributes["arg_attrs"] if "arg_attrs" in attributes else ():
            if mesh := re.search(r"mesh<\[([^\]]*)\]", str(argument)):
                pairs = re.findall(r'"([^"]*)"=(\d+)', mesh[1])
                return {name: int(size) for name, size in pairs}
    return {}


def keep_alive(ctx: Any, value: Any) -> None:
    """Keeps a value as long as the program that is being lowered."""
    ctx.module_context.add_keepalive(value)


# --- the call -------------------------------------------------------------------------


def custom_call(
    target: str, key: str, rule: str, operands: Sequence[Any], results: Sequence[Any]
) -> list[Any]:
    """The MLIR values of a call that our partitioner is asked about.

    Args:
      target: that is registered.
      key: what the partitioner is given.
      rule: Shardy's.
      operands: MLIR values.
      results: with shapes and dtypes.
    """
    private = _private()
    ir = private.ir
    op = private.custom_call(
        [
            ir.RankedTensorType.get(x.shape, private.dtype(np.dtype(x.dtype)))
            for x in results
        ],
        list(operands),
        call_target_name=ir.StringAttr.get(target),
        has_side_effect=ir.BoolAttr.get(False),
        api_version=ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 2),
        called_computations=ir.ArrayAttr.get([]),
        backend_config=ir.StringAttr.get(key),
        operand_layouts=None,
        result_layouts=None,
    )
    op.attributes["sdy.sharding_rule"] = ir.Attribute.parse(rule)
    return list(op.results)


# --- the partitioner ------------------------------------------------------------------

_registering = threading.Lock()
_registered: set[str] = set()


def register(target: str, partition: Partition) -> None:
    """Lets XLA ask ``partition`` about calls of a target, once in a process.

    Args:
      target: of custom calls.
      partition: (key, operands, tilings of these, results, tilings of these) ->
        (``module`` of one device, mesh, specs of operands, specs of results). Operands
        and results are ``jax.ShapeDtypeStruct``, tilings arrays (dimension, device) of
        the index of the device's tile.
    """
    with _registering:
        if target in _registered:
            return
        private = _private()
        how: dict[str, Any] = {
            "name": target,
            "prop_user_sharding": _not_asked,
            "partition": functools.partial(_partitioned, partition),
            "infer_sharding_from_operands": _not_asked,
            "can_side_effecting_have_replicated_sharding": True,
        }
        private.register(**how)
        private.register_plugins(functools.partial(private.register, **how))
        _registered.add(target)


def _not_asked(*_: Any) -> Any:
    # XLA has these callbacks for GSPMD, which ``is_enabled`` rules out.
    raise NotImplementedError("Shardy propagates shardings by rules")


def _partitioned(
    partition: Partition,
    arg_shapes: Any,
    arg_shardings: Any,
    result_shape: Any,
    result_sharding: Any,
    key: bytes,
) -> Any:
    private = _private()
    many = result_shape.is_tuple()
    shapes = list(result_shape.tuple_shapes()) if many else [result_shape]
    shardings = list(result_sharding.tuple_elements()) if many else [result_sharding]
    operands, results = [[_struct(x) for x in xs] for xs in (arg_shapes, shapes)]
    ranked = [*zip(arg_shardings, operands, strict=True)]
    ranked += zip(shardings, results, strict=True)
    count = max((_devices(s) for s, _ in ranked), default=1)
    tilings = [_tiling(s, x.ndim, count) for s, x in ranked]
    split = len(operands)
    made, mesh, ins, outs = partition(
        key.decode(), operands, tilings[:split], results, tilings[split:]
    )
    wanted = [_sharding(spec, mesh) for spec in outs]
    out = private.tuple_sharding(result_shape, wanted) if many else wanted[0]
    return made, [_sharding(spec, mesh) for spec in ins], out


def _struct(shape: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape.dimensions()), shape.numpy_dtype())


def _is_whole(sharding: Any) -> bool:
    return sharding is None or sharding.is_replicated()


def _devices(sharding: Any) -> int:
    """How many an array is spread over; 1 where each has it all."""
    if _is_whole(sharding):
        return 1
    return int(np.prod(sharding.tile_assignment_dimensions()))


def _tiling(sharding: Any, rank: int, count: int) -> np.ndarray:
    if _is_whole(sharding):
        return np.zeros((rank, count), int)
    shape = sharding.tile_assignment_dimensions()
    places = np.empty((len(shape), count), int)
    order = np.asarray(sharding.tile_assignment_devices())
    places[:, order] = np.indices(shape).reshape(len(shape), -1)
    return places[:rank]


def _sharding(spec: Spec, mesh: Mapping[str, int]) -> Any:
    abstract = jax.sharding.AbstractMesh(tuple(mesh.values()), tuple(mesh))
    names = jax.sharding.PartitionSpec(*(axes or None for axes in spec))
    named = jax.sharding.NamedSharding(abstract, names)
    return _private().to_hlo(named, len(spec))


def module(
    program: Callable[..., Any],
    operands: Sequence[Any],
    mesh: Mapping[str, int],
    platform: str,
) -> bytes:
    """The program of one device, in which collectives name axes of the mesh."""
    private = _private()
    manual: Any = private.manual  # annotated as if a mesh had to have devices
    types = (jax.sharding.AxisType.Manual,) * len(mesh)
    sizes, names = tuple(mesh.values()), tuple(mesh)
    abstract = jax.sharding.AbstractMesh(sizes, names, axis_types=types)
    with _bound(mesh):
        closed = jax.make_jaxpr(program)(*operands)
        made = private.module(
            closed,
            name="tracea_local",
            platforms=(platform,),
            backend=None,
            axis_context=manual(abstract, frozenset(mesh)),
        )
    return private.bytecode(made)


@contextlib.contextmanager
def _bound(mesh: Mapping[str, int]) -> Generator[None]:
    """A context with these axes, and without the mesh of the program around.

    The types of one device's arrays must not name its shardings.
    """
    private = _private()
    with private.use_mesh(private.no_mesh), private.axis_environment(mesh.items()):
        yield
