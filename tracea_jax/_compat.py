"""Private JAX APIs, each with the reason why no public one suffices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import jax
from jax.extend import core, source_info_util

# Errors and profiles name the user's line, not ours.
source_info_util.register_exclusion(__file__)

# The first minor of JAX that was not tested; pyproject.toml has the same number.
UNTESTED_JAX = (0, 13)


def untested_jax() -> str | None:
    """A warning about a JAX that is newer than those tested, or None.

    pip installs none; a person may all the same.
    """
    if jax.__version_info__[:2] < UNTESTED_JAX:
        return None
    limit = ".".join(map(str, UNTESTED_JAX))
    return (
        f"jax {jax.__version__} is newer than what this tracea_jax was tested with "
        f"(jax before {limit}): results may be wrong and calls may fail. Upgrade "
        f"tracea_jax, or install 'jax<{limit}'."
    )


# A jaxpr with its constants: another class than a jaxpr before jax 0.11, and not
# exported for type checkers since.
ClosedJaxpr: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)


def closed_jaxpr(
    invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any], *, like: Any
) -> Any:
    """Equations as a closed jaxpr without constants, named as another jaxpr.

    How a closed jaxpr is made changed with jax 0.11.
    """
    names = like.debug_info.with_unknown_names()
    made = core.Jaxpr([], list(invars), list(outvars), list(eqns), debug_info=names)
    return made if ClosedJaxpr is core.Jaxpr else ClosedJaxpr(made, [])


def partitioned_automatically(ctx: Any) -> bool:
    """True if the compiler will split this lowering's arrays over several devices.

    A custom call is opaque to the partitioner, which would gather its operands on every
    device. The axis context is the only place that tells, and it is not public: inside
    ``shard_map`` over all mesh axes it lists them as manual and arrays are local.
    """
    axis = ctx.module_context.axis_context
    if hasattr(axis, "num_devices"):
        return (axis.num_devices or 1) > 1
    mesh = getattr(axis, "mesh", None)
    return mesh is not None and frozenset(mesh.axis_names) != manual_axes(ctx)


def manual_axes(ctx: Any) -> frozenset[Any]:
    """The mesh axes over which arrays are local where this is lowered."""
    axis = ctx.module_context.axis_context
    return frozenset(getattr(axis, "manual_axes", ()))


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which x differs inside ``shard_map``.

    The attribute was ``vma`` before it became part of ``manual_axis_type``.
    """
    return _varying_axes_of(jax.typeof(x))


def _varying_axes_of(aval: Any) -> frozenset[str]:
    kind = getattr(aval, "manual_axis_type", None)
    return kind.varying if kind is not None else getattr(aval, "vma", frozenset())


@contextlib.contextmanager
def tracing_like(avals: Sequence[Any]) -> Iterator[None]:
    """The context in which JAX would trace a function of such arrays.

    Inside ``shard_map``, literals are made to vary over the mesh axes of what they meet
    only while a private setting says so, and only axes that are bound can be named. No
    public function does this for a function that is traced apart.
    """
    axes = frozenset[str]().union(*map(_varying_axes_of, avals))
    if not axes:
        yield
        return
    from jax._src import config
    from jax._src import core as private

    sizes = jax.sharding.get_abstract_mesh().shape
    bound = private.extend_axis_env_nd([(axis, sizes[axis]) for axis in sorted(axes)])
    with bound, config._check_vma(True):  # pyright: ignore[reportCallIssue]
        yield


def scan_constants(params: dict[str, Any]) -> int:
    """Number of a scan's first operands that are the same in every iteration.

    A number before jax 0.11; since then the first of three trees of operands.
    """
    if "num_consts" in params:
        return params["num_consts"]
    return len(params["ft_in"].unpack()[0])


def batched(
    jaxpr: Any, axis: Any, dims: Iterable[int | None]
) -> tuple[Any, tuple[int | None, ...]]:
    """A closed jaxpr under ``vmap``, and the mapped axis of each result.

    ``jax.vmap`` itself moves the axes of results to given places; a rule that has to
    keep a program as it is needs them where the equations leave them.

    Args:
      jaxpr: closed.
      axis: what a rule of ``fancy_primitive_batchers`` is told of the mapped axis.
      dims: the mapped axis of each operand; None where it is shared.
    """
    from jax._src.interpreters.batching import batch_jaxpr2

    batched, places = batch_jaxpr2(jaxpr, axis, tuple(dims))
    return batched, tuple(places)


def is_jitted(fn: Any) -> bool:
    """Returns whether ``jax.jit`` made this function; its type has no public name."""
    return isinstance(fn, _jitted_type())


@functools.cache
def _jitted_type() -> type[Any]:
    return type(jax.jit(is_jitted))


def jit_arguments(fn: Any) -> dict[str, Any]:
    """Arguments of ``jax.jit`` that made a jitted function, without its shardings.

    Its static and donated arguments and the compiler's options; they can be asked for
    nowhere publicly.
    """
    info = getattr(fn, "_jit_info", None)
    names = [f"{kind}_{of}" for kind in ("static", "donate") for of in _ARGUMENTS]
    found = {name: value for name in names if (value := getattr(info, name, None))}
    options = dict(getattr(info, "compiler_options_kvs", ()))
    return {**found, "compiler_options": options} if options else found


_ARGUMENTS = ("argnums", "argnames")


def traceable(fn: Any) -> Any:
    """A function that may be called in a trace, where fn would be called outside.

    JAX refuses jitted functions with options of the compiler there: those are options
    of a whole program. Such a function is made anew, without them.
    """
    arguments = jit_arguments(fn) if is_jitted(fn) else {}
    if arguments.pop("compiler_options", None) is None:
        return fn
    info = fn._jit_info
    shardings = {
        name: jax.tree.unflatten(getattr(info, f"{name}_treedef"), leaves)
        for name in ("in_shardings", "out_shardings")
        for leaves in [getattr(info, f"{name}_leaves")]
    }
    return jax.jit(fn.__wrapped__, **arguments, **shardings)


def static_leaves(fn: Any, args: Any, kwargs: Any) -> list[bool] | None:
    """Which leaves of (args, kwargs) are of static arguments; None if fn has none."""
    arguments = jit_arguments(fn) if is_jitted(fn) else {}
    numbers = arguments.get("static_argnums", ())
    names = arguments.get("static_argnames", ())
    if not (numbers or names):
        return None
    places = [i in numbers or i - len(args) in numbers for i in range(len(args))]
    of_args = zip(args, places, strict=True)
    of_kwargs = ((kwargs[name], name in names) for name in sorted(kwargs))
    return [
        is_static
        for value, is_static in (*of_args, *of_kwargs)
        for _ in jax.tree.leaves(value)
    ]


# --- reverse-mode differentiation -----------------------------------------------------

# A function (fun, primals, differentiate) that is asked for every derivative in reverse
# mode, or None. It is part of the key of JAX's traces, so it must be hashable.
linearize_hook = jax.make_user_context(None)

_LINEARIZE = ("traceable", "primals_ft", "has_aux", "is_vjp")
_LINEARIZE_KNOWN = (_LINEARIZE, (*_LINEARIZE, "in_nzs"))  # jax 0.10, and since 0.11
_installing = threading.Lock()


def install_linearize_hook() -> str | None:
    """Makes JAX ask ``linearize_hook``; the reason if this JAX cannot.

    There is no public place. ``grad``, ``vjp``, ``linearize``, Jacobians and what
    libraries build on them call one private function, by its name in its module at the
    time of the call; so names that users imported before are served too. The hook gets

      fun: the function to be differentiated.
      primals: () -> the tuple of its arguments.
      differentiate: (function like fun) -> what JAX makes of it.

    and returns what ``differentiate`` returned. Where no hook is in force, nothing
    changes. Rules of ``custom_vjp`` functions are not asked about: what they
    differentiate is part of a derivative, and not of the program.
    """
    with _installing:
        try:
            from jax._src.interpreters import ad

            original, own = ad.linearize, ad.custom_lin_p
            transposes = ad.primitive_transposes, ad.fancy_transposes
        except (ImportError, AttributeError) as e:
            return f"jax {jax.__version__} has no such function: {e}"
        if hasattr(original, "asks_hook"):
            return None
        given = tuple(inspect.signature(original).parameters)
        if given not in _LINEARIZE_KNOWN:
            names = ", ".join(given)
            return f"jax {jax.__version__} linearizes with unknown arguments: {names}"
        ad.linearize = _asking_hook(original)
        for rules in transposes:
            if own in rules:  # it runs the backward rule of a custom_vjp function
                rules[own] = _without_hook(rules[own])
        return None


def _asking_hook(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def linearize(traceable: Any, primals_ft: Any, *rest: Any, **kwargs: Any) -> Any:
        def differentiate(fun: Any) -> Any:
            return original(fun, primals_ft, *rest, **kwargs)

        hook: Any = linearize_hook.value
        if hook is None:
            return differentiate(traceable)
        return hook(traceable, primals_ft.unflatten, differentiate)

    linearize.asks_hook = True  # pyright: ignore[reportAttributeAccessIssue]
    return linearize


def _without_hook(rule: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(rule)
    def transposed(*args: Any, **params: Any) -> Any:
        with linearize_hook(None):
            return rule(*args, **params)

    return transposed


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """An element of name stacks that no text shows.

    Name stacks are the only thing that differentiation, transposition and ``vmap`` hand
    on from equation to equation. The protocol of their elements, ``name`` and ``wrap``,
    is not public.

    Attributes:
      note: what equations are marked with.
    """

    note: Any
    name: ClassVar[str] = ""

    def wrap(self, stack: list[str]) -> None:
        """Adds nothing to the text."""


def marked(note: Any) -> Any:
    """A context in which every equation that is traced carries a note."""
    here = source_info_util.current_name_stack()
    own: Any = (Mark(note),)
    return source_info_util.set_name_stack(here + source_info_util.NameStack(own))


def notes(name_stack: Any) -> Iterator[tuple[Any, Any]]:
    """The notes of a name stack, each after the name stack around its mark."""
    elements = getattr(name_stack, "stack", ())
    for i, element in enumerate(elements):
        if isinstance(element, Mark):
            yield name_stack[:i], element.note


# --- checks ---------------------------------------------------------------------------


def register_checked(primitive: Any, reference: Callable[..., Any]) -> None:
    """Makes ``checkify`` look for NaN and the like in a primitive's reference.

    It passes primitives by that JAX does not know. Its registry is not public; rules
    get a context before the error since jax 0.11.
    """
    try:
        from jax._src import checkify
    except ImportError:
        return

    def rule(*args: Any, **params: Any) -> Any:
        at = next(i for i, x in enumerate(args) if isinstance(x, checkify.Error))
        error, enabled, *operands = args[at:]
        if enabled <= checkify.user_checks:
            return error, primitive.bind(*operands, **params)
        traced = jax.make_jaxpr(functools.partial(reference, **params))(*operands)
        checked = checkify.checkify_jaxpr(*args[:at], traced, enabled, error, *operands)
        return checked if primitive.multiple_results else (checked[0], *checked[1])

    checkify.error_checks[primitive] = rule


# --- export and processes -------------------------------------------------------------


def declare_stable(targets: Iterable[str]) -> None:
    """Tells ``jax.export`` that programs with these custom calls may be serialised.

    Publicly a caller can only list them at every export.
    """
    try:
        from jax._src.export import _export
    except ImportError:
        return
    known = getattr(_export, "_CUSTOM_CALL_TARGETS_GUARANTEED_STABLE", None)
    if isinstance(known, set):
        known.update(targets)


@dataclasses.dataclass(frozen=True, slots=True)
class KeyValueStore:
    """The store of ``jax.distributed``'s coordinator.

    JAX has no public way to it; ``multihost_utils`` is made of collectives, which must
    not run while a program is lowered.
    """

    client: Any

    def set(self, key: str, value: bytes) -> None:
        self.client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value as soon as it is set; None if it is not set in time."""
        try:
            timeout_ms = round(timeout_s * 1e3)
            return self.client.blocking_key_value_get_bytes(key, timeout_ms)
        except jax.errors.JaxRuntimeError as e:
            if "DEADLINE_EXCEEDED" in str(e):
                return None
            raise


def has_clients() -> bool:
    """Returns whether JAX has started, with threads that a forked child would not have.

    What is public starts JAX in order to answer, and takes a lock, which a thread that
    is not in a child may have held.
    """
    from jax._src import xla_bridge

    return bool(getattr(xla_bridge, "_backends", True))


def key_value_store() -> KeyValueStore | None:
    """The store that all processes of the program reach; None without a coordinator."""
    from jax._src import distributed

    client = distributed.global_state.client
    return None if client is None else KeyValueStore(client)
